"""Where native libraries are searched: pyspec's own folder, and packages that offer a backend module by entry point.

Neither the working directory nor the folder of the executable is ever looked at. ggml's backend modules are opened by
explicit path; of several CPU variants the one with the best score on this machine is taken.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import BackendLoadError
from . import _dependencies, _plugins

__all__ = ["LIB_DIR", "REMEDY", "Module", "deepbind_flag", "import_extension", "listing", "load_modules"]

PACKAGE_DIR = Path(__file__).resolve().parent
LIB_DIR = PACKAGE_DIR / "lib"
EXTENSION = "pyspec.backends._llama"

_PREFIX = "libpyspec-ggml-"
_SUFFIXES = (".dll",) if sys.platform == "win32" else (".so", ".dylib")
_CORE = ("libpyspec-ggml-base", "libpyspec-ggml", "libpyspec-llama")
# Registration order decides the order of devices: fast ones first, the CPU last.
_ORDER = ("blas", "zendnn", "cann", "cuda", "hip", "metal", "musa", "sycl", "vulkan", "opencl", "openvino", "rpc")
REMEDY = "Install pyspec again (python -m pip install --force-reinstall pyspec-llm), or rebuild it: pip install -e ."

_logger = logging.getLogger("pyspec.native")


@dataclass
class Module:
    """One backend module file.

    Attributes:
        backend: "cpu", "cuda", "vulkan" and so on. path: the file.
        score: its score on this machine; None: not asked. loaded: registered with ggml.
        reason: why it is not loaded. package: the package it comes in, with its version; "": pyspec's own.
    """

    backend: str
    path: Path
    score: int | None = None
    loaded: bool = False
    reason: str = ""
    package: str = ""

    @property
    def label(self) -> str:
        """What tells this file from the others: two packages may have files of the same name."""
        return f"{self.path.name} ({self.package})" if self.package else self.path.name


def deepbind_flag() -> int:
    """RTLD_DEEPBIND where the platform has it and ``PYSPEC_NO_DEEPBIND`` is not set; else 0."""
    if os.environ.get("PYSPEC_NO_DEEPBIND", "") not in ("", "0"):
        return 0
    return getattr(os, "RTLD_DEEPBIND", 0)


def listing(folder: Path) -> str:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as exc:
        return f"{folder}: {exc.strerror}"
    return f"{folder} holds: {', '.join(names) if names else 'nothing'}"


def _find_core(name: str) -> Path | None:
    for suffix in (*_SUFFIXES, ".so", ".dylib", ".dll"):
        path: Path = LIB_DIR / (name + suffix)
        if path.exists():
            return path
    return None


def import_extension() -> ModuleType:
    """Import the compiled binding, which opens libllama and libggml from :data:`LIB_DIR`.

    The libraries are opened with RTLD_DEEPBIND: they look symbols up in themselves first, so neither a foreign
    libggml that was opened globally is picked up by ours, nor ours by others (RTLD_LOCAL).

    Raises:
        ImportError: the binding is not there or of another Python; lists the folder.
        BackendLoadError: a library it needs is missing or does not open; names it and the remedy.
    """
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    if not any((PACKAGE_DIR / ("_llama" + suffix)).exists() for suffix in suffixes):
        built = sorted(p.name for p in PACKAGE_DIR.glob("_llama*") if p.suffix in (".so", ".pyd"))
        why = f"it was built for another Python ({', '.join(built)})" if built else "it was not built"
        raise ImportError(
            f"pyspec's native binding {EXTENSION} cannot be imported: {why}. This is Python "
            f"{sys.version_info[0]}.{sys.version_info[1]}, which needs _llama{suffixes[0]}.\n"
            f"{listing(PACKAGE_DIR)}\n{REMEDY}"
        )
    if hasattr(sys, "setdlopenflags"):
        flags = sys.getdlopenflags()
        sys.setdlopenflags(os.RTLD_NOW | os.RTLD_LOCAL | deepbind_flag())
        try:
            return _import_or_explain()
        finally:
            sys.setdlopenflags(flags)
    if hasattr(os, "add_dll_directory"):  # Windows has no rpath
        with os.add_dll_directory(str(LIB_DIR)):
            return _import_or_explain()
    return _import_or_explain()


def _import_or_explain() -> ModuleType:
    try:
        return importlib.import_module(EXTENSION)
    except ImportError as exc:
        missing = [name for name in _CORE if _find_core(name) is None]
        which = f"missing in {LIB_DIR}: {', '.join(missing)}" if missing else "a native library does not open"
        raise BackendLoadError(
            f"pyspec's native libraries cannot be opened: {which}.\nsystem message: {exc}\n{listing(LIB_DIR)}\n{REMEDY}"
        ) from exc


def _modules_in(folder: Path, package: str = "", only: str | None = None) -> list[Module]:
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    modules = []
    for path in paths:
        if not path.name.startswith(_PREFIX) or path.suffix not in _SUFFIXES:
            continue
        name = path.name[len(_PREFIX) : -len(path.suffix)]
        backend = name.split("-")[0]
        if name != "base" and backend == (only or backend):
            modules.append(Module(backend, path, package=package))
    return modules


def find_modules() -> list[Module]:
    """Backend modules in :data:`LIB_DIR` and in installed packages, in the order in which they are to be registered."""
    modules = _modules_in(LIB_DIR)
    for package in _plugins.packages():
        if package.folder is None:
            # a name that stands in for the file that is not there
            modules.append(Module(package.backend, Path(package.name), reason=package.reason, package=package.name))
            continue
        found = _modules_in(package.folder, package.name, package.backend)
        missing = f"{package.folder} holds no module of the backend {package.backend}"
        modules += found or [Module(package.backend, package.folder, reason=missing, package=package.name)]
    order = {name: i for i, name in enumerate(_ORDER)}
    return sorted(modules, key=lambda m: (m.backend == "cpu", order.get(m.backend, len(order)), m.backend, m.path.name))


def load_modules(ffi: Any, lib: Any) -> list[Module]:
    """Register the best module of each backend with ggml; a module that does not open is skipped with a debug log.

    Returns:
        Every module found, loaded or not, with the reason.

    Raises:
        AbiMismatchError: a library or a module is of another version of pyspec.
    """
    modules = find_modules()
    # All are asked before the first is registered: ggml's registry cannot be taken back.
    commit = ffi.string(lib.ggml_commit()).decode("utf-8", "replace")
    for name in _CORE:
        core = _find_core(name)
        if core is not None and not _plugins.check_stamp(core, commit):
            raise _plugins.mismatch(core, "", commit)
    for module in modules:
        if not module.reason:
            _ask(ffi, lib, module, commit)
    by_backend: dict[str, list[Module]] = {}
    for module in modules:
        by_backend.setdefault(module.backend, []).append(module)
    for backend, variants in by_backend.items():
        ranked = sorted((m for m in variants if m.score), key=lambda m: -(m.score or 0))
        for i, module in enumerate(ranked):
            if i and ranked[0].loaded:
                module.reason = f"{ranked[0].label} suits this machine better"
                continue
            if int(lib.pyspec_backend_load(os.fsencode(module.path))) == 0:
                module.loaded = True
            else:
                module.reason = _last_error(ffi, lib)
        for module in variants:
            if not module.loaded:
                _logger.debug("backend %s: %s not loaded: %s", backend, module.label, module.reason)
    return modules


def _ask(ffi: Any, lib: Any, module: Module, commit: str) -> None:
    """Open a module and fill in its score, or the reason why it has none."""
    stamped = _plugins.check_stamp(module.path, commit, module.package)
    _dependencies.provide(ffi, lib, module.path)
    score = int(lib.pyspec_backend_score(os.fsencode(module.path)))
    if score < 0:
        module.reason = _dependencies.explain(_last_error(ffi, lib))
    elif not stamped:
        raise _plugins.mismatch(module.path, "", commit, module.package)
    elif score == 0:
        module.score, module.reason = 0, "this machine lacks what the module was compiled for"
    else:
        module.score = score


def _last_error(ffi: Any, lib: Any) -> str:
    text: bytes = ffi.string(lib.pyspec_last_error())
    return text.decode("utf-8", "replace")
