"""How fast this machine runs Python just now, so that limits in microseconds mean the same on slow and busy machines.

A limit is written down for one machine; another one may take three times as long for the same work, a virtual one at
times also the same one. What scales alike is a piece of plain Python that is timed in turns with what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time_ns

#: CPU time of :func:`_work` on the machine that the limits are for (Intel Xeon, 2 cores, CPython 3.11), microseconds.
NOMINAL_US = 47.0


class _Row:
    __slots__ = ("n", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.n = 0

    def add(self, token: int, seen: dict[int, int]) -> bool:
        self.tokens.append(token)
        self.n += 1
        seen[token] = seen.get(token, 0) + 1
        return token & 7 == 0


def _work() -> int:
    """Calls, attributes, lists and dictionaries, as in the code that is measured."""
    n, seen = 0, dict[int, int]()
    for i in range(32):
        row = _Row()
        for j in range(8):
            n += row.add(i * j & 63, seen)
        n += len([t for t in row.tokens if t > 3])
    return n


def pace() -> float:
    """Time of plain Python now / on the machine of the limits: CPU time of this thread, over about a millisecond."""
    start = thread_time_ns()
    for _ in range(10):
        _work()
    return (thread_time_ns() - start) / 10_000 / NOMINAL_US


def at_pace(measure: Callable[[], float], n: int) -> list[float]:
    """``n`` measurements, each divided by the pace around it, ascending. Never above what was measured.

    The middle one is what the work costs on the machine of the limits, or less where this machine is faster.
    """
    scaled, before = [], pace()
    for _ in range(n):
        value = measure()
        after = pace()
        scaled.append(value / max(1.0, (before + after) / 2))
        before = after
    return sorted(scaled)
