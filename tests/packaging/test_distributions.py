"""The sdist and the wheel: what is in them, and that the wheel works where no source is.

The native libraries of this checkout's build are handed to the wheel's build (same key, so it takes them as its own);
everything else is done as a stranger's `python -m build` would do it, without a network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

config = pytest.importorskip("build_support.config")
from build_support import native  # noqa: E402

pytest.importorskip("build", reason="needs the package build (pip install -e '.[dev]')")
pytest.importorskip("Cython", reason="needs Cython (a build requirement)")

pytestmark = [pytest.mark.packaging, pytest.mark.slow, pytest.mark.timeout(1200)]

LITTER = re.compile(
    r"__pycache__|\.py[cod]$|\.o$|\.part$|\.gguf$|_build_info|\.git(/|$)|\.(ruff|mypy|pytest)_cache|^models/"
)
LICENSES = ("LICENSE", "LICENSE-llama.cpp", "LICENSE-llamafile", "LICENSE-Apache-2.0")


def offline_env(**more: str) -> dict[str, str]:
    """The environment of a build that must not need the network or this checkout's build folder."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYSPEC_", "CMAKE_"))}
    env |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # A proxy that nobody runs: any attempt to fetch something fails at once.
    return env | {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"} | more


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    result = subprocess.run(
        [str(part) for part in command], env=env, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def sdist(root: Path, sync: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not sync.TREE_DIR.is_dir():
        pytest.skip("vendor/ggml/llama.cpp is not there: built with PYSPEC_LLAMA_SRC")
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", out, root, env=offline_env())
    (path,) = out.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        if sys.version_info >= (3, 12):
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    (inner,) = folder.iterdir()
    return inner


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel from the unpacked sdist; afterwards that folder is gone."""
    # Does nothing where this checkout is built with default options.
    build = native.build(config.BuildConfig.from_env(offline_env()))
    build_dir = tmp_path_factory.mktemp("build")
    target = build_dir / build.install_dir.parent.name
    shutil.copytree(build.install_dir, target / build.install_dir.name)
    shutil.copy2(native.stamp_file(build.install_dir), target)
    out = tmp_path_factory.mktemp("wheel")
    env = offline_env(PYSPEC_BUILD_DIR=str(build_dir))
    said = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", out, unpacked, env=env)
    assert "native libraries:" not in said, "the libraries of this checkout were not taken"
    shutil.rmtree(unpacked)
    (path,) = out.glob("*.whl")
    return path


def test_the_sdist_holds_the_pinned_tree(sdist: Path, unpacked: Path, sync: ModuleType) -> None:
    sync.check_tree(sync.read_pin(), unpacked / "vendor" / "ggml" / "llama.cpp")
    assert sdist.stat().st_size < 20e6


def test_the_sdist_holds_what_git_holds_and_no_litter(sdist: Path, root: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not [name for name in names if LITTER.search(name) or name.endswith((".so", ".dylib"))]
    assert {f"licenses/{name}" for name in LICENSES[1:]} | {"LICENSE", "vendor/ggml/PIN.toml"} <= names
    if not (root / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout: nothing to compare the sdist with")
    tracked = run("git", "-C", root, "ls-files").splitlines()
    left_out = re.compile(r"^\.|\.gguf$")  # dot files steer git and CI; models are fetched
    missing = [name for name in tracked if not left_out.search(name) and name not in names and (root / name).exists()]
    assert not missing


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"pyspec"}
    assert not [name for name in names if LITTER.search(name.replace("pyspec/_build_info.py", ""))]
    assert not [name for name in names if name.startswith("pyspec/") and name.endswith((".pyx", ".cpp", ".c"))]
    assert {"pyspec/py.typed", "pyspec/_build_info.py", "pyspec/_core.pyi", "pyspec/backends/_cdef.h"} <= set(names)
    assert {f"pyspec/prompts/{name}" for name in ("chat.txt", "code-edit.prediction.txt")} <= set(names)
    for name in LICENSES:
        assert [found for found in names if ".dist-info/licenses/" in found and found.endswith(f"/{name}")], name
    libraries = {Path(name).name.split(".")[0] for name in names if name.startswith("pyspec/backends/lib/")}
    assert {"libpyspec-llama", "libpyspec-ggml", "libpyspec-ggml-base", "libpyspec-ggml-cpu"} <= libraries
    assert re.search(r"^Name: pyspec-llm$", metadata, re.MULTILINE)
    assert re.search(r"^License-Expression: MIT$", metadata, re.MULTILINE)
    assert wheel.name.startswith(f"pyspec_llm-{re.search('^Version: (.*)$', metadata, re.MULTILINE).group(1)}-cp")  # type: ignore[union-attr]


def test_no_binary_names_a_folder_of_this_machine(
    wheel: Path, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folders = {str(root), str(tmp_path_factory.getbasetemp()), sys.prefix, sys.base_prefix, str(Path.home())}
    folders -= {"/", "/usr", "/usr/local"}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith((".so", ".dylib", "_build_info.py")):
                data = archive.read(name)
                assert not [folder for folder in folders if folder.encode() in data], name


def test_the_wheel_works_where_no_source_is(
    wheel: Path, tmp_path: Path, run_child: Callable[..., str], tiny: Callable[..., str]
) -> None:
    """Another environment; the requirements come from this one's folder, for there is no network."""
    env_dir = tmp_path / "env"
    venv.create(env_dir, with_pip=False)
    python = env_dir / ("Scripts" if os.name == "nt" else "bin") / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel]
    run(*install, env=offline_env())
    site = next(path for path in env_dir.rglob("site-packages") if path.is_dir())
    requirements = {str(Path(__import__(name).__file__ or "").parents[1]) for name in ("numpy", "cffi", "typer")}
    # Plain paths: path files inside these folders (an editable pyspec is one) are not read.
    (site / "requirements.pth").write_text("\n".join(sorted(requirements)) + "\n")
    code = """
    import sys
    import pyspec
    from pyspec import backends
    assert pyspec.__file__.startswith(sys.prefix), pyspec.__file__
    with pyspec.LLM(sys.argv[1], speculation="off", n_threads=1, n_ctx=64) as llm:
        print(len(llm.generate("a b c", max_tokens=8).tokens), backends.build_info()["ggml_commit"])
    """
    out = run_child(code, tiny("target-llama"), python=str(python), cwd=tmp_path, env={"PYTHONPATH": ""})
    n_tokens, commit = out.split()
    assert int(n_tokens) > 0
    assert commit == native.source_tree(config.BuildConfig())[1].llama_commit
    command = python.with_name("pyspec")
    shown = run(command, "devices", env=offline_env(PYTHONPATH=""), cwd=tmp_path)
    assert "CPU" in shown.upper()
