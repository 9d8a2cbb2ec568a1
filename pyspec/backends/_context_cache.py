"""The cache of a context: removal, copies, positions, saved states."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import RollbackError, UnsupportedError
from ._context_base import ContextBase
from ._status import ERR_ABORT, drain_log, last_log

__all__ = ["ContextCache"]

_U8Array = npt.NDArray[np.uint8]
_ON_DEVICE = 2  # LLAMA_STATE_SEQ_FLAGS_ON_DEVICE


class ContextCache(ContextBase):
    """Cache operations of :class:`ContextHandle`. Each holds the context's lock for its call."""

    def seq_rm(self, seq: int, p0: int, p1: int = -1) -> bool:
        """Forget positions [p0, p1) of a sequence; negative: from the start, to the end.

        Returns:
            False if this cache cannot (recurrent state, too few snapshots, sliding window overwritten); unchanged then.
        """
        self._seq(seq)
        with self._open().lock:
            rc = self._lib.pyspec_seq_rm(self._ptr(), seq, p0, p1, self._out_bool)
            if rc:
                self._fail(rc, "llama_memory_seq_rm", f"seq_rm({seq}, {p0}, {p1})")
            removed = bool(self._out_bool[0])
        drain_log()
        return removed

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let ``dst`` see the positions [p0, p1) of ``src`` too.

        Raises:
            UnsupportedError: part of a sequence without ``kv_unified``, or memory that belongs to the target.
        """
        self._seq(src)
        self._seq(dst)
        self._own_memory("seq_cp")
        if not self.params.kv_unified and (p0 > 0 or p1 >= 0) and src != dst:
            raise UnsupportedError("copying part of a sequence needs kv_unified=True")
        with self._open().lock:
            rc = self._lib.pyspec_seq_cp(self._ptr(), src, dst, p0, p1)
            if rc:
                self._fail(rc, "llama_memory_seq_cp", f"seq_cp({src}, {dst}, {p0}, {p1})")
        drain_log()

    def seq_keep(self, seq: int) -> None:
        """Forget every sequence but one (without ``kv_unified`` libllama looks at that one's own cells only)."""
        self._seq(seq)
        self._own_memory("seq_keep")
        with self._open().lock:
            rc = self._lib.pyspec_seq_keep(self._ptr(), seq)
            if rc:
                self._fail(rc, "llama_memory_seq_keep", f"seq_keep({seq})")

    def memory_clear(self) -> None:
        """Forget everything.

        Raises:
            UnsupportedError: the memory belongs to the target's context, which libllama would clear.
        """
        self._own_memory("memory_clear")
        with self._open().lock:
            rc = self._lib.pyspec_memory_clear(self._ptr())
            if rc:
                self._fail(rc, "llama_memory_clear", "memory_clear")

    def _own_memory(self, what: str) -> None:
        if self._shared_memory:
            raise UnsupportedError(f"{what}: this draft uses the target's cache; act on the target's context")

    def seq_pos_min(self, seq: int) -> int:
        """Smallest position in the cache, -1 if empty; above 0 once a sliding window moved on."""
        return self._seq_pos(seq)[0]

    def seq_pos_max(self, seq: int) -> int:
        """Largest position in the cache, -1 if empty."""
        return self._seq_pos(seq)[1]

    def _seq_pos(self, seq: int) -> tuple[int, int]:
        self._seq(seq)
        with self._open().lock:
            low, high = self._out_pos
            rc = self._lib.pyspec_seq_pos(self._ptr(), seq, low, high)
            if rc:
                self._fail(rc, "llama_memory_seq_pos_min", f"positions of sequence {seq}")
            return int(low[0]), int(high[0])

    def state_seq_get(self, seq: int, flags: int = 0) -> _U8Array:
        """The state of one sequence.

        Args:
            seq: sequence id.
            flags: llama.h's: 1 only what cannot be recomputed (sliding window, recurrent), 2 keep it on the device.

        Returns:
            uint8 [n], owned by the caller. With flag 2 the next such call for ``seq`` makes it void.
        """
        self._seq(seq)
        self._own_memory("state_seq_get")
        size, n = self._ffi.new("uint64_t *"), self._ffi.new("uint64_t *")
        with self._open().lock:
            ptr = self._ptr()
            rc = self._lib.pyspec_state_seq_size(ptr, seq, flags, size)
            if rc:
                self._fail(rc, "llama_state_seq_get_size_ext", f"state of sequence {seq}", "unchanged")
            out = np.empty(int(size[0]), np.uint8)
            rc = self._lib.pyspec_state_seq_get(ptr, seq, flags, self._ffi.from_buffer("uint8_t[]", out), len(out), n)
            if rc:
                self._fail(rc, "llama_state_seq_get_data_ext", f"state of sequence {seq}", "unchanged")
            if flags & _ON_DEVICE:
                self._device_states[seq] = out[: n[0]].tobytes()
        return out[: int(n[0])]

    def state_seq_set(self, seq: int, data: Any, flags: int = 0) -> None:
        """Put back a state of :meth:`state_seq_get` with the same flags, into any sequence.

        Raises:
            RollbackError: the data does not fit this context, or (flag 2) is not the last state taken of its sequence.
                The sequence's cache is then undefined: remove it.
        """
        self._seq(seq)
        self._own_memory("state_seq_set")
        view = np.frombuffer(data, np.uint8)
        n = self._ffi.new("uint64_t *")
        with self._open().lock:
            ptr = self._ptr()
            if flags & _ON_DEVICE and view.tobytes() not in self._device_states.values():
                raise RollbackError(f"sequence {seq}: this is not the last on-device state of its sequence")
            rc = self._lib.pyspec_state_seq_set(ptr, seq, flags, self._ffi.from_buffer("uint8_t[]", view), len(view), n)
            if rc == ERR_ABORT:
                self._fail(rc, "llama_state_seq_set_data_ext", f"state of sequence {seq}")
            if rc:
                log = last_log()
                drain_log()
                what = f"sequence {seq}: the state ({len(view)} bytes) cannot be put back"
                raise RollbackError("\n  ".join((what, *log)))
        drain_log()
