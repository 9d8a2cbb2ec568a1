"""Look at a model file before libllama opens it: what can be told cheaply and clearly."""

from __future__ import annotations

import errno
import os
import re
import stat
import struct

from ..errors import ModelLoadError

__all__ = ["check_file", "split_paths"]

_SPLIT = re.compile(r"^(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)


def _why(exc: OSError) -> str:
    if exc.errno == errno.ENAMETOOLONG:
        return "the path is too long for this system"
    return exc.strerror or str(exc)


def check_file(path: str | os.PathLike[str]) -> str:
    """Check that ``path`` is a readable regular file that starts like GGUF 2 or 3.

    Returns:
        The path as text.

    Raises:
        ModelLoadError: it is not; says how.
    """
    text = os.fsdecode(path)
    if "\0" in text:
        raise ModelLoadError(f"model path {text!r} holds a NUL character")
    try:
        status = os.stat(text)
        if stat.S_ISDIR(status.st_mode):
            raise ModelLoadError(f"model path {text!r} is a directory; a .gguf file is needed")
        if not stat.S_ISREG(status.st_mode):
            raise ModelLoadError(f"model path {text!r} is not a regular file")
        with open(text, "rb") as file:
            head = file.read(24)
    except ModelLoadError:
        raise
    except (OSError, ValueError) as exc:
        why = _why(exc) if isinstance(exc, OSError) else str(exc)
        raise ModelLoadError(f"model file {_short(text)} cannot be read: {why}") from exc
    if not head:
        raise ModelLoadError(f"model file {text!r} is empty")
    if head[:4] != b"GGUF":
        raise ModelLoadError(f"{text!r} is not a GGUF file (it starts with {head[:4]!r})")
    if len(head) < 24:
        raise ModelLoadError(f"GGUF file {text!r} is cut short: {status.st_size} bytes, the header alone has 24")
    version = struct.unpack("<I", head[4:8])[0]
    if version & 0xFFFF == 0:
        raise ModelLoadError(f"GGUF file {text!r} has the other byte order")
    if version not in (2, 3):
        raise ModelLoadError(f"GGUF file {text!r} has version {version}; 2 and 3 can be read")
    return text


def split_paths(path: str) -> list[str]:
    """All parts of a model split over several files, by llama.cpp's naming; just ``path`` for others."""
    match = _SPLIT.match(path)
    if match is None:
        return [path]
    count = int(match["count"])
    return [f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


def _short(text: str) -> str:
    return repr(text) if len(text) <= 300 else f"{text[:100]!r}... ({len(text)} characters)"
