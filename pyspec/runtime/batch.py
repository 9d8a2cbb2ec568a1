"""The rows of one pass, as plain arrays that ``_core`` fills and the backend hands over by value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import _core
from ..errors import ConfigError
from ..types import F32Array, I8Array, I32Array

__all__ = ["ALL", "LAST", "NONE", "Batch"]

#: Which rows of :meth:`Batch.extend` want outputs.
NONE, ALL, LAST = 0, 1, 2


class Batch:
    """Preallocated rows: token, position, sequence id, output flag and, optionally, an embedding row each.

    The rows of one sequence are contiguous and their positions ascend by one; drafters rely on both.
    The arrays are owned by the batch, live as long as it does and are reused by every pass.

    Attributes:
        tokens, pos, seq: int32, [capacity]. output: int8, [capacity]. All C-contiguous.
        embd: float32, [capacity, n_embd], or None.
        n: rows in use. n_outputs: rows whose output flag is set.
        use_tokens: False when the rows are embeddings only.
    """

    __slots__ = ("_ranges", "capacity", "embd", "n", "n_outputs", "output", "pos", "seq", "tokens", "use_tokens")

    def __init__(self, capacity: int, n_embd: int = 0, *, use_tokens: bool = True) -> None:
        if capacity < 1:
            raise ConfigError(f"a batch needs room for at least one row, got capacity {capacity}")
        self.capacity = capacity
        self.tokens: I32Array = np.zeros(capacity, np.int32)
        self.pos: I32Array = np.zeros(capacity, np.int32)
        self.seq: I32Array = np.zeros(capacity, np.int32)
        self.output: I8Array = np.zeros(capacity, np.int8)
        self.embd: F32Array | None = np.zeros((capacity, n_embd), np.float32) if n_embd else None
        self.use_tokens = use_tokens
        self._ranges: dict[int, tuple[int, int]] = {}
        self.n = 0
        self.n_outputs = 0

    def clear(self) -> None:
        """Forget all rows. The arrays stay."""
        self._ranges.clear()
        self.n = 0
        self.n_outputs = 0

    def extend(self, tokens: Sequence[int] | I32Array, pos0: int, seq: int, output: int = NONE) -> int:
        """Append rows of one sequence at positions ``pos0, pos0 + 1, ...``; returns the first row's index.

        Args:
            tokens: token ids, int32 or a sequence of int.
            pos0: position of the first row.
            seq: sequence id.
            output: NONE, ALL or LAST: which of these rows want outputs.

        Raises:
            ConfigError: not enough room (nothing is written), or the sequence already has rows that end elsewhere.
        """
        first = self.n
        ids = np.asarray(tokens, dtype=np.int32)
        n = len(ids)
        if first + n > self.capacity:
            raise ConfigError(f"batch of {self.capacity} rows cannot take {n} more, {first} are in use")
        old = self._ranges.get(seq)
        if old is not None and old[1] != first:
            raise ConfigError(f"rows of sequence {seq} must be contiguous")
        if n:
            _core.fill_batch(self.tokens, self.pos, self.seq, self.output, first, ids, pos0, seq, output)
            self.n = first + n
            self.n_outputs += n if output == ALL else 1 if output == LAST else 0
            self._ranges[seq] = (first if old is None else old[0], self.n)
        return first

    def add(self, token: int, pos: int, seq: int, output: bool) -> int:
        """Append one row; returns its index. Raises ConfigError when full."""
        i = self.n
        if i >= self.capacity:
            raise ConfigError(f"batch of {self.capacity} rows is full")
        old = self._ranges.get(seq)
        if old is not None and old[1] != i:
            raise ConfigError(f"rows of sequence {seq} must be contiguous")
        self.tokens[i] = token
        self.pos[i] = pos
        self.seq[i] = seq
        self.output[i] = output
        self.n = i + 1
        self.n_outputs += output
        self._ranges[seq] = (i if old is None else old[0], i + 1)
        return i

    def rows(self) -> dict[int, tuple[int, int]]:
        """Sequence id -> (first row, one past the last row), in batch order. Borrowed until the next change."""
        return self._ranges

    def __len__(self) -> int:
        return self.n
