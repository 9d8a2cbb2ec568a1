"""For all benchmarks: what a result belongs to, and comparison with a baseline.

    pytest benchmarks --benchmark-enable --benchmark-only

Without ``--benchmark-enable`` (the default of this project) every benchmark runs once, as a test that it still works;
nothing is timed and no ratio is asserted.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
Call = Callable[[], object]


def _commit() -> str:
    override = os.environ.get("PYSPEC_BENCH_COMMIT")
    if override:
        return override
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run.stdout.strip()


@lru_cache(maxsize=1)
def machine_key() -> dict[str, Any]:
    """What all results of this run belong to. The commit is what ``compare.py`` compares; the rest must be equal."""
    from pyspec.measure import cpu_name

    try:
        from pyspec._build_info import BUILD_INFO

        info: dict[str, Any] = BUILD_INFO
    except ImportError:
        info = {}
    return {
        "commit": _commit(),
        "pin": info.get("llama_commit"),
        "backend": ",".join(info.get("backends", ())) or None,
        "compiler": info.get("compiler"),
        "cpu": cpu_name(),
        "n_cpu": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        # what only benchmarks with a model have
        "device": None,
        "model": None,
        "model_sha256": None,
        "quantisation": None,
        "threads": None,
        "drafter": None,
        "draft_sha256": None,
        "k": None,
    }


@pytest.fixture
def key(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The key of this benchmark: change it before the measurement ends, and the change is recorded."""
    return dict(machine_key())


@pytest.fixture(autouse=True)
def _record_key(request: pytest.FixtureRequest, key: dict[str, Any]) -> None:
    if "benchmark" in request.fixturenames:
        # the same object, so that what a test adds is there when the file is written
        request.getfixturevalue("benchmark").extra_info["key"] = key


def _times(call: Call, n: int) -> float:
    start = time.thread_time()
    for _ in range(n):
        call()
    return (time.thread_time() - start) / n


def speed_ratio(ours: Call, baseline: Call, *, repeats: int = 41, seconds: float = 0.002) -> dict[str, float]:
    """CPU times of both, taken in turns so that a change of the machine's speed meets both.

    CPU time of this thread, because other processes may take the CPU away; so not for calls that use threads or wait.

    Args:
        ours: what is measured.
        baseline: what it is compared with.
        repeats: pairs of measurements.
        seconds: length of one measurement, at least one call.

    Returns:
        ``ours_us`` and ``baseline_us``: medians in microseconds; ``ratio``: median over the pairs of baseline / ours,
        above 1 when ours is faster.
    """
    ours(), baseline()
    n_ours, n_baseline = (max(1, int(seconds / max(_times(call, 3), 1e-9))) for call in (ours, baseline))
    pairs = [(_times(ours, n_ours), _times(baseline, n_baseline)) for _ in range(repeats)]
    return {
        "ours_us": 1e6 * statistics.median(a for a, _ in pairs),
        "baseline_us": 1e6 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
    }


@lru_cache(maxsize=1)
def _rest() -> np.ndarray:
    return np.zeros(16 << 20, np.uint32)


@pytest.fixture
def evict() -> Callable[[], None]:
    """Fills the processor's caches with something else, as a pass of a model does between two drafts."""
    return lambda: _rest().sum()


Compare = Callable[[Call, Call, str], float | None]


@pytest.fixture
def compare(benchmark: Any) -> Compare:
    """Benchmark a call, compare it with a baseline, and record both.

    ``compare(ours, baseline, name)`` gives the ratio baseline time / our time, or None when benchmarks are off.
    """

    def run(ours: Call, baseline: Call, name: str) -> float | None:
        benchmark(ours)
        if benchmark.disabled:
            baseline()
            return None
        result = speed_ratio(ours, baseline)
        benchmark.extra_info[f"vs_{name}"] = result
        return result["ratio"]

    return run


@pytest.fixture
def ratio_of() -> Callable[[Call, Call], dict[str, float]]:
    """:func:`speed_ratio`, for what needs more than one baseline."""
    return speed_ratio
