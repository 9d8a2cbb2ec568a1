"""``ngram-simple``: propose what followed the last n tokens when they occurred before in the same text.

Needs no model. Rules and limits are llama.cpp's (``common/ngram-map``); with the defaults a text has to have
more than 61 tokens. Helps where output repeats input: code edits, summaries, quotations.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from .._ngram import NgramIndex
from ..config import SpeculationParams
from ..types import DraftRequest, I32Array, Requirements
from .base import Drafter, Plan

if TYPE_CHECKING:
    from ..runtime.evaluator import Evaluator
    from ..runtime.model import Model

__all__ = ["History", "NgramSimple"]

log = logging.getLogger("pyspec")


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


class NgramSimple(Drafter):
    """Looks up the last ``size_n`` tokens in the text so far and proposes up to ``size_m`` tokens that followed.

    The latest earlier occurrence wins; one at position 0 does not count. Fewer than ``size_n`` following tokens are
    not proposed, and the text has to be longer than ``size_n + size_m + 1``. ``min_hits``: occurrences needed.
    """

    name: ClassVar[str] = "ngram-simple"
    limit_option: ClassVar[str] = "size_m"

    def __init__(self, target: Evaluator, draft: Evaluator | None, params: SpeculationParams, n_seq: int) -> None:
        super().__init__(target, draft, params, n_seq)
        self.n_max = params.size_m
        self._indexes: dict[int, NgramIndex] = {}
        log.info(
            "speculation: adding %s: size_n=%d, size_m=%d, min_hits=%d",
            self.name, params.size_n, params.size_m, params.min_hits,
        )  # fmt: skip

    @classmethod
    def plan(cls, target: Model, draft: Model | None, params: SpeculationParams, n_seq: int) -> Plan:
        """See :meth:`Drafter.plan`. Works with any target."""
        return Plan(Requirements(), None, params.size_m)

    def begin(self, seq: int, tokens: list[int]) -> None:
        """See :meth:`Drafter.begin`."""
        self._index(seq).clear()

    def draft(self, requests: list[DraftRequest]) -> None:
        """See :meth:`Drafter.draft`."""
        size_n, size_m, min_hits = self.params.size_n, self.params.size_m, min(self.params.min_hits, 2**31)
        for request in requests:
            tokens = request.tokens
            n_past = len(tokens) - 1
            if n_past <= size_n + size_m + 1:
                continue
            found = self._index(request.seq).find(tokens, min_hits)
            if found < 0:
                continue
            begin = found + size_n
            n_copy = min(size_m, n_past - begin)
            if n_copy >= size_n:
                request.draft.extend(tokens[begin : begin + min(n_copy, self.limit(request))])

    def _index(self, seq: int) -> NgramIndex:
        found = self._indexes.get(seq)
        if found is None:
            found = self._indexes[seq] = NgramIndex(self.params.size_n)
        return found

    def end(self, seq: int) -> None:
        """See :meth:`Drafter.end`."""
        self._indexes.pop(seq, None)
