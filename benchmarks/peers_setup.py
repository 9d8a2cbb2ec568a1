"""What ``peers.py`` compares with: llama.cpp's tools built from the pinned source, and Python packages in their own
environments. Everything lies in one cache folder outside the tree (``PYSPEC_PEERS_DIR``, else ``peers`` in pyspec's
cache folder) and is made once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

TOOLS = ("llama-bench", "llama-speculative-simple", "llama-server")

#: The strongest Python peer: a whole llama-server in the process, in a prebuilt wheel.
XLLAMACPP = "xllamacpp==2026.10.11549"

#: As in build_support/CMakeLists.txt: virtual machines announce AMX and end the process at the first tile instruction.
NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")

CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=ON",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


class SetupError(Exception):
    """A peer cannot be had; the message says why."""


@dataclass(frozen=True)
class Tools:
    """Built tools.

    Attributes:
        folder: where the programs are.
        cpu: folder with the CPU library, by how it shares work: "openmp", "pool" (ggml's own threads).
        flags: the options they were built with, for the report.
    """

    folder: Path
    cpu: dict[str, Path]
    flags: str

    def env(self, variant: str) -> dict[str, str]:
        """An environment in which the programs take the CPU library of that variant."""
        return dict(os.environ, LD_LIBRARY_PATH=f"{self.cpu[variant]}:{self.folder}")


def say(line: str) -> None:
    print(f"peers: {line}", flush=True)


def load_script(path: Path, name: str) -> ModuleType:
    """Import a script that is part of no package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def sync_script() -> ModuleType:
    """``vendor/ggml/sync.py``."""
    return load_script(ROOT / "vendor" / "ggml" / "sync.py", "pyspec_vendor_sync")


def cache_folder() -> Path:
    """Where peers are kept."""
    override = os.environ.get("PYSPEC_PEERS_DIR")
    return Path(override) if override else sync_script().cache_dir() / "peers"


def _run(command: list[str], log: Path, what: str, env: dict[str, str] | None = None) -> None:
    with log.open("a", encoding="utf-8") as out:
        try:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=env, check=False).returncode
        except OSError as e:
            raise SetupError(f"{what}: cannot start {command[0]}: {e}") from None
    if code:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
        raise SetupError(f"{what} failed (all of it: {log}):\n{tail}")


def _program(name: str) -> str:
    """``cmake`` or ``ninja``: of the package of that name, else of PATH."""
    try:
        module: Any = __import__(name)
    except ImportError:
        module = None
    folder = getattr(module, "CMAKE_BIN_DIR" if name == "cmake" else "BIN_DIR", None)
    found = (folder and shutil.which(name, path=folder)) or shutil.which(name)
    if not found:
        raise SetupError(f"{name} was not found: python -m pip install {name}")
    return str(found)


def _amx_flags() -> list[str]:
    """Those of NO_AMX that the compiler knows."""
    known = []
    for flag in NO_AMX:
        test = subprocess.run(
            [os.environ.get("CC", "cc"), flag, "-x", "c", "-fsyntax-only", os.devnull], capture_output=True, check=False
        )
        if test.returncode == 0:
            known.append(flag)
    return known


def build_tools(jobs: int = 2) -> Tools:
    """Build the tools from the pinned source: the compiler, the instruction set and the optimisation of pyspec's build.

    The CPU library is built twice, with OpenMP and with ggml's own threads: peers get the faster one. pyspec's build
    has no OpenMP (see docs/performance.md), and its other libraries are the same code with the same flags.

    Raises:
        SetupError: the source cannot be had, or the build fails.
    """
    sync = sync_script()
    pin = sync.read_pin()
    folder = cache_folder()
    source = folder / f"llama.cpp-{pin.tree_sha256[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (source / "tools" / "server").is_dir():
            sync.unpack_tools(source, pin, say)
    except (OSError, sync.SyncError) as e:
        raise SetupError(str(e)) from None
    flags = " ".join(_amx_flags())
    options = [*CMAKE_OPTIONS, f"-DCMAKE_C_FLAGS={flags}", f"-DCMAKE_CXX_FLAGS={flags}"]
    key = json.dumps([pin.tree_sha256, options])
    cpu = {}
    for variant, openmp in (("openmp", "ON"), ("pool", "OFF")):
        build = folder / f"build-{variant}"
        stamp = build / "peers.json"
        targets = TOOLS if variant == "openmp" else ("ggml-cpu",)
        if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == key):
            say(f"building {', '.join(targets)} ({variant}); the log is {build / 'peers.log'}")
            build.mkdir(parents=True, exist_ok=True)
            cmake = _program("cmake")
            _run(
                [cmake, "-S", str(source), "-B", str(build), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={_program('ninja')}",
                 f"-DGGML_OPENMP={openmp}", *options],
                build / "peers.log", "configuring llama.cpp",
            )  # fmt: skip
            _run([cmake, "--build", str(build), "-j", str(jobs), "--target", *targets], build / "peers.log", "building")
            stamp.write_text(key, encoding="utf-8")
        cpu[variant] = build / "bin"
    shown = [o for o in CMAKE_OPTIONS if "LLAMA_" not in o]
    return Tools(folder / "build-openmp" / "bin", cpu, " ".join([*shown, flags]))


def tools_in(folder: Path) -> Tools:
    """Tools that somebody has built already."""
    if not (folder / "llama-bench").is_file():
        raise SetupError(f"{folder} has no llama-bench")
    return Tools(folder, {"as built": folder}, f"as found in {folder.name}")


def _venv(name: str) -> Path:
    folder = cache_folder() / f"venv-{name}"
    if not (folder / "bin" / "python").exists():
        _run([sys.executable, "-m", "venv", str(folder)], cache_folder() / f"venv-{name}.log", "making an environment")
    return folder / "bin" / "python"


def _install(name: str, requirements: list[str], env: dict[str, str] | None = None, *, no_deps: bool = False) -> Path:
    """The interpreter of an environment in which these are installed."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    python = _venv(name)
    stamp = python.parent.parent / "peers.json"
    key = json.dumps(requirements)
    if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == key):
        say(f"installing {' '.join(Path(r).name for r in requirements)}")
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
        _run(
            [*pip, *(["--no-deps"] if no_deps else []), *requirements],
            cache_folder() / f"venv-{name}.log",
            f"installing {requirements[0]}",
            dict(os.environ, **(env or {})),
        )
        stamp.write_text(key, encoding="utf-8")
    return python


def install_xllamacpp() -> Path:
    """xllamacpp's prebuilt wheel. Its llama.cpp and its flags are its own (AVX2, OpenMP). Gives the interpreter."""
    return _install("xllamacpp", ["--only-binary=:all:", XLLAMACPP])


def install_llama_cpp_python() -> Path:
    """llama-cpp-python of the pinned version, without libraries of its own. Gives the interpreter.

    It has the very source that is pinned, so it runs on the libraries of :func:`build_tools`
    (``LLAMA_CPP_LIB_PATH``): same code, same flags.
    """
    sync = sync_script()
    pin = sync.read_pin()
    archive, _ = sync.fetch_archive(pin, say)
    return _install("llama-cpp-python", [str(archive)], {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"})
