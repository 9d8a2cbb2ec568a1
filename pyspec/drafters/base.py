"""What every drafter is: four verbs (``begin``, ``process``, ``draft``, ``accept``), a plan made before any context
exists, and counters.

A drafter proposes; the target decides. Whatever a drafter does, output stays right, so a mistake here can only cost
acceptance.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .. import _core, _sample
from ..config import SpeculationParams
from ..errors import ConfigError
from ..stats import DrafterStats
from ..types import CONSTRAINT, DraftRequest, F32Array, I32Array, Requirements

if TYPE_CHECKING:
    from ..runtime.batch import Batch
    from ..runtime.evaluator import Evaluator
    from ..runtime.model import Model

__all__ = ["DRAFT_TOP_K", "DraftSampler", "Drafter", "Plan", "log_setup"]

log = logging.getLogger("pyspec")

#: Candidates whose softmax gives a proposal's probability (llama.cpp's draft sampler is a top-k of 10).
DRAFT_TOP_K = 10

#: Most candidates that a drafted token is drawn from, where it is drawn.
_DRAW_TOP_K = 128


@dataclass(frozen=True, slots=True)
class Plan:
    """What a drafter needs, settled before contexts are made.

    Attributes:
        requirements: what the target context has to hand out.
        draft_context: options of the draft context that differ from the target's (names of ``ContextParams``), plus
            ``other``: True when the draft context must be tied to the target context. None: no draft context. Without a
            draft model of its own the context is made on the target model.
        n_max: most tokens this drafter proposes in a step.
    """

    requirements: Requirements = field(default_factory=Requirements)
    draft_context: Mapping[str, Any] | None = None
    n_max: int = 1


class Drafter(ABC):
    """Base of all drafters.

    The engine calls the ``run_*`` methods, which time and count; subclasses implement the verbs.

    Order of calls for a sequence: ``begin`` (before its prompt is evaluated), ``process`` after every evaluation of the
    target that holds rows of it, ``draft`` when it may speculate, ``accept`` after each verification, ``end``. Of a
    prompt only the very last row wants an output, which gives the first token; all rows of a verification want one.

    Args:
        target: the target's evaluator; hidden rows are borrowed from it in ``process``. Not owned.
        draft: the draft's evaluator, made as the plan says; None where the plan has no draft context. Not owned.
        params: options.
        n_seq: sequences the engine serves; ids are below it.
    """

    name: ClassVar[str]
    #: A proposal takes microseconds, whatever it proposes: ``speculation="auto"`` asks at every step, and others first.
    cheap: ClassVar[bool] = False
    #: ``DraftRequest.probs`` are probabilities of the whole proposal up to a token, not of the token alone.
    joint_probs: ClassVar[bool] = False
    #: ``DraftRequest.probs`` follow from what came true of earlier ones: ``speculation="auto"`` takes them as they are.
    calibrated: bool = False
    #: The option that says how many tokens are proposed at most; empty: there is none.
    limit_option: ClassVar[str] = "n_max"

    def __init__(self, target: Evaluator, draft: Evaluator | None, params: SpeculationParams, n_seq: int) -> None:
        self.target = target
        self.params = params
        self.n_seq = n_seq
        self.n_max = params.n_max
        self.n_min = params.n_min
        self.stats = DrafterStats(self.name)
        if draft is not None and draft.n_seq_max != n_seq:
            raise ConfigError(
                f"{self.name}: the draft context serves n_seq_max={draft.n_seq_max} sequences, the engine {n_seq}; "
                "make both equal"
            )

    def attach(self, target: Evaluator, draft: Evaluator | None, params: SpeculationParams, n_seq: int) -> None:
        """Bind a drafter that was made without a target, as in ``LLM(speculation=[MyDrafter(documents)])``.

        Called in place of the constructor above, so a subclass with a constructor of its own need not call it. May be
        called again after :meth:`close`, when the contexts are made anew. Args as of the class.
        """
        Drafter.__init__(self, target, draft, params, n_seq)

    @classmethod
    def plan(cls, target: Model, draft: Model | None, params: SpeculationParams, n_seq: int) -> Plan:
        """Check the pair and say what the contexts must be. Without one of your own: no draft context, any target.

        Raises:
            UnsupportedError: the method cannot work with this target or draft; the message has the reason.
            ConfigError, VocabMismatchError: target, draft and options do not fit; the message has both values.
        """
        return Plan(n_max=params.n_max)

    def begin(self, seq: int, tokens: list[int]) -> None:  # noqa: B027
        """A new generation starts; ``tokens`` is the prompt, not evaluated yet. Borrowed."""

    def process(self, batch: Batch) -> None:  # noqa: B027
        """Mirror what the target has just evaluated; its hidden rows are valid until its next decode."""

    @abstractmethod
    def draft(self, requests: list[DraftRequest]) -> None:
        """Fill ``draft`` (and ``probs`` where known) of each request; all sequences at once."""

    def accept(self, seq: int, n_accepted: int, is_other: bool) -> None:  # noqa: B027
        """``n_accepted`` tokens of the verified draft hold. ``is_other``: the draft was not this drafter's."""

    def rest(self, seq: int, value: bool) -> None:  # noqa: B027
        """Drafts of the sequence are hardly ever asked for from now on, or are again.

        A drafter that rests may leave out work, even where its next drafts become worse by that.
        """

    def state(self, seq: int) -> bytes | None:
        """What has to travel with a saved sequence; None: nothing."""
        return None

    def restore(self, seq: int, state: bytes | None) -> None:  # noqa: B027
        """Take back what ``state`` returned."""

    def end(self, seq: int) -> None:  # noqa: B027
        """The sequence is finished; free what it holds."""

    def inherit(self, previous: Drafter) -> None:  # noqa: B027
        """Take over what the drafter of the same class had learned; it is closed, and its contexts are gone."""

    def close(self) -> None:  # noqa: B027
        """Free what is owned. The contexts belong to the caller."""

    def run_begin(self, seq: int, tokens: list[int]) -> None:
        """Timed and counted ``begin``."""
        start = time.perf_counter_ns()
        try:
            self.begin(seq, tokens)
        finally:
            self.stats.n_call_begin += 1
            self.stats.t_begin_us += (time.perf_counter_ns() - start) // 1000

    def run_process(self, batch: Batch) -> None:
        """Timed ``process``."""
        start = time.perf_counter_ns()
        try:
            self.process(batch)
        finally:
            self.stats.t_process_us += (time.perf_counter_ns() - start) // 1000

    def run_draft(self, requests: list[DraftRequest]) -> None:
        """Timed and counted ``draft``."""
        start = time.perf_counter_ns()
        try:
            self.draft(requests)
        finally:
            self.stats.n_call_draft += 1
            self.stats.t_draft_us += (time.perf_counter_ns() - start) // 1000

    def run_accept(self, seq: int, n_accepted: int, is_other: bool, n_draft: int) -> None:
        """Timed and counted ``accept``.

        Args:
            seq, n_accepted, is_other: see ``accept``.
            n_draft: length of the draft that was verified.
        """
        start = time.perf_counter_ns()
        try:
            self.accept(seq, n_accepted, is_other)
        finally:
            if not is_other:
                self.stats.n_call_accept += 1
                self.stats.count(n_draft, n_accepted)
            self.stats.t_accept_us += (time.perf_counter_ns() - start) // 1000

    def limit(self, request: DraftRequest, n_room: int | None = None) -> int:
        """Tokens that may be proposed for ``request``: its own limit, the drafter's, and the draft context's room."""
        n = min(request.n_max, self.n_max)
        return n if n_room is None else min(n, n_room)

    def p_min(self, request: DraftRequest) -> float:
        """Drafting for ``request`` stops at the first token less likely than this."""
        return self.params.p_min if request.p_min is None else request.p_min

    def goes_on(self, request: DraftRequest, n: int) -> bool:
        """Whether a draft that has just got one more token is to have another; ``n``: its limit."""
        return len(request.draft) < n and (request.more is None or request.more(request.probs[-1]))

    def drop_short(self, requests: list[DraftRequest]) -> None:
        """Empty the drafts shorter than ``n_min``, except those that were drawn by lot."""
        n_min = self.n_min
        if n_min:
            for request in requests:
                # to leave out tokens that were drawn would change the distribution of the text
                if len(request.draft) < n_min and not request.q:
                    request.draft.clear()
                    request.probs.clear()


class DraftSampler:
    """Top-1 with its probability among the ten best, for several rows; buffers are made once.

    Attributes:
        ids: int32 [n_rows, k], best first. Owned.
        probs: float32 [n_rows, k], softmax over the k best. Owned.
    """

    def __init__(self, n_rows: int, n_vocab: int, k: int = DRAFT_TOP_K) -> None:
        self.k = min(k, n_vocab)
        self.ids: I32Array = np.empty((n_rows, self.k), np.int32)
        self.probs: F32Array = np.empty((n_rows, self.k), np.float32)
        n_draw = min(_DRAW_TOP_K, n_vocab)
        self._draw_ids: I32Array = np.empty(n_draw, np.int32)
        self._draw_probs: F32Array = np.empty(n_draw, np.float32)

    def rows(self, logits: F32Array) -> tuple[list[int], list[float]]:
        """Best token and its probability for each row of ``logits`` (float32 [n, n_vocab], borrowed)."""
        n = logits.shape[0]
        _core.topk_softmax_rows(logits, self.ids[:n], self.probs[:n])
        return self.ids[:n, 0].tolist(), self.probs[:n, 0].tolist()

    def allowed(self, row: int, request: DraftRequest, token: int, prob: float) -> tuple[int, float]:
        """The best candidate of row ``row`` of the last :meth:`rows` that a request's grammar allows after its draft.

        Args:
            token, prob: the best one whatever a grammar says; given back where there is no grammar.

        Returns:
            The token and its probability; (-1, 0.0): none of the candidates is allowed.
        """
        constraint = request.extra.get(CONSTRAINT)
        if constraint is None:
            return token, prob
        at = constraint.first_allowed(request.draft, self.ids[row].tolist())
        return (int(self.ids[row, at]), float(self.probs[row, at])) if at >= 0 else (-1, 0.0)

    def draw(
        self, logits: F32Array, row: int, request: DraftRequest, n_vocab: int, names: I32Array | None = None
    ) -> bool:
        """Draw the next token of a draft as ``request.sampling`` says, and append it with what it was drawn from.

        Args:
            logits: float32 [n, >= n_vocab], borrowed. row: which one. n_vocab: only ids below it are drawn.
            names: int32 [>= n_vocab], token ids of the columns; None: the columns' numbers.

        Returns:
            False: the row has nothing to draw from.
        """
        how = request.sampling
        assert how is not None
        k = min(how.top_k or _DRAW_TOP_K, len(self._draw_ids))
        u = _core.philox_uniform(how.seed, how.stream, len(request.tokens) + len(request.draft))
        ids, probs = self._draw_ids[:k], self._draw_probs[:k]
        token, n, _ = _sample.draft_row(logits, row, n_vocab, how.temperature, how.top_p, how.min_p, u, ids, probs)
        if token < 0:
            return False
        at = int(np.flatnonzero(ids[:n] == token)[0])
        request.q.append((ids[:n].copy() if names is None else names[ids[:n]], probs[:n].copy()))
        request.draft.append(token if names is None else int(names[token]))
        request.probs.append(float(probs[at]))
        return True


def log_setup(drafter: Drafter, draft: Evaluator | None, *extra: str) -> None:
    """Log what a drafter was set up with, as llama.cpp does: limits, GPU layers, cache types, devices."""
    params = drafter.params
    parts = [f"n_max={drafter.n_max}, n_min={drafter.n_min}, p_min={params.p_min:g}", *extra]
    if draft is not None:
        model = getattr(getattr(draft, "model", None), "params", None)
        context = getattr(draft, "params", None)
        devices = getattr(model, "devices", None)
        parts.append(
            f"gpu_layers={getattr(model, 'n_gpu_layers', '-')}, cache_k={getattr(context, 'cache_type_k', '-')}, "
            f"cache_v={getattr(context, 'cache_type_v', '-')}, "
            f"devices=[{', '.join(devices) if devices else 'default'}]"
        )
    log.info("speculation: adding %s: %s", drafter.name, "; ".join(parts))
