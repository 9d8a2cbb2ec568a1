#!/usr/bin/env python3
"""Fetch the pinned llama.cpp source tree into ``vendor/ggml/llama.cpp``.

    python vendor/ggml/sync.py                  fetch unless the right tree is there
    python vendor/ggml/sync.py --check          only say whether the right tree is there
    python vendor/ggml/sync.py --force          replace whatever is there
    python vendor/ggml/sync.py --with-tools DIR unpack all of llama.cpp (with its tools) to DIR, for peer benchmarks

Standard library only, Python 3.10 or newer: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

HERE = Path(__file__).resolve().parent
PIN_FILE = HERE / "PIN.toml"
TREE_DIR = HERE / "llama.cpp"

# pip asks an sdist's build backend for metadata before it hands the file over. This stand-in answers from the pin, so
# that neither the upstream backend nor its requirements are fetched and run just to obtain an archive.
_STAND_IN_BACKEND = """
import os


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    name, version = os.environ["PYSPEC_SYNC_NAME"], os.environ["PYSPEC_SYNC_VERSION"]
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    os.makedirs(os.path.join(metadata_directory, folder), exist_ok=True)
    with open(os.path.join(metadata_directory, folder, "METADATA"), "w", encoding="utf-8") as out:
        out.write(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return folder
"""


class SyncError(RuntimeError):
    """The tree could not be provided; the message says what to do."""


@dataclass(frozen=True)
class Pin:
    """What ``PIN.toml`` says."""

    package: str
    version: str
    sha256: str
    size_bytes: int
    subdir: str
    llama_commit: str
    ggml_version: str
    keep: tuple[str, ...]
    tree_sha256: str

    @property
    def archive_name(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}.tar.gz"


def parse_pin(text: str) -> Pin:
    """Parse the text of ``PIN.toml``.

    Only the part of TOML the file uses (strings, integers, one-line lists of strings): Python 3.10 has no TOML parser.

    Raises:
        SyncError: a line that cannot be read, or a missing or unknown key.
    """
    values: dict[str, object] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r'([a-z0-9_]+)\s*=\s*("[^"\\]*"|\d+|\[(?:\s*"[^"\\]*"\s*,?)*\s*\])', line)
        if match is None:
            raise SyncError(f"PIN.toml line {number} cannot be read: {line!r}")
        key, raw = match.groups()
        if raw.startswith('"'):
            values[key] = raw[1:-1]
        elif raw.startswith("["):
            values[key] = tuple(re.findall(r'"([^"]*)"', raw))
        else:
            values[key] = int(raw)
    try:
        return Pin(**values)  # type: ignore[arg-type]
    except TypeError as exc:
        raise SyncError(f"PIN.toml has a missing or an unknown key: {exc}") from None


def read_pin(path: Path = PIN_FILE) -> Pin:
    """Read ``PIN.toml``."""
    try:
        return parse_pin(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise SyncError(f"cannot read {path}: {exc.strerror}") from None


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def tree_sha256(root: Path) -> str:
    """Return the hash of a source tree: names and contents of all regular files, nothing else."""
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{file_sha256(root / name)}  {name}\n".encode())
    return digest.hexdigest()


def check_tree(pin: Pin, root: Path = TREE_DIR) -> None:
    """Raise :class:`SyncError` unless ``root`` is exactly the pinned tree."""
    if not root.is_dir():
        raise SyncError(f"the llama.cpp source tree is not there ({root}). Run: python vendor/ggml/sync.py")
    found = tree_sha256(root)
    if found != pin.tree_sha256:
        raise SyncError(
            f"the source tree in {root} is not the pinned one:\n"
            f"  pinned tree hash {pin.tree_sha256}\n"
            f"  found            {found}\n"
            "Somebody changed, added or removed a file there. To get the pinned tree back: "
            "python vendor/ggml/sync.py --force\n"
            "To build a llama.cpp checkout of your own instead: set PYSPEC_LLAMA_SRC to its folder."
        )


def cache_dir() -> Path:
    """Return the folder for downloads: ``PYSPEC_CACHE_DIR``, else ``pyspec`` in the user's cache folder."""
    if override := os.environ.get("PYSPEC_CACHE_DIR"):
        return Path(override)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pyspec"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "pyspec" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyspec"


def _largest_file(folder: Path) -> int:
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except OSError:  # pip moves its files while we look
                continue
    return largest


def pip_download(
    requirement: str,
    sha256: str,
    dest: Path,
    size_bytes: int,
    *,
    sdist: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Fetch one file of the package index into ``dest`` with pip, its hash checked by pip and again here.

    Args:
        requirement: ``name==version``.
        sha256: of the file.
        dest: an existing folder.
        size_bytes: expected size, for the progress lines only.
        sdist: take the source distribution, else the wheel.
        say: gets the progress lines.

    Raises:
        SyncError: no pip, no network, no such release, wrong hash.
    """
    name, _, version = requirement.partition("==")
    with tempfile.TemporaryDirectory(prefix="pyspec-fetch-") as tmp_name:
        tmp = Path(tmp_name)
        (tmp / "out").mkdir()
        requirements = tmp / "requirements.txt"
        requirements.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--progress-bar", "off"]
        env = dict(os.environ, TMPDIR=tmp_name, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_REQUIRE_VIRTUALENV="0")
        # A constraint is a second opinion on versions; here the hash alone decides.
        env.update(PIP_CONSTRAINT=os.devnull)
        env.pop("PIP_BUILD_CONSTRAINT", None)  # newer pips refuse it together with --no-build-isolation
        if sdist:
            backend = tmp / "backend" / "scikit_build_core"
            backend.mkdir(parents=True)
            (backend / "__init__.py").write_text("", encoding="utf-8")
            (backend / "build.py").write_text(_STAND_IN_BACKEND, encoding="utf-8")
            paths = [str(backend.parent), *filter(None, [env.get("PYTHONPATH")])]
            env.update(PYTHONPATH=os.pathsep.join(paths), PYSPEC_SYNC_NAME=name, PYSPEC_SYNC_VERSION=version)
            command += ["--no-binary", name, "--no-build-isolation"]
        else:
            command += ["--only-binary", name]
        command += ["--require-hashes", "-r", str(requirements), "-d", str(tmp / "out")]

        done = threading.Event()

        def progress() -> None:
            last = -1
            while not done.wait(2.0):
                got = min(_largest_file(tmp), size_bytes)
                if got // 1_000_000 != last:
                    last = got // 1_000_000
                    say(f"  {requirement}: {last} of {size_bytes // 1_000_000} MB")

        watcher = threading.Thread(target=progress, daemon=True)
        watcher.start()
        try:
            result = subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as exc:
            raise SyncError(f"cannot start {sys.executable} -m pip: {exc}") from None
        finally:
            done.set()
            watcher.join()
        if result.returncode != 0:
            raise SyncError(_explain_pip_failure(requirement, result.stdout))
        files = list((tmp / "out").iterdir())
        if len(files) != 1 or file_sha256(files[0]) != sha256:
            names = ", ".join(path.name for path in files)
            raise SyncError(f"pip answered {names} for {requirement}, not the file with sha256 {sha256}")
        target = dest / files[0].name
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        shutil.copyfile(files[0], partial)
        os.replace(partial, target)  # another process may be reading the old one
        return target


def _explain_pip_failure(requirement: str, output: str) -> str:
    lowered = output.lower()
    offline = (
        "Or, without a network: build from pyspec's sdist, which contains the source, or set PYSPEC_LLAMA_SRC to a "
        "llama.cpp checkout."
    )
    if "no module named pip" in lowered:
        why = (
            f"{sys.executable} has no pip. Install it (Debian: apt install python3-pip python3-venv; "
            "else: python -m ensurepip) and try again."
        )
    elif "do not match the hashes" in lowered:
        why = "the file the package index gave has another hash than PIN.toml says. It was not used."
    elif any(mark in lowered for mark in ("connection", "timed out", "name resolution", "network", "proxy", "ssl")):
        why = "the package index could not be reached. Check the network and pip's settings (pip config list)."
    else:
        why = "the package index does not offer it, or pip's settings forbid it (pip config list)."
    tail = "\n".join(f"  pip: {line}" for line in output.strip().splitlines()[-4:])
    return f"could not fetch {requirement}: {why}\n{offline}\n{tail}"


def fetch_archive(pin: Pin, say: Callable[[str], None] = print) -> tuple[Path, Callable[[], None]]:
    """Return the pinned archive and a function that removes it if it could not be kept in the cache."""
    folder = cache_dir()
    cached = folder / pin.archive_name
    if cached.is_file():
        if file_sha256(cached) == pin.sha256:
            say(f"using the cached {cached}")
            return cached, lambda: None
        say(f"the cached {cached} has a wrong hash: fetching it again")
    say(f"fetching {pin.package} {pin.version} ({pin.size_bytes // 1_000_000} MB) for its llama.cpp source")
    cleanup: Callable[[], None] = lambda: None  # noqa: E731
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(folder)
    except OSError:
        temporary = tempfile.TemporaryDirectory(prefix="pyspec-archive-")
        folder, cleanup = Path(temporary.name), temporary.cleanup
    path = pip_download(f"{pin.package}=={pin.version}", pin.sha256, folder, pin.size_bytes, sdist=True, say=say)
    return path, cleanup


def _members(
    archive: tarfile.TarFile, prefix: str, keep: tuple[str, ...] | None
) -> Iterator[tuple[tarfile.TarInfo, str]]:
    for member in archive:
        if not member.isfile() or not member.name.startswith(prefix):
            continue
        name = member.name[len(prefix) :]
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/"):
            raise SyncError(f"the archive holds an unsafe path: {member.name!r}")
        if keep is None or parts[0] in keep:
            yield member, name


def extract(pin: Pin, archive_path: Path, dest: Path, keep: tuple[str, ...] | None) -> int:
    """Unpack the llama.cpp part of the archive into ``dest`` and return the number of files."""
    prefix = f"{pin.archive_name.removesuffix('.tar.gz')}/{pin.subdir}/"
    count = 0
    with tarfile.open(archive_path, "r:gz") as archive:
        for member, name in _members(archive, prefix, keep):
            source = archive.extractfile(member)
            if source is None:
                continue
            target = dest / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with source, target.open("wb") as out:
                shutil.copyfileobj(source, out)
            # The archive's time: an unchanged tree fetched again must not look newer than what was built of it.
            os.utime(target, (member.mtime, member.mtime))
            if member.mode & 0o111:
                target.chmod(0o755)
            count += 1
    if count == 0:
        raise SyncError(f"{archive_path.name} holds nothing under {prefix}")
    return count


def sync(
    pin: Pin | None = None, root: Path = TREE_DIR, *, force: bool = False, say: Callable[[str], None] = print
) -> Path:
    """Make sure that ``root`` is the pinned tree and return it.

    Raises:
        SyncError: a tree with another hash is there and ``force`` is off, or the fetch failed.
    """
    pin = pin or read_pin()
    if root.is_dir() and not force:
        check_tree(pin, root)
        return root
    archive, cleanup = fetch_archive(pin, say)
    try:
        say("unpacking")
        # Beside the target, so that the last step is one rename: a killed run leaves no half tree.
        with tempfile.TemporaryDirectory(prefix=".unpack-", dir=root.parent) as tmp:
            fresh = Path(tmp) / "tree"
            count = extract(pin, archive, fresh, pin.keep)
            check_tree(pin, fresh)
            if root.exists():
                shutil.rmtree(root)
            try:
                os.replace(fresh, root)
            except OSError:
                check_tree(pin, root)  # another process was faster; fine if its tree is the right one
    finally:
        cleanup()
    say(f"{root.name}: {count} files of llama.cpp {pin.llama_commit}, tree hash {pin.tree_sha256[:16]}")
    return root


def unpack_tools(dest: Path, pin: Pin | None = None, say: Callable[[str], None] = print) -> Path:
    """Unpack the whole pinned llama.cpp, with its command-line tools, into ``dest`` (new or empty)."""
    pin = pin or read_pin()
    if dest.exists() and any(dest.iterdir()):
        raise SyncError(f"{dest} is not empty; name a new folder")
    archive, cleanup = fetch_archive(pin, say)
    try:
        count = extract(pin, archive, dest, None)
    finally:
        cleanup()
    say(f"{dest}: {count} files of llama.cpp {pin.llama_commit}")
    return dest


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="only say whether the right tree is there")
    action.add_argument("--force", action="store_true", help="replace whatever is there")
    action.add_argument("--with-tools", metavar="DIR", type=Path, help="unpack all of llama.cpp to DIR")
    options = parser.parse_args(argv)

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        if options.check:
            check_tree(read_pin())
            say("the pinned tree is there")
        elif options.with_tools:
            unpack_tools(options.with_tools, say=say)
        else:
            sync(force=options.force, say=say)
    except SyncError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
