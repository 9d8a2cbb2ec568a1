"""How many CPU threads pay at present, from the times of the passes.

The threads of a pass wait for each other at every layer, spinning. When another process takes one of their CPUs, all
wait for the one that was put aside: beside two busy processes a pass of two threads may take a second that one thread
does in 40 ms. So the count follows what is measured: passes that got several times slower than they were are tried
with fewer threads; with fewer threads, more are tried every now and then, for a pass or two, where the system says
that a CPU is idle. Whichever is faster stays.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

from .cost import PassCost

__all__ = ["ThreadGovernor"]

_S = 1_000_000_000
#: Passes this much slower than they were are worth a try with fewer threads.
_SLOW = 1.5
#: One pass that is so much slower is enough.
_SUDDEN = 3.0
#: More threads are tried where so much of a CPU is idle for each of them.
_IDLE = 0.5
#: What was the best speed is forgotten at this rate a pass: longer contexts are slower for good.
_FORGET = 0.0005
#: Passes before a number of threads is judged.
_N_JUDGE = 3
#: After so many passes fewer threads are tried once, whatever is measured: the machine may have been busy all along.
_N_FIRST = 12
#: More threads have to be faster by this much; until they are, they are tried again after these times.
_FASTER = 0.95
_UP_MIN_NS, _UP_MAX_NS = int(0.3 * _S), int(0.9 * _S)
#: A try with fewer threads that gained nothing is not repeated before.
_DOWN_MIN_NS, _DOWN_MAX_NS = _S // 2, 60 * _S


def _levels(n: int) -> list[int]:
    """Numbers of threads that are considered, falling."""
    return sorted({n, max(1, n - 1), max(1, 3 * n // 4), max(1, n // 2), max(1, n // 4), 1}, reverse=True)


class _Level:
    """A number of threads: its speed now, and its best."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self.cost = PassCost()
        self.best_ns = 0.0
        self.n = 0  # passes since it was chosen

    def add(self, n_rows: int, ns: int) -> None:
        self.n += 1
        cost = self.cost
        cost.add(n_rows, ns, n_rows == 1)
        best = self.best_ns * (1 + _FORGET)
        self.best_ns = min(best, cost.unit_ns) if best else cost.unit_ns


class ThreadGovernor:
    """Changes the number of threads between passes. Deterministic given the times.

    Args:
        n_threads: as many as there may be; the number at the start.
        apply: called with a new number, between two passes.
        clock: nanoseconds.
        idle: how many CPUs were idle since it was called last, or None (:class:`IdleCpus`). Without it more threads are
            tried whether there is a CPU for them or not.

    Attributes:
        n_changes: how often another number stayed.
    """

    def __init__(
        self,
        n_threads: int,
        apply: Callable[[int], None],
        clock: Callable[[], int] = perf_counter_ns,
        idle: Callable[[], float | None] | None = None,
    ) -> None:
        self._levels = [_Level(n) for n in _levels(n_threads)]
        self._apply = apply
        self._clock = clock
        self._idle = idle
        self._at = 0
        self._from: int | None = None  # the level that a try is compared with
        self._fresh: list[float] = []  # the try's passes
        self._limit_ns = 0.0
        self._tried_at_start = False
        self._up_ns, self._down_ns = _UP_MIN_NS, _DOWN_MIN_NS
        self._next_up = self._next_down = 0
        self.n_changes = 0

    @property
    def n_threads(self) -> int:
        """Threads of the next pass."""
        return self._levels[self._at].n_threads

    @property
    def trying(self) -> bool:
        """Whether this number is a try for a pass or two."""
        return self._from is not None

    def passed(self, n_rows: int, ns: int) -> None:
        """A pass of the target had so many rows and took so long."""
        level = self._levels[self._at]
        if self._from is not None:
            self._judge(level, n_rows, ns)
            return
        level.add(n_rows, ns)
        # the first passes of a size hold work that is done once, and its price is a guess
        known = n_rows == 1 or level.cost.curve.count(n_rows) > 2
        sudden = known and level.best_ns > 0 and ns > _SUDDEN * level.best_ns * level.cost.curve.at(n_rows)
        if level.n < _N_JUDGE and not sudden:
            return
        last = self._at == len(self._levels) - 1
        slow = sudden or level.cost.unit_ns > _SLOW * level.best_ns
        first = not self._tried_at_start and level.n >= _N_FIRST
        if (slow or first) and not last and self._clock() >= self._next_down:
            self._tried_at_start = True
            # what the mean of many passes does not show yet
            self._try(self._at + 1, ns / level.cost.curve.at(n_rows) / 2 if sudden else 0.0)
        elif self._at and self._clock() >= self._next_up:
            if self._has_room():
                self._try(self._at - 1)
            else:
                self._next_up = self._clock() + _UP_MIN_NS

    def _has_room(self) -> bool:
        """Whether CPUs are idle for the threads of the level above."""
        if self._idle is None:
            return True
        idle = self._idle()
        more = self._levels[self._at - 1].n_threads - self.n_threads
        return idle is not None and idle >= _IDLE * more

    def _try(self, at: int, limit_ns: float = 0.0) -> None:
        """limit_ns: a pass below it is better, whatever the mean of those before."""
        self._from, self._at = self._at, at
        self._limit_ns = limit_ns
        level = self._levels[at]
        level.n = 0
        self._fresh.clear()
        self._apply(level.n_threads)

    def _judge(self, level: _Level, n_rows: int, ns: int) -> None:
        """A pass of a try: take the new number, go back, or wait for one more pass."""
        assert self._from is not None
        before = self._levels[self._from]
        cost = level.cost if level.cost.unit_ns else before.cost
        unit = ns / cost.curve.at(n_rows)
        self._fresh.append(unit)
        limit = max(self._limit_ns, before.cost.unit_ns * _FASTER)
        up = self._at < self._from
        better = min(self._fresh) < limit
        # one pass is enough to see that more threads are far too slow; the first with other threads is not the best
        wait = len(self._fresh) < 2 and not (better if up else False) and not (up and unit > 2 * before.cost.unit_ns)
        if wait:
            return
        now = self._clock()
        level.cost.unit_ns = min(self._fresh)
        if better:
            self._from = None
            self.n_changes += 1
            level.best_ns = min(level.best_ns, level.cost.unit_ns) if level.best_ns else level.cost.unit_ns
            level.n = 0
            self._up_ns = _UP_MIN_NS
            self._next_up = now + (_UP_MIN_NS // 3 if up else _UP_MIN_NS)
            self._next_down = now if not up else self._next_down
            return
        self._at, self._from = self._from, None
        before.n = 0
        self._apply(before.n_threads)
        if up:
            self._up_ns = min(int(self._up_ns * 1.5), _UP_MAX_NS)
            self._next_up = now + self._up_ns
        else:
            # slow for another reason
            before.best_ns = before.cost.unit_ns
            self._next_down = now + self._down_ns
            self._down_ns = min(2 * self._down_ns, _DOWN_MAX_NS)
