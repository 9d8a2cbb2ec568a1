"""A target without a model: the whole loop runs on it with no model file.

:class:`Rule` decides the next token from *all* tokens before it, through a rolling hash. :class:`FakeEvaluator` keeps a
cache per sequence and applies the rule to what is really in that cache, so a wrong rollback, a wrong position or rows
of another sequence change the output. Its memory has every kind of rollback, with libllama's habit of saying yes and
being wrong beyond the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import InvalidBatchError, NativeError
from ..runtime.batch import Batch
from ..runtime.cache import PARTIAL_ONLY, Rollback
from ..types import F32Array, RollbackKind

__all__ = [
    "BOS",
    "CORRUPT",
    "EMPTY",
    "EOS",
    "EOT",
    "MEMORY",
    "N_SPECIAL",
    "N_VOCAB",
    "FakeEvaluator",
    "FakeMemory",
    "FakeVocab",
    "Rule",
    "advance",
]

#: Ids below this are special; the others are bytes.
N_SPECIAL = 16
N_VOCAB = N_SPECIAL + 256
BOS, EOS, EOT = 1, 2, 3

_PRIME = (1 << 61) - 1
_BASE = 0x9E3779B97F4A7C15 % _PRIME
#: The hash of nothing, and what a corrupt state turns into.
EMPTY, CORRUPT = 1, 0x5DEECE66D


#: Every kind of memory, as options of :class:`FakeEvaluator`.
MEMORY: dict[str, dict[str, Any]] = {
    "partial": {"kind": RollbackKind.PARTIAL},
    "bounded": {"kind": RollbackKind.BOUNDED, "n_rs_seq": 4},
    "bounded-small": {"kind": RollbackKind.BOUNDED, "n_rs_seq": 2},
    "bounded-hybrid": {"kind": RollbackKind.BOUNDED, "n_rs_seq": 4, "hybrid": True},
    "full": {"kind": RollbackKind.FULL},
    "full-hybrid": {"kind": RollbackKind.FULL, "hybrid": True},
    "window": {"kind": RollbackKind.PARTIAL, "n_swa": 12, "n_ubatch": 8},
    "window-tight": {"kind": RollbackKind.PARTIAL, "n_swa": 5, "n_ubatch": 2},
}


def advance(h: int, token: int) -> int:
    """Hash of a history and one more token."""
    return (h * _BASE + token + 1) % _PRIME


class Rule:
    """What the fake model says: a row of logits for each history, and so a next token.

    ``script`` fixes the continuation of one prompt; every other history goes on with pseudo-random printable letters.
    """

    def __init__(self, seed: int = 0, n_vocab: int = N_VOCAB, n_rows: int = 251) -> None:
        rng = np.random.default_rng(seed)
        self.n_vocab = n_vocab
        self.table: F32Array = rng.normal(0, 1, (n_rows, n_vocab)).astype(np.float32)
        self.table[:, :N_SPECIAL] = -10.0
        # printable ASCII only, so that any output is text
        self.table[:, N_SPECIAL : N_SPECIAL + 32] = -10.0
        self.table[:, N_SPECIAL + 127 :] = -10.0
        self.best: list[int] = self.table.argmax(1).tolist()
        self.scripted: dict[int, int] = {}

    def script(self, prompt: Iterable[int], output: Iterable[int]) -> Rule:
        """After ``prompt`` comes ``output``."""
        h = self.hash(prompt)
        for token in output:
            self.scripted[h] = token
            h = advance(h, token)
        return self

    @staticmethod
    def hash(tokens: Iterable[int], h: int = EMPTY) -> int:
        for token in tokens:
            h = advance(h, token)
        return h

    def next(self, h: int) -> int:
        """The most likely token after a history of this hash."""
        return self.scripted[h] if h in self.scripted else self.best[h % len(self.best)]

    def row(self, h: int, out: F32Array) -> None:
        """Logits after a history of this hash, float32 [n_vocab]."""
        out[:] = self.table[h % len(self.best)]
        if h in self.scripted:
            out[self.scripted[h]] = 20.0

    def generate(self, prompt: Sequence[int], n: int, stop: Iterable[int] = ()) -> list[int]:
        """The first ``n`` tokens after ``prompt``, ending with the first of ``stop``."""
        h, out, ends = self.hash(prompt), [], set(stop)
        for _ in range(n):
            out.append(self.next(h))
            if out[-1] in ends:
                break
            h = advance(h, out[-1])
        return out


class FakeVocab:
    """Byte tokens behind the special ones."""

    def token_bytes(self, token: int, special: bool = False) -> bytes:
        if token < N_SPECIAL:
            return b"<%d>" % token if special else b""
        return bytes([(token - N_SPECIAL) % 256])

    @staticmethod
    def encode(text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [N_SPECIAL + b for b in data]

    @staticmethod
    def decode(tokens: Iterable[int]) -> str:
        return b"".join(FakeVocab().token_bytes(t) for t in tokens).decode("utf-8", "replace")


# ---- memory ----------------------------------------------------------------------------


@dataclass
class _Cells:
    """What the cache holds of one sequence."""

    # attention: hash of the history up to and including each position; a window forgets the first ones
    hashes: list[int] = field(default_factory=list)
    first: int = 0
    # recurrent: hash of all, after so many positions; snapshots of the last pass, newest last
    state: int = EMPTY
    n: int = 0
    snapshots: list[int] = field(default_factory=list)
    rows_last: int = 0


class FakeMemory:
    """Memory calls on hashes. Which parts exist depends on the kind.

    Args:
        kind: PARTIAL (attention), BOUNDED and FULL (recurrent), NONE.
        n_rs_seq: snapshots, for BOUNDED.
        n_swa: window; 0: none. Cells beyond ``n_swa + n_ubatch`` are lost, as in libllama.
        hybrid: FULL or BOUNDED with attention beside the recurrent part.
    """

    def __init__(self, kind: RollbackKind, n_seq: int, n_rs_seq: int, n_swa: int, n_ubatch: int, hybrid: bool) -> None:
        self.kind = kind
        self.n_rs_seq = n_rs_seq
        self.n_swa = n_swa
        self.n_ubatch = n_ubatch
        self.recurrent = kind in (RollbackKind.BOUNDED, RollbackKind.FULL)
        self.attention = not self.recurrent or hybrid
        self.cells = [_Cells() for _ in range(n_seq)]
        self.calls: list[tuple[Any, ...]] = []

    def n_past(self, seq: int) -> int:
        cells = self.cells[seq]
        return cells.n if self.recurrent else cells.first + len(cells.hashes)

    def begin_pass(self, seq: int, n_rows: int) -> None:
        cells = self.cells[seq]
        cells.rows_last = n_rows
        cells.snapshots = []

    def append(self, seq: int, token: int) -> int:
        """Add one position; returns the hash its logits depend on."""
        cells = self.cells[seq]
        out = 0
        if self.attention:
            before = cells.hashes[-1] if cells.hashes else EMPTY
            cells.hashes.append(advance(before, token))
            out = cells.hashes[-1]
        if self.recurrent:
            cells.snapshots.append(cells.state)
            cells.state = advance(cells.state, token)
            out = cells.state if not self.attention or cells.state == out else CORRUPT ^ cells.state ^ out
        cells.n += 1
        return out

    def end_ubatch(self, seq: int) -> None:
        """Cells that the window does not need are taken by later micro-batches."""
        cells = self.cells[seq]
        if self.n_swa:
            n_over = len(cells.hashes) - (self.n_swa + self.n_ubatch)
            if n_over > 0:
                del cells.hashes[:n_over]
                cells.first += n_over

    # -- what Rollback calls --

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        self.calls.append(("seq_rm", seq, p0, p1))
        assert p1 < 0, "only suffixes are removed"
        cells = self.cells[seq]
        if self.kind is RollbackKind.NONE:
            return True
        if p0 <= 0:
            self.cells[seq] = _Cells()
            return True
        if self.recurrent and p0 < cells.n:
            n_drop = cells.n - p0
            if self.kind is RollbackKind.FULL or n_drop > self.n_rs_seq or not cells.rows_last:
                return False
            # beyond the last pass the answer is yes, and wrong
            cells.state = cells.snapshots[-n_drop] if n_drop < cells.rows_last else CORRUPT
            cells.n = p0
            cells.rows_last = 0
        if self.attention:
            # a window that has forgotten what position p0 needs: yes, and wrong
            if self.n_swa and max(0, p0 - self.n_swa + 1) < cells.first:
                cells.hashes = [CORRUPT] * len(cells.hashes)
            del cells.hashes[max(0, p0 - cells.first) :]
            cells.n = min(cells.n, p0)
        return True

    def seq_pos_min(self, seq: int) -> int:
        return self.cells[seq].first if self.n_past(seq) else -1

    def seq_pos_max(self, seq: int) -> int:
        return self.n_past(seq) - 1

    def state_seq_get(self, seq: int, flags: int = 0) -> Any:
        self.calls.append(("state_seq_get", seq, flags))
        cells = self.cells[seq]
        return (cells.state, cells.n, None if flags & PARTIAL_ONLY else list(cells.hashes), cells.first)

    def state_seq_set(self, seq: int, data: Any, flags: int = 0) -> None:
        self.calls.append(("state_seq_set", seq, flags))
        state, n, hashes, first = data
        cells = self.cells[seq]
        cells.state, cells.n, cells.rows_last = state, n, 0
        if not flags & PARTIAL_ONLY:
            cells.hashes, cells.first = list(hashes), first


# ---- the evaluator ---------------------------------------------------------------------


class FakeEvaluator:
    """Implements ``pyspec.runtime.Evaluator`` on a :class:`Rule`.

    Args:
        kind, n_rs_seq, n_swa, hybrid: the memory, see :class:`FakeMemory`.
        before_decode: called with (evaluator, batch) before each pass; may raise.
        n_layer_inputs: layers whose input rows can be read.

    Attributes:
        passes: for each pass, sequence id -> (first position, tokens, rows with output).
        violations: what the caller did wrong. Tests check that it is empty.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        kind: RollbackKind = RollbackKind.PARTIAL,
        n_seq: int = 1,
        n_ctx_seq: int = 4096,
        n_batch: int = 64,
        n_ubatch: int = 16,
        n_outputs_max: int = 0,
        n_rs_seq: int = 0,
        n_swa: int = 0,
        hybrid: bool = False,
        n_embd: int = 8,
        before_decode: Callable[[FakeEvaluator, Batch], None] | None = None,
        keep_log: bool = True,
    ) -> None:
        self.rule = rule
        self.n_vocab = rule.n_vocab
        self.n_embd = self.n_embd_out = n_embd
        self.n_ctx_seq = n_ctx_seq
        self.n_batch = n_batch
        self.n_ubatch = n_ubatch
        self.n_seq_max = n_seq
        self.n_rs_seq = n_rs_seq
        self.n_outputs_max = n_outputs_max or n_batch
        self.cells = FakeMemory(kind, n_seq, n_rs_seq, n_swa, n_ubatch, hybrid)
        self.memory = Rollback(
            self.cells, kind, n_rs_seq=n_rs_seq, n_swa=n_swa, n_ubatch=n_ubatch, partial_state=hybrid
        )
        self.before_decode = before_decode
        self.keep_log = keep_log
        self.passes: list[dict[int, tuple[int, list[int], int]]] = []
        self.violations: list[str] = []
        self.n_decode = 0
        self.n_abort_clear = 0
        self._logits: F32Array = np.zeros((n_batch, self.n_vocab), np.float32)
        self._n_outputs = 0
        self._hidden: F32Array = np.zeros((n_batch, n_embd), np.float32)

    def wrong(self, text: str) -> None:
        self.violations.append(text)
        raise InvalidBatchError(text, func="fake_decode", code=-1, state="unchanged")

    def decode(self, batch: Batch) -> None:
        self.n_decode += 1
        if self.before_decode is not None:
            self.before_decode(self, batch)
        n = batch.n
        if not 1 <= n <= self.n_batch:
            self.wrong(f"{n} rows, n_batch is {self.n_batch}")
        tokens, pos, output = batch.tokens[:n].tolist(), batch.pos[:n].tolist(), batch.output[:n].tolist()
        if batch.seq[:n].tolist() != [s for s, (b, e) in batch.rows().items() for _ in range(b, e)]:
            self.wrong("rows of one sequence are not contiguous")
        if sum(output) != batch.n_outputs or batch.n_outputs > self.n_outputs_max:
            self.wrong(f"{sum(output)} output rows, {batch.n_outputs} counted, at most {self.n_outputs_max}")
        for seq, (begin, end) in batch.rows().items():
            if not 0 <= seq < self.n_seq_max:
                self.wrong(f"sequence {seq} of {self.n_seq_max}")
            n_past = self.cells.n_past(seq)
            if pos[begin:end] != list(range(n_past, n_past + end - begin)):
                self.wrong(f"sequence {seq} holds {n_past} positions, rows are at {pos[begin:end]}")
            if pos[end - 1] >= self.n_ctx_seq:
                self.wrong(f"position {pos[end - 1]}, n_ctx_seq is {self.n_ctx_seq}")
            if not all(0 <= t < self.n_vocab for t in tokens[begin:end]):
                self.wrong(f"token ids {tokens[begin:end]}")
        row = 0
        for seq, (begin, end) in batch.rows().items():
            self.cells.begin_pass(seq, end - begin)
            for i in range(begin, end):
                h = self.cells.append(seq, tokens[i])
                self._hidden[i] = h % 9973
                if output[i]:
                    self.rule.row(h, self._logits[row])
                    row += 1
                if (i - begin) % self.n_ubatch == self.n_ubatch - 1:
                    self.cells.end_ubatch(seq)
            self.cells.end_ubatch(seq)
            if self.keep_log:
                if not begin:
                    self.passes.append({})
                self.passes[-1][seq] = (pos[begin], tokens[begin:end], sum(output[begin:end]))
        self._n_outputs = row
        self.memory.note(batch.rows())

    def logits(self) -> F32Array:
        return self._logits[: self._n_outputs]

    def nextn(self, n_rows: int) -> F32Array:
        return self._hidden[:n_rows]

    def layer_input(self, layer: int, n_rows: int) -> F32Array:
        return self._hidden[:n_rows]

    def encode(self, embd: F32Array, n: int) -> None:
        raise NativeError("the fake has no encoder", func="fake_encode", state="unchanged")

    def abort_clear(self) -> None:
        self.n_abort_clear += 1
