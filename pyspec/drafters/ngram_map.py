"""``ngram-map-k`` and ``ngram-map-k4v``: n-grams of the text so far, and how well proposals after them did.

Need no model. Rules and limits are llama.cpp's (``common/ngram-map``), and so are the drafts. A proposal after an
n-gram is never longer than what was accepted of the one before it after the same n-gram, so an n-gram of which nothing
was accepted is silent from then on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar

from .._ngram import NgramMap
from ..config import SpeculationParams
from ..types import DraftRequest, Requirements
from .base import Drafter, Plan

if TYPE_CHECKING:
    from ..runtime.evaluator import Evaluator
    from ..runtime.model import Model

__all__ = ["NgramMapK", "NgramMapK4v"]

log = logging.getLogger("pyspec")


class NgramMapK(Drafter):
    """Proposes up to ``size_m`` tokens that followed an earlier occurrence of the last ``size_n`` tokens.

    The text has to have ``2 * size_n + size_m`` tokens before the last one. ``min_hits`` is for ``ngram-map-k4v``
    only, as in llama.cpp.
    """

    name: ClassVar[str] = "ngram-map-k"
    limit_option: ClassVar[str] = "size_m"
    key_only: ClassVar[bool] = True

    def __init__(self, target: Evaluator, draft: Evaluator | None, params: SpeculationParams, n_seq: int) -> None:
        super().__init__(target, draft, params, n_seq)
        self.n_max = params.size_m
        self._maps: dict[int, NgramMap] = {}
        log.info(
            "speculation: adding %s: size_n=%d, size_m=%d, min_hits=%d",
            self.name, params.size_n, params.size_m, params.min_hits,
        )  # fmt: skip

    @classmethod
    def plan(cls, target: Model, draft: Model | None, params: SpeculationParams, n_seq: int) -> Plan:
        """See :meth:`Drafter.plan`. Works with any target; a draft is for others in the chain."""
        return Plan(Requirements(), None, params.size_m)

    def begin(self, seq: int, tokens: list[int]) -> None:
        """See :meth:`Drafter.begin`."""
        self._map(seq).begin(tokens)

    def draft(self, requests: list[DraftRequest]) -> None:
        """See :meth:`Drafter.draft`."""
        for request in requests:
            request.draft.extend(self._map(request.seq).draft(request.tokens, self.limit(request)))

    def accept(self, seq: int, n_accepted: int, is_other: bool) -> None:
        """See :meth:`Drafter.accept`."""
        if not is_other:
            self._map(seq).accept(n_accepted)

    def end(self, seq: int) -> None:
        """See :meth:`Drafter.end`."""
        self._maps.pop(seq, None)

    def _map(self, seq: int) -> NgramMap:
        found = self._maps.get(seq)
        if found is None:
            p = self.params
            found = self._maps[seq] = NgramMap(p.size_n, p.size_m, self.key_only, min(p.min_hits, 2**31))
        return found


class NgramMapK4v(NgramMapK):
    """As ``ngram-map-k``, but tells up to four continuations of an n-gram apart.

    Proposes only where one was seen at least twice as often as the others together, and only when the n-gram was found
    ``min_hits`` times.
    """

    name: ClassVar[str] = "ngram-map-k4v"
    key_only: ClassVar[bool] = False
