"""The number of threads follows the times of the passes: on a simulated machine, and between real busy processes."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pyspec.control import IdleCpus, ThreadGovernor

MS = 1_000_000
S = 1_000_000_000

#: Milliseconds of a pass of one row by (threads, busy foreign processes), measured on two CPUs (SmolLM2 135M, F16).
TWO_CPUS = {(2, 0): 13.3, (1, 0): 20.0, (2, 2): 38.0, (1, 2): 21.0}


def many_cpus(n: int, busy: int) -> float:
    """16 CPUs: work is shared evenly, and everybody waits for a thread that shares its CPU."""
    return 160.0 / n * (1 if n + busy <= 16 else 2.2) + 1


class Machine:
    """Passes by a governor, with foreign load that comes and goes."""

    def __init__(
        self, n_threads: int, ms: Callable[[int, int], float], noise: float = 0.04, n_cpus: int | None = None
    ) -> None:
        self.ms, self.noise = ms, noise
        self.now = 0
        self.rng = random.Random(3)
        self.used = n_threads
        self.busy = 0
        self.most = 0.0  # milliseconds of the longest pass
        self.n_cpus = n_cpus
        idle = None if n_cpus is None else self.idle
        self.governor = ThreadGovernor(n_threads, self.apply, lambda: self.now, idle)

    def idle(self) -> float:
        assert self.n_cpus is not None
        return max(0.0, self.n_cpus - self.busy - self.used)

    def apply(self, n: int) -> None:
        self.used = n

    def run(self, seconds: float, busy: int, rows: Callable[[int], int] = lambda i: 1) -> float:
        """Tokens a second (a pass gives one)."""
        start, n = self.now, 0
        self.busy = busy
        while self.now - start < seconds * S:
            n_rows = rows(n)
            ns = int(self.ms(self.used, busy) * MS * (1 + 0.2 * (n_rows - 1)))
            ns = int(ns * self.rng.uniform(1 - self.noise, 1 + self.noise))
            if busy:  # the scheduler's slices
                ns = int(ns * self.rng.uniform(0.7, 1.3))
            self.now += ns
            self.most = max(self.most, ns / MS)
            self.governor.passed(n_rows, ns)
            n += 1
        return n * S / (self.now - start)

    @property
    def settled(self) -> int:
        """The number of threads, without a try that is going on."""
        while self.governor.trying:
            self.run(1e-9, self.busy)
        return self.used


def two_cpus(noise: float = 0.04) -> Machine:
    return Machine(2, lambda n, busy: TWO_CPUS[n, busy], noise)


@pytest.mark.parametrize("rows", [lambda i: 1, lambda i: 1 + i % 4, lambda i: 4], ids=["plain", "mixed", "drafts"])
def test_foreign_load_comes_and_goes(rows: Callable[[int], int]) -> None:
    machine = two_cpus()
    quiet = machine.run(5, 0, rows)
    assert machine.settled == 2
    machine.run(0.5, 2, rows)
    assert machine.settled == 1, "a few slow passes are enough"
    loaded = machine.run(10, 2, rows)
    assert loaded >= 0.45 * quiet
    assert loaded >= 0.9 * quiet * TWO_CPUS[2, 0] / TWO_CPUS[1, 2], "trying more threads costs little"
    machine.run(2, 0, rows)
    assert machine.settled == 2, "back within two seconds"
    assert machine.run(3, 0, rows) >= 0.97 * quiet


def test_where_two_threads_are_hopeless_one_pass_tells() -> None:
    """Threads that spin for each other beside busy processes: measured on two CPUs with an attached pool."""
    times = TWO_CPUS | {(2, 2): 1000.0, (1, 2): 42.0}
    machine = Machine(2, lambda n, busy: times[n, busy], n_cpus=2)
    quiet = machine.run(3, 0)
    machine.run(1.2, 2)
    assert machine.settled == 1
    machine.most = 0
    assert machine.run(20, 2) >= 0.98 * 1000 / 42 * 0.97
    assert machine.most < 100, "nothing is tried while no CPU is idle"
    machine.run(0.7, 0)
    assert machine.settled == 2
    assert machine.run(3, 0) >= 0.97 * quiet


def test_the_first_pass_of_a_size_is_no_load() -> None:
    machine = two_cpus()
    machine.run(2, 0)
    assert machine.settled == 2
    n_changes = machine.governor.n_changes
    for n_rows in (5, 9, 17):
        machine.governor.passed(n_rows, int(20 * n_rows * TWO_CPUS[2, 0] * MS))
        assert not machine.governor.trying
    assert machine.governor.n_changes == n_changes


def test_what_linux_counts_as_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2}, raising=False)
    stat = tmp_path / "stat"

    def ticks(*cpus: tuple[int, int]) -> None:
        lines = [f"cpu{i} {busy} 0 0 {idle} 0 0 0 0 0 0" for i, (busy, idle) in enumerate(cpus)]
        stat.write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 5 0", ""]), encoding="ascii")

    ticks((100, 100), (100, 100), (100, 100))
    idle = IdleCpus(str(stat))
    assert idle.works
    assert idle() is None, "no time has gone by"
    ticks((110, 100), (100, 110), (105, 105))
    assert idle() == pytest.approx(0.5), "the CPU in between is not ours"
    stat.unlink()
    assert idle() is None
    assert not IdleCpus(str(stat)).works


def test_this_system_is_idle_now_and_then() -> None:
    idle = IdleCpus()
    if not idle.works:
        pytest.skip("this system does not say")
    time.sleep(0.1)
    found = idle()
    assert found is None or 0 <= found <= len(os.sched_getaffinity(0))


def test_busy_from_the_start() -> None:
    machine = two_cpus()
    machine.run(2, 2)
    assert machine.settled == 1
    machine.run(2, 0)
    assert machine.settled == 2


def test_a_quiet_machine_pays_next_to_nothing() -> None:
    machine = two_cpus(0.1)
    assert machine.run(20, 0) >= 0.985 * 1000 / TWO_CPUS[2, 0]
    assert machine.governor.n_changes <= 2


def test_passes_that_get_slower_with_the_context_are_no_load() -> None:
    machine = two_cpus()
    for i in range(40):
        machine.ms = lambda n, busy, f=1 + i / 20: TWO_CPUS[n, busy] * f  # type: ignore[misc]
        machine.run(0.5, 0)
    assert machine.settled == 2
    assert machine.governor.n_changes <= 2


def test_where_fewer_threads_do_not_help_they_are_not_tried_all_the_time() -> None:
    """Everything is slower, whatever the number of threads: a laptop that got hot."""
    machine = two_cpus()
    machine.run(3, 0)
    machine.ms = lambda n, busy: 2.5 * TWO_CPUS[n, 0]
    expected = 1000 / 2.5 / TWO_CPUS[2, 0]
    assert machine.run(20, 0) >= 0.97 * expected
    assert machine.settled == 2


def test_many_threads_give_up_some() -> None:
    machine = Machine(16, many_cpus)
    machine.run(2, 0)
    assert machine.settled == 16
    machine.run(3, 1)
    assert 8 <= machine.settled < 16
    machine.run(3, 0)
    assert machine.settled == 16


def test_the_same_times_give_the_same_decisions() -> None:
    def story() -> list[int]:
        machine, used = two_cpus(), []
        for busy in (0, 2, 0, 2):
            machine.run(1.5, busy)
            used.append(machine.now)
        return used

    assert story() == story()
