"""The wheel for others: installed without a compiler, and run on CPUs older than this one.

It takes long to build, so it is not built here: `make test-wheel` builds it and names it in PYSPEC_TEST_WHEEL. The
older CPUs are qemu's; without qemu-x86_64 those tests are skipped.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("build_support.config")
from build_support.extensions import KERNELS

WHEEL = os.environ.get("PYSPEC_TEST_WHEEL", "")
SMOKE = Path(__file__).with_name("smoke.py")

pytestmark = [
    pytest.mark.packaging,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not WHEEL, reason="PYSPEC_TEST_WHEEL names no wheel (make test-wheel builds one)"),
]

on_x86_linux = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="CPU variants of x86-64, on Linux"
)

# By what ggml calls them: the oldest first. Those with AMX are left out on purpose.
VARIANTS = {
    "x64", "sse42", "sandybridge", "ivybridge", "piledriver", "haswell", "alderlake", "skylakex", "cannonlake",
    "cascadelake", "cooperlake", "icelake", "zen4",
}  # fmt: skip


@pytest.fixture(scope="module")
def wheel() -> Path:
    path = Path(WHEEL).resolve()
    assert path.is_file(), path
    return path


@pytest.fixture(scope="module")
def clean_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment without a compiler, and without anything of this source tree."""
    tools = tmp_path_factory.mktemp("bin")
    for name in ("sh", "uname", "ldd", "ldconfig"):  # what numpy and pip may ask
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    keep = ("PIP_", "HOME", "LANG", "TMP", "SSL_", "http", "HTTP", "no_proxy", "NO_PROXY", "REQUESTS")
    env = {name: value for name, value in os.environ.items() if name.startswith(keep)}
    return env | {"PATH": str(tools), "CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}


@pytest.fixture(scope="module")
def python(wheel: Path, clean_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel and its requirements, all installed as wheels."""
    folder = tmp_path_factory.mktemp("clean") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    assert shutil.which("cc", path=clean_env["PATH"]) is None
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--only-binary",
        ":all:",
        str(wheel),
    ]
    result = subprocess.run(command, env=clean_env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return python


@pytest.fixture(scope="module")
def models(tiny: Callable[..., str]) -> list[str]:
    return [tiny("target-llama"), tiny("draft-llama")]


def smoke(python: Path, models: list[str], env: dict[str, str], cwd: Path, *before: str) -> dict[str, Any]:
    result = subprocess.run(
        [*before, str(python), str(SMOKE), *models],
        env=env | {"PYTHONFAULTHANDLER": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert result.returncode == 0, f"{result.returncode}\n{result.stdout}\n{result.stderr[-4000:]}"
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert report["n_tokens"] > 0
    assert Path(report["file"]).is_relative_to(python.parents[1]), "the source tree was imported"
    return report


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@on_x86_linux
def test_all_variants_but_amx_are_in_it(wheel: Path) -> None:
    found = {match.group(1) for name in names(wheel) if (match := re.search(r"libpyspec-ggml-cpu-(\w+)\.so$", name))}
    assert found == VARIANTS


def test_tags(wheel: Path) -> None:
    """One wheel for all later Pythons, on a platform that other Linuxes have."""
    _, _, python, abi, platforms = wheel.stem.split("-")
    if sys.version_info >= (3, 11):
        assert (python, abi) == ("cp311", "abi3")
        extensions = [name for name in names(wheel) if name.endswith(".so") and "/lib/" not in name]
        assert {Path(name).name.split(".")[0] for name in extensions} == {*KERNELS, "_llama"}
        assert all(name.endswith(".abi3.so") for name in extensions)
    if sys.platform == "linux":
        assert platforms.startswith("manylinux"), platforms


@pytest.mark.skipif(sys.platform != "linux", reason="auditwheel is for Linux")
def test_auditwheel_finds_nothing(wheel: Path) -> None:
    pytest.importorskip("auditwheel", reason="needs auditwheel (pip install -e '.[wheel]')")
    show = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True, check=True
    ).stdout
    flat = " ".join(show.split())
    assert re.search(r'is consistent with the following platform tag: "manylinux_2_\d+', flat), show
    assert ".libs/" not in " ".join(names(wheel)), "a library of this machine was put in"


def test_only_the_stable_abi_is_used(wheel: Path) -> None:
    pytest.importorskip("abi3audit", reason="needs abi3audit (pip install -e '.[wheel]')")
    if "-abi3-" not in wheel.name:
        pytest.skip("a wheel for one Python")
    result = subprocess.run(
        [sys.executable, "-m", "abi3audit", "--strict", str(wheel)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_it_works_where_no_compiler_is(
    python: Path, models: list[str], clean_env: dict[str, str], tmp_path: Path
) -> None:
    report = smoke(python, models, clean_env, tmp_path)
    if sys.platform == "linux" and platform.machine() == "x86_64":
        assert re.fullmatch(r"libpyspec-ggml-cpu-\w+\.so", report["cpu"])
        reasons = [reason for name, reason in report["not_loaded"].items() if "ggml-cpu-" in name]
        assert len(reasons) == len(VARIANTS) - 1
        assert all("suits this machine better" in r or "this machine lacks" in r for r in reasons), reasons


@pytest.fixture(scope="module")
def qemu() -> str:
    found = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    if found is None:
        pytest.skip("needs qemu-x86_64 (Debian: apt install qemu-user)")
    return found


@on_x86_linux
@pytest.mark.parametrize(
    ("cpu", "variant"),
    [
        ("Nehalem", "sse42"),  # x86-64-v2 and nothing more: the oldest that numpy runs on
        ("SandyBridge", "sandybridge"),
        ("IvyBridge", "ivybridge"),
        ("Opteron_G5", "piledriver"),
        ("Haswell", "haswell"),
        ("Haswell,-xsave", "sse42"),  # AVX2 in the CPU, but the operating system does not save its registers
    ],
)
def test_it_works_on_an_older_cpu(
    python: Path, models: list[str], clean_env: dict[str, str], tmp_path: Path, qemu: str, cpu: str, variant: str
) -> None:
    """Every variant is opened to ask for its score, also those that this CPU cannot run."""
    report = smoke(python, models, clean_env, tmp_path, qemu, "-cpu", cpu)
    assert report["cpu"] == f"libpyspec-ggml-cpu-{variant}.so"


@on_x86_linux
def test_a_variant_for_a_newer_cpu_would_fail(
    python: Path, models: list[str], clean_env: dict[str, str], tmp_path: Path, qemu: str
) -> None:
    """What the emulation is worth: the same CPU with the wrong variant ends at an illegal instruction."""
    copy = tmp_path / "env"
    shutil.copytree(python.parents[1], copy, symlinks=True)
    (lib,) = copy.glob("lib/python3.*/site-packages/pyspec/backends/lib")
    haswell = (lib / "libpyspec-ggml-cpu-haswell.so").read_bytes()
    for path in lib.glob("libpyspec-ggml-cpu-*"):
        path.unlink()
    (lib / "libpyspec-ggml-cpu.so").write_bytes(haswell.replace(b"ggml_backend_score", b"ggml_backend_scorn"))
    code = "import pyspec, sys; pyspec.LLM(sys.argv[1], speculation='off', n_threads=1, n_ctx=64).generate('a b c')"
    command = [qemu, "-cpu", "Nehalem", str(copy / "bin" / "python"), "-c", code, models[0]]
    result = subprocess.run(
        command, env=clean_env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode in (-4, 132), f"{result.returncode}\n{result.stderr[-2000:]}"
