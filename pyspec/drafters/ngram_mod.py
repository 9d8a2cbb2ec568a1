"""``ngram-mod``: one pool of hashed n-grams for all sequences, each with the token that followed last.

Needs no model. Rules and limits are llama.cpp's (``common/ngram-mod``), and so are the drafts: long n-grams, long
proposals, constant memory (16 MiB). What one sequence has said helps the others, and later ones.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar

from .._ngram import NgramPool
from ..config import SpeculationParams
from ..types import DraftRequest, Requirements
from .base import Drafter, Plan

if TYPE_CHECKING:
    from ..runtime.evaluator import Evaluator
    from ..runtime.model import Model

__all__ = ["NgramMod"]

log = logging.getLogger("pyspec")

#: Shorter n-grams give many wrong proposals (llama.cpp warns too).
N_MATCH_LOW = 16


class NgramMod(Drafter):
    """Looks up the last ``n_match`` tokens, then those with the token found, and so on, up to ``mod_n_max`` tokens.

    Proposals shorter than ``mod_n_min`` are not made. The pool is emptied when a sequence begins and a quarter of it is
    in use, and after five proposals to a sequence in a row of which less than a quarter was accepted. llama.cpp takes
    the quarter of the whole proposal, even where only its beginning was verified; here it is of what was verified.
    """

    name: ClassVar[str] = "ngram-mod"
    cheap: ClassVar[bool] = True
    limit_option: ClassVar[str] = "mod_n_max"

    def __init__(self, target: Evaluator, draft: Evaluator | None, params: SpeculationParams, n_seq: int) -> None:
        super().__init__(target, draft, params, n_seq)
        self.n_max = params.mod_n_max
        self.n_min = params.mod_n_min
        self.pool = NgramPool(params.n_match, params.mod_n_max, params.mod_n_min, n_seq)
        log.info(
            "speculation: adding %s: n_match=%d, n_max=%d, n_min=%d; pool of %d entries",
            self.name, params.n_match, self.n_max, self.n_min, self.pool.n_entries,
        )  # fmt: skip
        if params.n_match < N_MATCH_LOW:
            log.warning("%s: n_match=%d is small: many proposals will be wrong", self.name, params.n_match)

    @classmethod
    def plan(cls, target: Model, draft: Model | None, params: SpeculationParams, n_seq: int) -> Plan:
        """See :meth:`Drafter.plan`. Works with any target; a draft is for others in the chain."""
        return Plan(Requirements(), None, params.mod_n_max)

    def begin(self, seq: int, tokens: list[int]) -> None:
        """See :meth:`Drafter.begin`."""
        if self.pool.begin(seq, tokens):
            log.info("%s: more than a quarter of the pool was in use; it was emptied", self.name)

    def draft(self, requests: list[DraftRequest]) -> None:
        """See :meth:`Drafter.draft`."""
        for request in requests:
            request.draft.extend(self.pool.draft(request.seq, request.tokens, self.limit(request)))

    def accept(self, seq: int, n_accepted: int, is_other: bool) -> None:
        """See :meth:`Drafter.accept`."""
        if not is_other and self.pool.accept(seq, n_accepted):
            log.info("%s: few tokens were accepted; the pool was emptied", self.name)

    def end(self, seq: int) -> None:
        """See :meth:`Drafter.end`."""
        self.pool.end(seq)
