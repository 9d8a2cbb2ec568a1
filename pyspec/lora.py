"""LoRA adapters: what ``LLM(lora=...)`` may be, and whether a file fits the target.

An adapter adds ``scale * alpha / rank * B A`` to weights of the target. It belongs to one engine, and to its target
only: a draft proposes as before, so with a strong adapter it is right less often.

libllama takes names and the first two dimensions as the proof that an adapter fits; what it does not look at would end
the process in the first pass, or be ignored in silence. So the header is read here before.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from . import backends
from .drafters.gguf import GgufHeader, read_header
from .errors import ConfigError, ModelLoadError, UnsupportedError

if TYPE_CHECKING:
    from .runtime import Model

__all__ = ["Adapter", "LoraSpec", "describe", "load", "parse"]

LoraSpec: TypeAlias = (
    "str | os.PathLike[str] | tuple[str | os.PathLike[str], float] "
    "| Sequence[str | os.PathLike[str] | tuple[str | os.PathLike[str], float]]"
)

_A, _B = ".lora_a", ".lora_b"
# ggml types 24 to 28 are integers and F64: no matrix product takes them
_NO_WEIGHTS = frozenset(range(24, 29))


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as it was asked for. scale: 1 is as trained, 0 is off."""

    path: Path
    scale: float = 1.0


def parse(lora: Any) -> tuple[Adapter, ...]:
    """A path, a (path, scale) pair, or a list of either; None: none.

    Raises:
        ConfigError: it is something else, or a scale is not a finite number.
    """
    if lora is None:
        return ()
    if isinstance(lora, (str, os.PathLike)) or _is_pair(lora):
        lora = [lora]
    if not isinstance(lora, Sequence):
        raise ConfigError(f"lora must be a path, a (path, scale) pair, or a list of them, got {lora!r}")
    return tuple(_parse_one(i, item) for i, item in enumerate(lora))


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and not isinstance(item[1], (str, os.PathLike, tuple, list))


def _parse_one(index: int, item: Any) -> Adapter:
    path, scale = item if isinstance(item, (tuple, list)) and len(item) == 2 else (item, 1.0)
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ConfigError(f"lora[{index}] must be a path or a (path, scale) pair, got {item!r}")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ConfigError(f"lora[{index}]: the scale of {os.fspath(path)!r} must be a finite number, got {scale!r}")
    if abs(scale) > 1e6:
        raise ConfigError(f"lora[{index}]: the scale of {os.fspath(path)!r} must be within 1e6, got {scale!r}")
    return Adapter(Path(path), float(scale))


def load(target: Model, adapters: Sequence[Adapter]) -> list[tuple[backends.LoraHandle, float]]:
    """Load adapters for a target; the caller closes them. When one fails the others are freed again.

    Raises:
        ModelLoadError: a file is missing or damaged. ConfigError: it is for another model.
        UnsupportedError: a kind of adapter that would not do what it was trained for.
    """
    if not adapters:
        return []
    model = read_header(target.path)
    loaded: list[tuple[backends.LoraHandle, float]] = []
    try:
        for adapter in adapters:
            check(adapter.path, target, model)
            loaded.append((backends.LoraHandle(target.handle, adapter.path), adapter.scale))
    except BaseException:
        for handle, _ in loaded:
            handle.close()
        raise
    return loaded


def check(path: Path, target: Model, model: GgufHeader) -> None:
    """Raise what :func:`load` would raise for this file, before libllama sees it.

    Args:
        model: header of the target's file.
    """
    name = f"LoRA adapter {os.fspath(path)!r}"
    try:
        header = read_header(path)
    except ModelLoadError as e:
        raise ModelLoadError(f"{name}: {e}") from e
    kind = header.keys.get("general.type")
    if kind != "adapter" or header.keys.get("adapter.type") != "lora":
        raise ConfigError(
            f"{name} is no LoRA adapter (general.type is {kind!r}, adapter.type {header.keys.get('adapter.type')!r}); "
            "make one with llama.cpp's convert_lora_to_gguf.py"
        )
    if header.architecture != target.architecture:
        raise ConfigError(f"{name} is for {header.architecture} models, {target.path.name!r} is {target.architecture}")
    if not isinstance(header.keys.get("adapter.lora.alpha", 0.0), float):
        raise ConfigError(f"{name}: adapter.lora.alpha is not a float32")
    if "adapter.alora.invocation_tokens[]" in header.keys:
        raise UnsupportedError(
            f"{name} is an activated LoRA, which begins to act within a prompt; pyspec cannot do that"
        )
    _check_tensors(name, target.path.name, header, model)


def _check_tensors(name: str, model_name: str, header: GgufHeader, model: GgufHeader) -> None:
    pairs = {t[: -len(_A)] for t in header.tensors if t.endswith((_A, _B))}
    if not pairs:
        raise ConfigError(f"{name} holds no tensors named *{_A} and *{_B}")
    for tensor in sorted(pairs):
        for suffix in (_A, _B):
            if tensor + suffix not in header.tensors:
                raise ConfigError(f"{name} lacks {tensor}{suffix}")
        if tensor not in model.tensors:
            raise ConfigError(f"{name} changes {tensor}, which {model_name!r} does not have: it is for another model")
        base, a, b = (
            _shape(s) for s in (model.tensors[tensor], header.tensors[tensor + _A], header.tensors[tensor + _B])
        )
        for suffix in (_A, _B):
            if header.types[tensor + suffix] in _NO_WEIGHTS:
                raise ConfigError(
                    f"{name}: {tensor}{suffix} holds no weights (ggml type {header.types[tensor + suffix]})"
                )
        if tensor == "token_embd.weight":
            if "output.weight" not in model.tensors:
                raise UnsupportedError(
                    f"{name} changes {tensor}, the output matrix of {model_name!r} too; libllama cannot do both"
                )
            # rows of A are picked by token, so both are the other way round
            rank, fits = a[0], a[1:] == base[1:] and b == (a[0], base[0])
        else:
            rank = a[1]
            fits = a == (base[0], rank, *base[2:]) and b == (rank, *base[1:])
        if not fits or rank < 1:
            raise ConfigError(
                f"{name} does not fit {model_name!r}: {tensor} has shape {base} there, the adapter's factors "
                f"{a} and {b}: it is for another model"
            )


def _shape(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Two dimensions or more; further ones of length 1 say nothing."""
    dims = (*dims, 1, 1)[: max(2, len(dims))]
    while len(dims) > 2 and dims[-1] == 1:
        dims = dims[:-1]
    return dims


def describe(adapters: Sequence[Adapter]) -> list[dict[str, Any]]:
    """As plain values."""
    return [{"path": str(a.path), "scale": a.scale} for a in adapters]
