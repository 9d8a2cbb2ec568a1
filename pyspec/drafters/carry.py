"""Common part of the drafters that continue a target's hidden rows: EAGLE-3 and multi-token prediction.

Both feed their own small decoder with *pairs*: the hidden row of position P and the token at P + 1. EAGLE-3 keeps the
pair in its cache at position P, MTP at P + 1 (``shift``). The last row of a pass has no next token yet, so it waits,
together with the rows of a verification, in a *stash* per sequence:

- ``process`` (rows of a prompt): all pairs but the last are evaluated, the last row is stashed.
- ``process`` (a verification): nothing is evaluated, the rows are stashed. Which of them hold is not known yet.
- ``accept``: forgets the rows of rejected tokens.
- ``draft``: completes the stash with the tokens that came, and evaluates these pairs as the first pass of the draft. So
  no pair is evaluated that is not needed, and catching up costs no pass of its own. Where a pass without outputs is so
  much cheaper that a pass more pays (``skips_logits``), only the last pair is in the first one, the others before it.
- Where no draft was asked for, the stash grows, up to :data:`N_STASH` rows; only then does ``process`` evaluate it, in
  one pass. So a drafter that nobody asks costs a copy of the rows, and its own evaluation at the speed of a prompt; it
  comes back when it likes, with nothing missing.
- A sequence that *rests* (``rest``) is not evaluated at all, its prompt included: the stash keeps the last rows and
  forgets what was before. The next draft then knows the last :data:`N_KEPT` rows at least, and starts its cache with
  these. (EAGLE-3 on SmolLM2, six prompts: .157 accepted knowing 64 rows, .143 with 32, .114 with 8, .150 with all.)

The stash holds a few dozen rows: O(n_seq * N_STASH * width), whatever the length of the text. Its rows are *raw*: as
the target hands them out. What the drafter makes of them (EAGLE-3's encoder) is made of those rows only that are used.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import numpy as np

from ..config import SpeculationParams
from ..errors import ConfigError, PyspecError
from ..runtime.batch import ALL, LAST, NONE, Batch
from ..types import DraftRequest, F32Array, I32Array, RollbackKind
from .base import DRAFT_TOP_K, Drafter, DraftSampler

if TYPE_CHECKING:
    from ..runtime.evaluator import Evaluator

__all__ = ["N_KEPT", "N_STASH", "CarryDrafter", "DraftHandle", "Work", "handle_of"]

log = logging.getLogger("pyspec")

#: Rows of a sequence that may wait until somebody asks for a draft; and how many of them are left where a sequence that
#: rests has more.
N_STASH, N_KEPT = 64, 32

_STATE = struct.Struct("<4sqqqqq")
_STATE_MAGIC = b"psc2"


class DraftHandle(Protocol):
    """Switches of a draft's context that ordinary evaluators do not need (``runtime.Context.handle``)."""

    def embeddings_nextn(self, value: bool, masked: bool) -> None: ...
    def causal_attn(self, value: bool) -> None: ...
    def nextn_layer_offset(self, offset: int) -> None: ...
    def set_backend_sampler(self, seq: int, top_k: int | None) -> bool: ...
    def sampled_candidates(self, row: int) -> tuple[I32Array, F32Array] | None: ...


def handle_of(evaluator: Evaluator) -> DraftHandle:
    """The switches of a draft's context."""
    return cast(DraftHandle, cast(Any, evaluator).handle)


@dataclass(slots=True)
class _State:
    """What is known of one sequence. Positions are the target's.

    Attributes:
        alive: False once something was missed: no more drafts until the next generation.
        first, n: the stash holds the hidden rows of [first, first + n). last: where in it the last pass begins.
        done: all pairs before this one are in the draft's cache, and right.
        cells: positions in the draft's cache, proposals included; -1: what it holds ends too early to go on from.
        rests: nothing is evaluated until a draft is asked for.
    """

    alive: bool = False
    first: int = 0
    n: int = 0
    last: int = 0
    done: int = 0
    cells: int = 0
    rests: bool = False


@dataclass(slots=True)
class Work:
    """A request on its way.

    Attributes:
        request, n: what is asked for; how many tokens may be drafted.
        start: first pair that is evaluated; they go up to ``request.n_past - 1``.
        row, out: its row of the last pass, and the same counted over output rows only.
    """

    request: DraftRequest
    n: int
    start: int
    row: int = -1
    out: int = -1


class CarryDrafter(Drafter):
    """See the module's text. Subclasses say where the hidden rows come from.

    Args:
        target, draft, params, n_seq: see :class:`Drafter`.
        width: floats of a row of the draft. raw_width: floats of a row as the target hands it out; 0: the same.
        rows_per_pass: most rows of one pass of the draft; 0: its n_batch.
        single_outputs: outputs can be asked for single rows of a pass; hidden rows then come for every row. False: for
            all rows of a pass or none (libllama ignores the flags of single rows, in silence, in some decoders).
    """

    #: Where a pair lies in the draft's cache: 0 at the row's position, 1 at the token's.
    shift: ClassVar[int]

    def __init__(
        self,
        target: Evaluator,
        draft: Evaluator | None,
        params: SpeculationParams,
        n_seq: int,
        width: int,
        rows_per_pass: int = 0,
        single_outputs: bool = False,
        raw_width: int = 0,
    ) -> None:
        if draft is None:
            raise ConfigError(f"{self.name} needs a context for the draft")
        super().__init__(target, draft, params, n_seq)
        self._draft = draft
        self._width = raw_width or width
        self._handle = handle_of(draft)
        self._batch = Batch(min(rows_per_pass or draft.n_batch, draft.n_batch), width)
        assert self._batch.embd is not None
        self._embd: F32Array = self._batch.embd
        self._states = [_State() for _ in range(n_seq)]
        self._stash: F32Array = np.zeros((n_seq, params.n_max + 1, self._width), np.float32)
        # token that follows each stashed row
        self._next: I32Array = np.zeros((n_seq, params.n_max + 1), np.int32)
        self._sampler = DraftSampler(max(1, min(n_seq, draft.n_batch)), draft.n_vocab)
        self._on_device = False
        # rows may wait in the stash while nobody asks for drafts
        self._patient = True
        self._single_outputs = single_outputs
        self._seed_alone = getattr(self._handle, "skips_logits", False)
        self._handle.embeddings_nextn(True, not single_outputs)

    @abstractmethod
    def _hidden(self, batch: Batch) -> F32Array:
        """Raw rows of the pass that the target has just made, float32 [batch.n, raw_width]. Borrowed until the next."""

    def _fuse(self, parts: list[F32Array]) -> list[F32Array]:
        """The draft's rows for parts of raw ones, float32 [n, raw_width] to [n, width]. Valid until the next call."""
        return parts

    def _sample_on_device(self) -> None:
        """Let the draft's device pick the candidates, where that saves copying logits. Never with several sequences.

        After a pass without outputs libllama keeps its memory plan, in which the candidate ids of all sequences lie in
        one place; the next pass with outputs then gives every sequence the ids of the last one, in silence. (EAGLE-3:
        its graph has the same shape with and without outputs; .57 accepted instead of .92 at three sequences.)
        """
        model = getattr(self._draft, "model", None)
        if self.params.backend_sampling and self.n_seq == 1 and getattr(model, "on_gpu", False):
            with contextlib.suppress(PyspecError):
                self._on_device = self._handle.set_backend_sampler(0, DRAFT_TOP_K)

    # -- the verbs --

    def begin(self, seq: int, tokens: list[int]) -> None:
        """See :meth:`Drafter.begin`."""
        self._draft.memory.clear(seq)
        state = self._states[seq]
        state.alive = True
        # a shift of one means that the first token has a pair too, with a row of zeros
        state.first = state.done = -self.shift
        state.n = self.shift
        state.last = 0
        state.cells = 0
        state.rests = False
        self._stash[seq, 0] = 0.0

    def end(self, seq: int) -> None:
        """See :meth:`Drafter.end`."""
        self._states[seq].alive = False
        self._draft.memory.clear(seq)

    def process(self, batch: Batch) -> None:
        """See :meth:`Drafter.process`. Passes without tokens (embeddings only) end drafting for their sequences."""
        rows = [(seq, b, e) for seq, (b, e) in batch.rows().items() if self._follows(seq, batch, b)]
        if not rows:
            return
        try:
            hidden = self._hidden(batch)
            self._batch.clear()
            for seq, b, e in rows:
                if self._states[seq].rests:
                    continue
                p0 = int(batch.pos[b])
                verification = bool(batch.output[b])
                if verification and self._can_wait(seq, p0, e - b):
                    continue
                self._write(seq, batch, hidden, b, e, p0 if verification else p0 + e - b - 1)
            self._run()
            for seq, b, e in rows:
                if self._states[seq].rests:
                    self._hold(seq, batch, hidden, b, e)
                else:
                    self._keep(seq, batch, hidden, b, e)
        except BaseException:
            self._lose([seq for seq, _, _ in rows])
            raise

    def accept(self, seq: int, n_accepted: int, is_other: bool) -> None:
        """See :meth:`Drafter.accept`."""
        state = self._states[seq]
        state.n = min(state.n, state.last + n_accepted + 1)

    def rest(self, seq: int, value: bool) -> None:
        """See :meth:`Drafter.rest`. Of no effect where rows cannot wait, or the cache cannot start in mid-text."""
        memory = self._draft.memory
        self._states[seq].rests = (
            value and self._patient and memory.kind is RollbackKind.PARTIAL and not memory.has_window
        )

    def draft(self, requests: list[DraftRequest]) -> None:
        """See :meth:`Drafter.draft`."""
        works = [w for w in map(self._prepare, requests) if w is not None]
        if not works:
            return
        try:
            self._draft_all(works)
        except BaseException:
            self._lose([w.request.seq for w in works])
            raise
        self.drop_short(requests)

    def state(self, seq: int) -> bytes | None:
        """The stash and where it belongs; None when the sequence is not drafted for."""
        s = self._states[seq]
        if not s.alive:
            return None
        head = _STATE.pack(_STATE_MAGIC, s.first, s.n, s.done, s.cells, self._width)
        return head + self._next[seq, : s.n].tobytes() + self._stash[seq, : s.n].tobytes()

    def restore(self, seq: int, state: bytes | None) -> None:
        """Take back what ``state`` returned; the draft's cache is the caller's to restore.

        Raises:
            ConfigError: ``state`` is not from a drafter like this one.
        """
        s = self._states[seq]
        s.alive = False
        if state is None:
            return
        n_head = _STATE.size
        magic, first, n, done, cells, width = _STATE.unpack(state[:n_head].ljust(n_head, b"\0"))
        if magic != _STATE_MAGIC or width != self._width or len(state) != n_head + n * 4 * (1 + width):
            raise ConfigError(f"{self.name}: the saved state is not of this drafter (rows of {self._width} floats)")
        self._grow(n)
        self._next[seq, :n] = np.frombuffer(state, np.int32, n, n_head)
        self._stash[seq, :n] = np.frombuffer(state, np.float32, n * width, n_head + 4 * n).reshape(n, width)
        s.alive, s.first, s.n, s.last, s.done, s.cells = True, first, n, max(0, n - 1), done, cells

    # -- catching up --

    def _follows(self, seq: int, batch: Batch, b: int) -> bool:
        """Whether this pass of the target goes on where the last one of the sequence ended."""
        state = self._states[seq] if seq < self.n_seq else None
        if state is None or not state.alive:
            return False
        p0 = int(batch.pos[b])
        if batch.use_tokens and state.first + state.n == p0:
            return True
        reason = f"rows at {p0} follow {state.first + state.n}" if batch.use_tokens else "a pass without tokens"
        log.warning("%s: sequence %d: %s: no more drafts for it", self.name, seq, reason)
        state.alive = False
        return False

    def _can_wait(self, seq: int, p0: int, n: int) -> bool:
        """Whether what the stash holds can stay there, with ``n`` rows more from position ``p0`` on."""
        state = self._states[seq]
        return self._patient and state.n > 0 and state.done < p0 and p0 - max(state.first, state.done) + n <= N_STASH

    def _write(self, seq: int, batch: Batch, hidden: F32Array, b: int, e: int, end: int) -> None:
        """Evaluate the pairs before ``end`` that are not in the cache yet: first the stash's, then the pass's."""
        state = self._states[seq]
        p0 = state.first + state.n
        if end + self.shift > self._draft.n_ctx_seq:
            log.info(
                "%s: the text of sequence %d is longer than the draft's context (%d): no more drafts for it",
                self.name, seq, self._draft.n_ctx_seq,
            )  # fmt: skip
            state.alive = False
            return
        if state.done >= end:
            return
        if not self._reset_to(seq, state.done):
            return
        if state.n:
            self._next[seq, state.n - 1] = batch.tokens[b]
            i = max(0, state.done - state.first)
            rows = self._fuse([self._stash[seq, i : state.n]])[0]
            self._add(seq, state.first + i, self._next[seq, i : state.n], rows)
        if end > p0:
            n = end - p0
            self._add(seq, p0, batch.tokens[b + 1 : b + 1 + n], self._fuse([hidden[b : b + n]])[0])
        state.done = end
        state.cells = end + self.shift

    def _reset_to(self, seq: int, pair: int) -> bool:
        """Take everything from ``pair`` on out of the draft's cache."""
        state = self._states[seq]
        wanted = pair + self.shift
        if state.cells < 0:
            self._draft.memory.clear(seq)
            state.cells = wanted
        if pair < state.first or self._draft.memory.rollback(seq, wanted, state.cells) != wanted:
            log.warning("%s: the draft's cache has lost sequence %d: no more drafts for it", self.name, seq)
            state.alive = False
            return False
        state.cells = wanted
        return True

    def _add(self, seq: int, pair: int, tokens: I32Array, rows: F32Array) -> None:
        """Append pairs to the batch without outputs, and evaluate it whenever it is full."""
        at, n = 0, len(tokens)
        while at < n:
            if self._batch.n == self._batch.capacity:
                self._run()
            i = self._batch.n
            m = min(n - at, self._batch.capacity - i)
            self._batch.extend(tokens[at : at + m], pair + at + self.shift, seq, NONE)
            self._embd[i : i + m] = rows[at : at + m]
            at += m

    def _run(self) -> None:
        """Evaluate what the batch holds, and empty it."""
        if self._batch.n:
            self._decode()
            self._batch.clear()

    def _decode(self) -> None:
        self._draft.decode(self._batch)

    def _keep(self, seq: int, batch: Batch, hidden: F32Array, b: int, e: int) -> None:
        """Stash the rows of a verification, or the last row of a prompt's pass."""
        state = self._states[seq]
        if not state.alive:
            return
        n_old = 0
        if not batch.output[b]:
            b = e - 1
        elif self._can_wait(seq, int(batch.pos[b]), e - b):
            # behind the rows that wait
            n_old = state.n - max(0, state.done - state.first)
        self._append(seq, batch, hidden, b, e, n_old)

    def _hold(self, seq: int, batch: Batch, hidden: F32Array, b: int, e: int) -> None:
        """Stash the rows of a pass of a sequence that rests; the oldest rows give way."""
        state = self._states[seq]
        begin = max(b, e - N_STASH)
        n_old = state.n if begin == b else 0
        if n_old + e - begin > N_STASH:
            n_old = min(n_old, max(0, N_KEPT - (e - begin)))
        self._append(seq, batch, hidden, begin, e, n_old)
        if state.done < state.first:
            state.done, state.cells = state.first, -1

    def _append(self, seq: int, batch: Batch, hidden: F32Array, b: int, e: int, n_old: int) -> None:
        """Stash rows of a pass behind the last ``n_old`` that are there, which they follow; forget those before."""
        state = self._states[seq]
        n_gone = state.n - n_old
        if n_old and n_gone:
            self._stash[seq, :n_old] = self._stash[seq, n_gone : state.n].copy()
            self._next[seq, :n_old] = self._next[seq, n_gone : state.n].copy()
        n = n_old + e - b
        self._grow(n)
        if n_old:
            self._next[seq, n_old - 1] = batch.tokens[b]
        self._stash[seq, n_old:n] = hidden[b:e]
        self._next[seq, n_old : n - 1] = batch.tokens[b + 1 : e]
        state.first, state.n, state.last = int(batch.pos[b]) - n_old, n, n_old

    def _grow(self, n: int) -> None:
        """Room for ``n`` stashed rows; another drafter's drafts may be longer than ours."""
        n_old = self._stash.shape[1]
        if n > n_old:
            n = max(n, min(2 * n_old, N_STASH))
            stash = np.zeros((self.n_seq, n, self._width), np.float32)
            tokens = np.zeros((self.n_seq, n), np.int32)
            stash[:, :n_old], tokens[:, :n_old] = self._stash, self._next
            self._stash, self._next = stash, tokens

    def _lose(self, seqs: list[int]) -> None:
        """After a failure nobody knows what the cache holds."""
        for seq in seqs:
            self._states[seq].alive = False
            with contextlib.suppress(PyspecError):
                self._draft.memory.clear(seq)

    # -- drafting --

    def _prepare(self, request: DraftRequest) -> Work | None:
        state = self._states[request.seq]
        n_past = request.n_past
        n = self.limit(request, self._draft.n_ctx_seq - n_past - self.shift + 1)
        # a prompt of one token: there is no hidden row yet
        if not state.alive or n < 1 or n_past + self.shift < 1:
            return None
        if state.first + state.n != n_past:
            log.warning(
                "%s: sequence %d: drafting at %d, hidden rows end at %d: no more drafts for it",
                self.name, request.seq, n_past, state.first + state.n,
            )  # fmt: skip
            state.alive = False
            return None
        # the last pair is evaluated in any case: its row yields the first proposal
        start = min(state.done, n_past - 1)
        if self._draft.memory.kind is not RollbackKind.NONE and not self._reset_to(request.seq, start):
            return None
        return Work(request, n, start)

    def _pairs(self, work: Work) -> tuple[I32Array, F32Array]:
        """Tokens and hidden rows of the pairs that ``work`` starts with: views of the stash."""
        request, state = work.request, self._states[work.request.seq]
        i = work.start - state.first
        # accepted tokens are known to the stash already, what came after them is not
        self._next[request.seq, state.n - 1] = request.id_last
        return self._next[request.seq, i : state.n], self._stash[request.seq, i : state.n]

    def _draft_all(self, works: list[Work]) -> None:
        batch = self._batch
        room = 1 if self._seed_alone else max(1, min(batch.capacity, self._draft.n_outputs_max) // len(works))
        batch.clear()
        heads = []
        pairs = [self._pairs(work) for work in works]
        fused = self._fuse([rows for _, rows in pairs])
        for work, (tokens, _), rows in zip(works, pairs, fused, strict=True):
            n_head = max(0, len(tokens) - room)
            if n_head:
                self._add(work.request.seq, work.start, tokens[:n_head], rows[:n_head])
            heads.append((tokens[n_head:], rows[n_head:]))
        self._run()
        for work, (tokens, rows) in zip(works, heads, strict=True):
            seq, n_past = work.request.seq, work.request.n_past
            self._add_seed(work, tokens, rows)
            state = self._states[seq]
            state.done, state.cells = n_past, n_past + self.shift
        while works:
            self._decode()
            works = self._advance(works)

    def _add_seed(self, work: Work, tokens: I32Array, rows: F32Array) -> None:
        """Append the last pairs of the text, the very last with an output."""
        n = len(tokens)
        pos0 = work.request.n_past - n + self.shift
        i = self._batch.extend(tokens, pos0, work.request.seq, LAST if self._single_outputs else ALL)
        self._embd[i : i + n] = rows
        work.row = i + n - 1
        work.out = self._batch.n_outputs - 1

    def _nextn(self) -> F32Array:
        """Hidden rows of the pass just made, by row of the batch. Borrowed."""
        return self._draft.nextn(self._batch.n)

    def _advance(self, works: list[Work]) -> list[Work]:
        """Take a proposal for each work from the pass just made, and make the next batch of those that go on."""
        going = self._sample(works)
        nextn = self._nextn() if going else None
        self._batch.clear()
        for work in going:
            assert nextn is not None
            request = work.request
            cell = self._cell(request, len(request.draft))
            i = self._batch.add(request.draft[-1], cell, request.seq, True)
            self._embd[i] = nextn[work.row]
            work.row = work.out = i
            self._states[request.seq].cells = cell + 1
        return going

    def _cell(self, request: DraftRequest, n_drafted: int) -> int:
        """Position of the ``n_drafted``-th proposal's pair in the draft's cache."""
        return request.n_past + self.shift + n_drafted - 1

    def _sample(self, works: list[Work]) -> list[Work]:
        """Append the best token of each work's row, or one drawn, to its draft; gives those that may go on."""
        ids, probs = self._candidates(works)
        n_vocab = self.target.n_vocab
        # whether the sampler still has the candidates of all rows
        kept = not self._on_device and len(self._draft.logits()) == len(works)
        going = []
        for i, (work, token, prob) in enumerate(zip(works, ids, probs, strict=True)):
            if work.request.sampling is None and kept:
                token, prob = self._sampler.allowed(i, work.request, token, prob)
            if prob < self.p_min(work.request):
                continue
            if work.request.sampling is not None:
                if not self._draw(work, i, len(works)):
                    continue
            elif not 0 <= token < n_vocab:
                continue
            else:
                work.request.draft.append(token)
                work.request.probs.append(prob)
            if self.goes_on(work.request, work.n):
                going.append(work)
        return going

    def _draw(self, work: Work, i: int, n_works: int) -> bool:
        """Draw a token for ``work``, the ``i``-th of ``n_works``."""
        n_vocab = min(self.target.n_vocab, self._draft.n_vocab)
        if self._on_device:
            found = self._handle.sampled_candidates(work.row)
            if found is None:
                return False
            tokens, values = found
            known = np.flatnonzero(tokens < n_vocab)
            if not known.size:
                return False
            row = np.ascontiguousarray(values[known], np.float32)[None]
            return self._sampler.draw(row, 0, work.request, known.size, np.ascontiguousarray(tokens[known], np.int32))
        logits = self._draft.logits()
        return self._sampler.draw(logits, i if len(logits) == n_works else work.out, work.request, n_vocab)

    def _candidates(self, works: list[Work]) -> tuple[list[int], list[float]]:
        if self._on_device:
            return self._device_candidates(works)
        logits = self._draft.logits()
        if len(logits) == len(works):
            return self._sampler.rows(logits)
        ids, probs = [], []
        for work in works:
            top = self._sampler.rows(logits[work.out : work.out + 1])
            ids += top[0]
            probs += top[1]
        return ids, probs

    def _device_candidates(self, works: list[Work]) -> tuple[list[int], list[float]]:
        ids, probs = [], []
        for work in works:
            found = self._handle.sampled_candidates(work.row)
            if found is None:
                raise ConfigError(f"{self.name}: the device gave no candidates")
            tokens, values = found
            best = int(values.argmax())
            weights = np.exp(values - values[best])
            ids.append(int(tokens[best]))
            probs.append(float(1.0 / weights.sum()))
        return ids, probs
