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


class SuffixCorpus:
    """Documents, oldest first, and the automaton over them.

    When the limit is passed, the oldest documents go until half of it is free, and the index is made anew from the
    rest: about 0.5 us for each token that ever came in, on the whole. Thread-safe.

    Args:
        max_tokens: limit, >= 2. A longer document keeps its end.
        n_vocab: the vocabulary's size. fingerprint: what tells it from others of that size; 0: unknown.

    Attributes:
        index: the automaton; cleared and filled again after an eviction or a removal (``SuffixMatch.stale`` tells).
    """

    def __init__(self, max_tokens: int, n_vocab: int, fingerprint: int = 0) -> None:
        if max_tokens < 2:
            raise ConfigError(f"the corpus must hold 2 tokens or more, got {max_tokens}")
        self.max_tokens = max_tokens
        self.n_vocab = n_vocab
        self.fingerprint = fingerprint
        self.index = SuffixIndex()
        self._documents: dict[int, I32Array] = {}
        self._n_tokens = 0
        self._next = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Documents held."""
        return len(self._documents)

    @property
    def n_tokens(self) -> int:
        """Tokens held, one more for each document."""
        return self._n_tokens

    def add(self, tokens: Sequence[int] | I32Array) -> int:
        """Add a document; returns its id, for :meth:`remove`.

        Raises:
            ConfigError: a token id is not of this vocabulary; nothing was added.
        """
        document = np.array(tokens, np.int32).reshape(-1)
        if document.size and not 0 <= int(document.min()) <= int(document.max()) < self.n_vocab:
            raise ConfigError(f"a document holds ids outside of the vocabulary of {self.n_vocab} tokens")
        document = document[max(0, document.size - self.max_tokens // 2 + 1) :]
        with self._lock:
            key = self._next
            self._next += 1
            self._documents[key] = document
            self._n_tokens += document.size + 1
            if self._n_tokens <= self.max_tokens:
                self._index(document)
            else:
                while self._n_tokens > self.max_tokens // 2 and len(self._documents) > 1:
                    self._drop(next(iter(self._documents)))
                self._rebuild()
            return key

    def remove(self, key: int) -> bool:
        """Forget one document; False when it is gone already. Takes as long as indexing the others."""
        with self._lock:
            if key not in self._documents:
                return False
            self._drop(key)
            self._rebuild()
            return True

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._documents.clear()
            self._n_tokens = 0
            self.index.clear()

    def _drop(self, key: int) -> None:
        self._n_tokens -= self._documents.pop(key).size + 1

    def _index(self, document: I32Array) -> None:
        self.index.extend(document)
        self.index.end_document()

    def _rebuild(self) -> None:
        self.index.clear()
        for document in self._documents.values():
            self._index(document)

    # -- files --

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all documents to a file; an existing one is replaced as a whole, or not at all.

        Raises:
            DataFileError: the file cannot be written.
        """
        with self._lock:
            documents = list(self._documents.values())
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
