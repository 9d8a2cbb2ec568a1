"""The opened native libraries: ``ffi`` and ``lib``, version handshake, what this build can do.

Nothing native opens before :func:`load`. The libraries stay open until the process ends: ggml's registry is a process
singleton that cannot be unloaded.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from .._version import __version__
from ..errors import AbiMismatchError, BackendLoadError
from . import _loader

__all__ = ["ffi", "is_loaded", "lib", "load", "modules"]

ffi: Any = None
lib: Any = None
modules: list[_loader.Module] = []

_lock = threading.RLock()
_loaded = False
_log_level: int | None = None

logger = logging.getLogger("pyspec.native")
logger.addHandler(logging.NullHandler())  # else the logging module prints warnings to stderr by itself

# logging level -> ggml_log_level
_GGML_LEVELS = ((logging.DEBUG, 1), (logging.INFO, 2), (logging.WARNING, 3), (logging.ERROR, 4))


def _reset_after_fork() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def is_loaded() -> bool:
    """True after a successful :func:`load`."""
    return _loaded


def load() -> None:
    """Open the native libraries and backend modules once per process; later calls return at once. Thread-safe.

    Raises:
        ImportError: pyspec was not built for this Python.
        BackendLoadError: a library is missing or does not open, or there is no usable CPU backend.
        AbiMismatchError: a library or backend module of another version was found.
    """
    global _loaded, ffi, lib, modules
    if _loaded:
        return
    with _lock:
        if is_loaded():  # by another thread meanwhile
            return
        extension = _loader.import_extension()
        ffi_, lib_ = extension.ffi, extension.lib
        _handshake(ffi_, lib_)
        lib_.pyspec_init()
        _apply_log_level(lib_)
        _install_progress(ffi_)
        found = _loader.load_modules(ffi_, lib_)
        if not _has_cpu(ffi_, lib_):
            reasons = "; ".join(f"{m.label}: {m.reason}" for m in found if not m.loaded) or "no module found"
            raise BackendLoadError(
                f"no CPU backend could be loaded from {_loader.LIB_DIR} ({reasons}).\n"
                f"{_loader.listing(_loader.LIB_DIR)}\n{_loader.REMEDY}"
            )
        ffi, lib, modules = ffi_, lib_, found
        _loaded = True


def _text(ffi: Any, pointer: Any) -> str:
    return "" if pointer == ffi.NULL else str(ffi.string(pointer).decode("utf-8", "replace"))


def library_path(ffi: Any, lib: Any, which: int) -> str:
    """File of the library that holds llama_decode (0), ggml_abort (1) or ggml_backend_load (2)."""
    buf = ffi.new("char[]", 8192)
    lib.pyspec_library_path(which, buf, 8192)
    return os.fsdecode(ffi.string(buf))


def _handshake(ffi: Any, lib: Any) -> None:
    """Compare what was compiled in with what was opened."""
    abi = ffi.new("struct pyspec_abi *")
    lib.pyspec_abi_info(abi)
    pairs = [
        ("pyspec", _text(ffi, abi.pyspec_version), __version__),
        ("libllama", _text(ffi, abi.llama_version), _text(ffi, lib.llama_version())),
        ("libggml", _text(ffi, abi.ggml_version), _text(ffi, lib.ggml_version())),
        ("libggml commit", _text(ffi, abi.ggml_commit), _text(ffi, lib.ggml_commit())),
    ]
    for name, built, opened in pairs:
        if built and built != opened:
            raise AbiMismatchError(
                f"{name}: the native binding was built for {built}, but {opened} is here "
                f"({library_path(ffi, lib, 0)}). A build was left half done or mixed with another one. "
                f"{_loader.REMEDY}"
            )
    if not abi.layout_ok:
        raise AbiMismatchError(
            f"the parameter structs of {library_path(ffi, lib, 0)} differ from those the native binding was built for. "
            f"{_loader.REMEDY}"
        )
    for which, name in enumerate(("llama_decode", "ggml_abort", "ggml_backend_load")):
        path = library_path(ffi, lib, which)
        if not _same_folder(path):
            raise AbiMismatchError(
                f"{name} comes from {path}, not from {_loader.LIB_DIR}: another package's library was picked up. "
                "Import pyspec before that package, or unset PYSPEC_NO_DEEPBIND."
            )


def _same_folder(path: str) -> bool:
    try:
        return os.path.samefile(os.path.dirname(path), _loader.LIB_DIR)
    except OSError:
        return False


def _has_cpu(ffi: Any, lib: Any) -> bool:
    info = ffi.new("struct pyspec_device *")
    return any(lib.pyspec_device_info(i, info) == 0 and info.type == 0 for i in range(lib.pyspec_device_count()))


def _install_progress(ffi: Any) -> None:
    def progress(value: float, user_data: Any) -> bool:
        return bool(ffi.from_handle(user_data)(value))

    def keep(_kind: Any, error: BaseException, trace: Any) -> None:
        # Ctrl-C may strike before the first line of ``progress``; nothing may leave through C
        ffi.from_handle(trace.tb_frame.f_locals["user_data"]).error = error

    ffi.def_extern(name="pyspec_py_progress", error=False, onerror=keep)(progress)


def set_log_level(level: int | str) -> None:
    """Lowest level of native log lines that reach ``logging.getLogger("pyspec.native")``.

    Args:
        level: a ``logging`` level, by number or name. Lines below it are dropped in C.
    """
    global _log_level
    number = logging.getLevelName(level.upper()) if isinstance(level, str) else level
    if not isinstance(number, int):
        raise ValueError(f"unknown log level {level!r}")
    logger.setLevel(number)
    _log_level = number
    if _loaded:
        _apply_log_level(lib)


def _apply_log_level(lib: Any) -> None:
    wanted = logger.getEffectiveLevel() if _log_level is None else _log_level
    native = next((ggml for python, ggml in _GGML_LEVELS if wanted <= python), 5)
    lib.pyspec_log_set_level(native)
