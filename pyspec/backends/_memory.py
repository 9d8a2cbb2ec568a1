"""Host memory: how much there is, and whether a model file is mapped into it or read into huge pages.

Each pass reads all weights. A mapped file lies in pages of 4 KiB, and to find each of them takes time: in a virtual
machine a pass of one thread over 270 MB was measured to take 1.4 to 1.5 times as long as over the same weights in huge
pages (docs/performance.md).
"""

from __future__ import annotations

import os
import sys

from ..config import ModelParams
from ._gguf import split_paths
from ._select import devices_in_use

__all__ = ["available_bytes", "has_huge_pages", "is_mapped"]

_THP = "/sys/kernel/mm/transparent_hugepage/enabled"
#: A file that takes more of the available memory than this is mapped: the system can drop mapped pages again.
_SHARE = 1 / 3


def available_bytes() -> int | None:
    """Memory this process can still get: the system's, cut to the cgroup's limit; None if unknown."""
    free: int | None = None
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    free = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    for limit_path, usage_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit_path) as f_limit, open(usage_path) as f_usage:
                left = int(f_limit.read()) - int(f_usage.read())
        except (OSError, ValueError):
            continue
        free = left if free is None else min(free, left)
    return free


def has_huge_pages() -> bool:
    """Whether our native libraries get huge pages from this system (build_support/huge_pages.c)."""
    if not sys.platform.startswith("linux") or os.sysconf("SC_PAGE_SIZE") != 4096:
        return False
    try:
        with open(_THP) as f:
            setting = f.read()
    except OSError:
        return False
    return "[always]" in setting or "[madvise]" in setting


def is_mapped(path: str, params: ModelParams) -> bool:
    """Whether the file is mapped: as ``use_mmap`` says; None: unless its weights will lie in huge pages of host memory.

    Raises:
        BackendNotFoundError, ConfigError: as :func:`pyspec.backends.devices_in_use`.
    """
    if params.use_mmap is not None:
        return params.use_mmap
    if params.vocab_only or not has_huge_pages() or devices_in_use(params):
        return True
    available = available_bytes()
    try:
        size = sum(os.path.getsize(part) for part in split_paths(path))
    except OSError:
        return True
    return available is None or size > available * _SHARE
