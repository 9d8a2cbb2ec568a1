"""How many CPUs have nothing to do, as the system counts it."""

from __future__ import annotations

import os
import sys

__all__ = ["IdleCpus"]

_STAT = "/proc/stat"


class IdleCpus:
    """Idle CPUs among those that this process may use, from one call to the next.

    Linux only (``/proc/stat``, in ticks of 10 ms): elsewhere, and where the file cannot be read, the answer is None.

    Args:
        path: read instead of ``/proc/stat``.
    """

    def __init__(self, path: str = _STAT) -> None:
        self._path = path
        self._last = self._read()

    @property
    def works(self) -> bool:
        """Whether there is an answer on this system."""
        return self._last is not None

    def __call__(self) -> float | None:
        """CPUs that were idle on average since the call before; None: unknown, or nothing was counted in between."""
        last, self._last = self._last, self._read()
        if last is None or self._last is None:
            return None
        total = self._last[1] - last[1]
        return self._last[2] * (self._last[0] - last[0]) / total if total > 0 else None

    def _read(self) -> tuple[int, int, int] | None:
        """Ticks that the CPUs were idle, all their ticks, and how many CPUs these are."""
        if not sys.platform.startswith("linux"):
            return None
        try:
            mine = {f"cpu{i}" for i in os.sched_getaffinity(0)}
            idle = total = n = 0
            with open(self._path, encoding="ascii") as file:
                for line in file:
                    if not line.startswith("cpu"):
                        break
                    name, *fields = line.split()
                    if name in mine:
                        # user nice system idle iowait irq softirq steal; the guests' share is in the first two
                        ticks = [int(field) for field in fields[:8]]
                        idle += ticks[3] + ticks[4]
                        total += sum(ticks)
                        n += 1
        except (OSError, ValueError, IndexError):
            return None
        return (idle, total, n) if n else None
