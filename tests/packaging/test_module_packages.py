"""The packages pyspec-vulkan and pyspec-cuda: what their wheels hold, and that pyspec finds the module in them.

The compile is left out: a file stands in for the module. `make wheel-vulkan` and `make wheel-cuda` do the whole.
"""

from __future__ import annotations

import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import pyspec

pytest.importorskip("build_support.config")

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(300)]

BUILD = """
import os, sys
from pathlib import Path
root, backend, folder, out = sys.argv[1:]
folder = Path(folder)
sys.path.insert(0, root)
from build_support import cuda, native

def build(config, module=""):
    assert module == backend and backend in config.backends
    return native.NativeBuild(folder, folder, tuple(p.name for p in folder.iterdir()), {}, True)

native.build = build
cuda.find_toolkit = lambda *_: cuda.Toolkit(Path("nvcc"), (13, 0), Path("/"))
os.chdir(Path(root, "wheels", "pyspec-" + backend))
from setuptools import build_meta
print("WHEEL", build_meta.build_wheel(out))
"""


@pytest.fixture
def make(root: Path, tmp_path: Path, run_child: Callable[..., str]) -> Callable[[str, bytes], Path]:
    """Build the wheel of one backend in a copy of the source tree."""

    def build(backend: str, data: bytes) -> Path:
        tree, module, out = tmp_path / "tree", tmp_path / "module", tmp_path / "out"
        for folder in (tree / "pyspec", module, out):
            folder.mkdir(parents=True)
        for name in ("build_support", "licenses", "wheels"):
            shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        shutil.copy2(root / "LICENSE", tree)
        shutil.copy2(root / "pyspec" / "_version.py", tree / "pyspec")
        (module / f"libpyspec-ggml-{backend}.so").write_bytes(data)
        run_child(BUILD, str(tree), backend, str(module), str(out), stderr=None)
        (wheel,) = out.glob("*.whl")
        return wheel

    return build


@pytest.mark.parametrize(
    ("backend", "requirements"),
    [("vulkan", set()), ("cuda", {"nvidia-cublas<14,>=13", "nvidia-cuda-runtime<14,>=13"})],
)
def test_what_is_in_the_wheel(make: Callable[[str, bytes], Path], backend: str, requirements: set[str]) -> None:
    wheel = make(backend, b"stands in for the module")
    version = pyspec.__version__
    assert re.fullmatch(rf"pyspec_{backend}-{re.escape(version)}-py3-none-(?!any)\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(name for name in names if name.endswith("/METADATA")).rpartition("/")[0]
        metadata = archive.read(f"{info}/METADATA").decode()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    package = f"pyspec_{backend}"
    assert {n for n in names if n.startswith(package + "/")} == {
        f"{package}/__init__.py",
        f"{package}/libpyspec-ggml-{backend}.so",
    }
    wanted = {line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Requires-Dist: ")}
    assert wanted == {f"pyspec-llm=={version}", *requirements}
    assert entry_points.split() == ["[pyspec.backends]", backend, "=", package]
    for name in ("LICENSE", "LICENSE-llama.cpp", "LICENSE-Apache-2.0"):
        assert f"{info}/licenses/licenses/{name}" in names


LOAD = """
import sys
sys.path.insert(0, sys.argv[1])
from pyspec import backends
from pyspec.errors import AbiMismatchError
try:
    print(backends.unavailable())
except AbiMismatchError as exc:
    print("AbiMismatchError", exc)
"""


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="the file stands in for a module by Linux's name of it")
def test_pyspec_finds_the_module(
    make: Callable[[str, bytes], Path], tmp_path: Path, run_child: Callable[..., str]
) -> None:
    """Once a module of this pyspec that does not open, once of another one."""
    stamp = b"pyspec-stamp:%s 0123456789\0"
    wheel = make("vulkan", b"no library " + stamp % b"0.0.1")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    out = run_child(LOAD, str(site))
    assert out.startswith("AbiMismatchError"), out
    assert "is of pyspec 0.0.1 of llama.cpp 0123456789" in out
    assert f"python -m pip install pyspec-vulkan=={pyspec.__version__}" in out
    (site / "pyspec_vulkan" / "libpyspec-ggml-vulkan.so").write_bytes(b"no library, and no stamp")
    out = run_child(LOAD, str(site))
    assert f"libpyspec-ggml-vulkan.so (pyspec-vulkan {pyspec.__version__})" in out
    assert "invalid ELF header" in out or "file too short" in out
