"""Return codes to exceptions, with the last native log lines attached; the way of native log lines into ``logging``."""

from __future__ import annotations

import logging
import os
import threading
from typing import NoReturn

from ..errors import (
    ContextFullError,
    DecodeAborted,
    DecodeFailed,
    InvalidBatchError,
    NativeAbortError,
    NativeError,
    State,
)
from . import _binding

__all__ = [
    "ERR_ABORT", "ERR_ARG", "ERR_EXCEPTION", "ERR_MEMORY", "ERR_NULL", "drain_log", "last_error", "last_log",
    "raise_decode", "raise_status",
]  # fmt: skip

# enum pyspec_status of _shim.h
ERR_ABORT = -1001
ERR_EXCEPTION = -1002
ERR_MEMORY = -1003
ERR_ARG = -1004
ERR_NULL = -1005

_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_drain_lock = threading.Lock()


def _reset_after_fork() -> None:
    global _drain_lock
    _drain_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def last_error() -> str:
    """Reason of the last failed wrapper call on this thread."""
    return str(_binding.ffi.string(_binding.lib.pyspec_last_error()).decode("utf-8", "replace"))


def last_log() -> tuple[str, ...]:
    """Warnings and errors logged by the last wrapper call of this thread; the caller's to show."""
    buf = _binding.ffi.new("char[]", 16384)
    n = _binding.lib.pyspec_last_log(buf, 16384)
    text = bytes(_binding.ffi.buffer(buf, n)).decode("utf-8", "replace")
    return tuple(line for line in text.split("\n") if line)


def drain_log() -> None:
    """Hand waiting native log lines to ``logging``. Cheap when there are none."""
    lib = _binding.lib
    if not lib.pyspec_log_pending or not _drain_lock.acquire(blocking=False):
        return
    try:
        ffi = _binding.ffi
        buf, level = ffi.new("char[]", 4096), ffi.new("int *")
        while (n := lib.pyspec_log_pop(level, buf, 4096)) >= 0:
            text = bytes(ffi.buffer(buf, n)).decode("utf-8", "replace")
            _binding.logger.log(_LEVELS.get(level[0], logging.INFO), "%s", text)
        if dropped := lib.pyspec_log_dropped():
            _binding.logger.warning("%d native log lines were lost", dropped)
    finally:
        _drain_lock.release()


def raise_status(code: int, func: str, what: str, failed_state: State = "unchanged") -> NoReturn:
    """Raise the exception for a non-zero code.

    Args:
        code: what the wrapper returned.
        func: the C function, for ``NativeError.func``.
        what: what was being done, as the start of the message.
        failed_state: what a failure that is not an assertion leaves behind.
    """
    reason, log = last_error(), last_log()
    drain_log()
    if code == ERR_ABORT:
        raise NativeAbortError(f"{what}: a native assertion failed: {reason}", func=func, log=log, state="lost")
    if code == ERR_ARG:
        raise InvalidBatchError(f"{what}: {reason}", func=func, code=code, log=log, state="unchanged")
    reason = reason or f"{func} returned {code}"
    raise NativeError(f"{what}: {reason}", func=func, code=code, log=log, state=failed_state)


def raise_decode(code: int, func: str, what: str) -> NoReturn:
    """Raise the exception for a non-zero code of llama_decode or llama_encode (``include/llama.h``)."""
    if code in (ERR_ABORT, ERR_ARG) or code <= ERR_ABORT:
        raise_status(code, func, what, "lost")
    log = last_log()
    drain_log()
    if code == 1:
        raise ContextFullError(f"{what}: no room in the KV cache", func=func, code=code, log=log, state="unchanged")
    if code == 2:
        raise DecodeAborted(f"{what}: aborted on request", func=func, code=code, log=log, state="partial")
    if code == -1:
        raise InvalidBatchError(f"{what}: the batch was rejected", func=func, code=code, log=log, state="unchanged")
    raise DecodeFailed(f"{what}: {func} returned {code}", func=func, code=code, log=log, state="partial")
