"""What must be installed, asked before a long compile starts."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from build_support import cuda
from build_support.config import BuildConfig, BuildError

_COMPILER_HELP = (
    "Debian or Ubuntu: apt install g++   Fedora: dnf install gcc-c++   macOS: xcode-select --install\n"
    "A compiler elsewhere: set CC and CXX."
)

# Where an SDK usually lies although it is not on PATH.
_SDK_FOLDERS = {"hip": "/opt/rocm/bin/hipcc"}


def _which(name: str, environ: Mapping[str, str]) -> str | None:
    return shutil.which(name, path=environ.get("PATH", ""))


def _find_compiler(variable: str, candidates: tuple[str, ...], environ: Mapping[str, str]) -> str:
    wanted = environ.get(variable, "").split()
    if wanted:
        found = _which(wanted[0], environ)
        if found is None:
            raise BuildError(f"{variable}={environ[variable]!r}: there is no such program.\n{_COMPILER_HELP}")
        return found
    for name in candidates:
        if found := _which(name, environ):
            return found
    language = "C++" if variable == "CXX" else "C"
    raise BuildError(f"no {language} compiler found (looked for {', '.join(candidates)}).\n{_COMPILER_HELP}")


def _find_sdk(backend: str, program: str, environ: Mapping[str, str]) -> bool:
    usual = _SDK_FOLDERS.get(backend)
    return _which(program, environ) is not None or (usual is not None and Path(usual).exists())


def _has_header(name: str, environ: Mapping[str, str]) -> bool:
    folders = ["/usr/include", "/usr/local/include", "/opt/homebrew/include"]
    folders += [f"/usr/include/{sysconfig.get_config_var('MULTIARCH') or ''}"]
    if sdk := environ.get("VULKAN_SDK"):
        folders.append(f"{sdk}/include")
    for variable in ("CPATH", "CPLUS_INCLUDE_PATH"):
        folders += environ.get(variable, "").split(os.pathsep)
    folders += [f"{prefix}/include" for prefix in environ.get("CMAKE_PREFIX_PATH", "").split(os.pathsep) if prefix]
    return any(folder and (Path(folder) / name).is_file() for folder in folders)


def _check_vulkan(config: BuildConfig, environ: Mapping[str, str]) -> None:
    told = " ".join(config.cmake_args)
    if _which("glslc", environ) is None and "Vulkan_GLSLC_EXECUTABLE" not in told:
        raise BuildError("backend vulkan: the shader compiler glslc was not found. Debian: apt install glslc")
    if "Vulkan_INCLUDE_DIR" not in told and not _has_header("vulkan/vulkan.h", environ):
        raise BuildError(
            "backend vulkan: vulkan/vulkan.h was not found. Debian: apt install libvulkan-dev spirv-headers "
            "(headers of 1.4 or newer are needed; else install the Vulkan SDK and set VULKAN_SDK)"
        )


def check(config: BuildConfig, environ: Mapping[str, str] | None = None, *, packages: bool = True) -> None:
    """Check compilers, Python headers and the SDKs of the chosen backends.

    Args:
        config: the build.
        environ: instead of ``os.environ``.
        packages: miss Python packages, too. Off before there is an environment to install them into.

    Raises:
        BuildError: something is missing; the message names the package to install.
    """
    env = os.environ if environ is None else environ
    if sys.platform != "win32":
        _find_compiler("CC", ("cc", "gcc", "clang"), env)
        _find_compiler("CXX", ("c++", "g++", "clang++"), env)
    if not any((Path(sysconfig.get_path(key)) / "Python.h").is_file() for key in ("include", "platinclude")):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise BuildError(
            f"the C headers of Python {version} (Python.h) are missing. Debian or Ubuntu: apt install python3-dev   "
            "Fedora: dnf install python3-devel"
        )
    if "cuda" in config.backends:
        cuda.check(config, env, packages=packages)
    if "vulkan" in config.backends:
        _check_vulkan(config, env)
    if "metal" in config.backends and sys.platform != "darwin":
        raise BuildError("backend metal: it exists on macOS only. Take metal out of PYSPEC_BACKENDS.")
    if "hip" in config.backends and not _find_sdk("hip", "hipcc", env):
        raise BuildError("backend hip: hipcc was not found. Install ROCm (Debian: apt install hipcc).")
    if "sycl" in config.backends and _which("icpx", env) is None:
        raise BuildError("backend sycl: icpx was not found. Install Intel's oneAPI toolkit and run its setvars.sh.")
