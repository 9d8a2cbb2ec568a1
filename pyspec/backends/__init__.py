"""The native boundary: the only package that sees native pointers. Importing it opens no native library."""

from __future__ import annotations

from typing import Any

from . import _binding, _loader
from ._binding import is_loaded, load, set_log_level
from .devices import Device, devices
from .handles import ContextHandle, ModelHandle, ThreadPool, context_memory, quantize

__all__ = [
    "ContextHandle",
    "Device",
    "ModelHandle",
    "ThreadPool",
    "available",
    "build_info",
    "context_memory",
    "devices",
    "is_loaded",
    "load",
    "quantize",
    "set_log_level",
    "unavailable",
]


def available() -> list[str]:
    """Backends that are loaded and ready ("cpu", "cuda", "vulkan" ...). Loads the native libraries."""
    load()
    ffi, lib = _binding.ffi, _binding.lib
    names = (ffi.string(lib.pyspec_backend_name(i)).decode() for i in range(lib.pyspec_backend_count()))
    return list(dict.fromkeys(name.lower() for name in names))


def unavailable() -> dict[str, str]:
    """Backend modules that are installed but not in use, by file name, each with the reason."""
    load()
    return {module.path.name: module.reason for module in _binding.modules if not module.loaded}


def build_info() -> dict[str, Any]:
    """What was built and opened, for ``pyspec info`` and bug reports. Loads the native libraries."""
    from .._build_info import BUILD_INFO

    load()
    ffi, lib = _binding.ffi, _binding.lib
    return {
        "build": BUILD_INFO,
        "llama_version": ffi.string(lib.llama_version()).decode(),
        "ggml_version": ffi.string(lib.ggml_version()).decode(),
        "ggml_commit": ffi.string(lib.ggml_commit()).decode(),
        "library_dir": str(_loader.LIB_DIR),
        "deepbind": bool(_loader.deepbind_flag()),
        "backends": available(),
        "modules": {
            m.path.name: {"backend": m.backend, "score": m.score, "loaded": m.loaded, "reason": m.reason}
            for m in _binding.modules
        },
        "system_info": ffi.string(lib.llama_print_system_info()).decode().strip(),
        "supports_mmap": bool(lib.llama_supports_mmap()),
        "supports_mlock": bool(lib.llama_supports_mlock()),
    }
