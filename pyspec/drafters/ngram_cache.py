"""``ngram-cache``: counts of what followed n-grams of 1 to 4 tokens, in this text, in earlier ones, and in a corpus.

Needs no model. Rules, limits and file format are llama.cpp's (``common/ngram-cache``). Files are made by
``pyspec lookup create`` or by llama.cpp's ``llama-lookup-create``; either reads the other's.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from .._lookup import LookupCache
from .._lookup import draft as draft_tokens
from ..config import SpeculationParams
from ..errors import DataFileError
from ..types import DraftRequest, I32Array, Requirements
from .base import Drafter, Plan

if TYPE_CHECKING:
    from ..runtime.evaluator import Evaluator
    from ..runtime.model import Model

__all__ = ["N_DRAFT", "History", "NgramCache", "read_cache", "write_cache"]

log = logging.getLogger("pyspec")

#: Most tokens proposed, as in llama.cpp.
N_DRAFT = 8


def read_cache(path: str | os.PathLike[str], n_vocab: int = 2**31 - 1) -> LookupCache:
    """Read a lookup-cache file.

    Args:
        path: the file.
        n_vocab: token ids must be smaller.

    Raises:
        DataFileError: the file cannot be read, is damaged, of another byte order, or of another vocabulary.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise DataFileError(f"lookup cache {os.fspath(path)!r} cannot be read: {e.strerror or e}") from e
    try:
        return LookupCache.from_bytes(data, n_vocab)
    except ValueError as e:
        raise DataFileError(f"lookup cache {os.fspath(path)!r}: {e}{_guess(data, n_vocab)}") from None


def _guess(data: bytes, n_vocab: int) -> str:
    """What else the file may be."""
    with contextlib.suppress(ValueError):
        LookupCache.from_bytes(data)
        return f"; it was made for another model: this vocabulary has {n_vocab} tokens"
    if len(data) % 4 == 0:
        with contextlib.suppress(ValueError):
            LookupCache.from_bytes(np.frombuffer(data, np.int32).byteswap().tobytes())
            return "; it was made on a machine of the other byte order"
    return "; it is damaged, or no lookup cache"


def write_cache(path: str | os.PathLike[str], cache: LookupCache) -> None:
    """Write a lookup-cache file; a file that is there is replaced as a whole, or stays as it is.

    Raises:
        DataFileError: it cannot be written.
    """
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        try:
            part.write_bytes(cache.to_bytes())
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as e:
        raise DataFileError(f"lookup cache {os.fspath(path)!r} cannot be written: {e.strerror or e}") from e


class History:
    """The tokens of one sequence as an int32 array that grows; only new tokens are converted.

    Attributes:
        n: tokens held.
    """

    def __init__(self, n_reserve: int = 1024) -> None:
        self._buffer: I32Array = np.empty(n_reserve, np.int32)
        self.n = 0

    def follow(self, tokens: list[int]) -> I32Array:
        """Bring the array up to ``tokens``, of which the part held so far is a prefix.

        Returns:
            int32 [len(tokens)], a view of the buffer, valid until the next call.
        """
        n = len(tokens)
        if n < self.n:
            self.n = 0
        if n > len(self._buffer):
            grown = np.empty(max(n, 2 * len(self._buffer)), np.int32)
            grown[: self.n] = self._buffer[: self.n]
            self._buffer = grown
        if n > self.n:
            self._buffer[self.n : n] = tokens[self.n :]
            self.n = n
        return self._buffer[:n]


class _Text:
    """One sequence's text and its counts."""

    def __init__(self) -> None:
        self.history = History()
        self.counts = LookupCache()
        self.n = 0

    def follow(self, tokens: list[int]) -> None:
        """Count what is new in ``tokens``."""
        if len(tokens) < self.n:
            self.counts, self.n = LookupCache(), 0
        text = self.history.follow(tokens)
        self.counts.update(text, self.n, len(text))
        self.n = len(text)


class NgramCache(Drafter):
    """Proposes, token by token, the most frequent continuation of the longest n-gram that is frequent enough.

    Three levels are asked: the counts of the text itself, the dynamic level (``lookup_cache_dynamic``: earlier texts),
    which has to be surer, and the static one (``lookup_cache_static``: a corpus), which also weighs what the others
    know. With ``lookup_cache_dynamic`` the counts of every finished text go into the dynamic level, and into the file
    when the drafter is closed; the file is made if there is none.

    All n-grams of the text are counted, as in llama.cpp's ``llama-lookup``; its servers leave out those that lie across
    the border between two steps.
    """

    name: ClassVar[str] = "ngram-cache"
    cheap: ClassVar[bool] = True
    limit_option: ClassVar[str] = ""

    def __init__(self, target: Evaluator, draft: Evaluator | None, params: SpeculationParams, n_seq: int) -> None:
        super().__init__(target, draft, params, n_seq)
        self.n_max = N_DRAFT
        self._texts: dict[int, _Text] = {}
        self._static, self._dynamic = LookupCache(), LookupCache()
        self._changed = False
        if params.lookup_cache_static is not None:
            self._static = read_cache(params.lookup_cache_static, target.n_vocab)
        path = params.lookup_cache_dynamic
        if path is not None and Path(path).exists():
            self._dynamic = read_cache(path, target.n_vocab)
        log.info(
            "speculation: adding %s: n_max=%d, static level of %d n-grams, dynamic level of %d",
            self.name, self.n_max, len(self._static), len(self._dynamic),
        )  # fmt: skip

    @classmethod
    def plan(cls, target: Model, draft: Model | None, params: SpeculationParams, n_seq: int) -> Plan:
        """See :meth:`Drafter.plan`. Works with any target; a draft is for others in the chain.

        Raises:
            DataFileError: the static level's file is not there.
        """
        path = params.lookup_cache_static
        if path is not None and not Path(path).is_file():
            raise DataFileError(f"lookup_cache_static: there is no file {os.fspath(path)!r}")
        return Plan(Requirements(), None, N_DRAFT)

    def begin(self, seq: int, tokens: list[int]) -> None:
        """See :meth:`Drafter.begin`."""
        text = self._texts[seq] = _Text()
        text.follow(tokens)

    def draft(self, requests: list[DraftRequest]) -> None:
        """See :meth:`Drafter.draft`."""
        for request in requests:
            text = self._texts.get(request.seq)
            if text is None:
                text = self._texts[request.seq] = _Text()
            text.follow(request.tokens)
            request.draft.extend(
                draft_tokens(
                    text.counts,
                    self._dynamic,
                    self._static,
                    text.history.follow(request.tokens),
                    text.n,
                    self.limit(request),
                )
            )

    def end(self, seq: int) -> None:
        """See :meth:`Drafter.end`."""
        text = self._texts.pop(seq, None)
        if text is not None and self.params.lookup_cache_dynamic is not None and len(text.counts):
            self._dynamic.merge(text.counts)
            self._changed = True

    def close(self) -> None:
        """See :meth:`Drafter.close`. Writes the dynamic level.

        Raises:
            DataFileError: it cannot be written.
        """
        if self._changed and self.params.lookup_cache_dynamic is not None:
            self._changed = False
            write_cache(self.params.lookup_cache_dynamic, self._dynamic)
