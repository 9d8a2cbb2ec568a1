"""The CUDA toolkit of this machine, and what it may lack: cuBLAS, the driver's stub library, a GPU to ask.

cuBLAS then comes from the package index: the package ``nvidia-cublas`` has its headers and libraries. The same package
serves at run time (extra ``cuda``).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from build_support.config import BuildConfig, BuildError

_USUAL_ROOT = Path("/usr/local/cuda")
_NO_TOOLKIT = (
    "backend cuda: the CUDA compiler nvcc was not found. Install the CUDA toolkit (Debian: apt install "
    "nvidia-cuda-toolkit, or NVIDIA's own packages) and put its bin folder on PATH, or set CUDACXX to nvcc."
)
# Upstream's CMake code needs 11.7 for its flags; older ones fail late and in words of their own.
_OLDEST = (11, 7)


@dataclass(frozen=True)
class Toolkit:
    """An installed CUDA toolkit.

    Attributes:
        nvcc: the compiler.
        version: major and minor.
        root: the folder that holds ``bin`` and ``include``.
    """

    nvcc: Path
    version: tuple[int, int]
    root: Path

    def _library_folders(self) -> list[Path]:
        folders = [self.root / "lib64", self.root / "lib", *self.root.glob("targets/*/lib"), *self.root.glob("lib/x64")]
        if str(self.root) == "/usr":
            folders += Path("/usr/lib").glob("*-linux-gnu")
        return folders

    def has_cublas(self) -> bool:
        """Return whether headers and libraries of cuBLAS are part of it."""
        headers = [self.root / "include", *self.root.glob("targets/*/include")]
        names = ("libcublas.so", "cublas.lib")
        return any((folder / "cublas_v2.h").is_file() for folder in headers) and any(
            (folder / name).exists() for folder in self._library_folders() for name in names
        )

    def has_driver_stub(self) -> bool:
        """Return whether something named libcuda is there to link against: the stub, or the driver itself."""
        folders = [*(folder / "stubs" for folder in self._library_folders()), *self._library_folders()]
        folders += [*Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib")]
        return any((folder / name).exists() for folder in folders for name in ("libcuda.so", "cuda.lib"))


def find_nvcc(config: BuildConfig, environ: Mapping[str, str] | None = None) -> Path:
    """Return the CUDA compiler: ``CMAKE_ARGS``, ``CUDACXX``, ``CUDA_HOME``, ``CUDA_PATH``, ``PATH``, the usual folder.

    Raises:
        BuildError: there is none.
    """
    env = os.environ if environ is None else environ
    for arg in config.cmake_args:
        if match := re.fullmatch(r"-DCMAKE_CUDA_COMPILER(?::\w+)?=(.+)", arg):
            return _program(match.group(1), "CMAKE_ARGS names the CUDA compiler", env)
    if env.get("CUDACXX"):
        return _program(env["CUDACXX"], "CUDACXX is", env)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(name) and (found := Path(env[name]) / "bin" / "nvcc").is_file():
            return found
    if on_path := shutil.which("nvcc", path=env.get("PATH", "")):
        return Path(on_path)
    if (usual := _USUAL_ROOT / "bin" / "nvcc").is_file():
        return usual
    raise BuildError(_NO_TOOLKIT)


def _program(name: str, what: str, environ: Mapping[str, str]) -> Path:
    found = shutil.which(name, path=environ.get("PATH", ""))
    if found is None:
        raise BuildError(f"backend cuda: {what} {name}, but there is no such program.")
    return Path(found)


def find_toolkit(config: BuildConfig, environ: Mapping[str, str] | None = None) -> Toolkit:
    """Return the toolkit that the CUDA compiler belongs to.

    Raises:
        BuildError: there is no compiler, it does not run, or it is too old.
    """
    nvcc = find_nvcc(config, environ)
    try:
        result = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
        output = result.stdout + result.stderr
    except OSError as exc:
        output = str(exc)
    match = re.search(r"release (\d+)\.(\d+)", output)
    if match is None:
        raise BuildError(f"backend cuda: {nvcc} --version does not answer like nvcc:\n  {output.strip()[-300:]}")
    version = (int(match.group(1)), int(match.group(2)))
    if version < _OLDEST:
        raise BuildError(
            f"backend cuda: {nvcc} is of CUDA {version[0]}.{version[1]}, {_OLDEST[0]}.{_OLDEST[1]} or newer is needed. "
            "Set CUDACXX to a newer nvcc."
        )
    return Toolkit(nvcc, version, nvcc.resolve().parent.parent)


def _told(config: BuildConfig, option: str) -> bool:
    return any(re.match(rf"-D{option}(?::\w+)?=", arg) for arg in config.cmake_args)


def _has_gpu() -> bool:
    return any(Path("/proc/driver/nvidia/gpus").glob("*")) or Path("/dev/nvidia0").exists()


def requirement(toolkit: Toolkit) -> str:
    """Return what to install for cuBLAS of the toolkit's version: headers and libraries."""
    major = toolkit.version[0]
    # Packages up to CUDA 12 carry the major version in their name.
    return f"nvidia-cublas>={major},<{major + 1}" if major >= 13 else f"nvidia-cublas-cu{major}"


def runtime_requirements(config: BuildConfig) -> list[str]:
    """Return the packages that bring the libraries a CUDA module needs beside the driver.

    Raises:
        BuildError: there is no CUDA toolkit.
    """
    toolkit = find_toolkit(config)
    return [requirement(toolkit), requirement(toolkit).replace("nvidia-cublas", "nvidia-cuda-runtime")]


def _package_folder(toolkit: Toolkit) -> Path | None:
    """Return the folder of the installed cuBLAS package that holds ``include`` and ``lib``."""
    spec = importlib.util.find_spec("nvidia")
    for location in (spec and spec.submodule_search_locations) or ():
        for name in (f"cu{toolkit.version[0]}", "cublas"):
            folder = Path(location) / name
            if (folder / "include" / "cublas_v2.h").is_file() and any(
                (folder / "lib").glob(f"libcublas.so.{toolkit.version[0]}")
            ):
                return folder
    return None


def missing_requirements(config: BuildConfig, environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the Python packages a CUDA build needs here and has not got. Empty without the CUDA backend."""
    if "cuda" not in config.backends or _told(config, "CUDA_cublas_LIBRARY"):
        return []
    toolkit = find_toolkit(config, environ)
    if toolkit.has_cublas() or _package_folder(toolkit):
        return []
    return [requirement(toolkit)]


def check(config: BuildConfig, environ: Mapping[str, str] | None = None, *, packages: bool = True) -> None:
    """Check compiler, cuBLAS and the architecture to build for.

    Args:
        config: the build.
        environ: instead of ``os.environ``.
        packages: miss Python packages, too.

    Raises:
        BuildError: something is missing; the message names what to install or to set.
    """
    env = os.environ if environ is None else environ
    toolkit = find_toolkit(config, env)
    if packages and (missing := missing_requirements(config, env)):
        raise BuildError(
            f"backend cuda: the toolkit at {toolkit.root} has no cuBLAS. Install it: Debian, NVIDIA's packages: apt "
            f"install libcublas-dev-{toolkit.version[0]}-{toolkit.version[1]}, or python -m pip install '{missing[0]}'"
        )
    architectures = _told(config, "CMAKE_CUDA_ARCHITECTURES") or bool(config.cuda_archs)
    if not (architectures or config.portable or _told(config, "GGML_NATIVE") or _has_gpu()):
        raise BuildError(
            "backend cuda: there is no NVIDIA GPU here to ask for its architecture. Name it, for example "
            "CUDAARCHS=90: 75 T4, RTX 20; 80 A100; 86 RTX 30; 89 L4, RTX 40; 90 H100, "
            "H200; 100 B200; 120 RTX 50. Several: 86;89. Or PYSPEC_PORTABLE=1 for all of them (takes hours)."
        )


def _stage(toolkit: Toolkit, folder: Path) -> list[str]:
    """Put cuBLAS of the Python package where its path stays the same, and return the options that name it.

    The package lies in an environment that may be gone at the next build (pip's build isolation); another path would
    compile everything anew.
    """
    package = _package_folder(toolkit)
    if package is None:
        raise BuildError(f"cuBLAS is not there. Install it: python -m pip install '{requirement(toolkit)}'")
    include, lib = folder / "include", folder / "lib"
    for each in (include, lib):
        each.mkdir(parents=True, exist_ok=True)
    for header in (package / "include").glob("cublas*.h"):
        staged = include / header.name
        if not staged.exists() or staged.read_bytes() != header.read_bytes():
            shutil.copyfile(header, staged)
    options = [f"-DPYSPEC_CUDA_INCLUDE={include}"]
    for name in ("cublas", "cublasLt"):
        library = package / "lib" / f"lib{name}.so.{toolkit.version[0]}"
        staged = lib / library.name
        if staged.is_symlink() or staged.exists():
            staged.unlink()
        staged.symlink_to(library)
        options.append(f"-DCUDA_{name}_LIBRARY={staged}")
    return options


def options(config: BuildConfig, folder: Path, environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the CMake options that this machine's toolkit needs; the user's own still win.

    Args:
        config: the build.
        folder: where files may be put that have to stay.
        environ: instead of ``os.environ``.
    """
    toolkit = find_toolkit(config, environ)
    found = [f"-DCMAKE_CUDA_COMPILER={toolkit.nvcc}"]
    if not (toolkit.has_cublas() or _told(config, "CUDA_cublas_LIBRARY")):
        found += _stage(toolkit, folder / f"cuda-{toolkit.version[0]}")
    if not toolkit.has_driver_stub():
        # Its pool of virtual memory calls the driver directly, which then must be there to link against.
        found.append("-DGGML_CUDA_NO_VMM=ON")
    return found
