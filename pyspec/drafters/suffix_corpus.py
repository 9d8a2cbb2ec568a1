"""A bounded memory of token texts with a suffix index, for all sequences of an engine; can be saved and loaded.

File format, little-endian: the magic ``PYSPSUF1``, uint32 vocabulary size, uint32 vocabulary fingerprint (0: unknown),
uint32 number of documents, uint32 length of each, int32 tokens of all, uint32 CRC-32 of everything before it.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .._suffix import SuffixIndex
from ..errors import ConfigError, DataFileError
from ..types import I32Array

__all__ = ["SuffixCorpus"]

_MAGIC = b"PYSPSUF1"
_HEAD = struct.Struct("<8sIII")


class _Half:
    """Documents, oldest first, and the automaton over them."""

    def __init__(self) -> None:
        self.index = SuffixIndex()
        self.documents: dict[int, I32Array] = {}
        self.n_tokens = 0

    def add(self, key: int, document: I32Array) -> None:
        self.documents[key] = document
        self.n_tokens += document.size + 1
        self.index.extend(document)
        self.index.end_document()


class SuffixCorpus:
    """Documents in two halves, each with an automaton of its own. Thread-safe.

    A document goes into the newer half. When that is full, the older one is dropped as a whole and an empty one takes
    its place: forgetting costs no more than freeing its memory, and no document waits for others to be indexed again.

    Args:
        max_tokens: limit of both together, >= 2. A longer document than fits into a half keeps its end.
        n_vocab: the vocabulary's size. fingerprint: what tells it from others of that size; 0: unknown.

    Attributes:
        version: changes with the content.
    """

    def __init__(self, max_tokens: int, n_vocab: int, fingerprint: int = 0) -> None:
        if max_tokens < 2:
            raise ConfigError(f"the corpus must hold 2 tokens or more, got {max_tokens}")
        self.max_tokens = max_tokens
        self.n_vocab = n_vocab
        self.fingerprint = fingerprint
        self.version = 0
        self._halves = [_Half()]
        self._next = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Documents held."""
        return sum(len(half.documents) for half in self._halves)

    @property
    def indexes(self) -> tuple[SuffixIndex, ...]:
        """The automata, the newer one first."""
        return tuple(half.index for half in reversed(self._halves))

    @property
    def documents(self) -> list[I32Array]:
        """What is held, the oldest first: int32 [n] each, borrowed."""
        return [d for half in self._halves for d in half.documents.values()]

    @property
    def n_bytes(self) -> int:
        """Memory in use by documents and automata, bytes."""
        return sum(h.index.n_bytes + sum(d.nbytes for d in h.documents.values()) for h in self._halves)

    @property
    def n_tokens(self) -> int:
        """Tokens held, one more for each document."""
        return sum(half.n_tokens for half in self._halves)

    def add(self, tokens: Sequence[int] | I32Array) -> int:
        """Add a document; returns its id, for :meth:`remove`.

        Raises:
            ConfigError: a token id is not of this vocabulary; nothing was added.
        """
        document = np.array(tokens, np.int32).reshape(-1)
        if document.size and not 0 <= int(document.min()) <= int(document.max()) < self.n_vocab:
            raise ConfigError(f"a document holds ids outside of the vocabulary of {self.n_vocab} tokens")
        n_half = max(1, self.max_tokens // 2)
        document = document[max(0, document.size - n_half + 1) :]
        with self._lock:
            key = self._next
            self._next += 1
            if self._halves[-1].n_tokens + document.size + 1 > n_half:
                self._halves = [*self._halves[-1:], _Half()]
            self._halves[-1].add(key, document)
            self.version += 1
            return key

    def remove(self, key: int) -> bool:
        """Forget one document; False when it is gone already. Takes as long as indexing the others of its half."""
        with self._lock:
            for i, half in enumerate(self._halves):
                if key in half.documents:
                    rest = _Half()
                    for other, document in half.documents.items():
                        if other != key:
                            rest.add(other, document)
                    self._halves[i] = rest
                    self.version += 1
                    return True
            return False

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._halves = [_Half()]
            self.version += 1

    # -- files --

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all documents to a file; an existing one is replaced as a whole, or not at all.

        Raises:
            DataFileError: the file cannot be written.
        """
        with self._lock:
            documents = self.documents
        data = _HEAD.pack(_MAGIC, self.n_vocab, self.fingerprint, len(documents))
        data += np.array([d.size for d in documents], "<u4").tobytes()
        data += b"".join(d.astype("<i4").tobytes() for d in documents)
        data += struct.pack("<I", zlib.crc32(data))
        file = Path(path)
        partial = file.with_name(f"{file.name}.{os.getpid()}.part")
        try:
            partial.write_bytes(data)
            os.replace(partial, file)
        except OSError as e:
            partial.unlink(missing_ok=True)
            raise DataFileError(f"suffix corpus {str(file)!r} cannot be written: {e}") from e

    def load(self, path: str | os.PathLike[str]) -> int:
        """Add the documents of a file to those held; returns how many were read.

        Raises:
            DataFileError: no such file, damaged, of another format or another vocabulary; nothing was added.
        """
        documents = self._read(Path(path))
        for document in documents:
            self.add(document)
        return len(documents)

    def _read(self, file: Path) -> list[I32Array]:
        def fail(reason: str) -> DataFileError:
            return DataFileError(f"suffix corpus {str(file)!r} {reason}")

        try:
            data = file.read_bytes()
        except OSError as e:
            raise fail(f"cannot be read: {e}") from e
        if data[:8] != _MAGIC:
            raise fail("is not a suffix corpus of pyspec")
        if len(data) < _HEAD.size + 4:
            raise fail(f"is cut short: {len(data)} bytes")
        if struct.unpack("<I", data[-4:])[0] != zlib.crc32(data[:-4]):
            raise fail("is damaged: its checksum does not fit its content")
        _, n_vocab, fingerprint, n_documents = _HEAD.unpack_from(data)
        body = len(data) - 4 - _HEAD.size
        lengths = np.frombuffer(data, "<u4", min(n_documents, body // 4), _HEAD.size).astype(np.int64)
        if lengths.size != n_documents or 4 * (n_documents + int(lengths.sum())) != body:
            raise fail("is damaged: lengths and content do not fit")
        if n_vocab != self.n_vocab:
            raise fail(f"is of a vocabulary of {n_vocab} tokens, this model has {self.n_vocab}")
        if fingerprint and self.fingerprint and fingerprint != self.fingerprint:
            raise fail("is of another vocabulary of the same size")
        tokens = np.frombuffer(data, "<i4", int(lengths.sum()), _HEAD.size + 4 * n_documents).astype(np.int32)
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.n_vocab:
            raise fail("is damaged: it holds token ids that the vocabulary does not have")
        return np.split(tokens, np.cumsum(lengths)[:-1]) if n_documents else []
