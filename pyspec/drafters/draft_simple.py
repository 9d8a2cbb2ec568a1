"""``draft-simple``: a smaller model of the same vocabulary writes the draft, token by token.

The draft reads a prompt chunk by chunk with the target, so that no step of other sequences waits for all of it. After
that its cache is brought up to date when a draft is wanted, not after every pass of the target: rows of rejected tokens
are then never evaluated, and in a chain the draft model rests while another drafter does the work. A sequence that
rests (``rest``) is not read before a draft is wanted.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ..config import SpeculationParams
from ..errors import ConfigError, PyspecError, RollbackError
from ..runtime.batch import LAST, NONE, Batch
from ..types import DraftRequest, Requirements
from .base import Drafter, DraftSampler, Plan, log_setup
from .choose import require_kind
from .compat import check_vocab

if TYPE_CHECKING:
    from ..runtime.evaluator import Evaluator
    from ..runtime.model import Model

__all__ = ["DraftSimple"]

log = logging.getLogger("pyspec")


@dataclass(slots=True)
class _Cache:
    """What the draft's cache holds for one sequence.

    The first ``n_text`` rows are known to be the sequence's text; ``tail`` holds the tokens of the rows after them
    (proposals that were evaluated).
    """

    n_text: int = 0
    tail: list[int] = field(default_factory=list)
    warned: bool = False
    rests: bool = False

    @property
    def n(self) -> int:
        return self.n_text + len(self.tail)


@dataclass(slots=True)
class _Work:
    """A request on its way: ``tokens[at:]`` has still to be evaluated, then ``n`` tokens may be drafted."""

    request: DraftRequest
    cache: _Cache
    at: int
    n: int


class DraftSimple(Drafter):
    """Proposals of an ordinary draft model, the best ones or drawn by lot; see the module's text.

    Args: see :class:`Drafter`; ``draft`` is a context on the draft model with as many sequences as the engine.
    """

    name: ClassVar[str] = "draft-simple"

    def __init__(self, target: Evaluator, draft: Evaluator | None, params: SpeculationParams, n_seq: int) -> None:
        if draft is None:
            raise ConfigError(f"{self.name} needs a draft model")
        super().__init__(target, draft, params, n_seq)
        self._draft = draft
        self._n_vocab = min(target.n_vocab, draft.n_vocab)
        self._batch = Batch(draft.n_batch)
        self._sampler = DraftSampler(min(n_seq, draft.n_batch), draft.n_vocab)
        self._caches = [_Cache() for _ in range(n_seq)]
        log_setup(self, draft)

    @classmethod
    def plan(cls, target: Model, draft: Model | None, params: SpeculationParams, n_seq: int) -> Plan:
        """See :meth:`Drafter.plan`. The vocabularies have to fit by llama.cpp's rules."""
        if draft is None:
            raise ConfigError(f"{cls.name} needs a draft model: pass draft='file.gguf'")
        require_kind(DraftSimple.name, draft)
        check_vocab(target.vocab, draft.vocab)
        # no snapshots for the draft: it decodes row by row, and snapshots undo less than the last pass
        n_rs_seq = params.n_max if target.is_recurrent or target.is_hybrid else 0
        return Plan(
            Requirements(n_rs_seq=n_rs_seq), {"n_rs_seq": 0, "n_outputs_max": n_seq, "other": False}, params.n_max
        )

    def begin(self, seq: int, tokens: list[int]) -> None:
        """See :meth:`Drafter.begin`."""
        self._forget(seq)

    def end(self, seq: int) -> None:
        """See :meth:`Drafter.end`."""
        self._forget(seq)

    def rest(self, seq: int, value: bool) -> None:
        """See :meth:`Drafter.rest`."""
        self._caches[seq].rests = value

    def process(self, batch: Batch) -> None:
        """See :meth:`Drafter.process`. Rows of a verification wait until a draft is wanted."""
        for seq, (b, e) in batch.rows().items():
            if not batch.output[b] and batch.use_tokens and self._follows(seq, batch, b, e):
                try:
                    self._read(seq, batch, b, e)
                except BaseException:
                    with contextlib.suppress(PyspecError):
                        self._forget(seq)
                    raise

    def _follows(self, seq: int, batch: Batch, b: int, e: int) -> bool:
        """Whether rows of a prompt go on where the cache ends, and the draft has room for them and knows them."""
        cache, begin = self._caches[seq], int(batch.pos[b])
        return (
            not cache.rests
            and not cache.tail
            and cache.n_text == begin
            and begin + e - b <= self._draft.n_ctx_seq
            and (self._draft.n_vocab >= self.target.n_vocab or int(batch.tokens[b:e].max()) < self._draft.n_vocab)
        )

    def _read(self, seq: int, batch: Batch, b: int, e: int) -> None:
        cache, own = self._caches[seq], self._batch
        for i in range(b, e, own.capacity):
            own.clear()
            own.extend(batch.tokens[i : min(e, i + own.capacity)], int(batch.pos[i]), seq, NONE)
            self._draft.decode(own)
            cache.n_text += own.n

    def draft(self, requests: list[DraftRequest]) -> None:
        """See :meth:`Drafter.draft`. A sequence whose text does not fit the draft's context gets no draft."""
        try:
            self._draft_all(requests)
        except BaseException:
            # which rows were evaluated is unknown; start over from the text next time
            for request in requests:
                with contextlib.suppress(PyspecError):
                    self._forget(request.seq)
            raise
        self.drop_short(requests)

    def _forget(self, seq: int) -> None:
        cache = self._caches[seq]
        cache.n_text = 0
        cache.tail.clear()
        cache.warned = False
        cache.rests = False
        self._draft.memory.clear(seq)

    def _draft_all(self, requests: list[DraftRequest]) -> None:
        works = [w for w in map(self._prepare, requests) if w is not None]
        works = self._catch_up(works)
        batch = self._batch
        while works:
            batch.clear()
            for work in works:
                request, cache = work.request, work.cache
                batch.add(request.draft[-1], request.n_past + len(request.draft), request.seq, True)
                cache.tail.append(request.draft[-1])
            self._draft.decode(batch)
            works = self._sample(works)

    def _prepare(self, request: DraftRequest) -> _Work | None:
        """Roll the cache back to the text, and say what has to be evaluated; None: no draft for this sequence."""
        cache = self._caches[request.seq]
        tokens = request.tokens
        n = self.limit(request, self._draft.n_ctx_seq - request.n_past)
        if n < 1:
            if not cache.warned and request.n_past >= self._draft.n_ctx_seq:
                cache.warned = True
                log.info(
                    "%s: the text of sequence %d is longer than the draft's context (%d): no more drafts for it",
                    self.name, request.seq, self._draft.n_ctx_seq,
                )  # fmt: skip
            return None
        keep = cache.n_text
        for token in cache.tail:
            if keep >= request.n_past or tokens[keep] != token:
                break
            keep += 1
        # the last token is always evaluated: its row yields the first proposal
        keep = min(keep, request.n_past)
        if not self._speaks(tokens, min(keep, cache.n_text), cache, request.seq):
            return None
        memory = self._draft.memory
        try:
            kept = memory.rollback(request.seq, keep, cache.n)
        except RollbackError:
            memory.clear(request.seq)
            kept = 0
        cache.n_text = kept
        cache.tail.clear()
        return _Work(request, cache, kept, n)

    def _speaks(self, tokens: list[int], begin: int, cache: _Cache, seq: int) -> bool:
        """Whether the draft knows all of ``tokens[begin:]``; a target may have up to 128 tokens more."""
        if self._draft.n_vocab >= self.target.n_vocab or max(tokens[begin:]) < self._draft.n_vocab:
            return True
        if not cache.warned:
            cache.warned = True
            log.info("%s: sequence %d holds a token that the draft lacks: no more drafts for it", self.name, seq)
        return False

    def _catch_up(self, works: list[_Work]) -> list[_Work]:
        """Evaluate what is missing of every text, in as few passes as fit; returns those that go on drafting."""
        batch, going = self._batch, []
        todo = list(works)
        while todo:
            batch.clear()
            finished = []
            for work in todo:
                room = batch.capacity - batch.n
                if not room:
                    break
                tokens = work.request.tokens
                end = min(len(tokens), work.at + room)
                last = end == len(tokens)
                batch.extend(tokens[work.at : end], work.at, work.request.seq, LAST if last else NONE)
                work.at = end
                if last:
                    finished.append(work)
            self._draft.decode(batch)
            for work in finished:
                work.cache.n_text = work.at
                if work.n > 1:
                    # proposals are evaluated next, and some will be taken back
                    self._draft.memory.checkpoint(work.request.seq, work.at)
            going += self._sample(finished)
            todo = [w for w in todo if w.at < len(w.request.tokens)]
        return going

    def _sample(self, works: list[_Work]) -> list[_Work]:
        """Take one proposal for each of ``works`` from the pass just made; returns those that go on."""
        if not works:
            return []
        logits = self._draft.logits()
        ids, probs = self._sampler.rows(logits)
        going = []
        for i, (work, token, prob) in enumerate(zip(works, ids, probs, strict=True)):
            if work.request.sampling is None:
                token, prob = self._sampler.allowed(i, work.request, token, prob)
            if prob < self.p_min(work.request):
                continue
            if work.request.sampling is not None:
                if not self._sampler.draw(logits, i, work.request, self._n_vocab):
                    continue
            elif not 0 <= token < self._n_vocab:
                continue
            else:
                work.request.draft.append(token)
                work.request.probs.append(prob)
            if self.goes_on(work.request, work.n):
                going.append(work)
        return going
