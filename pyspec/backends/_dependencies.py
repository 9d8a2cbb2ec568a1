"""Libraries that a backend module needs besides ours: the CUDA runtime, cuBLAS, a driver.

The dynamic linker finds those that are installed for the system. Others come in Python packages or toolkits whose
folders it does not know (extra ``cuda``): these are opened here first, by full path; the module then finds them in the
process. Where one is nowhere, the reason says what to install.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["explain", "folders", "provide"]

# Start of a library's name -> what to do when it is nowhere.
_REMEDIES = {
    "libcuda.": "the NVIDIA driver is not installed",
    "libcudart.": "the CUDA runtime is not installed: python -m pip install 'pyspec-llm[cuda]', or a CUDA toolkit",
    "libcublas": "cuBLAS is not installed: python -m pip install 'pyspec-llm[cuda]', or a CUDA toolkit",
    "libnccl.": "NCCL is not installed: python -m pip install nvidia-nccl-cu13",
    "libvulkan.": "the Vulkan loader is not installed (Debian: apt install libvulkan1)",
    "libamdhip64.": "ROCm's runtime is not installed",
    "libhipblas": "ROCm's hipBLAS is not installed",
    "librocblas": "ROCm's rocBLAS is not installed",
    "libsycl.": "Intel's oneAPI runtime is not installed, or its setvars.sh was not run",
}
# Those that are looked for. Never a driver: it must be the one of the running kernel.
_FETCHABLE = re.compile(r"lib(cudart|cublas|cublasLt|nccl|nvJitLink|amdhip64|hipblas|hipblaslt|rocblas)\.so(\.\d+)*")
_MISSING = re.compile(r"(lib[\w+-]+\.so[\w.]*): cannot open shared object file")
_DEPTH = 16


def folders(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Where vendors' libraries lie that the dynamic linker does not know; the working directory is never among them."""
    env = os.environ if environ is None else environ
    found: list[Path] = []
    try:
        spec = importlib.util.find_spec("nvidia")  # a namespace without code of its own
    except (ImportError, ValueError):
        spec = None
    for location in (spec and spec.submodule_search_locations) or ():
        if os.path.isabs(location):
            found += sorted(Path(location).glob("*/lib"), reverse=True)  # newest CUDA first
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.path.isabs(env.get(name, "")):
            found += [Path(env[name]) / "lib64", Path(env[name]) / "lib"]
    found += [Path("/usr/local/cuda/lib64"), Path("/opt/cuda/lib64"), Path("/opt/rocm/lib")]
    return [folder for folder in found if folder.is_dir()]


def provide(ffi: Any, lib: Any, path: Path) -> bool:
    """Open a library, and first those it lacks, as far as they can be found.

    Returns:
        Whether it opened. If not, the same error comes when it is loaded.
    """
    for _ in range(_DEPTH):
        if int(lib.pyspec_library_open(os.fsencode(path))) == 0:
            return True
        missing = _MISSING.match(_last_error(ffi, lib))
        if missing is None or not _FETCHABLE.fullmatch(missing.group(1)):
            return False
        candidate = next((each for folder in folders() if (each := folder / missing.group(1)).is_file()), None)
        if candidate is None or candidate == path or not provide(ffi, lib, candidate):
            return False
    return False


def explain(reason: str) -> str:
    """Add what to do to the system's message about a library that does not open."""
    missing = _MISSING.search(reason)
    if missing is None:
        return reason
    name = missing.group(1)
    remedy = next((text for start, text in _REMEDIES.items() if name.startswith(start)), "")
    return f"{remedy} ({name} was not found)" if remedy else reason


def _last_error(ffi: Any, lib: Any) -> str:
    return str(ffi.string(lib.pyspec_last_error()).decode("utf-8", "replace"))
