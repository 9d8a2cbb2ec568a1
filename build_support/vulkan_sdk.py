"""Bring what the Vulkan backend is built and tested with onto a Debian machine.

    python -m build_support.vulkan_sdk FOLDER

Debian's packages: the shader compiler glslc, the loader, Mesa's drivers (llvmpipe is a Vulkan device on any CPU), and
the headers. Those of Debian 12 are too old, so the headers come from Debian 13: their packages are fetched with apt
from the mirror that this machine uses, checked by apt's signature and by a hash here, and unpacked into FOLDER, which
then serves as ``VULKAN_SDK``. Nothing of Debian 13 is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from build_support.config import BuildError
from build_support.native import load_sync, say

#: Installed with apt if missing. Mesa's drivers are only needed to run, not to build.
PACKAGES = ("glslc", "libvulkan1", "mesa-vulkan-drivers")
HEADER_RELEASE = "trixie"
HEADER_PACKAGES = ("libvulkan-dev", "spirv-headers")
HEADER_VERSION = "1.4.309"
#: Over the tree hashes (``vendor/ggml/sync.py``) of the folders that are kept.
HEADER_SHA256 = "1a96f71eaaa732346ecdaea90c00ca209e5373b60d7fc6490b73a90c42c6cb14"
_KEPT = ("include", "share/cmake")


def _run(command: list[str], what: str, *, folder: Path | None = None, path: str = "") -> str:
    """Run a command and return its output.

    Args:
        command: program and arguments.
        what: what it does, for the message.
        folder: to run it in.
        path: what to add to ``PATH``.

    Raises:
        BuildError: it failed; the message has its last lines.
    """
    try:
        result = subprocess.run(
            command,
            env=dict(os.environ, DEBIAN_FRONTEND="noninteractive", LC_ALL="C", PATH=os.environ.get("PATH", "") + path),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as exc:
        raise BuildError(f"{what}: cannot start {command[0]}: {exc.strerror}") from None
    if result.returncode != 0:
        lines = (result.stdout + result.stderr).strip().splitlines()[-6:]
        raise BuildError("\n".join([f"{what} failed:", *(f"  {line}" for line in lines)]))
    return result.stdout


def _installed(package: str) -> bool:
    result = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Abbrev}", package], capture_output=True, text=True, check=False
    )
    return result.returncode == 0 and result.stdout.startswith("ii")


def install_packages() -> None:
    """Install the packages that are missing.

    Raises:
        BuildError: this is no Debian or Ubuntu, the rights are missing, or apt failed.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg-query") is None:
        raise BuildError(
            "there is no apt-get here. Install a Vulkan driver, its loader, glslc, and Vulkan headers of 1.4 (or the "
            "Vulkan SDK, and set VULKAN_SDK), then: PYSPEC_BACKENDS=vulkan make build"
        )
    missing = [package for package in PACKAGES if not _installed(package)]
    if not missing:
        return
    command = ["apt-get", "-y", "-o", "DPkg::Lock::Timeout=300", "install", "--no-install-recommends", *missing]
    if os.geteuid() != 0:
        raise BuildError(f"packages are missing and only root can install them: sudo {' '.join(command)}")
    say(f"installing {' '.join(missing)}")
    _run(["apt-get", "-o", "DPkg::Lock::Timeout=300", "update"], "apt-get update")
    _run(command, "apt-get install")


def _mirror() -> str:
    """Return the address of the Debian mirror in use.

    Raises:
        BuildError: none is set up, as on another distribution.
    """
    output = _run(
        ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(COMPONENT)|$(REPO_URI)", "Created-By: Packages"],
        "asking apt for its sources",
    )
    for line in output.splitlines():
        origin, label, component, uri = line.split("|", 3)
        if (origin, label, component) == ("Debian", "Debian", "main"):
            return uri
    raise BuildError(
        f"apt has no Debian mirror to take the Vulkan headers {HEADER_VERSION} from. Install the Vulkan SDK and set "
        "VULKAN_SDK."
    )


def fetch_headers(folder: Path) -> None:
    """Unpack the headers into ``folder`` unless they are there.

    Raises:
        BuildError: they cannot be had, or are not the ones they should be.
    """
    if folder.is_dir() and _header_hash(folder) == HEADER_SHA256:
        return
    say(f"fetching the Vulkan headers {HEADER_VERSION}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pyspec-vulkan-") as name:
        scratch = Path(name)
        scratch.chmod(0o755)  # apt fetches as a user of its own
        for each in ("lists/partial", "cache/archives/partial", "debs", "fresh"):
            (scratch / each).mkdir(parents=True)
        sources = scratch / "debian.sources"
        keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
        sources.write_text(
            f"Types: deb\nURIs: {_mirror()}\nSuites: {HEADER_RELEASE}\nComponents: main\nSigned-By: {keyring}\n"
        )
        options = [
            f"Dir::Etc::SourceList={sources}",
            "Dir::Etc::SourceParts=/dev/null",
            f"Dir::State::Lists={scratch / 'lists'}",
            f"Dir::Cache={scratch / 'cache'}",
            "APT::Sandbox::User=root" if os.geteuid() == 0 else "Debug::NoLocking=1",
        ]
        apt = ["apt-get", *(part for option in options for part in ("-o", option))]
        _run([*apt, "update"], f"reading the package list of Debian {HEADER_RELEASE}")
        _run(
            [*apt, "download", *HEADER_PACKAGES],
            f"fetching {' '.join(HEADER_PACKAGES)}",
            folder=scratch / "debs",
        )
        unpacked = scratch / "unpacked"
        for package in sorted((scratch / "debs").glob("*.deb")):
            _run(["dpkg-deb", "-x", str(package), str(unpacked)], f"unpacking {package.name}")
        for each in _KEPT:
            shutil.copytree(unpacked / "usr" / each, scratch / "fresh" / each)
        found = _header_hash(scratch / "fresh")
        if found != HEADER_SHA256:
            raise BuildError(
                f"the Vulkan headers fetched have the hash {found}, not {HEADER_SHA256}: they are not "
                f"{HEADER_VERSION} as packaged by Debian {HEADER_RELEASE}. They were not used."
            )
        if folder.exists():
            shutil.rmtree(folder)
        shutil.copytree(scratch / "fresh", folder)


def _header_hash(folder: Path) -> str:
    """Return one hash over the folders of the packages, or "" if one is missing."""
    parts = [folder / name for name in _KEPT]
    if not all(part.is_dir() for part in parts):
        return ""
    hashes = [load_sync().tree_sha256(part) for part in parts]
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def link_loader(folder: Path) -> None:
    """Give the linker the name it looks for; the loader's own package has only ``libvulkan.so.1``.

    Raises:
        BuildError: there is no loader.
    """
    listing = _run(["ldconfig", "-p"], "looking for libvulkan", path=":/sbin:/usr/sbin")
    paths = re.findall(r"libvulkan\.so\.1 .*=> (\S+)", listing)
    if not paths:
        raise BuildError("the Vulkan loader libvulkan.so.1 was not found. Debian: apt install libvulkan1")
    link = folder / "lib" / "libvulkan.so"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() or os.readlink(link) != paths[0]:
        link.unlink(missing_ok=True)
        link.symlink_to(paths[0])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m build_support.vulkan_sdk", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the headers go; set VULKAN_SDK to it")
    folder = parser.parse_args(arguments).folder.resolve()
    try:
        install_packages()
        fetch_headers(folder)
        link_loader(folder)
    except BuildError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
