"""Build the native libraries with CMake and Ninja, once for each set of options."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from build_support import cuda, preflight
from build_support.config import ROOT, BuildConfig, BuildError, package_version

# What decides how the libraries come out, besides the sources and the options.
_BUILD_FILES = ("CMakeLists.txt", "flash_rows.c", "huge_pages.c", "vulkan_bindings.c", "stamp.c.in", "native.py")


def say(line: str) -> None:
    """Show a progress line."""
    print(f"pyspec build: {line}", flush=True)


def load_sync() -> ModuleType:
    """Import ``vendor/ggml/sync.py``, which is a script beside the tree, not part of a package."""
    spec = importlib.util.spec_from_file_location("pyspec_vendor_sync", ROOT / "vendor" / "ggml" / "sync.py")
    if spec is None or spec.loader is None:
        raise BuildError("vendor/ggml/sync.py is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class NativeBuild:
    """A finished build.

    Attributes:
        install_dir: holds the libraries.
        source_dir: the llama.cpp tree (headers).
        libraries: file names in ``install_dir``.
        info: the content of ``pyspec/_build_info.py``.
        rebuilt: whether anything was compiled.
    """

    install_dir: Path
    source_dir: Path
    libraries: tuple[str, ...]
    info: dict[str, Any]
    rebuilt: bool


def source_tree(config: BuildConfig) -> tuple[Path, Any]:
    """Return the llama.cpp tree to build and the pin: ``PYSPEC_LLAMA_SRC``, else the pinned tree, fetched if absent.

    Raises:
        BuildError: the tree is damaged or cannot be had.
    """
    sync = load_sync()
    try:
        pin = sync.read_pin()
        if config.llama_src is not None:
            return config.llama_src, pin
        return sync.sync(pin, say=say), pin
    except sync.SyncError as exc:
        raise BuildError(str(exc)) from None


def find_tool(name: str) -> str:
    """Return the path of ``cmake`` or ``ninja``: the package of the build requirements, else ``PATH``.

    Raises:
        BuildError: not installed.
    """
    try:
        module = __import__(name)
    except ImportError:
        module = None
    folder = getattr(module, "CMAKE_BIN_DIR" if name == "cmake" else "BIN_DIR", None)
    found = (folder and shutil.which(name, path=folder)) or shutil.which(name)
    if not found:
        raise BuildError(f"{name} was not found. Install it: python -m pip install {name}   (or apt install {name})")
    return str(found)


def stamp_key(config: BuildConfig, pin: Any) -> str:
    """Return the key of all that decides the outcome: options, pinned source, our own build files."""
    digest = hashlib.sha256()
    source = str(config.llama_src) if config.llama_src else pin.tree_sha256
    digest.update(json.dumps([config.options_key(), source, pin.llama_commit, package_version()]).encode())
    for name in _BUILD_FILES:
        digest.update((ROOT / "build_support" / name).read_bytes())
    return digest.hexdigest()


def stamp_file(install_dir: Path) -> Path:
    """Return where the record of a finished build is."""
    return install_dir.with_name(f"{install_dir.name}.json")


def read_stamp(install_dir: Path) -> dict[str, Any]:
    """Return the stamp of a finished build in ``install_dir``, or an empty dict."""
    try:
        stamp = json.loads(stamp_file(install_dir).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def is_current(install_dir: Path, key: str) -> bool:
    """Return whether ``install_dir`` holds a complete build for ``key``."""
    stamp = read_stamp(install_dir)
    libraries = stamp.get("libraries")
    if stamp.get("key") != key or not libraries:
        return False
    sizes = {path.name: path.stat().st_size for path in install_dir.glob("*") if path.is_file()}
    return bool(sizes == libraries)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock: two builds in one folder would destroy each other's files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows: no lock, as before there was none
        yield
        return
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("waiting for another build in the same folder")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _run(command: list[str], what: str, log: Path, *, throttle: bool = False) -> None:
    """Run a build step; progress lines go through, the whole output into ``log``.

    Raises:
        BuildError: the step failed; the message has the lines that tell why.
    """
    lines: list[str] = []
    last_shown = 0.0
    env = dict(os.environ, NINJA_STATUS="[%f/%t] ")
    with log.open("w", encoding="utf-8") as out:
        try:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as exc:
            raise BuildError(f"cannot start {command[0]}: {exc}") from None
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                out.write(line)
                lines.append(line.rstrip())
                if throttle and re.match(r"\[\d+/\d+\]", line) and time.monotonic() - last_shown > 2.0:
                    last_shown = time.monotonic()
                    say(re.sub(r"CMakeFiles/([^/]*)\.dir/", r"\1: ", line.strip()))
    if process.returncode != 0:
        marks = [line for line in lines if re.search(r"error|fatal|not found|CMake Error", line, re.IGNORECASE)]
        shown = "\n".join(f"  {line}" for line in (marks[:12] or lines[-12:]))
        raise BuildError(f"{what} failed (all of its output: {log}):\n{shown}")


def _external_commit(source: Path) -> str:
    try:
        result = subprocess.run(
            ["git", "-C", str(source), "rev-parse", "--short=9", "HEAD"], capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return result.stdout.strip() or "unknown"


def _version_in(source: Path, file_name: str, prefix: str) -> str:
    """Return the version that a CMake file of the tree states as three ``set()`` lines."""
    text = (source / file_name).read_text(encoding="utf-8", errors="replace")
    parts = [re.search(rf"set\({prefix}_VERSION_{name} (\d+)\)", text) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part.group(1) if part else "0" for part in parts)


def _info(config: BuildConfig, pin: Any, source: Path, folder: Path, libraries: list[str]) -> dict[str, Any]:
    external = config.llama_src is not None
    modules = sorted(
        name[len("libpyspec-ggml-") :].split(".")[0]
        for name in libraries
        if name.startswith("libpyspec-ggml-") and not name.startswith("libpyspec-ggml-base.")
    )
    compiler = folder / "compiler.txt"
    return {
        "llama_commit": _external_commit(source) if external else pin.llama_commit,
        "llama_version": _version_in(source, "CMakeLists.txt", "LLAMA"),
        "ggml_version": _version_in(source, "ggml/CMakeLists.txt", "GGML"),
        "source": "external" if external else f"{pin.package} {pin.version}",
        "source_sha256": "" if external else pin.sha256,
        "tree_sha256": "" if external else pin.tree_sha256,
        "backends": list(config.backends),
        "modules": modules,
        "portable": config.portable,
        "debug": config.debug,
        "build_type": config.build_type,
        "cmake_options": config.cmake_options(),
        "compiler": compiler.read_text(encoding="utf-8").strip() if compiler.exists() else "unknown",
    }


def build(config: BuildConfig, module: str = "") -> NativeBuild:
    """Build the libraries unless a build with the same key is there.

    Args:
        config: the build.
        module: build the module of this backend alone, for a package of its own. "": all libraries.

    Builds that differ in their backends alone share a folder and all that is compiled in it; each has a folder of its
    own to install to. A tree of the user's (``PYSPEC_LLAMA_SRC``) may change at any time, so there Ninja decides each
    time.

    Raises:
        BuildError: something is missing, or a step failed.
    """
    source, pin = source_tree(config)
    folder = config.build_dir / f"native-{config.folder_key()}"
    key = stamp_key(config, pin)
    install_dir = folder / "-".join(["install", config.options_key(), *filter(None, [module])])
    with _lock(config.build_dir / f"{folder.name}.lock"):
        if config.llama_src is None and is_current(install_dir, key):
            stamp = read_stamp(install_dir)
            return NativeBuild(install_dir, source, tuple(stamp["libraries"]), stamp["info"], rebuilt=False)
        preflight.check(config)
        start = time.monotonic()
        say(f"native libraries: {config.summary()}{f', the module {module} alone' if module else ''}")
        _configure_and_compile(config, pin, source, folder, install_dir, module)
        libraries = {path.name: path.stat().st_size for path in sorted(install_dir.glob("*")) if path.is_file()}
        info = _info(config, pin, source, folder, list(libraries))
        partial = install_dir.with_name(f"{install_dir.name}.part")
        partial.write_text(json.dumps({"key": key, "libraries": libraries, "info": info}, indent=1), encoding="utf-8")
        os.replace(partial, stamp_file(install_dir))
        total = sum(libraries.values()) / 1e6
        say(f"native libraries ready after {time.monotonic() - start:.0f} s: {len(libraries)} files, {total:.1f} MB")
        return NativeBuild(install_dir, source, tuple(libraries), info, rebuilt=True)


def configure_command(config: BuildConfig, pin: Any, source: Path, folder: Path) -> list[str]:
    """Return the command that configures the native build in ``folder``.

    Raises:
        BuildError: CMake, Ninja or the CUDA toolkit was not found.
    """
    commit = "external" if config.llama_src else pin.llama_commit
    command = [find_tool("cmake"), "-G", "Ninja", "-S", str(ROOT / "build_support"), "-B", str(folder)]
    command += [f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}"]
    command += [f"-DPYSPEC_LLAMA_DIR={source}", f"-DPYSPEC_LLAMA_COMMIT={commit}"]
    command += [f"-DPYSPEC_VERSION={package_version()}"]
    if "cuda" in config.backends:
        command += cuda.options(config, config.build_dir)
    return command + config.cmake_options()


def _configure_and_compile(
    config: BuildConfig, pin: Any, source: Path, folder: Path, install_dir: Path, module: str
) -> None:
    cmake = find_tool("cmake")
    cache = folder / "CMakeCache.txt"
    if cache.exists():
        # Options that are gone from the command line would live on in the cache; compiled objects stay usable.
        # And CMake refuses a folder configured for other sources: an unpacked sdist lies somewhere new each time.
        text = cache.read_text(encoding="utf-8", errors="replace")
        home = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", text, re.MULTILINE)
        tree = re.search(r"^PYSPEC_LLAMA_DIR:[A-Z]+=(.*)$", text, re.MULTILINE)
        if not home or Path(home.group(1)) != ROOT / "build_support" or not tree or Path(tree.group(1)) != source:
            shutil.rmtree(folder)
        cache.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    stamp_file(install_dir).unlink(missing_ok=True)
    _run(configure_command(config, pin, source, folder), "configuring the native build", folder / "configure.log")
    target = f"ggml-{module}"
    _run(
        [cmake, "--build", str(folder), "--parallel", str(config.jobs), *(["--target", target] if module else [])],
        "compiling the native libraries",
        folder / "compile.log",
        throttle=True,
    )
    if install_dir.exists():
        shutil.rmtree(install_dir)
    component = f"pyspec-{target}" if module else "pyspec"
    install = [cmake, "--install", str(folder), "--component", component, "--prefix", str(install_dir)]
    if not config.debug:
        install.append("--strip")
    _run(install, "collecting the native libraries", folder / "install.log")
