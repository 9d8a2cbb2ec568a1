"""Fake drafts that notice every wrong row: hidden rows carry the hash of the whole history up to their position.

A :class:`PairHead` (EAGLE-3, MTP) checks each pair it is given against the cell before it, a :class:`BlockHead`
(DFlash) what was injected. Both propose what the target will say, or something else where they do not ``agree``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from fakes import EMPTY, N_VOCAB, FakeEvaluator, Rule, advance

from pyspec.errors import DecodeFailed
from pyspec.runtime.batch import Batch
from pyspec.runtime.cache import Rollback
from pyspec.types import F32Array, RollbackKind

RULE = Rule()
MASK = 3
WIDTH = 4


def to_row(h: int) -> list[float]:
    """A 61-bit hash as four floats that hold it exactly; the hash of nothing is a row of zeros."""
    return [float(((h ^ EMPTY) >> s) & 0xFFFF) for s in (0, 16, 32, 48)]


def from_row(row: Any) -> int:
    return sum(int(v) << s for v, s in zip(row, (0, 16, 32, 48), strict=True)) ^ EMPTY


class Target(FakeEvaluator):
    """The fake target, with hidden rows that tell their history."""

    def __init__(self, **options: Any) -> None:
        super().__init__(RULE, n_embd=WIDTH, **options)
        self.hashes: list[int] = []
        append = self.cells.append

        def keep(seq: int, token: int) -> int:
            self.hashes.append(append(seq, token))
            return self.hashes[-1]

        self.cells.append = keep  # type: ignore[method-assign]
        self.model = SimpleNamespace(n_layer=9)

    def decode(self, batch: Batch) -> None:
        self.hashes.clear()
        super().decode(batch)
        self._hidden[: len(self.hashes)] = [to_row(h) for h in self.hashes]

    def history(self, seq: int) -> int:
        """Hash of what is in the cache."""
        cells = self.cells.cells[seq]
        return cells.hashes[-1] if cells.hashes else EMPTY


@dataclass
class Cells:
    """Cells of one sequence: what each block stored there; a removed cell keeps its data until it is written again."""

    n: int = 0
    data: list[list[int]] = field(default_factory=list)


class Head:
    """Common part of the fake heads: memory, sizes, rows."""

    def __init__(
        self,
        target: Target,
        *,
        kind: RollbackKind = RollbackKind.PARTIAL,
        n_ctx_seq: int = 4096,
        n_batch: int = 64,
        n_ubatch: int = 16,
        n_outputs_max: int = 64,
        agree: Callable[[int], bool] = lambda h: True,
        skips_logits: bool = False,
        **model: Any,
    ) -> None:
        self.target = target
        self.agree = agree
        self.n_vocab = N_VOCAB
        self.n_embd = self.n_embd_out = WIDTH
        self.n_ctx_seq, self.n_batch, self.n_ubatch, self.n_outputs_max = n_ctx_seq, n_batch, n_ubatch, n_outputs_max
        self.n_seq_max = target.n_seq_max
        self.n_heads = model.get("n_layer_nextn", 1)
        self.cells = [Cells() for _ in range(self.n_seq_max)]
        self.memory = Rollback(self, kind)  # type: ignore[arg-type]
        self.handle = self
        self.skips_logits = skips_logits
        self.model = SimpleNamespace(
            **{
                "target_layer_ids": (1, 2, 3), "architecture": "qwen35", "n_layer_nextn": 0, "path": Path("head.gguf"),
                "dflash_selector_top_k": 0, "vocab": SimpleNamespace(mask=MASK), "metadata": {},
            }
            | model
        )  # fmt: skip
        self.violations: list[str] = []
        # an empty cache may begin in mid-text
        self.may_begin_late = False
        self.n_decode = 0
        self.passes: list[dict[int, int]] = []
        self.fail_at = -1
        self.head = 0
        self.masked = False
        self._nextn: F32Array = np.zeros((n_batch, WIDTH), np.float32)
        self._logits: F32Array = np.zeros((n_batch, N_VOCAB), np.float32)
        self._n_out = 0
        self._n_nextn = 0

    # switches

    def embeddings_nextn(self, value: bool, masked: bool) -> None:
        self.masked = masked

    def causal_attn(self, value: bool) -> None:
        self.causal = value

    def nextn_layer_offset(self, offset: int) -> None:
        assert 0 <= offset < self.n_heads
        self.head = offset

    def set_backend_sampler(self, seq: int, top_k: int | None) -> bool:
        raise AssertionError("the fake runs on no device")

    # memory

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        self.cells[seq].n = min(self.cells[seq].n, max(p0, 0))
        return True

    def seq_pos_min(self, seq: int) -> int:
        return 0 if self.cells[seq].n else -1

    # rows

    def wrong(self, text: str) -> None:
        self.violations.append(text)

    def put(self, seq: int, pos: int, value: int) -> None:
        cells = self.cells[seq]
        if pos != cells.n and not self.begins_late(seq):
            self.wrong(f"sequence {seq}: row at {pos}, {cells.n} cells")
        if pos >= self.n_ctx_seq:
            self.wrong(f"position {pos}, n_ctx_seq is {self.n_ctx_seq}")
        while len(cells.data) <= pos:
            cells.data.append([-1] * self.n_heads)
        cells.data[pos][self.head] = value
        cells.n = pos + 1

    def begins_late(self, seq: int) -> bool:
        return self.may_begin_late and self.cells[seq].n == 0

    def before(self, seq: int, pos: int) -> int:
        """What this block holds of the cell before ``pos``."""
        return self.cells[seq].data[pos - 1][self.head] if pos else EMPTY

    def say(self, h: int) -> int:
        """Token that this head proposes after a history."""
        right = RULE.next(h)
        return right if self.agree(h) else 60 + (right + 1) % 30

    def start(self, batch: Batch) -> None:
        self.n_decode += 1
        self.passes.append({seq: e - b for seq, (b, e) in batch.rows().items()})
        if self.n_decode == self.fail_at:
            raise DecodeFailed("broken", func="decode", state="partial")
        if not 1 <= batch.n <= self.n_batch:
            self.wrong(f"{batch.n} rows, n_batch is {self.n_batch}")
        if batch.n_outputs > self.n_outputs_max:
            self.wrong(f"{batch.n_outputs} outputs, n_outputs_max is {self.n_outputs_max}")
        self._n_out = 0

    def out(self, token: int) -> None:
        row = self._logits[self._n_out]
        row[:] = 0.0
        row[token] = 5.0
        self._n_out += 1

    def logits(self) -> F32Array:
        return self._logits[: self._n_out]

    def nextn(self, n_rows: int) -> F32Array:
        if n_rows > self._n_nextn:
            self.wrong(f"{n_rows} nextn rows asked for, {self._n_nextn} there")
        return self._nextn[:n_rows]


class PairHead(Head):
    """Takes pairs of hidden row and token: EAGLE-3 (shift 0), MTP (shift 1)."""

    def __init__(self, target: Target, shift: int, rowwise: bool = False, **options: Any) -> None:
        super().__init__(target, **options)
        self.shift = shift
        self.rowwise = rowwise
        self._shared_last = [EMPTY] * self.n_seq_max

    def decode(self, batch: Batch) -> None:
        self.start(batch)
        assert batch.embd is not None
        if not self.rowwise and batch.n_outputs not in (0, batch.n):
            self.wrong("outputs of single rows")
        shared = self.memory.kind is RollbackKind.NONE
        n_nextn = 0
        for seq, (b, e) in batch.rows().items():
            for i in range(b, e):
                pos, h = int(batch.pos[i]), from_row(batch.embd[i])
                if shared:
                    history = self.target.history(seq)
                    if pos != self.target.cells.n_past(seq):
                        self.wrong(f"sequence {seq}: row at {pos}, the target has {self.target.cells.n_past(seq)}")
                    if h not in (history, self._shared_last[seq]):
                        self.wrong(f"sequence {seq}: hidden row of another history")
                elif pos + self.shift > 0 and not self.begins_late(seq) and h != self.before(seq, pos):
                    self.wrong(
                        f"sequence {seq}, position {pos}, block {self.head}: row does not follow the cell before"
                    )
                after = advance(h, int(batch.tokens[i]))
                self._shared_last[seq] = after
                if not shared:
                    self.put(seq, pos, after)
                if batch.output[i]:
                    self.out(self.say(after))
                if batch.output[i] or not self.masked:
                    self._nextn[n_nextn] = to_row(after)
                    n_nextn += 1
        self._n_nextn = n_nextn

    def encode(self, embd: F32Array, n: int) -> None:
        if not 1 <= n <= self.n_ubatch:
            self.wrong(f"encoding {n} rows, n_ubatch is {self.n_ubatch}")
        parts = embd[:n].reshape(n, 3, WIDTH)
        if not (parts == parts[:, :1]).all():
            self.wrong("features of different rows side by side")
        self._nextn[:n] = parts[:, 0]
        self._n_nextn = n


class BlockHead(Head):
    """Takes features per position, then a block of masks: DFlash and its kin."""

    def __init__(self, target: Target, **options: Any) -> None:
        self.lattice_k = options.get("dflash_selector_top_k", 0)
        self.anchor = options.pop("anchor", False)
        self.doubt = options.pop("doubt", 99)
        super().__init__(target, **options)

    def decode(self, batch: Batch) -> None:
        self.start(batch)
        if batch.n > self.n_ubatch:
            self.wrong("more than a micro-batch without causal attention")
        if not batch.use_tokens:
            assert batch.embd is not None
            parts = batch.embd[: batch.n].reshape(batch.n, 3, WIDTH)
            if not (parts == parts[:, :1]).all():
                self.wrong("features of different rows side by side")
            for seq, (b, e) in batch.rows().items():
                for i in range(b, e):
                    self.put(seq, int(batch.pos[i]), from_row(parts[i, 0]))
            return
        if len({e - b for b, e in batch.rows().values()}) > 1:
            self.wrong("blocks of different lengths")
        for seq, (b, e) in batch.rows().items():
            h = self.before(seq, int(batch.pos[b]))
            if h != self.target.history(seq):
                self.wrong(f"sequence {seq}: the cache is not the text")
            if batch.tokens[b + 1 : e].tolist() != [MASK] * (e - b - 1):
                self.wrong("masks expected")
            h = advance(h, int(batch.tokens[b]))
            for i in range(b, e):
                self.put(seq, int(batch.pos[i]), -2)
                if i > b or self.anchor:
                    token = self.say(h)
                    h = advance(h, token)
                else:
                    token = 70  # the last token's own row is not a proposal
                if batch.output[i]:
                    self.out(token)
                self._nextn[i] = 0.9 if i - b < self.doubt else 0.1
                if self.lattice_k:
                    self._lattice[i] = self.lattice_row(i - b, token)
        self._n_nextn = batch.n

    def lattice_row(self, i: int, token: int) -> list[float]:
        """Candidates with the right one at place i % k; its score counts only after the right one before."""
        k = self.lattice_k
        ids = [float(80 + j) for j in range(k)]
        ids[i % k] = float(token)
        scores = np.zeros((k, k), np.float32)
        for before in range(k):
            right = i == 1 or before == (i - 1) % k
            scores[before, i % k if right else (i + 1) % k] = 4.0
        return [*ids, *scores.ravel()]

    def nextn(self, n_rows: int) -> F32Array:
        rows = super().nextn(n_rows)
        return self._lattice[:n_rows] if self.lattice_k else rows

    def embeddings_nextn(self, value: bool, masked: bool) -> None:
        super().embeddings_nextn(value, masked)
        self._lattice: F32Array = np.zeros((self.n_batch, self.lattice_k * (self.lattice_k + 1)), np.float32)
