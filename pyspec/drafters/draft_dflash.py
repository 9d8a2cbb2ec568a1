"""``draft-dflash``: block diffusion. One pass fills a whole block of mask tokens.

The draft has no tokens of its own in its cache: for each position of the text, some of the target's layer inputs are
fused and written into the cache as keys and values (*injection*). A draft is one pass over [last token, mask, mask ...]
behind them, with attention in both directions unless the model says otherwise; the masks' rows are the proposals. What
that pass leaves in the cache is taken out again.

DFlash2 does not read the proposals off the logits: its graph gives, for each position, a few candidates and the score
of each after each candidate of the position before (a lattice), and the best path is walked here.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from .. import _core
from ..config import SpeculationParams
from ..errors import ConfigError, PyspecError, UnsupportedError
from ..runtime.batch import ALL, NONE, Batch
from ..types import DraftRequest, F32Array, I32Array, Requirements
from .base import Drafter, DraftSampler, Plan, log_setup
from .carry import handle_of
from .choose import require_kind
from .compat import check_token_texts
from .draft_eagle3 import check_layers

if TYPE_CHECKING:
    from ..runtime.evaluator import Evaluator
    from ..runtime.model import Model

__all__ = ["BLOCK_SIZE_DEFAULT", "DraftDflash"]

log = logging.getLogger("pyspec")

#: Block size of DFlash files that do not say.
BLOCK_SIZE_DEFAULT = 16

_STATE = struct.Struct("<4sqq")
_STATE_MAGIC = b"psb1"


@dataclass(slots=True)
class _State:
    """What is known of one sequence: ``n`` positions of the text are injected, ``cells`` are in the cache."""

    alive: bool = False
    n: int = 0
    first: int = 0
    cells: int = 0


class DraftDflash(Drafter):
    """See the module's text and :class:`Drafter`."""

    name: ClassVar[str] = "draft-dflash"

    def __init__(self, target: Evaluator, draft: Evaluator | None, params: SpeculationParams, n_seq: int) -> None:
        if draft is None:
            raise ConfigError(f"{self.name} needs a draft model")
        super().__init__(target, draft, params, n_seq)
        model: Model = cast(Any, draft).model
        self._draft = draft
        self._layers = model.target_layer_ids
        self._top_k = model.dflash_selector_top_k
        # proposals start at this row of a block
        self._first_row = self.first_row(model)
        longest = self.longest(model)
        self.n_max = min(params.n_max, longest)
        self.n_min = min(params.n_min, longest)
        if self.n_max < params.n_max:
            log.warning(
                "%s: n_max=%d is more than %s can fill (block size %d): drafts of %d",
                self.name, params.n_max, model.path.name, self.block_size(model), self.n_max,
            )  # fmt: skip
        self._block: I32Array = np.full(self.n_max + self._first_row, model.vocab.mask, np.int32)
        capacity = min(draft.n_batch, draft.n_ubatch)
        # without causal attention a pass is one micro-batch, and every row of a block wants an output
        self._blocks_per_pass = min(capacity, draft.n_outputs_max) // len(self._block)
        if self._blocks_per_pass < 1:
            raise ConfigError(
                f"{self.name}: a block of {len(self._block)} rows does not fit the draft context: "
                f"n_batch={draft.n_batch}, n_ubatch={draft.n_ubatch}, n_outputs_max={draft.n_outputs_max}; "
                "lower n_max or raise these"
            )
        self._noise = Batch(capacity)
        self._inject = Batch(capacity, len(self._layers) * target.n_embd, use_tokens=False)
        self._zeros: I32Array = np.zeros(capacity, np.int32)
        self._sampler = DraftSampler(len(self._block), draft.n_vocab)
        self._states = [_State() for _ in range(n_seq)]
        causal = model.metadata.get("dflash.attention.causal") == "true"
        handle = handle_of(draft)
        handle.causal_attn(causal)
        if self.reads_nextn():
            handle.embeddings_nextn(True, not self._top_k)
        log_setup(
            self, draft,
            f"block_size={self.block_size(model)}, mask={model.vocab.mask}, layers={list(self._layers)}, "
            f"causal={causal}, selector_top_k={self._top_k}",
        )  # fmt: skip

    # -- what the file says --

    @classmethod
    def block_size(cls, model: Model) -> int:
        """Rows of a block that the draft was trained with."""
        return int(model.metadata.get("dflash.block_size", BLOCK_SIZE_DEFAULT))

    @classmethod
    def first_row(cls, model: Model) -> int:
        """Row of a block that holds the first proposal: 1 behind the last token."""
        return 1

    @classmethod
    def longest(cls, model: Model) -> int:
        """Most tokens of a draft."""
        return cls.block_size(model) - cls.first_row(model)

    def reads_nextn(self) -> bool:
        """Whether the draft's nextn rows are needed (for the lattice)."""
        return self._top_k > 0

    @classmethod
    def plan(cls, target: Model, draft: Model | None, params: SpeculationParams, n_seq: int) -> Plan:
        """See :meth:`Drafter.plan`."""
        if draft is None:
            raise ConfigError(f"{cls.name} needs a draft model: pass draft='file.gguf'")
        require_kind(cls.name, draft)
        if draft.n_embd != target.n_embd:
            raise ConfigError(
                f"draft {draft.path.name!r} is made for a target of hidden size {draft.n_embd}, "
                f"{target.path.name!r} has {target.n_embd}"
            )
        check_layers(target, draft, final_row=False)
        check_token_texts(target.vocab, draft.vocab)
        if not 0 <= draft.vocab.mask < draft.n_vocab:
            raise UnsupportedError(f"draft {draft.path.name!r} names no mask token (tokenizer.ggml.mask_token_id)")
        cls.check_file(draft, params)
        longest = cls.longest(draft)
        if longest < 1:
            raise UnsupportedError(f"draft {draft.path.name!r} has blocks of {cls.block_size(draft)}: too few to draft")
        n_max = min(params.n_max, longest)
        n_rs_seq = n_max if target.is_recurrent or target.is_hybrid else 0
        return Plan(
            Requirements(layer_inputs=draft.target_layer_ids, n_rs_seq=n_rs_seq),
            {"n_rs_seq": 0, "n_outputs_max": n_seq * (n_max + 1), "other": True},
            n_max,
        )

    @classmethod
    def check_file(cls, draft: Model, params: SpeculationParams) -> None:
        """Further checks of a subclass."""

    # -- the verbs --

    def begin(self, seq: int, tokens: list[int]) -> None:
        """See :meth:`Drafter.begin`."""
        self._draft.memory.clear(seq)
        state = self._states[seq]
        state.alive, state.n, state.first, state.cells = True, 0, 0, 0

    def end(self, seq: int) -> None:
        """See :meth:`Drafter.end`."""
        self._states[seq].alive = False
        self._draft.memory.clear(seq)

    def process(self, batch: Batch) -> None:
        """See :meth:`Drafter.process`. All rows are injected, those of rejected tokens are taken out again."""
        rows = [(seq, b, e) for seq, (b, e) in batch.rows().items() if self._follows(seq, batch, b, e)]
        if not rows:
            return
        try:
            sources = [self.target.layer_input(layer, batch.n) for layer in self._layers]
            self._inject.clear()
            for seq, b, e in rows:
                self._add(seq, sources, int(batch.pos[b]), b, e)
            self._flush()
        except BaseException:
            self._lose([seq for seq, _, _ in rows])
            raise

    def accept(self, seq: int, n_accepted: int, is_other: bool) -> None:
        """See :meth:`Drafter.accept`."""
        state = self._states[seq]
        state.n = min(state.n, state.first + n_accepted + 1)

    def draft(self, requests: list[DraftRequest]) -> None:
        """See :meth:`Drafter.draft`."""
        todo = [r for r in requests if self._ready(r)]
        try:
            for i in range(0, len(todo), self._blocks_per_pass):
                self._draft_blocks(todo[i : i + self._blocks_per_pass])
        except BaseException:
            self._lose([r.seq for r in todo])
            raise
        self.drop_short(requests)

    def state(self, seq: int) -> bytes | None:
        """Where the text ends in the draft's cache; None when the sequence is not drafted for."""
        s = self._states[seq]
        return _STATE.pack(_STATE_MAGIC, s.n, s.cells) if s.alive else None

    def restore(self, seq: int, state: bytes | None) -> None:
        """Take back what ``state`` returned; the draft's cache is the caller's to restore.

        Raises:
            ConfigError: ``state`` is not from a drafter like this one.
        """
        s = self._states[seq]
        s.alive = False
        if state is None:
            return
        if len(state) != _STATE.size or not state.startswith(_STATE_MAGIC):
            raise ConfigError(f"{self.name}: the saved state is not of this drafter")
        _, s.n, s.cells = _STATE.unpack(state)
        s.first, s.alive = s.n, True

    # -- injection --

    def _follows(self, seq: int, batch: Batch, b: int, e: int) -> bool:
        """Whether this pass of the target goes on where the last one ended, and fits; takes proposals out."""
        state = self._states[seq] if seq < self.n_seq else None
        if state is None or not state.alive:
            return False
        p0 = int(batch.pos[b])
        if p0 != state.n:
            log.warning("%s: sequence %d: rows at %d follow %d: no more drafts for it", self.name, seq, p0, state.n)
        elif p0 + e - b > self._draft.n_ctx_seq:
            log.info(
                "%s: the text of sequence %d is longer than the draft's context (%d): no more drafts for it",
                self.name, seq, self._draft.n_ctx_seq,
            )  # fmt: skip
        else:
            return self._reset(seq)
        state.alive = False
        return False

    def _reset(self, seq: int) -> bool:
        """Take out of the draft's cache what is not text."""
        state = self._states[seq]
        if self._draft.memory.rollback(seq, state.n, state.cells) != state.n:
            log.warning("%s: the draft's cache has lost sequence %d: no more drafts for it", self.name, seq)
            state.alive = False
        state.cells = state.n
        return state.alive

    def _add(self, seq: int, sources: list[F32Array], p0: int, b: int, e: int) -> None:
        inject = self._inject
        assert inject.embd is not None
        at, n = 0, e - b
        while at < n:
            if inject.n == inject.capacity:
                self._flush()
            i = inject.n
            m = min(n - at, inject.capacity - i)
            inject.extend(self._zeros[:m], p0 + at, seq, NONE)
            _core.interleave_rows(inject.embd[i : i + m], [s[b + at : b + at + m] for s in sources], m)
            at += m
        state = self._states[seq]
        state.first, state.n, state.cells = p0, p0 + n, p0 + n

    def _flush(self) -> None:
        if self._inject.n:
            self._draft.decode(self._inject)
            self._inject.clear()

    def _lose(self, seqs: list[int]) -> None:
        """After a failure nobody knows what the cache holds."""
        for seq in seqs:
            self._states[seq].alive = False
            with contextlib.suppress(PyspecError):
                self._draft.memory.clear(seq)

    # -- drafting --

    def _ready(self, request: DraftRequest) -> bool:
        state = self._states[request.seq]
        if not state.alive or self.limit(request) < 1:
            return False
        if state.n != request.n_past:
            log.warning(
                "%s: sequence %d: drafting at %d, injected up to %d: no more drafts for it",
                self.name, request.seq, request.n_past, state.n,
            )  # fmt: skip
            state.alive = False
            return False
        # the whole block is needed: proposals depend on how many masks there are
        return request.n_past + len(self._block) <= self._draft.n_ctx_seq and self._reset(request.seq)

    def _draft_blocks(self, requests: list[DraftRequest]) -> None:
        """One pass over a block of each sequence; blocks have the same length, as the graphs want it."""
        noise, n_block = self._noise, len(self._block)
        noise.clear()
        for request in requests:
            self._block[0] = request.id_last
            noise.extend(self._block, request.n_past, request.seq, NONE if self._top_k else ALL)
            self._states[request.seq].cells = request.n_past + n_block
        self._draft.decode(noise)
        n_vocab = self.target.n_vocab
        for i, request in enumerate(requests):
            n = self.limit(request)
            for token, prob in zip(*self._read(i * n_block, n, self.p_min(request)), strict=True):
                if not 0 <= token < n_vocab:
                    break
                request.draft.append(token)
                request.probs.append(prob)

    def _read(self, begin: int, n: int, p_min: float) -> tuple[list[int], list[float]]:
        """Up to ``n`` proposals of the block whose rows start at ``begin``, with their probabilities."""
        if self._top_k:
            return self._walk(begin, n, p_min)
        first = begin + self._first_row
        ids, probs = self._sampler.rows(self._draft.logits()[first : first + n])
        for i, p in enumerate(probs):
            if p < p_min:
                return ids[:i], probs[:i]
        return ids, probs

    def _walk(self, begin: int, n: int, p_min: float) -> tuple[list[int], list[float]]:
        """The best path through DFlash2's lattice.

        A row holds the k candidates of its position, then k x k scores: candidate j after the previous position's
        candidate i at [i, j]. At the first position all i are the same, the last token.
        """
        k = self._top_k
        lattice = self._draft.nextn(self._noise.n)
        ids: list[int] = []
        probs: list[float] = []
        before = 0
        for row in range(begin + self._first_row, begin + self._first_row + n):
            scores = lattice[row, k * (1 + before) : k * (2 + before)]
            before = int(scores.argmax())
            prob = float(1.0 / np.exp(scores - scores[before]).sum())
            if prob < p_min:
                break
            ids.append(int(lattice[row, before]))
            probs.append(prob)
        return ids, probs
