"""The native boundary: the only package that sees native pointers. Importing it opens no native library."""

from __future__ import annotations

from typing import Any

from . import _binding, _loader
from ._binding import is_loaded, load, set_log_level
from ._estimate import HOST, MemoryUse, estimate_memory
from ._gguf import split_paths
from ._memory import available_bytes
from ._select import devices_in_use
from .devices import Device, DeviceTest, check_device, devices, features, find_device
from .handles import ContextHandle, LoraHandle, ModelHandle, ThreadPool, context_memory, quantize

__all__ = [
    "HOST",
    "ContextHandle",
    "Device",
    "DeviceTest",
    "LoraHandle",
    "MemoryUse",
    "ModelHandle",
    "ThreadPool",
    "available",
    "available_bytes",
    "build_info",
    "check_device",
    "context_memory",
    "devices",
    "devices_in_use",
    "estimate_memory",
    "features",
    "find_device",
    "is_loaded",
    "load",
    "quantize",
    "set_log_level",
    "split_paths",
    "unavailable",
]


# Where ggml's name is not that of the build option.
_BACKEND_NAMES = {"MTL": "metal", "ROCm": "hip"}


def available() -> list[str]:
    """Backends that are loaded and ready ("cpu", "cuda", "vulkan" ...). Loads the native libraries."""
    load()
    ffi, lib = _binding.ffi, _binding.lib
    names = (ffi.string(lib.pyspec_backend_name(i)).decode() for i in range(lib.pyspec_backend_count()))
    return list(dict.fromkeys(_BACKEND_NAMES.get(name, name.lower()) for name in names))


def unavailable() -> dict[str, str]:
    """Backend modules that are installed but not in use, by file name, each with the reason."""
    load()
    return {module.label: module.reason for module in _binding.modules if not module.loaded}


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
            m.label: {
                "backend": m.backend,
                "path": str(m.path),
                "score": m.score,
                "loaded": m.loaded,
                "reason": m.reason,
            }
            for m in _binding.modules
        },
        "system_info": ffi.string(lib.llama_print_system_info()).decode().strip(),
        "supports_mmap": bool(lib.llama_supports_mmap()),
        "supports_mlock": bool(lib.llama_supports_mlock()),
    }
