"""Backend modules that come in packages of their own (pyspec-cuda, pyspec-vulkan), and what a module belongs to.

Such a package has an entry point in the group ``pyspec.backends``: the name is the backend, the value is the package
whose folder holds the module. The package is never imported. A module shares structs with the libraries in ``lib/``, so
it has to come from the same version of pyspec; each library carries a stamp that says where it comes from.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import mmap
from dataclasses import dataclass
from pathlib import Path

from .._version import __version__
from ..errors import AbiMismatchError

__all__ = ["GROUP", "Package", "check_stamp", "mismatch", "packages", "stamp_of"]

GROUP = "pyspec.backends"

_MARK = b"pyspec-stamp:"


@dataclass(frozen=True)
class Package:
    """One entry point.

    Attributes:
        backend: the backend it offers.
        name: the distribution with its version, "pyspec-vulkan 0.1.0".
        folder: where the module is; None: it cannot be found.
        reason: why not.
    """

    backend: str
    name: str
    folder: Path | None
    reason: str = ""


def packages() -> list[Package]:
    """Return the installed packages that offer a backend module, by name; a folder that is not there has its reason."""
    found = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        name = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
        folder, reason = None, f"entry point {entry.name} = {entry.value}: there is no such package"
        try:
            spec = importlib.util.find_spec(entry.module)
            locations = list(spec.submodule_search_locations or ()) if spec is not None else []
            folder = Path(locations[0]).resolve() if locations else None
        except Exception as exc:  # a name with dots imports what is before the last one, which may do anything
            reason = f"entry point {entry.name} = {entry.value}: {type(exc).__name__}: {exc}"
        found.append(Package(entry.name.lower(), name, folder, "" if folder else reason))
    return sorted(set(found), key=lambda package: (package.name, package.backend))


def stamp_of(path: Path) -> str:
    """Return what a library's file says it belongs to, "<pyspec> <llama.cpp commit>"; "": it says nothing.

    Read from the file: a library of another version need not open at all, and asking an opened one for a symbol may
    find that of a library it depends on.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            start = data.find(_MARK)
            end = data.find(b"\0", start, start + 256) if start >= 0 else -1
            return data[start + len(_MARK) : end].decode("utf-8", "replace") if end >= 0 else ""
    except (OSError, ValueError):  # an empty file cannot be mapped
        return ""


def mismatch(path: Path, stamp: str, commit: str, package: str = "") -> AbiMismatchError:
    """Return the error for a library that does not belong to this pyspec.

    Args:
        path: the library's file.
        stamp: what it says.
        commit: the llama.cpp commit that libggml states.
        package: the package it came in, with its version; "": pyspec's own.
    """
    what = f"is of pyspec {' of llama.cpp '.join(stamp.split())}" if stamp else "says no pyspec version"
    if package:
        name = package.split()[0]
        remedy = f"Install the one that fits: python -m pip install {name}=={__version__}, or uninstall {name}."
    else:
        remedy = "Remove it, or install pyspec again: python -m pip install --force-reinstall pyspec-llm"
    return AbiMismatchError(
        f"the native library {path}{f' ({package})' if package else ''} {what}; this is pyspec {__version__} of "
        f"llama.cpp {commit}. {remedy}"
    )


def check_stamp(path: Path, commit: str, package: str = "") -> bool:
    """Compare the version a library was built for with this pyspec's; arguments as of :func:`mismatch`.

    Returns:
        False: it says nothing.

    Raises:
        AbiMismatchError: it is of another pyspec or another llama.cpp; both sides are in the message.
    """
    stamp = stamp_of(path)
    if stamp and stamp != f"{__version__} {commit}":
        raise mismatch(path, stamp, commit, package)
    return bool(stamp)
