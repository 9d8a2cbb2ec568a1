"""``draft-mtp``: the multi-token-prediction blocks that some models are trained with.

Three modes, by what the draft is:

- *single*: one block, in the target's own file or in a file of its own. Each step feeds its hidden row to the next.
- *chain*: one trained block per step. A step runs the next block, which has its own layer in the cache: before each
  step the cache is taken back to the text, and the block evaluates all proposals so far. So no more proposals than
  blocks.
- *shared*: an assistant (gemma4) that reads the target's cache and has none of its own. Nothing to catch up, and all
  proposals stand at the position after the text. Its memory is the target's: it must never be cleared.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from ..config import SpeculationParams
from ..errors import ConfigError, RollbackError, UnsupportedError
from ..runtime.batch import ALL, Batch
from ..types import DraftRequest, F32Array, I32Array, Requirements, RollbackKind
from .base import Plan, log_setup
from .carry import CarryDrafter, Work
from .choose import mtp_reason, require_kind
from .compat import HIDDEN_ROW_ARCHITECTURES, check_token_texts

if TYPE_CHECKING:
    from ..runtime.evaluator import Evaluator
    from ..runtime.model import Model

__all__ = ["DraftMtp", "n_heads_used"]

log = logging.getLogger("pyspec")

#: Architectures whose block computes hidden rows for every row and logits for the flagged ones (src/models of the
#: pinned tree): there the output head runs for one row per sequence only. For others all rows of a pass are flagged.
_ROWWISE = frozenset(
    {
        "bailingmoe3", "cohere2moe", "deepseek2", "deepseek2-ocr", "deepseek32", "glm-dsa", "glm4moe", "hy_v3",
        "qwen35", "qwen35moe",
    }
)  # fmt: skip

_ASSISTANT = "gemma4-assistant"


def n_heads_used(model: Model, n_max: int) -> int:
    """Blocks that drafts of ``n_max`` tokens run, one a step; 1 where a single block does all steps."""
    chained = model.architecture != _ASSISTANT and model.n_layer_nextn > 1
    return min(n_max, model.n_layer_nextn) if chained else 1


class DraftMtp(CarryDrafter):
    """See the module's text and :class:`CarryDrafter`."""

    name: ClassVar[str] = "draft-mtp"
    shift: ClassVar[int] = 1

    def __init__(self, target: Evaluator, draft: Evaluator | None, params: SpeculationParams, n_seq: int) -> None:
        if draft is None:
            raise ConfigError(f"{self.name} needs a context for the multi-token-prediction blocks")
        model: Model = cast(Any, draft).model
        self._shared = draft.memory.kind is RollbackKind.NONE
        self._n_heads = n_heads_used(model, params.n_max)
        chain = model.n_layer_nextn > 1 and not self._shared
        super().__init__(
            target,
            draft,
            params,
            n_seq,
            draft.n_embd_out,
            # a chain takes each pass back once per block; a windowed cache keeps a micro-batch for that
            rows_per_pass=draft.n_ubatch if chain else 0,
            single_outputs=model.architecture in _ROWWISE and not chain,
        )
        self._chain = chain
        # a chain repeats the text's end with every draft; an assistant has nothing to catch up with
        self._patient = not chain and not self._shared
        self._cells_move = False
        if chain:
            if params.n_max > model.n_layer_nextn:
                log.warning(
                    "%s: n_max=%d, but %s has %d blocks, one a token: drafts of %d",
                    self.name, params.n_max, model.path.name, model.n_layer_nextn, model.n_layer_nextn,
                )  # fmt: skip
            self.n_max = self._n_heads
            # hidden rows of the proposals: block i's row goes with the i-th proposal
            self._rows: F32Array = np.zeros((n_seq, self.n_max, self._width), np.float32)
            self._handle.nextn_layer_offset(0)
            # where sequences share their cells, a row may get another cell under the next block
            self._cells_move = n_seq > 1 and bool(getattr(getattr(draft, "params", None), "kv_unified", False))
        else:
            self._sample_on_device()
        mode = "shared" if self._shared else "chain" if chain else "single"
        log_setup(
            self,
            draft,
            f"mode={mode}, blocks={model.n_layer_nextn}",
            f"sampling={'device' if self._on_device else 'cpu'}",
        )

    @classmethod
    def plan(cls, target: Model, draft: Model | None, params: SpeculationParams, n_seq: int) -> Plan:
        """See :meth:`Drafter.plan`. Without a draft the blocks are the target's own."""
        model = target if draft is None else draft
        if draft is not None:
            _check_draft(target, draft)
        else:
            reason = mtp_reason(target)
            if reason is not None:
                raise UnsupportedError(f"{cls.name} cannot be had from {target.path.name!r} itself: {reason}")
        if model.architecture != _ASSISTANT and not model.params.load_mtp:
            raise ConfigError(
                f"{model.path.name!r} was loaded without its multi-token-prediction blocks: load it with load_mtp=True"
            )
        chained = model.architecture != _ASSISTANT and model.n_layer_nextn > 1
        n_max = n_heads_used(model, params.n_max) if chained else params.n_max
        n_rs_seq = params.n_max if target.is_recurrent or target.is_hybrid else 0
        # rows of a seed pass: what was accepted and what came after it; a chain repeats the proposals behind them
        n_rows = n_max + 1 + (n_max if chained else 0)
        return Plan(
            Requirements(nextn=True, load_mtp=draft is None, n_rs_seq=n_rs_seq),
            {"ctx_type": "mtp", "n_rs_seq": 0, "n_outputs_max": n_seq * n_rows, "other": True},
            n_max,
        )

    def _hidden(self, batch: Batch) -> F32Array:
        return self.target.nextn(batch.n)

    # -- shared memory: nothing to catch up --

    def _write(self, seq: int, batch: Batch, hidden: F32Array, b: int, e: int, end: int) -> None:
        if self._shared:
            self._states[seq].done = end
        else:
            super()._write(seq, batch, hidden, b, e, end)

    def _prepare(self, request: DraftRequest) -> Work | None:
        work = super()._prepare(request)
        if work is not None and self._shared:
            work.start = request.n_past - 1
        return work

    def _cell(self, request: DraftRequest, n_drafted: int) -> int:
        return request.n_past if self._shared else super()._cell(request, n_drafted)

    # -- a chain: a block a step --

    def _decode(self) -> None:
        """Evaluate the batch under every block that is used."""
        if not self._chain:
            super()._decode()
            return
        try:
            for head in range(self._n_heads):
                if head:
                    for seq, (b, e) in self._batch.rows().items():
                        self._take_back(seq, int(self._batch.pos[b]), int(self._batch.pos[e - 1]) + 1)
                self._handle.nextn_layer_offset(head)
                self._draft.decode(self._batch)
        finally:
            self._handle.nextn_layer_offset(0)

    def _take_back(self, seq: int, n_keep: int, n_now: int) -> None:
        kept = self._draft.memory.rollback(seq, n_keep, n_now)
        if kept != n_keep:
            raise RollbackError(f"{self.name}: the draft's cache kept {kept} of {n_keep} positions of sequence {seq}")

    def _draft_all(self, works: list[Work]) -> None:
        if not self._chain:
            super()._draft_all(works)
            return
        room = max(1, min(self._batch.capacity, self._draft.n_outputs_max) // len(works) - self.n_max)
        self._batch.clear()
        seeds: list[tuple[I32Array, F32Array]] = []
        for work in works:
            tokens, rows = self._pairs(work)
            n_head = max(0, len(tokens) - room)
            if n_head:
                self._add(work.request.seq, work.start, tokens[:n_head], rows[:n_head])
            seeds.append((tokens[n_head:], rows[n_head:]))
        self._run()
        going = list(works)
        try:
            for head in range(self._n_heads):
                self._fill_chain(head, works, seeds)
                self._handle.nextn_layer_offset(head)
                self._draft.decode(self._batch)
                # every block has to see the text, so the passes go on when no proposal is wanted any more
                if going:
                    going = self._sample(going)
                    nextn = self._nextn()
                    for work in going:
                        self._rows[work.request.seq, len(work.request.draft) - 1] = nextn[work.row]
        finally:
            self._handle.nextn_layer_offset(0)
        if self._cells_move:
            # passes with the proposals between differ in layout: the next process does the text again, without them
            for work in works:
                self._states[work.request.seq].done = work.start

    def _fill_chain(self, head: int, works: list[Work], seeds: list[tuple[I32Array, F32Array]]) -> None:
        """The batch for one block: the end of the text and the proposals so far, of every sequence."""
        batch = self._batch
        batch.clear()
        for work, (tokens, rows) in zip(works, seeds, strict=True):
            seq, draft = work.request.seq, work.request.draft
            state = self._states[seq]
            n = len(tokens)
            # those that go on have a proposal from each block before this one
            n_draft = len(draft) if len(draft) == head < work.n else 0
            pos0 = work.request.n_past + self.shift - n
            if head:
                self._take_back(seq, pos0, state.cells)
            i = batch.extend(tokens, pos0, seq, ALL)
            self._embd[i : i + n] = rows
            if n_draft:
                batch.extend(draft, pos0 + n, seq, ALL)
                self._embd[i + n : i + n + n_draft] = self._rows[seq, :n_draft]
            work.row = work.out = i + n + n_draft - 1
            state.done, state.cells = work.request.n_past, pos0 + n + n_draft


def _check_draft(target: Model, draft: Model) -> None:
    """Refuse a file that does not continue this target.

    Raises:
        UnsupportedError, ConfigError, VocabMismatchError: with the reason.
    """
    require_kind(DraftMtp.name, draft)
    pair = f"draft {draft.path.name!r} ({draft.architecture}), target {target.path.name!r} ({target.architecture})"
    if draft.architecture == _ASSISTANT:
        if target.architecture != "gemma4":
            raise UnsupportedError(f"{pair}: this assistant reads the cache of a gemma4 target and works with no other")
    elif target.architecture not in HIDDEN_ROW_ARCHITECTURES:
        raise UnsupportedError(f"{pair}: libllama does not hand out the hidden rows of {target.architecture} models")
    if draft.n_embd_out != target.n_embd_out:
        raise ConfigError(
            f"{pair}: the draft takes hidden rows of {draft.n_embd_out} values, the target has {target.n_embd_out}: "
            "it is made for another target"
        )
    check_token_texts(target.vocab, draft.vocab)
