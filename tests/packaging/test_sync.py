"""The pinned source: what is accepted, what is refused, and what a failed fetch says."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILES = {"LICENSE": b"free\n", "src/a.cpp": b"int a;\n", "ggml/src/b.c": b"int b;\n", "tools/server.cpp": b"no\n"}
KEEP = ("LICENSE", "src", "ggml")
BACKEND_THAT_FAILS = b'[build-system]\nrequires = ["scikit-build-core"]\nbuild-backend = "scikit_build_core.build"\n'


def write_tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_sdist(path: Path, extra: dict[str, bytes] | None = None) -> Path:
    """Write an sdist shaped like the pinned one: a package with a llama.cpp tree inside."""
    members = {f"vendor/llama.cpp/{name}": data for name, data in FILES.items()}
    members |= {"pyproject.toml": BACKEND_THAT_FAILS, "PKG-INFO": b"Metadata-Version: 2.1\nName: x\nVersion: 1\n"}
    members |= extra or {}
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(f"tiny_upstream-1.0/{name}")
            info.size, info.mtime = len(data), 1_700_000_000
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "tree", {name: data for name, data in FILES.items() if not name.startswith("tools")})


@pytest.fixture
def pin(sync: ModuleType, tree: Path, tmp_path: Path) -> Any:
    (tmp_path / "index").mkdir(exist_ok=True)
    sdist = write_sdist(tmp_path / "index" / "tiny_upstream-1.0.tar.gz")
    return sync.Pin(
        package="tiny-upstream",
        version="1.0",
        sha256=sync.file_sha256(sdist),
        size_bytes=sdist.stat().st_size,
        subdir="vendor/llama.cpp",
        llama_commit="abc",
        ggml_version="1",
        keep=KEEP,
        tree_sha256=sync.tree_sha256(tree),
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local folder as pip's only source of packages, and an empty cache folder."""
    folder = tmp_path / "index"
    folder.mkdir(exist_ok=True)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PYSPEC_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def quiet(line: str) -> None:
    assert "\n" not in line


# --- PIN.toml ---


def test_pin_file_reads_as_toml_does(sync: ModuleType) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML parser to compare with")
    expected = tomllib.loads(sync.PIN_FILE.read_text(encoding="utf-8"))
    found = dataclasses.asdict(sync.read_pin())
    assert found == expected | {"keep": tuple(expected["keep"])}


def test_pin_file_is_complete(sync: ModuleType) -> None:
    pin = sync.read_pin()
    assert all(len(value) == 64 and set(value) <= set("0123456789abcdef") for value in (pin.sha256, pin.tree_sha256))
    assert re.fullmatch(r"[a-z0-9_]+-[0-9.]+\.tar\.gz", pin.archive_name)
    assert re.fullmatch(r"[0-9a-f]{7,40}", pin.llama_commit)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('package = "x"\nversion = 1.5\n', "line 2 cannot be read"),
        ('package = "x"\n', "missing or an unknown key"),
        ('colour = "red"\n', "missing or an unknown key"),
    ],
)
def test_a_damaged_pin_file_is_refused(sync: ModuleType, text: str, message: str) -> None:
    with pytest.raises(sync.SyncError, match=message):
        sync.parse_pin(text)


# --- the tree ---


def test_the_hash_is_over_names_and_contents(sync: ModuleType, tmp_path: Path) -> None:
    write_tree(tmp_path, {"b": b"2", "a/c": b"1"})
    line = "{}  {}\n".format
    text = line(hashlib.sha256(b"1").hexdigest(), "a/c") + line(hashlib.sha256(b"2").hexdigest(), "b")
    assert sync.tree_sha256(tmp_path) == hashlib.sha256(text.encode()).hexdigest()


def test_the_right_tree_is_accepted_without_a_fetch(
    sync: ModuleType, pin: Any, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "fetch_archive", lambda *_: pytest.fail("nothing to fetch"))
    assert sync.sync(pin, tree, say=quiet) == tree


def edit(tree: Path) -> None:
    (tree / "src" / "a.cpp").write_bytes(b"int A;\n")


def add(tree: Path) -> None:
    (tree / "src" / "extra.cpp").write_bytes(b"")


def remove(tree: Path) -> None:
    (tree / "LICENSE").unlink()


def rename(tree: Path) -> None:
    (tree / "LICENSE").rename(tree / "LICENCE")


@pytest.mark.parametrize("tamper", [edit, add, remove, rename])
def test_a_changed_tree_is_refused_and_left_alone(sync: ModuleType, pin: Any, tree: Path, tamper: Any) -> None:
    tamper(tree)
    before = sync.tree_sha256(tree)
    with pytest.raises(sync.SyncError, match="not the pinned one") as caught:
        sync.sync(pin, tree, say=quiet)
    assert pin.tree_sha256 in str(caught.value)
    assert "sync.py --force" in str(caught.value)
    assert "PYSPEC_LLAMA_SRC" in str(caught.value)
    assert sync.tree_sha256(tree) == before


def test_the_tree_here_is_the_pinned_one(sync: ModuleType) -> None:
    if not sync.TREE_DIR.is_dir():
        pytest.skip("vendor/ggml/llama.cpp is not there: built with PYSPEC_LLAMA_SRC")
    pin = sync.read_pin()
    sync.check_tree(pin)
    text = (sync.TREE_DIR / "ggml" / "CMakeLists.txt").read_text(encoding="utf-8")
    major, minor, patch = pin.ggml_version.split(".")
    for name, value in (("MAJOR", major), ("MINOR", minor), ("PATCH", patch)):
        assert f"set(GGML_VERSION_{name} {value})" in text


# --- fetching ---


def test_a_fetch_keeps_what_the_pin_names(
    sync: ModuleType, pin: Any, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also: the upstream build backend is not run, for it is not installed here and pip cannot get it."""
    # Settings of the user's that newer pips refuse, or that would forbid the one version wanted.
    (tmp_path / "constraint.txt").write_text("tiny-upstream<1\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraint.txt"))
    monkeypatch.setenv("PIP_BUILD_CONSTRAINT", str(tmp_path / "constraint.txt"))
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    said: list[str] = []
    root = sync.sync(pin, tmp_path / "new", say=said.append)
    assert sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()) == [
        "LICENSE",
        "ggml/src/b.c",
        "src/a.cpp",
    ]
    assert any("fetching tiny-upstream 1.0" in line for line in said)
    assert (tmp_path / "cache" / pin.archive_name).is_file()
    assert not list(tmp_path.glob(".unpack-*"))


def test_a_second_clone_uses_the_cache(sync: ModuleType, pin: Any, index: Path, tmp_path: Path) -> None:
    sync.sync(pin, tmp_path / "one", say=quiet)
    shutil.rmtree(index)
    said: list[str] = []
    sync.sync(pin, tmp_path / "two", say=said.append)
    assert any("using the cached" in line for line in said)


def test_a_damaged_cache_is_not_used(sync: ModuleType, pin: Any, index: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / pin.archive_name).write_bytes(b"junk")
    said: list[str] = []
    sync.sync(pin, tmp_path / "new", say=said.append)
    assert any("wrong hash" in line for line in said)
    assert sync.file_sha256(tmp_path / "cache" / pin.archive_name) == pin.sha256


def test_force_replaces_a_changed_tree(sync: ModuleType, pin: Any, tree: Path, index: Path) -> None:
    edit(tree)
    sync.sync(pin, tree, force=True, say=quiet)
    sync.check_tree(pin, tree)


def test_a_cache_folder_that_cannot_be_made_is_no_obstacle(
    sync: ModuleType, pin: Any, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("PYSPEC_CACHE_DIR", str(tmp_path / "file" / "below"))
    sync.sync(pin, tmp_path / "new", say=quiet)
    sync.check_tree(pin, tmp_path / "new")


def test_an_archive_with_another_hash_is_refused(sync: ModuleType, pin: Any, index: Path, tmp_path: Path) -> None:
    write_sdist(index / "tiny_upstream-1.0.tar.gz", {"vendor/llama.cpp/src/evil.cpp": b""})
    with pytest.raises(sync.SyncError, match=r"another hash than PIN\.toml says"):
        sync.sync(pin, tmp_path / "new", say=quiet)
    assert not (tmp_path / "new").exists()


def test_an_archive_whose_tree_has_another_hash_is_refused(
    sync: ModuleType, pin: Any, index: Path, tmp_path: Path
) -> None:
    pin = dataclasses.replace(pin, tree_sha256="0" * 64)
    with pytest.raises(sync.SyncError, match="not the pinned one"):
        sync.sync(pin, tmp_path / "new", say=quiet)
    assert not (tmp_path / "new").exists()


def test_a_missing_release_is_one_readable_message(sync: ModuleType, pin: Any, index: Path, tmp_path: Path) -> None:
    shutil.rmtree(index)
    index.mkdir()
    with pytest.raises(sync.SyncError, match=r"could not fetch tiny-upstream==1\.0") as caught:
        sync.sync(pin, tmp_path / "new", say=quiet)
    assert "PYSPEC_LLAMA_SRC" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_no_network_is_named(sync: ModuleType, pin: Any, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens on the discard port
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(sync.SyncError, match="could not be reached"):
        sync.sync(pin, index / "new", say=quiet)


def test_no_pip_is_named(sync: ModuleType, tmp_path: Path) -> None:
    """The script itself, run by a Python that has no pip."""
    venv.create(tmp_path / "env", with_pip=False)
    script_dir = tmp_path / "vendor" / "ggml"
    script_dir.mkdir(parents=True)
    for name in ("sync.py", "PIN.toml"):
        shutil.copy(sync.HERE / name, script_dir / name)
    python = tmp_path / "env" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    env = os.environ | {"PYSPEC_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": ""}
    run = subprocess.run([python, script_dir / "sync.py"], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    pin = sync.read_pin()
    assert run.stderr.startswith(f"error: could not fetch {pin.package}=={pin.version}: ")
    assert "has no pip" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("name", ["vendor/llama.cpp/../../escape", "vendor/llama.cpp//etc/passwd"])
def test_an_archive_cannot_write_outside(sync: ModuleType, pin: Any, tmp_path: Path, name: str) -> None:
    archive = write_sdist(tmp_path / "evil.tar.gz", {name: b""})
    with pytest.raises(sync.SyncError, match="unsafe path"):
        sync.extract(pin, archive, tmp_path / "out", None)


def test_all_tools_on_request(sync: ModuleType, pin: Any, index: Path, tmp_path: Path) -> None:
    sync.unpack_tools(tmp_path / "all", pin, say=quiet)
    assert (tmp_path / "all" / "tools" / "server.cpp").is_file()
    with pytest.raises(sync.SyncError, match="not empty"):
        sync.unpack_tools(tmp_path / "all", pin, say=quiet)


def test_check_says_yes_and_no(sync: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script_dir = tmp_path / "vendor" / "ggml"
    script_dir.mkdir(parents=True)
    for name in ("sync.py", "PIN.toml"):
        shutil.copy(sync.HERE / name, script_dir / name)
    run = subprocess.run(
        [sys.executable, script_dir / "sync.py", "--check"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "is not there" in run.stderr
    if sync.TREE_DIR.is_dir():
        assert sync.main(["--check"]) == 0
        assert "the pinned tree is there" in capsys.readouterr().out
