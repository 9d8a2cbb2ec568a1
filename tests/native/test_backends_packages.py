"""Backend modules in packages of their own: found by entry point, never imported, refused when of another version."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import pyspec

pytestmark = pytest.mark.native

PACKAGE = Path(next(iter(importlib.util.find_spec("pyspec").submodule_search_locations or [])))  # type: ignore[union-attr]
STAMP = b"pyspec-stamp:"

REPORT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pyspec import backends
assert backends.__file__.startswith(sys.argv[1]), backends.__file__
try:
    backends.load()
except Exception as exc:
    print(json.dumps({"error": type(exc).__name__, "message": str(exc)}))
else:
    used = [module.label for module in backends._binding.modules if module.loaded]
    print(json.dumps({"available": backends.available(), "used": used, "unavailable": backends.unavailable()}))
"""


class Site:
    """A folder on the path with a copy of pyspec that a test may damage, and packages beside it."""

    def __init__(self, root: Path, run_child: Callable[..., str]) -> None:
        self.root = root
        self.lib = root / "pyspec" / "backends" / "lib"
        self._run_child = run_child
        shutil.copytree(PACKAGE, root / "pyspec", ignore=shutil.ignore_patterns("__pycache__"))

    def add(self, backend: str, files: dict[str, bytes], *, name: str = "pyspec-extra", value: str = "") -> Path:
        """Install a package that offers ``backend``; importing it fails."""
        folder = self.root / name.replace("-", "_")
        folder.mkdir()
        (folder / "__init__.py").write_text('raise RuntimeError("must not be imported")\n')
        for file, data in files.items():
            (folder / file).write_bytes(data)
        info = self.root / f"{folder.name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[pyspec.backends]\n{backend} = {value or folder.name}\n")
        return folder

    def report(self) -> dict[str, object]:
        result: dict[str, object] = json.loads(self._run_child(REPORT, str(self.root)))
        return result


@pytest.fixture
def site(tmp_path: Path, run_child: Callable[..., str]) -> Site:
    return Site(tmp_path, run_child)


def cpu_module(site: Site) -> Path:
    """The CPU module in use here (of a wheel's several: any)."""
    return sorted(site.lib.glob("libpyspec-ggml-cpu*"))[0]


def of_another_version(data: bytes) -> bytes:
    assert data.count(STAMP) == 1
    start = data.index(STAMP) + len(STAMP)
    return data[:start] + b"9" + data[start + 1 :]


def test_a_module_is_used_out_of_its_package(site: Site) -> None:
    modules = list(site.lib.glob("libpyspec-ggml-cpu*"))
    site.add("cpu", {path.name: path.read_bytes() for path in modules})
    for path in modules:
        path.unlink()
    report = site.report()
    assert report["available"] == ["cpu"]
    (used,) = report["used"]  # type: ignore[misc]
    assert used.endswith("(pyspec-extra 1.0)")


def test_of_two_that_suit_alike_pyspecs_own_is_taken(site: Site) -> None:
    site.add("cpu", {path.name: path.read_bytes() for path in site.lib.glob("libpyspec-ggml-cpu*")})
    report = site.report()
    (used,) = report["used"]  # type: ignore[misc]
    assert "pyspec-extra" not in used
    assert f"{used} (pyspec-extra 1.0)" in report["unavailable"]  # type: ignore[operator]


@pytest.mark.parametrize("whole", [True, False], ids=["opens", "does-not-open"])
def test_a_package_of_another_version_is_an_error(site: Site, whole: bool) -> None:
    data = of_another_version(cpu_module(site).read_bytes())
    if not whole:  # as a module that needs functions this libggml has not got: only its bytes can be asked
        start = data.index(STAMP)
        data = b"no library" + data[start : start + 200]
    folder = site.add("vulkan", {"libpyspec-ggml-vulkan.so": data}, name="pyspec-vulkan")
    report = site.report()
    assert report["error"] == "AbiMismatchError", report
    message = str(report["message"])
    assert str(folder / "libpyspec-ggml-vulkan.so") in message
    assert "pyspec-vulkan 1.0" in message
    assert f"is of pyspec 9{pyspec.__version__[1:]} of llama.cpp" in message
    assert f"this is pyspec {pyspec.__version__} of llama.cpp" in message
    assert f"python -m pip install pyspec-vulkan=={pyspec.__version__}" in message


def test_a_module_that_says_no_version_is_an_error(site: Site) -> None:
    data = cpu_module(site).read_bytes().replace(STAMP, b"nothing-much:")
    site.add("vulkan", {"libpyspec-ggml-vulkan.so": data}, name="pyspec-vulkan")
    report = site.report()
    assert report["error"] == "AbiMismatchError", report
    assert "says no pyspec version" in str(report["message"])


@pytest.mark.parametrize("name", ["llama", "ggml", "ggml-base", "ggml-cpu"])
def test_a_library_of_another_version_in_the_folder(site: Site, name: str) -> None:
    path = sorted(site.lib.glob(f"libpyspec-{name}[.-]*"))[0] if name == "ggml-cpu" else None
    path = path or next(site.lib.glob(f"libpyspec-{name}.*"))
    path.write_bytes(of_another_version(path.read_bytes()))
    report = site.report()
    assert report["error"] == "AbiMismatchError", report
    message = str(report["message"])
    assert path.name in message
    assert f"pyspec 9{pyspec.__version__[1:]}" in message
    assert pyspec.__version__ in message
    assert "python -m pip install --force-reinstall pyspec-llm" in message


def test_packages_that_hold_nothing_are_skipped_with_the_reason(site: Site) -> None:
    site.add("cuda", {}, name="pyspec-cuda")
    site.add("vulkan", {"libpyspec-ggml-cpu.so": b"not of this backend"}, name="pyspec-vulkan")
    site.add("hip", {}, name="pyspec-hip", value="gone_away")
    site.add("sycl", {}, name="pyspec-sycl", value="pyspec_sycl.inner")  # imports the package, which raises
    site.add("musa", {"libpyspec-ggml-musa.so": b"no library at all"}, name="pyspec-musa")
    report = site.report()
    assert report["available"] == ["cpu"]
    reasons = report["unavailable"]
    assert isinstance(reasons, dict)
    text = {backend: next((v for k, v in reasons.items() if f"pyspec-{backend}" in k), "") for backend in
            ("cuda", "vulkan", "hip", "sycl", "musa")}  # fmt: skip
    assert "holds no module of the backend cuda" in text["cuda"]
    assert "holds no module of the backend vulkan" in text["vulkan"]
    assert "gone_away: there is no such package" in text["hip"]
    assert "RuntimeError: must not be imported" in text["sycl"]
    assert text["musa"]
