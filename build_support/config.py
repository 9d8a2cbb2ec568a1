"""Build options: read from the environment once, then plain data."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Backend name -> CMake options that build it. The CPU backend is always built: the others fall back to it.
BACKEND_FLAGS: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "cuda": ("-DGGML_CUDA=ON",),
    "metal": ("-DGGML_METAL=ON", "-DGGML_METAL_EMBED_LIBRARY=ON"),
    "vulkan": ("-DGGML_VULKAN=ON",),
    "hip": ("-DGGML_HIP=ON",),
    "sycl": ("-DGGML_SYCL=ON",),
}

# CMake and setuptools both read these.
TOOLCHAIN_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")


class BuildError(RuntimeError):
    """The build cannot go on; the message says what to install or to change."""


def package_version() -> str:
    """Return pyspec's version, without importing it."""
    text = (ROOT / "pyspec" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if match is None:
        raise BuildError("pyspec/_version.py states no version")
    return match.group(1)


def _flag(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in ("", "0", "off", "no", "false"):
        return False
    if value in ("1", "on", "yes", "true"):
        return True
    raise BuildError(f"{name}={environ[name]!r} is neither on (1) nor off (0)")


def parse_backends(text: str) -> tuple[str, ...]:
    """Turn ``"cuda vulkan"`` (spaces or commas) into names, CPU first, without duplicates.

    Raises:
        BuildError: a name that is not known.
    """
    names = {"cpu": None} | {name.lower(): None for name in text.replace(",", " ").replace(";", " ").split()}
    unknown = [name for name in names if name not in BACKEND_FLAGS]
    if unknown:
        raise BuildError(f"PYSPEC_BACKENDS: unknown backend {', '.join(unknown)}. Known: {', '.join(BACKEND_FLAGS)}")
    return tuple(names)


def backends_in(cmake_args: tuple[str, ...]) -> list[str]:
    """Return the backends that CMake options in the ecosystem's usual form turn on (``-DGGML_CUDA=on``)."""
    found = []
    for arg in cmake_args:
        match = re.fullmatch(r"-DGGML_(\w+?)(?::\w+)?=(on|1|true|yes)", arg, re.IGNORECASE)
        if match and match.group(1).lower() in BACKEND_FLAGS:
            found.append(match.group(1).lower())
    return found


def available_cpus() -> int:
    """Return how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


@dataclass(frozen=True)
class BuildConfig:
    """All that the environment can say about a build.

    Attributes:
        backends: names of :data:`BACKEND_FLAGS`, CPU first.
        cmake_args: the user's ``CMAKE_ARGS``, split; they come last and so win.
        portable: build all CPU variants and choose at run time, instead of for this CPU only.
        debug: symbols kept, bounds checks in the Cython kernels.
        jobs: parallel compile jobs.
        llama_src: a llama.cpp checkout to use instead of the pinned tree.
        build_dir: where intermediate files go.
        toolchain: the variables of :data:`TOOLCHAIN_VARIABLES`; another compiler or flag is another build.
        cuda_archs: CMake's own variable ``CUDAARCHS``: GPU architectures to build for, as in ``86;89``.
    """

    backends: tuple[str, ...] = ("cpu",)
    cmake_args: tuple[str, ...] = ()
    portable: bool = False
    debug: bool = False
    jobs: int = 1
    llama_src: Path | None = None
    build_dir: Path = ROOT / "build"
    toolchain: tuple[str, ...] = ("",) * len(TOOLCHAIN_VARIABLES)
    cuda_archs: str = ""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> BuildConfig:
        """Read the configuration.

        Raises:
            BuildError: a value that means nothing, or a ``PYSPEC_LLAMA_SRC`` that is no llama.cpp tree.
        """
        env = os.environ if environ is None else environ
        backends = env.get("PYSPEC_BACKENDS")
        if backends is None:
            backends = "metal" if sys.platform == "darwin" else ""
        jobs_text = env.get("PYSPEC_BUILD_JOBS") or env.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(available_cpus())
        if not jobs_text.isdigit() or int(jobs_text) < 1:
            raise BuildError(f"PYSPEC_BUILD_JOBS={jobs_text!r} is not a positive number")
        llama_src = Path(env["PYSPEC_LLAMA_SRC"]).expanduser().resolve() if env.get("PYSPEC_LLAMA_SRC") else None
        if llama_src is not None and not (llama_src / "src" / "CMakeLists.txt").is_file():
            raise BuildError(f"PYSPEC_LLAMA_SRC={llama_src} is no llama.cpp source tree (no src/CMakeLists.txt there)")
        build_dir = env.get("PYSPEC_BUILD_DIR")
        try:
            cmake_args = tuple(shlex.split(env.get("CMAKE_ARGS", "")))
        except ValueError as exc:
            raise BuildError(f"CMAKE_ARGS cannot be split: {exc}") from None
        return cls(
            backends=parse_backends(" ".join([backends, *backends_in(cmake_args)])),
            cmake_args=cmake_args,
            portable=_flag(env, "PYSPEC_PORTABLE"),
            debug=_flag(env, "PYSPEC_BUILD_DEBUG"),
            jobs=int(jobs_text),
            llama_src=llama_src,
            build_dir=Path(build_dir).expanduser().resolve() if build_dir else ROOT / "build",
            toolchain=tuple(env.get(name, "") for name in TOOLCHAIN_VARIABLES),
            cuda_archs=env.get("CUDAARCHS", "").strip(),
        )

    @property
    def build_type(self) -> str:
        return "RelWithDebInfo" if self.debug else "Release"

    def cmake_options(self) -> list[str]:
        """Return the ``-D`` options for CMake, the user's last."""
        options = [f"-DCMAKE_BUILD_TYPE={self.build_type}", "-DGGML_OPENMP=OFF"]
        if self.portable:
            options += ["-DPYSPEC_NATIVE=OFF", "-DGGML_CPU_ALL_VARIANTS=ON"]
        else:
            options += ["-DPYSPEC_NATIVE=ON", "-DGGML_CPU_ALL_VARIANTS=OFF"]
        if "metal" not in self.backends:
            options.append("-DGGML_METAL=OFF")
        for name in self.backends:
            options += BACKEND_FLAGS[name]
        if "cuda" in self.backends and self.cuda_archs:
            options.append(f"-DCMAKE_CUDA_ARCHITECTURES={self.cuda_archs}")
        return options + list(self.cmake_args)

    def options_key(self) -> str:
        """Return a short name for a build: the same for equal options, whatever the sources."""
        data = [self.cmake_options(), list(self.toolchain), str(self.llama_src or ""), sys.platform]
        return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:12]

    def folder_key(self) -> str:
        """Return a short name for the folder of a build.

        Backends are modules of their own: with one more of them all else stays as it was compiled.
        """
        return replace(self, backends=("cpu",)).options_key()

    def summary(self) -> str:
        """Return one line for people."""
        parts = [
            f"backends: {' '.join(self.backends)}",
            "portable (all CPU variants)" if self.portable else "for this CPU",
            self.build_type,
            f"{self.jobs} jobs",
        ]
        if "cuda" in self.backends and self.cuda_archs:
            parts.append(f"CUDA architectures {self.cuda_archs}")
        if self.cmake_args:
            parts.append(f"CMAKE_ARGS: {shlex.join(self.cmake_args)}")
        if self.llama_src:
            parts.append(f"llama.cpp from {self.llama_src}")
        return ", ".join(parts)
