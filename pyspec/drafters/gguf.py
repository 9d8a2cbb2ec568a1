"""Reads the header of a GGUF file: scalar keys, array lengths, tensor names and shapes. No tensor data is touched.

libllama has no call that tells whether a file holds a tensor, and some kinds of draft (DSpark, files with MTP blocks
only) differ from others by their tensors alone. Knowing the kind before loading also keeps files that end the process
in the wrong kind of context from getting there.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass, field
from typing import Any

from ..errors import ModelLoadError

__all__ = ["GgufHeader", "read_header"]

_MAGIC = b"GGUF"
# gguf value types: struct codes of the scalars by type number
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself.

    Attributes:
        keys: scalar values by key; of arrays the length only (as ``"<key>[]"``).
        tensors: tensor name -> shape, in GGUF's order (row length first).
        types: tensor name -> number of its ``ggml_type``.
    """

    keys: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    types: dict[str, int] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return str(self.keys.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Value of ``<architecture>.<key>``."""
        return self.keys.get(f"{self.architecture}.{key}", default)


class _Reader:
    """Little-endian reads with bounds checks. Borrows the buffer."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, n: int) -> bytes:
        end = self.at + n
        if n < 0 or end > len(self.data):
            raise ValueError("the file ends inside its header")
        out = self.data[self.at : end]
        self.at = end
        return out

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> tuple[Any, bool]:
        """A value, and whether it was an array (then its length)."""
        if kind == _STRING:
            return self.string(), False
        if kind == _ARRAY:
            inner, n = self.number("I"), self.number("Q")
            self._skip(inner, n)
            return n, True
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self.number(_SCALARS[kind]), False

    def _skip(self, kind: int, n: int) -> None:
        if kind in _SCALARS:
            self.take(n * struct.calcsize("<" + _SCALARS[kind]))
        elif kind == _STRING:
            # by hand: vocabularies have some 100,000 entries
            data, at, size = self.data, self.at, len(self.data)
            unpack = struct.Struct("<Q").unpack_from
            for _ in range(n):
                if at + 8 > size:
                    raise ValueError("the file ends inside its header")
                at += 8 + unpack(data, at)[0]
            if at > size:
                raise ValueError("the file ends inside its header")
            self.at = at
        else:
            raise ValueError(f"arrays of type {kind} are not known")


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Read the header of ``path``; of a split model, that of all its parts.

    Raises:
        ModelLoadError: no such file, or not a GGUF file; the message names the file and what is wrong.
    """
    if not isinstance(path, (str, os.PathLike)):
        # open() would take an integer for a file descriptor, and close it
        raise ModelLoadError(f"a model file is named by a str or Path, got {path!r}")
    header = _read_one(path)
    n_parts = header.keys.get("split.count", 0)
    name = os.fspath(path)
    first = f"-00001-of-{n_parts:05d}.gguf" if isinstance(n_parts, int) and 1 < n_parts < 100_000 else None
    if first is not None and name.endswith(first):
        for i in range(2, n_parts + 1):
            part = f"{name[: -len(first)]}-{i:05d}-of-{n_parts:05d}.gguf"
            more = _read_one(part)
            header.tensors.update(more.tensors)
            header.types.update(more.types)
    return header


def _read_one(path: str | os.PathLike[str]) -> GgufHeader:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Reader(data))
    except OSError as e:
        raise ModelLoadError(f"cannot read model file {os.fspath(path)!r}: {e.strerror or e}") from e
    except (ValueError, OverflowError) as e:
        raise ModelLoadError(f"model file {os.fspath(path)!r} is not a usable GGUF file: {e}") from e


def _parse(reader: _Reader) -> GgufHeader:
    if reader.take(4) != _MAGIC:
        raise ValueError("it does not start with 'GGUF'")
    version = reader.number("I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} (2 or 3 expected)")
    n_tensors, n_keys = reader.number("Q"), reader.number("Q")
    if max(n_tensors, n_keys) > len(reader.data):
        raise ValueError("the counts in its header are larger than the file")
    keys: dict[str, Any] = {}
    for _ in range(n_keys):
        key = reader.string()
        value, is_array = reader.value(reader.number("I"))
        keys[f"{key}[]" if is_array else key] = value
    tensors: dict[str, tuple[int, ...]] = {}
    types: dict[str, int] = {}
    for _ in range(n_tensors):
        name = reader.string()
        n_dims = reader.number("I")
        if n_dims > 4:
            raise ValueError(f"tensor {name!r} has {n_dims} dimensions")
        tensors[name] = tuple(reader.number("Q") for _ in range(n_dims))
        types[name] = reader.number("I")
        reader.take(8)  # offset
    return GgufHeader(keys, tensors, types)
