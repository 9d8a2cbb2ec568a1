"""Rollback: how a cache forgets the rows of rejected drafts.

Four kinds of memory (:class:`pyspec.types.RollbackKind`), found out once per context:

- NONE: shared with another context, nothing of its own to forget.
- PARTIAL: attention. Any suffix can be removed. With a sliding window the cells that the window still needs must be
  there as well; libllama's ``seq_rm`` does not check that, so it is checked here.
- BOUNDED: recurrent snapshots (``n_rs_seq``). At most ``n_rs_seq`` positions can be dropped, and fewer than the last
  pass held for the sequence; libllama says yes beyond the second limit too, and is silently wrong then.
- FULL: only whole states. A checkpoint is taken before rows that may be rejected; rollback restores it and tells the
  caller what to evaluate again.

Whatever cannot be put back exactly is emptied, and the caller evaluates the sequence again from the start: slow, but
never wrong.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..errors import RollbackError
from ..types import RollbackKind

__all__ = ["Memory", "Rollback"]

# LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: the recurrent (or sliding-window) part of the state only
PARTIAL_ONLY = 1

_NO_LIMIT = 1 << 30


class Memory(Protocol):
    """The memory calls that rollback is built on (``llama_memory_*``, ``llama_state_seq_*``)."""

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool: ...
    def seq_pos_min(self, seq: int) -> int: ...
    def seq_pos_max(self, seq: int) -> int: ...
    def state_seq_get(self, seq: int, flags: int = 0) -> Any: ...
    def state_seq_set(self, seq: int, data: Any, flags: int = 0) -> None: ...


class Rollback:
    """Rollback of one context's memory.

    Args:
        memory: the calls to use.
        kind: what the memory can do.
        n_rs_seq: snapshots per sequence, for BOUNDED.
        n_swa: window length of a cache that keeps only the window; 0 when everything is kept.
        n_ubatch: rows computed at once; a windowed cache keeps ``n_swa + n_ubatch`` cells.
        partial_state: checkpoints need only the part of the state that ``seq_rm`` cannot undo.
    """

    def __init__(
        self,
        memory: Memory,
        kind: RollbackKind,
        *,
        n_rs_seq: int = 0,
        n_swa: int = 0,
        n_ubatch: int = 512,
        partial_state: bool = False,
    ) -> None:
        self.kind = kind
        self._memory = memory
        self._n_rs_seq = n_rs_seq
        self._n_swa = n_swa
        self._n_ubatch = n_ubatch
        self._flags = PARTIAL_ONLY if partial_state else 0
        self._checkpoints: dict[int, tuple[int, Any]] = {}
        self._last_rows: dict[int, int] = {}

    @property
    def n_draft_max(self) -> int:
        """Longest draft of a sequence whose rejection can be rolled back; a large number where there is no limit."""
        if self.kind is RollbackKind.NONE:
            return 0
        return self._n_rs_seq if self.kind is RollbackKind.BOUNDED else _NO_LIMIT

    @property
    def has_window(self) -> bool:
        """Old cells are lost (sliding-window attention): to go back needs the whole window before."""
        return self._n_swa > 0

    @property
    def n_rows_max(self) -> int:
        """Most rows of a pass that may be rejected; a large number where there is no limit.

        A windowed cache has ``n_ubatch`` cells more than the window, and a cell leaves the window only when a later
        micro-batch takes it: as long as the rows of a pass fit in one micro-batch, all can be taken back.
        """
        return self._n_ubatch if self._n_swa else _NO_LIMIT

    def note(self, rows: dict[int, tuple[int, int]]) -> None:
        """Remember how many rows each sequence had in the pass that has just been evaluated."""
        if self.kind is RollbackKind.BOUNDED:
            self._last_rows = {seq: end - begin for seq, (begin, end) in rows.items()}

    def checkpoint(self, seq: int, n_past: int) -> None:
        """Call before rows that may be rejected are decoded; ``n_past`` positions are in the cache.

        Copies the state for FULL memory; costs nothing otherwise.
        """
        if self.kind is not RollbackKind.FULL:
            return
        old = self._checkpoints.get(seq)
        if old is not None and old[0] == n_past:
            return
        self._checkpoints[seq] = (n_past, self._memory.state_seq_get(seq, self._flags) if n_past else None)

    def rollback(self, seq: int, n_keep: int, n_now: int) -> int:
        """Forget the positions from ``n_keep`` on.

        Args:
            seq: sequence id.
            n_keep: positions to keep.
            n_now: positions in the cache now.

        Returns:
            How many positions are really kept, <= n_keep. The caller evaluates ``[returned, n_keep)`` again.

        Raises:
            RollbackError: not even emptying the sequence worked.
        """
        if n_keep >= n_now or self.kind is RollbackKind.NONE:
            return min(n_keep, n_now)
        if n_keep > 0:
            if self.kind is RollbackKind.PARTIAL and self._window_is_whole(seq, n_keep):
                if self._memory.seq_rm(seq, n_keep, -1):
                    return n_keep
            elif self.kind is RollbackKind.BOUNDED:
                n_drop = n_now - n_keep
                in_bounds = n_drop <= self._n_rs_seq and n_drop < self._last_rows.pop(seq, 0)
                if in_bounds and self._memory.seq_rm(seq, n_keep, -1):
                    return n_keep
            elif self.kind is RollbackKind.FULL:
                n_past, state = self._checkpoints.get(seq, (0, None))
                if 0 < n_past <= n_keep:
                    self._memory.state_seq_set(seq, state, self._flags)
                    # a partial state leaves the attention cells of the dropped positions in place
                    if not self._flags or self._memory.seq_rm(seq, n_past, -1):
                        return n_past
        self.clear(seq)
        return 0

    def clear(self, seq: int) -> None:
        """Empty the sequence. Raises RollbackError when the memory refuses."""
        self._checkpoints.pop(seq, None)
        self._last_rows.pop(seq, None)
        if self.kind is RollbackKind.NONE:
            return
        if not self._memory.seq_rm(seq, -1, -1):
            raise RollbackError(f"sequence {seq} could not be removed from the cache")

    def _window_is_whole(self, seq: int, n_keep: int) -> bool:
        if not self._n_swa:
            return True
        # the next row sits at position n_keep and attends to the n_swa - 1 positions before it
        return self._memory.seq_pos_min(seq) <= max(0, n_keep - self._n_swa + 1)
