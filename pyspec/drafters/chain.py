"""Several drafters as one: in order of priority, the first that proposes something for a sequence wins."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DecodeAborted
from ..types import CONSTRAINT, DraftRequest, F32Array, I32Array
from .base import Drafter

if TYPE_CHECKING:
    from ..runtime import Batch

__all__ = ["DrafterChain"]

log = logging.getLogger("pyspec")


class DrafterChain:
    """Asks drafters and keeps their mistakes from the engine.

    A draft is only a hint, so a drafter may be wrong, never unsafe: what is too long is cut, so is everything from an
    unknown token id on, and a drafter that raises is off for the sequences concerned until they end (counted in
    ``stats.n_failed``, logged as a warning). Only an abort goes through: it is a request, not a failure.

    Args:
        drafters: in order of priority.
        n_vocab: the target's vocabulary size.
    """

    def __init__(self, drafters: Sequence[Drafter], n_vocab: int) -> None:
        self.drafters = drafters
        self.n_max = max((d.n_max for d in self.drafters), default=0)
        self._n_vocab = n_vocab
        # by identity: a drafter of the user's may not be hashable
        self._failed: dict[int, set[int]] = {}

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """In order of priority."""
        return self._drafters

    @drafters.setter
    def drafters(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        # who has something to do after a pass; a call that does nothing costs as much as one that does little
        self._processing = tuple(d for d in self._drafters if _has_own(d, "process"))
        self._accepting = frozenset(id(d) for d in self._drafters if _has_own(d, "accept"))

    def begin(self, seq: int, tokens: list[int]) -> None:
        """A sequence starts, or starts over."""
        for drafter in self.drafters:
            if not self._is_off(drafter, seq):
                try:
                    drafter.run_begin(seq, tokens)
                except Exception as e:
                    self._fail(drafter, [seq], e)

    def draft(self, requests: Sequence[DraftRequest]) -> dict[int, Drafter]:
        """Fill the requests; returns who won each sequence that has a draft."""
        winners: dict[int, Drafter] = {}
        for drafter in self.drafters:
            asked = [r for r in requests if r.seq not in winners] if winners else requests
            if asked:
                self.ask(drafter, asked)
                winners.update((r.seq, drafter) for r in asked if r.draft)
        return winners

    def ask(self, drafter: Drafter, requests: Sequence[DraftRequest]) -> None:
        """Let one drafter fill the requests, as far as it is in order and allowed. Their drafts are empty before."""
        asked = [r for r in requests if self._may(drafter, r)]
        if not asked:
            return
        limits = [r.n_max for r in asked]
        try:
            drafter.run_draft(asked)
            for r, n_max in zip(asked, limits, strict=True):
                r.draft = self._checked(r.draft, n_max)
                r.q = self._checked_q(r)
                self._cut(r)
        except Exception as e:
            for r, n_max in zip(asked, limits, strict=True):
                r.draft, r.probs, r.q, r.n_max = [], [], [], n_max
            self._fail(drafter, [r.seq for r in asked], e)

    def rest(self, drafter: Drafter, seq: int, value: bool) -> None:
        """Tell one drafter that it will hardly be asked for a sequence, or again will."""
        if not self._is_off(drafter, seq):
            try:
                drafter.rest(seq, value)
            except Exception as e:
                self._fail(drafter, [seq], e)

    def _may(self, drafter: Drafter, request: DraftRequest) -> bool:
        chosen = request.drafters is None or drafter.name in request.drafters
        return chosen and not (self._failed and self._is_off(drafter, request.seq))

    def _checked(self, draft: Iterable[int], n_max: int) -> list[int]:
        """At most ``n_max`` ids, up to the first unknown one. Raises TypeError for what is no integer."""
        tokens = [operator.index(t) for t in islice(draft, n_max)]
        if not tokens or (min(tokens) >= 0 and max(tokens) < self._n_vocab):
            return tokens
        return list(takewhile(lambda t: 0 <= t < self._n_vocab, tokens))

    @staticmethod
    def _cut(request: DraftRequest) -> None:
        """Nothing after a token that the request's grammar refuses; without that token too, unless it was drawn.

        A token that was drawn must be seen to fail: its place is filled by rejection sampling, from what is left.
        """
        constraint = request.extra.get(CONSTRAINT)
        if constraint is not None and request.draft:
            n = constraint.n_allowed(request.draft)
            del request.draft[n + 1 if request.q else n :]
            del request.q[len(request.draft) :]

    @staticmethod
    def _checked_q(request: DraftRequest) -> list[tuple[I32Array, F32Array]]:
        """What the draft was drawn from; empty where that was not asked for or cannot be so."""
        n = len(request.draft)
        if request.sampling is None or not n or len(request.q) < n:
            return []
        q: list[tuple[I32Array, F32Array]] = []
        for token, (ids, probs) in zip(request.draft, request.q, strict=False):
            ids, probs = np.ascontiguousarray(ids, np.int32), np.ascontiguousarray(probs, np.float32)
            if ids.ndim != 1 or ids.shape != probs.shape or not probs[ids == token].sum() > 0:
                return []
            q.append((ids, probs))
        return q

    def process(self, batch: Batch) -> None:
        """Let all mirror the pass that the target has just evaluated."""
        for drafter in self._processing:
            seqs = list(batch.rows())
            if self._failed:
                seqs = [seq for seq in seqs if not self._is_off(drafter, seq)]
            if seqs:
                try:
                    drafter.run_process(batch)
                except Exception as e:
                    self._fail(drafter, seqs, e)

    def accept(self, seq: int, n_accepted: int, winner: Drafter | None, n_draft: int) -> None:
        """Tell all that want to know how much of the verified draft holds, and whose it was."""
        accepting = self._accepting
        for drafter in self._drafters:
            if drafter is not winner and id(drafter) not in accepting:
                continue
            if not (self._failed and self._is_off(drafter, seq)):
                try:
                    drafter.run_accept(seq, n_accepted, drafter is not winner, n_draft)
                except Exception as e:
                    self._fail(drafter, [seq], e)

    def end(self, seq: int) -> None:
        """The sequence is finished; its slot may be used by another one."""
        self._failed.pop(seq, None)
        for drafter in self.drafters:
            try:
                drafter.end(seq)
            except Exception as e:
                self._fail(drafter, [], e)

    def close(self) -> None:
        """Close all, whatever one of them raises."""
        for drafter in self.drafters:
            try:
                drafter.close()
            except Exception as e:
                self._fail(drafter, [], e)

    def _is_off(self, drafter: Drafter, seq: int) -> bool:
        return id(drafter) in self._failed.get(seq, ())

    def _fail(self, drafter: Drafter, seqs: list[int], e: Exception) -> None:
        if isinstance(e, DecodeAborted):
            raise e
        drafter.stats.n_failed += 1
        log.warning("%s failed and is off for sequence(s) %s: %s", drafter.name, seqs, e, exc_info=e)
        for seq in seqs:
            self._failed.setdefault(seq, set()).add(id(drafter))


def _has_own(drafter: Drafter, verb: str) -> bool:
    """Whether a drafter does something when it is told."""
    names = (verb, f"run_{verb}")
    return any(getattr(type(drafter), n, None) is not getattr(Drafter, n) or n in vars(drafter) for n in names)
