"""One pool of compute threads for several contexts."""

from __future__ import annotations

import os
import weakref
from typing import Any

from ..errors import ConfigError
from . import _binding
from ._ownership import Handle, Native, creating
from ._status import drain_log, raise_status

__all__ = ["ThreadPool", "usable_cpus"]


def usable_cpus() -> int:
    """CPUs this process may run on. More compute threads than that only wait for each other (ggml's barriers spin)."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows have no affinity call
        return os.cpu_count() or 512


class ThreadPool(Handle):
    """Owner of a ggml thread pool. Without one, every pass of a context starts and ends its own threads.

    A pool serves one pass at a time: contexts that share it wait for each other (``native.lock``).
    Closing it detaches it from its contexts, which then go on with threads of their own.

    Args:
        n_threads: threads, the caller's own included; 1 to 512. No more than there are CPUs are made; the attribute
            ``n_threads`` tells.
        poll: how hard idle threads spin before they sleep, 0 to 100.

    Raises:
        ConfigError: a value out of range. NativeError: the threads could not be made.
    """

    def __init__(self, n_threads: int, poll: int = 50) -> None:
        if not 1 <= n_threads <= 512:
            raise ConfigError(f"n_threads must be between 1 and 512, got {n_threads}")
        if not 0 <= poll <= 100:
            raise ConfigError(f"poll must be between 0 and 100, got {poll}")
        n_threads = min(n_threads, usable_cpus())
        _binding.load()
        out = _binding.ffi.new("pyspec_threadpool **")
        with creating():
            rc = _binding.lib.pyspec_threadpool_new(n_threads, poll, out)
            if rc:
                raise_status(rc, "ggml_threadpool_new", f"thread pool with {n_threads} threads", "unchanged")
        self.n_threads = n_threads
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()  # contexts it is attached to
        self._native = Native("thread pool", out[0], _binding.lib.pyspec_threadpool_free)
        drain_log()

    def close(self) -> None:
        """Detach from every context; waits for running passes. Idempotent.

        The threads end when the last of these contexts makes its next pass or is closed.
        """
        if not self.closed:
            for context in list(self._users):
                if not context.closed and not context.lost:
                    context.attach_threadpool(None)
        super().close()

    def __repr__(self) -> str:
        return f"<ThreadPool n_threads={self.n_threads}{' closed' if self.closed else ''}>"
