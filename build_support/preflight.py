"""What must be installed, asked before a long compile starts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
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
_SYSTEM_PREFIXES = ("/usr", "/usr/local", "/opt/homebrew")


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


def _prefixes(config: BuildConfig, environ: Mapping[str, str]) -> list[Path]:
    """Return the folders under which CMake looks for ``include`` and ``share``."""
    names = [environ.get("VULKAN_SDK", ""), *environ.get("CMAKE_PREFIX_PATH", "").split(os.pathsep)]
    for arg in config.cmake_args:
        if match := re.fullmatch(r"-DCMAKE_PREFIX_PATH(?::\w+)?=(.*)", arg):
            names += match.group(1).split(";")
    return [Path(name) for name in (*names, *_SYSTEM_PREFIXES) if name]


def _find_header(name: str, config: BuildConfig, environ: Mapping[str, str]) -> Path | None:
    folders = [prefix / "include" for prefix in _prefixes(config, environ)]
    for variable in ("CPATH", "CPLUS_INCLUDE_PATH"):
        folders += [Path(folder) for folder in environ.get(variable, "").split(os.pathsep) if folder]
    for arg in config.cmake_args:
        if match := re.fullmatch(r"-DVulkan_INCLUDE_DIR(?::\w+)?=(.*)", arg):
            folders.insert(0, Path(match.group(1)))
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def vulkan_header_version(core: Path) -> str:
    """Return the version that ``vulkan_core.h`` states."""
    text = core.read_text(encoding="utf-8", errors="replace")
    complete = re.search(r"define VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION\(\d+, (\d+), (\d+),", text)
    patch = re.search(r"define VK_HEADER_VERSION (\d+)", text)
    return ".".join([*(complete.groups() if complete else ("?", "?")), patch.group(1) if patch else "?"])


def _check_vulkan(config: BuildConfig, environ: Mapping[str, str]) -> None:
    told = " ".join(config.cmake_args)
    if "Vulkan_GLSLC_EXECUTABLE" not in told and not (
        _which("glslc", environ) or any((prefix / "bin" / "glslc").is_file() for prefix in _prefixes(config, environ))
    ):
        raise BuildError(
            "backend vulkan: the shader compiler glslc was not found. Debian: apt install glslc   Fedora: dnf install "
            "glslc   macOS: brew install shaderc   else: the Vulkan SDK, with VULKAN_SDK set"
        )
    core = _find_header("vulkan/vulkan_core.h", config, environ)
    if core is None:
        raise BuildError(
            "backend vulkan: vulkan/vulkan_core.h was not found. Debian 13, Ubuntu 24.10 or newer: apt install "
            "libvulkan-dev spirv-headers   Debian 12: python -m build_support.vulkan_sdk build/vulkan-sdk, then set "
            "VULKAN_SDK to that folder   else: the Vulkan SDK, with VULKAN_SDK set"
        )
    structs = core.with_name("vulkan_structs.hpp")
    if not structs.is_file() or "struct LayerSettingEXT" not in structs.read_text(encoding="utf-8", errors="replace"):
        raise BuildError(
            f"backend vulkan: the headers in {core.parent} are of Vulkan {vulkan_header_version(core)} and have no "
            "vk::LayerSettingEXT; 1.3.275 or newer is needed. Debian 12: python -m build_support.vulkan_sdk "
            "build/vulkan-sdk, then set VULKAN_SDK to that folder   else: the Vulkan SDK, with VULKAN_SDK set"
        )
    if "SPIRV-Headers_DIR" not in told and _find_header("spirv/unified1/spirv.hpp", config, environ) is None:
        raise BuildError(
            "backend vulkan: spirv/unified1/spirv.hpp was not found. Debian: apt install spirv-headers   Fedora: dnf "
            "install spirv-headers-devel   macOS: brew install spirv-headers"
        )
    if "Vulkan_LIBRARY" not in told and not _has_vulkan_loader(config, environ):
        raise BuildError(
            "backend vulkan: the loader libvulkan was not found. Debian: apt install libvulkan-dev   Fedora: dnf "
            "install vulkan-loader-devel   macOS: brew install vulkan-loader"
        )


def _has_vulkan_loader(config: BuildConfig, environ: Mapping[str, str]) -> bool:
    folders = [prefix / name for prefix in _prefixes(config, environ) for name in ("lib", "lib64", "Lib")]
    folders += [Path(f"/usr/lib/{sysconfig.get_config_var('MULTIARCH') or '.'}")]
    names = ("libvulkan.so", "libvulkan.dylib", "vulkan-1.lib")
    return any((folder / name).exists() for folder in folders for name in names)


def _check_metal() -> None:
    if sys.platform != "darwin":
        raise BuildError("backend metal: it exists on macOS only. Take metal out of PYSPEC_BACKENDS.")
    try:
        done = subprocess.run(["xcrun", "--show-sdk-path"], capture_output=True, text=True, check=False)
        found = done.returncode == 0 and bool(done.stdout.strip())
    except OSError:
        found = False
    if not found:
        raise BuildError(
            "backend metal: the macOS SDK was not found (xcrun --show-sdk-path fails). Install the command line tools: "
            'xcode-select --install   or build without it: PYSPEC_BACKENDS=""'
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
    if "metal" in config.backends:
        _check_metal()
    if "hip" in config.backends and not _find_sdk("hip", "hipcc", env):
        raise BuildError("backend hip: hipcc was not found. Install ROCm (Debian: apt install hipcc).")
    if "sycl" in config.backends and _which("icpx", env) is None:
        raise BuildError("backend sycl: icpx was not found. Install Intel's oneAPI toolkit and run its setvars.sh.")
