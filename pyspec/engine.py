"""The loop: draft, evaluate, verify, commit or roll back. Several sequences share each pass.

The pass that reads the end of a prompt gives the first token (not in exact mode). From then on a sequence's last token
is pending: the target has evaluated everything before it. A step evaluates it together with a draft for what follows,
so every step emits one token at least.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from operator import attrgetter
from time import perf_counter_ns
from typing import Any, TypeAlias

from .config import SamplingParams, SpeculationParams
from .control import Controller, ThreadGovernor
from .drafters.base import Drafter
from .drafters.chain import DrafterChain
from .errors import ClosedError, ConfigError, DecodeAborted, PyspecError, SamplingError, UnsupportedError
from .runtime import ALL, LAST, NONE, Batch, Evaluator, Piece, Sequence, TextStream
from .sampling import (
    Breakers,
    Constraint,
    LogprobRows,
    Q,
    SamplerChain,
    Scratch,
    SyntheticVerifier,
    Verifier,
    VocabLike,
    make_breakers,
    processed_logprobs,
    synthetic_rates,
)
from .stats import SpecStats
from .types import DraftRequest, F32Array, FinishReason, RollbackKind, TokenLogprob

__all__ = ["Engine", "Observer"]

log = logging.getLogger("pyspec")

#: Where all sequences do not fit into one pass with drafts of this length, they take several.
_N_DRAFT_SHARED = 15

#: A short chunk of a prompt takes as long as so many rows more of a long one would.
_N_ROWS_PASS = 32

#: Called after each verification with (sequence, logits, row, n_draft, emitted): row ``row + i`` of ``logits`` decided
#: ``emitted[i]``. Logits are borrowed for the call. What follows the end of the sequence is emitted, not committed.
Observer: TypeAlias = Callable[[Sequence, F32Array, int, int, list[int]], None]


class Engine:
    """Runs sequences on one target, with drafters in order of priority. Not thread-safe: the caller holds a lock.

    Args:
        target: the model whose output it is.
        drafters: asked in this order; the first that proposes something for a sequence wins. Empty: plain decoding.
        eog_tokens: tokens that end a generation.
        n_ctx: most positions of a sequence; 0: what the target has.
        draft_evaluators: the drafters' own, so that a request to abort can be withdrawn from all.
        speculation: asks for synthetic acceptance or exact passes, or not; the drafters have the other options.
        vocab: the target's, where requests may use DRY, whose sequence breakers are text.
        control: see the attribute.
        clock: nanoseconds; another one for tests.

    Attributes:
        stats: totals over all sequences; ``n_pass`` counts passes of running sequences, whoever shared them.
        observer: sees every verification, for measurements; None: nobody.
        control: decides at each step who drafts how much; None: the first drafter that proposes something, as much as
            it proposes.
        threads: changes the number of CPU threads between passes; None: it stays.
    """

    def __init__(
        self,
        target: Evaluator,
        drafters: Seq[Drafter] = (),
        eog_tokens: Collection[int] = (),
        n_ctx: int = 0,
        draft_evaluators: Seq[Evaluator] = (),
        speculation: SpeculationParams | None = None,
        vocab: VocabLike | None = None,
        *,
        control: Controller | None = None,
        clock: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self.target = target
        self.chain = DrafterChain(drafters, target.n_vocab)
        self.eog_tokens = frozenset(eog_tokens)
        self.n_ctx = min(n_ctx or target.n_ctx_seq, target.n_ctx_seq)
        self.stats = SpecStats(drafters=[d.stats for d in drafters])
        self.closed = False
        self.observer: Observer | None = None
        self.control = control
        self.threads: ThreadGovernor | None = None
        self._clock = clock
        self._evaluators = (target, *draft_evaluators)
        self._batch = Batch(target.n_batch)
        self._verify: Verifier | SyntheticVerifier = Verifier()
        self._scratch = Scratch(target.n_vocab)
        self._vocab = vocab
        self._breakers: dict[tuple[str, ...], Breakers] = {}
        self._logprobs = LogprobRows(16)
        self._waiting: deque[Sequence] = deque()
        self._slots: list[Sequence | None] = [None] * target.n_seq_max
        self._n_admitted = 0
        self._n_chunk = min(target.n_ubatch, target.n_batch)
        self._n_rows_max = min(target.n_batch, target.n_outputs_max, target.memory.n_rows_max)
        self._n_draft_max = min(self.chain.n_max, target.memory.n_draft_max)
        # rows of every verification in exact mode; 0: as many as there are
        self._n_rows = speculation.n_max + 1 if speculation is not None and speculation.exact else 0
        # a prompt's last token that is left to a verification: in exact mode the first token, too, has a pass of that
        # shape, because some graphs compute a prompt's last row in other ways when a drafter reads hidden rows
        self._n_held = 1 if self._n_rows else 0
        if self._n_rows:
            self._check_exact()
            self.n_ctx = min(self.n_ctx, target.n_ctx_seq - self._n_rows + 1)
            self._n_draft_max = min(self._n_draft_max, self._n_rows - 1)
        # in exact mode who else is running must not show in the shape of a pass; drafts are else shortened to share
        # one, but not to nothing
        shortest = min(self.n_draft_max, _N_DRAFT_SHARED)
        self._n_group = 1 if self._n_rows else max(1, self._n_rows_max // (shortest + 1))
        rates = synthetic_rates(speculation or SpeculationParams(), self.n_draft_max)
        if rates:
            self._verify = SyntheticVerifier(self._verify, rates, self.eog_tokens)
            self.stats.synthetic = True
            log.warning(
                "synthetic acceptance, for benchmarks only: THE OUTPUT IS NOT VALID. Mean length %.3f, rates [%s]",
                1 + sum(rates),
                ", ".join(f"{r:.3g}" for r in rates),
            )

    def _check_exact(self) -> None:
        memory, n_rows = self.target.memory, self._n_rows
        if memory.kind not in (RollbackKind.PARTIAL, RollbackKind.BOUNDED):
            raise UnsupportedError(
                "exact=True is not possible with this target: its memory goes back only by evaluating tokens again, "
                "in passes of another shape"
            )
        limit = min(memory.n_draft_max, memory.n_rows_max - 1, self.target.n_batch - 1, self.target.n_outputs_max - 1)
        if n_rows - 1 > limit or n_rows > self.target.n_ubatch:
            limit = min(limit, self.target.n_ubatch - 1)
            raise ConfigError(f"exact=True with n_max={n_rows - 1}: this target's contexts allow n_max <= {limit}")

    # -- requests --

    def submit(
        self,
        prompt: Seq[int],
        params: SamplingParams | None = None,
        text: TextStream | None = None,
        extra: Mapping[str, Any] | None = None,
        constraint: Constraint | None = None,
    ) -> Sequence:
        """Queue a request; :meth:`step` works on it. The caller reads ``pieces`` and must :meth:`release` it.

        ``extra`` goes to the drafters with every ``DraftRequest``. ``constraint`` is this request's alone.

        Raises:
            ConfigError: the prompt is empty, too long for the context, or holds an unknown token id; or an option of
                ``params`` does not fit this model.
        """
        self.check_prompt(prompt)
        params = params or SamplingParams()
        if self._n_rows and params.verification in ("rejection", "block"):
            raise ConfigError(
                f"verification={params.verification!r} makes the text depend on the draft, exact=True forbids that: "
                "use verification='match'"
            )
        if self._n_rows and params.verification == "auto":
            params = params.override(verification="match")
        self.check_speculation(params)
        seq = Sequence(list(prompt), params, text, extra)
        seq.sampler = self._sampler(seq, constraint)
        seq.stats.synthetic = self.stats.synthetic
        if seq.params.max_tokens == 0:
            self._end(seq, "length")
        else:
            self._waiting.append(seq)
        return seq

    def _sampler(self, seq: Sequence, constraint: Constraint | None) -> SamplerChain:
        params = seq.params
        breakers = None
        if params.dry_multiplier > 0 and self._vocab is not None:
            key = params.dry_sequence_breakers
            if key not in self._breakers:
                self._breakers[key] = make_breakers(self._vocab, self.target.n_vocab, key)
            breakers = self._breakers[key]
        ends = () if params.ignore_eos else self.eog_tokens
        return SamplerChain(
            params, self.target.n_vocab, seq.tokens, seq.seed, self._scratch, constraint, breakers, ends
        )

    def cancel_all(self) -> None:
        """Ask for every sequence to end, at the next step. May be called from any thread, without the lock."""
        for seq in (*list(self._waiting), *self.active):
            seq.cancelled = True

    def check_prompt(self, prompt: Seq[int]) -> None:
        """Raise what :meth:`submit` would raise for this prompt."""
        if self.closed:
            raise ClosedError("the engine is closed")
        if not len(prompt):
            raise ConfigError("the prompt has no tokens: pass some text, or a token id such as the model's BOS")
        if len(prompt) > self.n_ctx:
            raise ConfigError(f"the prompt has {len(prompt)} tokens, the context n_ctx = {self.n_ctx}: raise n_ctx")
        for token in prompt:
            if not 0 <= token < self.target.n_vocab:
                raise ConfigError(f"token id {token} is out of range: the model has {self.target.n_vocab} tokens")

    def check_speculation(self, params: SamplingParams | None, more: Collection[str] = ()) -> None:
        """Raise ConfigError if a request asks for drafters that are not there; ``more``: names that will be there."""
        names = [d.name for d in self.chain.drafters]
        for name in (params.speculation if params is not None else None) or ():
            if name not in names and name not in more:
                raise ConfigError(
                    f"speculation={name!r} for a request: loaded are {', '.join(names) or 'no drafters'}; "
                    f"load it with LLM(speculation=[...])"
                )

    def release(self, seq: Sequence) -> None:
        """End a sequence, if it still runs, and free its slot."""
        if not seq.done:
            self._end(seq, "cancelled")
            self._leave(seq)

    @property
    def n_draft_max(self) -> int:
        """Most tokens a draft can have; 0: no drafting, whatever the drafters propose."""
        return max(0, min(self._n_rows_max - 1, self._n_draft_max))

    @property
    def active(self) -> list[Sequence]:
        """Sequences that have a slot."""
        return [s for s in self._slots if s is not None]

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self._waiting and not any(self._slots)

    def close(self) -> None:
        """End everything. Contexts and models are the caller's. Idempotent."""
        if not self.closed:
            self.closed = True
            for seq in [*self._waiting, *self.active]:
                seq.error = seq.error or ClosedError("closed while generating")
                self.release(seq)
            self.chain.close()

    # -- the loop --

    def step(self) -> bool:
        """Evaluate one chunk of prompts and one draft of every running sequence. False when there is nothing to do.

        Raises:
            NativeError: a pass failed. The sequences are kept and start over from their tokens at the next step.
        """
        if self.closed:
            raise ClosedError("the engine is closed")
        for seq in (*self._waiting, *self._slots):
            if seq is not None and seq.cancelled:
                self._release_cancelled()
                break
        if self._waiting:
            self._admit()
        active = self.active
        if not active:
            return False
        try:
            # who gets its first token with its prompt has it shown before it goes on
            ready = [s for s in active if not s.prompt_pending]
            self._prefill_some([s for s in active if s.prompt_pending])
            for i in range(0, len(ready), self._n_group):
                self._decode_step(ready[i : i + self._n_group])
        except BaseException as e:
            # half-done caches are never used: whatever was interrupted starts over from its tokens
            self._restart_all()
            if not isinstance(e, DecodeAborted):
                raise
        return True

    def _release_cancelled(self) -> None:
        for seq in [s for s in (*self._waiting, *self.active) if s.cancelled]:
            self.release(seq)
        self._abort_clear()

    def _admit(self) -> None:
        for i, slot in enumerate(self._slots):
            if slot is None and self._waiting:
                seq = self._waiting.popleft()
                self._slots[i] = seq
                seq.id = i
                self._n_admitted += 1
                seq.turn = self._n_admitted
                self._begin(seq)

    def _begin(self, seq: Sequence) -> None:
        seq.n_past = 0
        seq.prompt_pending = len(seq.tokens) > self._n_held
        seq.sampler.rewind(seq.n_output)
        self.target.memory.clear(seq.id)
        self.chain.begin(seq.id, seq.tokens)
        if self.control is not None:
            self.control.begin(seq.id)

    def _prefill_some(self, seqs: list[Sequence]) -> None:
        """A chunk of the prompt that came first, and of others as long as all take about the time of a whole chunk.

        So running sequences wait, and a Ctrl-C does, for no more than that; and short prompts that came together
        generate together from the start, in passes that cost little more than with one sequence's row.
        """
        n_rows = 0
        for seq in sorted(seqs, key=attrgetter("turn")):
            n = min(len(seq.tokens) - self._n_held - seq.n_past, self._n_chunk)
            if n_rows and n_rows + n > self._n_chunk:
                break
            self._prefill(seq, n)
            n_rows += n + _N_ROWS_PASS

    def _prefill(self, seq: Sequence, n: int) -> None:
        """One chunk, whose rows belong to one sequence: what is computed does not depend on who else is there."""
        t0 = self._clock()
        end = seq.n_past + n
        seq.prompt_pending = end < len(seq.tokens) - self._n_held
        last = end == len(seq.tokens)
        self._evaluate(seq, end, LAST if last else NONE)
        if self.control is not None:
            self.control.prefilled(n, self._clock() - t0)
        self.chain.process(self._batch)
        n_first = self._first(seq) if last else 0
        us = (self._clock() - t0) // 1000
        for stats in (seq.stats, self.stats):
            stats.n_prompt += n
            stats.n_output += n_first
            stats.n_first += n_first
            stats.times.prefill_us += us

    def _first(self, seq: Sequence) -> int:
        """Commit the token that the pass just made gives: it has read the end of the prompt. Returns how many."""
        logits = self.target.logits()
        _, emitted, scores = self._judge(seq, logits, 0, (), ())
        n_used = self._commit(seq, 0, emitted, scores)
        if seq.done:
            self._leave(seq)
        return n_used

    def _evaluate(self, seq: Sequence, end: int, output: int = NONE) -> None:
        """Put ``tokens[n_past:end]`` into the cache."""
        self._batch.clear()
        self._batch.extend(seq.tokens[seq.n_past : end], seq.n_past, seq.id, output)
        self.target.decode(self._batch)
        seq.n_past = end

    def _decode_step(self, seqs: list[Sequence]) -> None:
        target, batch = self.target, self._batch
        t0 = self._clock()
        requests = self._requests(seqs)
        control = self.control
        if control is not None:
            winners = control.draft(self.chain, requests, len(seqs))
        else:
            winners = self.chain.draft(requests) if requests else {}
        drafts = {r.seq: r.draft for r in requests}
        qs = {r.seq: r.q for r in requests}
        t1 = self._clock()
        batch.clear()
        for seq in seqs:
            draft = drafts.setdefault(seq.id, [])
            if draft:
                target.memory.checkpoint(seq.id, seq.n_past)
            last = seq.tokens[-1]
            tokens = [last, *draft]
            if len(tokens) < self._n_rows:
                tokens += [last] * (self._n_rows - len(tokens))
            batch.extend(tokens, seq.n_past, seq.id, ALL)
        target.decode(batch)
        logits = target.logits()
        t2 = self._clock()
        self.chain.process(batch)
        t3 = self._clock()
        rows, n_rows = batch.rows(), batch.n
        verdicts = []
        for seq in seqs:
            row, draft = rows[seq.id][0], drafts[seq.id]
            verdicts.append(self._judge(seq, logits, row, draft, qs.get(seq.id, ())))
        t4 = self._clock()
        behind: list[tuple[Sequence, int]] = []
        for seq, (n_acc, emitted, scores) in zip(seqs, verdicts, strict=True):
            n_draft, winner = len(drafts[seq.id]), winners.get(seq.id)
            n_keep, n_now = seq.n_past + 1 + n_acc, seq.n_past + max(1 + n_draft, self._n_rows)
            n_used = self._commit(seq, n_acc, emitted, scores)
            n_acc = min(n_acc, n_used)
            if winner is not None:
                seq.drafter_stats(winner.name).count(n_draft, n_acc)
            for stats in (seq.stats, self.stats):
                stats.count(n_draft, n_acc)
                stats.n_output += n_used
            self.chain.accept(seq.id, n_acc, winner, n_draft)
            if control is not None:
                control.accept(seq.id, n_draft, n_acc, emitted)
            if seq.done:
                self._leave(seq)
            else:
                seq.n_past = target.memory.rollback(seq.id, n_keep, n_now)
                if seq.n_past < n_keep:
                    behind.append((seq, n_keep))
        for seq, n_keep in behind:
            while seq.n_past < n_keep:
                self._evaluate(seq, min(n_keep, seq.n_past + self._n_chunk))
        self.stats.n_pass += 1 - len(seqs)
        t5 = self._clock()
        if control is not None:
            # what had to be evaluated again belongs to the price of the pass
            ns = t2 - t1 + (t5 - t4 if behind else 0)
            control.passed(n_rows, ns)
        if self.threads is not None:
            self.threads.passed(n_rows, t2 - t1)
        us = ((t1 - t0) // 1000, (t2 - t1) // 1000, (t3 - t2) // 1000, (t4 - t3) // 1000, (t5 - t4) // 1000)
        self.stats.times.add(*us)
        for seq in seqs:
            seq.stats.times.add(*us)

    def _judge(
        self, seq: Sequence, logits: F32Array, row: int, draft: Seq[int], q: Q
    ) -> tuple[int, list[int], list[TokenLogprob]]:
        """How many drafted tokens stand, what is emitted, and its log-probabilities where they are asked for."""
        n_acc, emitted = self._verdict(seq, logits, row, draft, q)
        if self.observer is not None:
            self.observer(seq, logits, row, len(draft), emitted)
        return n_acc, emitted, self._score(seq, logits, row, emitted) if seq.params.logprobs else []

    def _verdict(self, seq: Sequence, logits: F32Array, row: int, draft: Seq[int], q: Q) -> tuple[int, list[int]]:
        """How many drafted tokens stand, and what is emitted; nothing where this request cannot go on."""
        if seq.params.logprobs and seq.params.logprobs_mode == "processed":
            seq.sampler.trace = []
        try:
            return self._verify(logits, row, draft, seq.sampler, len(seq.tokens), q)
        except SamplingError as e:
            seq.error = e
            return 0, []

    def _score(self, seq: Sequence, logits: F32Array, row: int, emitted: list[int]) -> list[TokenLogprob]:
        """Log-probabilities of the tokens just emitted."""
        n_top = seq.params.top_logprobs
        if seq.params.logprobs_mode == "processed":
            return processed_logprobs(emitted, seq.sampler.trace or (), n_top)
        return self._logprobs(logits, row, emitted, n_top)

    def _requests(self, seqs: list[Sequence]) -> list[DraftRequest]:
        """Who may draft how much: limited by the pass, the cache, the context and the token budget."""
        share = min(self._n_rows_max // len(seqs) - 1, self._n_draft_max)
        requests = []
        for seq in seqs if share > 0 else ():
            chosen = seq.params.speculation
            if chosen is not None and not chosen:
                continue
            n = min(share, self.n_ctx - seq.n_past - 1, seq.params.n_max or share)
            if seq.params.max_tokens is not None:
                n = min(n, seq.params.max_tokens - seq.n_output - 1)
            if n > 0:
                request = DraftRequest(seq.id, seq.n_past, seq.tokens[-1], seq.tokens, n)
                request.temperature = seq.params.temperature
                request.sampling = seq.sampler.draft_sampling(len(seq.tokens))
                request.drafters = None if chosen is None else tuple(chosen)
                request.p_min = seq.params.p_min
                request.extra = seq.extra
                requests.append(request)
        return requests

    def _commit(self, seq: Sequence, n_acc: int, emitted: list[int], logprobs: list[TokenLogprob]) -> int:
        """Take over the emitted tokens up to whatever ends the sequence; returns how many were taken."""
        piece = Piece("")
        reason: FinishReason | None = None
        params, tokens, text = seq.params, seq.tokens, seq.text
        eog: Collection[int] = () if params.ignore_eos else self.eog_tokens
        n_before = len(tokens)
        n_max = self.n_ctx if params.max_tokens is None else min(self.n_ctx, seq.n_prompt + params.max_tokens - 1)
        n = 0
        for token in emitted:
            n += 1
            if token in eog:
                reason = "stop"
            elif text is not None:
                piece.text += text.push(token)
                if text.stopped:
                    reason = "stop"
            if reason is None and n_before + n > n_max:
                reason = "length"
            if reason is not None:
                break
        piece.tokens = emitted[:n]
        n_drafted = min(n, n_acc)
        piece.drafted = [True] * n_drafted + [False] * (n - n_drafted)
        tokens += piece.tokens
        piece.logprobs = logprobs[: len(piece.tokens)]
        seq.drafted.extend(piece.drafted)
        seq.pieces.append(piece)
        constraint = seq.sampler.constraint
        if reason in (None, "length") and constraint is not None and constraint.stopped:
            # the token that completes the text is the last of a verification: it ends the text whatever the limit says
            reason = "stop" if len(piece.tokens) == len(emitted) else reason
        if seq.error is not None:
            reason = "cancelled"
        if reason is not None:
            self._end(seq, reason)
        return len(piece.tokens)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        tail = seq.text.flush() if seq.text is not None else ""
        if not seq.pieces:
            seq.pieces.append(Piece(""))
        seq.pieces[-1].text += tail
        seq.pieces[-1].finish_reason = reason
        seq.finish_reason = reason

    def _leave(self, seq: Sequence) -> None:
        """Free the slot; its cache is emptied when the next sequence moves in."""
        if seq.id >= 0:
            self._slots[seq.id] = None
            self.chain.end(seq.id)
            seq.id = -1
        elif seq in self._waiting:
            self._waiting.remove(seq)

    def _restart_all(self) -> None:
        self._abort_clear()
        for seq in self.active:
            try:
                self._begin(seq)
            except PyspecError as e:  # the context is lost; nothing of this sequence can go on
                seq.error = seq.error or e
                self.release(seq)

    def _abort_clear(self) -> None:
        for evaluator in self._evaluators:
            evaluator.abort_clear()
