"""Who frees what: one :class:`Native` per native object, one :class:`Handle` class per kind.

Rules, the same for all handles:

- ``close()`` frees, once; a second call does nothing. Using a closed handle raises ClosedError.
- A child (context) keeps its parents (model, the context it shares with, thread pool). Closing a parent closes its
  children first, whoever still holds them.
- A handle collected unclosed is freed and a ResourceWarning is given.
- At interpreter exit the rest is freed in silence, children first. If daemon threads still run, their passes are
  aborted and further calls never return; the memory is left to the system: they may be reading rows, and native code
  must not run on while the libraries' static objects are destroyed.
- A handle belongs to the process that made it: in a forked child it raises and frees nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from ..errors import ClosedError

__all__ = ["Handle", "Native", "creating", "exiting", "park_if_exiting"]

_HandleT = TypeVar("_HandleT", bound="Handle")

# Guards the tree of natives (children, _live); held for a few instructions only, never during a native call.
_tree_lock = threading.RLock()
_live: dict[int, Native] = {}
_exiting = False
# Native calls that make something, and so have no Native yet.
_creating = 0
_created = threading.Condition()
_EXIT_PATIENCE_S = 5.0


@contextlib.contextmanager
def creating() -> Iterator[None]:
    """Around a native call that makes an object: interpreter exit waits for it.

    Raises:
        ClosedError: the interpreter is exiting.
    """
    global _creating
    park_if_exiting()
    with _created:
        if _exiting:
            raise ClosedError("the interpreter is exiting")
        _creating += 1
    try:
        yield
    finally:
        with _created:
            _creating -= 1
            _created.notify_all()


def exiting() -> bool:
    """True once interpreter exit has begun: long calls should end."""
    return _exiting


def park_if_exiting() -> None:
    """Stop a daemon thread here once interpreter exit has begun; an error would only print a traceback nobody wants.

    Call it without locks that others need.
    """
    if _exiting and threading.current_thread() is not threading.main_thread():
        forever = threading.Lock()
        forever.acquire()
        forever.acquire()


class Native:
    """A native pointer, how to free it, its lock, its process, and the natives that depend on it.

    Attributes:
        ptr: the pointer; None once freed. lock: held while ``ptr`` is used, so that closing waits for running calls.
        pid: the process that made it. interrupt: makes a running call end early; takes no lock.
    """

    __slots__ = ("_children", "_parents", "_release", "interrupt", "kind", "lock", "pid", "ptr")

    def __init__(
        self,
        kind: str,
        ptr: Any,
        release: Callable[[Any], None],
        parents: tuple[Native, ...] = (),
        lock: threading.RLock | None = None,
    ) -> None:
        self.kind = kind
        self.ptr = ptr
        self.lock = threading.RLock() if lock is None else lock
        self.pid = os.getpid()
        self.interrupt: Callable[[], None] | None = None
        self._release = release
        self._parents = parents
        self._children: dict[int, Native] = {}
        with _tree_lock:
            _live[id(self)] = self
            for parent in parents:
                parent._children[id(self)] = self

    @property
    def children(self) -> list[Native]:
        """Open dependants, oldest first."""
        with _tree_lock:
            return list(self._children.values())

    def adopt(self, child: Native) -> None:
        """From now on ``child`` uses this: closing this closes it first."""
        with _tree_lock:
            child._parents = (*child._parents, self)
            self._children[id(child)] = child

    def disown(self, child: Native) -> None:
        """``child`` does not use this any more."""
        with _tree_lock:
            child._parents = tuple(p for p in child._parents if p is not self)
            self._children.pop(id(child), None)

    def close(self, blocking: bool = True) -> bool:
        """Free the children, then this. Returns False if something is in use and ``blocking`` is False."""
        if self.pid != os.getpid():
            return True
        busy = [child for child in reversed(self.children) if not child.close(blocking)]
        if busy or not self.lock.acquire(blocking):
            return False
        try:
            ptr, self.ptr = self.ptr, None
            if ptr is not None:
                self._release(ptr)
        finally:
            self.lock.release()
        with _tree_lock:
            _live.pop(id(self), None)
            for parent in self._parents:
                parent._children.pop(id(self), None)
        return True

    def abandon(self, timeout: float) -> None:
        """Refuse further calls without freeing; waits for the running one."""
        if self.pid == os.getpid() and self.lock.acquire(timeout=timeout):
            self.ptr = None
            self.lock.release()


def _close_all() -> None:
    global _exiting
    with _created:
        _exiting = True
    if len(sys._current_frames()) <= 1:
        for native in _open_natives():
            native.close(blocking=False)
        return
    for native in _open_natives():
        if native.interrupt is not None:
            native.interrupt()
    with _created:
        _created.wait_for(lambda: _creating == 0, _EXIT_PATIENCE_S)
    for native in _open_natives():
        native.abandon(_EXIT_PATIENCE_S)


def _open_natives() -> list[Native]:
    """Youngest first."""
    with _tree_lock:
        return list(reversed(_live.values()))


def _forget_after_fork() -> None:
    global _tree_lock, _created, _creating
    _tree_lock = threading.RLock()
    _created, _creating = threading.Condition(), 0
    _live.clear()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


class Handle:
    """Base of the owner classes: close, context manager, collection, process guard."""

    _native: Native | None = None

    def _open(self) -> Native:
        """The native object, checked.

        Raises:
            ClosedError: closed, or made by another process.
        """
        native = self._native
        if native is None or native.ptr is None or native.pid != os.getpid():
            raise self._closed_error()
        return native

    def _closed_error(self) -> ClosedError:
        park_if_exiting()
        native, name = self._native, type(self).__name__
        if native is not None and native.pid != os.getpid():
            return ClosedError(f"this {name} belongs to process {native.pid}; a forked child must make its own")
        return ClosedError(f"this {name} is closed")

    @property
    def closed(self) -> bool:
        """True once freed, by ``close()`` of this handle or of one it depends on."""
        native = self._native
        return native is None or native.ptr is None or native.pid != os.getpid()

    def close(self) -> None:
        """Free the native object and everything that depends on it; waits for calls in other threads. Idempotent."""
        native = self._native
        if native is not None:
            native.close()

    def __enter__(self: _HandleT) -> _HandleT:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, warn: Any = warnings.warn, getpid: Any = os.getpid) -> None:
        # module globals may be gone at interpreter exit, hence the defaults
        native = self._native
        if native is None or native.ptr is None or native.pid != getpid() or _exiting is not False:
            return
        try:
            warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
        finally:
            native.close()
