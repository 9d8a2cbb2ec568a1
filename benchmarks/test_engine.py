"""Cost of the loop alone: the engine on fakes with fixed acceptance, no model.

The fake's own time (hashing, writing logits rows) is measured apart and subtracted, so what is left is the loop:
drafter chain, batch, verification, commit, rollback, counters. Limits: 50 us a step for one sequence with 4 drafted
tokens, 20 us for each further sequence. Times are CPU times of the thread, because other processes may take the CPU
away.

    pytest benchmarks/test_engine.py --benchmark-enable
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from time import thread_time_ns
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fakes import FakeEvaluator, Rule
from pace import at_pace

from pyspec.config import SamplingParams, SpeculationParams
from pyspec.drafters.base import Drafter, Plan
from pyspec.engine import Engine
from pyspec.runtime import Batch
from pyspec.types import DraftRequest

#: Most a step may cost, in microseconds, with one sequence and 4 drafted tokens.
LIMIT_US = 50
#: Most that each further sequence may add.
LIMIT_FURTHER_US = 20
#: How much more is let pass in the normal test run, where times are taken at the machine's pace (see ``pace``).
ALLOWANCE = 1.6
N_DRAFT = 4
PROMPT = list(range(50, 80))


class Timed(FakeEvaluator):
    """A fake target that knows how long its own work took."""

    t_ns = 0

    def decode(self, batch: Batch) -> None:
        start = thread_time_ns()
        super().decode(batch)
        self.t_ns += thread_time_ns() - start


class Fixed(Drafter):
    """Proposes 4 tokens, of which the first ``n_right`` are right. Its own time is not the loop's."""

    name = "fixed"
    t_ns = 0

    def __init__(self, target: FakeEvaluator, n_right: int) -> None:
        super().__init__(target, None, SpeculationParams(n_max=N_DRAFT), target.n_seq_max)
        self.rule, self.n_right = target.rule, n_right
        self._hash: dict[int, tuple[int, int]] = {}

    @classmethod
    def plan(cls, target: Any, draft: Any, params: SpeculationParams, n_seq: int) -> Plan:
        return Plan(n_max=params.n_max)

    def begin(self, seq: int, tokens: list[int]) -> None:
        self._hash[seq] = (0, self.rule.hash([]))

    def draft(self, requests: list[DraftRequest]) -> None:
        start = thread_time_ns()
        for r in requests:
            n, h = self._hash[r.seq]
            h = self.rule.hash(r.tokens[n:], h)
            self._hash[r.seq] = (len(r.tokens), h)
            for i in range(min(r.n_max, N_DRAFT)):
                token = self.rule.next(h)
                r.draft.append(token if i < self.n_right else 60)
                h = self.rule.hash([token], h)
        self.t_ns += thread_time_ns() - start


def loop_us(n_seq: int, n_right: int | None, n_steps: int, n_vocab: int, temperature: float = 0.0) -> float:
    """Microseconds of one step without the fakes' own time."""
    target = Timed(Rule(n_vocab=n_vocab), n_seq=n_seq, n_ctx_seq=1 << 20, keep_log=False)
    drafter = None if n_right is None else Fixed(target, n_right)
    engine = Engine(target, [drafter] if drafter else [])
    params = SamplingParams(max_tokens=1 << 18, temperature=temperature, seed=1)
    sequences = [engine.submit(PROMPT, params) for _ in range(n_seq)]
    while any(s.n_output < 8 for s in sequences):
        engine.step()
    for s in sequences:
        s.pieces.clear()
    target.t_ns = 0
    own = drafter.t_ns if drafter else 0
    start = thread_time_ns()
    for _ in range(n_steps):
        engine.step()
    spent = thread_time_ns() - start - target.t_ns - ((drafter.t_ns - own) if drafter else 0)
    if drafter:
        assert sequences[0].stats.n_draft >= N_DRAFT * n_steps
    return spent / n_steps / 1000


@pytest.fixture
def steps(request: pytest.FixtureRequest) -> Callable[[int, int, int], float]:
    """``steps(n_seq, n_right, n_steps)``: what limits are compared with, in microseconds a step.

    With benchmarks on, :func:`loop_us` as it is. Else at the machine's pace and without the allowance, because tests
    also run on machines that are three times as slow, all the time or for a while.
    """
    if request.config.getoption("benchmark_enable"):
        return lambda n_seq, n_right, n_steps: loop_us(n_seq, n_right, n_steps, n_vocab=512)

    def at_its_pace(n_seq: int, n_right: int, n_steps: int) -> float:
        return at_pace(lambda: loop_us(n_seq, n_right, n_steps, n_vocab=512), 1)[0] / ALLOWANCE

    return at_its_pace


@pytest.mark.parametrize("n_right", [0, 2, 4])
def test_step_of_one_sequence_stays_below_the_limit(steps: Callable[[int, int, int], float], n_right: int) -> None:
    """The best of several short runs: other work on the machine can only add time."""
    times = [steps(1, n_right, 200) for _ in range(15)]
    assert min(times) <= LIMIT_US, f"{min(times):.1f} us a step"


@pytest.mark.parametrize("n_right", [0, 2, 4])
def test_each_further_sequence_stays_below_the_limit(steps: Callable[[int, int, int], float], n_right: int) -> None:
    """Against one sequence, for 2, 4 and 8. The best of short runs, as many as it takes: other work only adds time."""
    best = dict.fromkeys((1, 2, 4, 8), float("inf"))
    further = dict.fromkeys((2, 4, 8), float("inf"))
    for i in range(60):
        for n in best:
            best[n] = min(best[n], steps(n, n_right, 50))
        further = {n: (best[n] - best[1]) / (n - 1) for n in further}
        if i >= 9 and max(further.values()) <= LIMIT_FURTHER_US:
            return
    pytest.fail(f"{further} us for each sequence after the first")


def measure(benchmark: Any, n_seq: int, n_right: int | None, n_vocab: int, temperature: float) -> None:
    """One step of the engine; ``extra_info.loop_us`` is the part of it that is not the fakes'."""
    target = Timed(Rule(n_vocab=n_vocab), n_seq=n_seq, n_ctx_seq=1 << 20, keep_log=False)
    engine = Engine(target, [Fixed(target, n_right)] if n_right is not None else [])
    for _ in range(n_seq):
        engine.submit(PROMPT, SamplingParams(max_tokens=1 << 18, temperature=temperature, seed=1))
    while any(s.prompt_pending for s in engine.active) or not engine.active:
        engine.step()
    n_draft = N_DRAFT if n_right is not None else 0
    benchmark.extra_info.update(n_seq=n_seq, n_draft=n_draft, n_right=n_right, temperature=temperature, n_vocab=n_vocab)
    benchmark(engine.step)
    assert engine.stats.n_output > 0
    benchmark.extra_info["loop_us"] = min(loop_us(n_seq, n_right, 200, n_vocab, temperature) for _ in range(5))


@pytest.mark.parametrize("n_seq", [1, 2, 4, 8])
@pytest.mark.parametrize("n_right", [None, 0, 2, 4])
def test_loop(benchmark: Any, n_seq: int, n_right: int | None) -> None:
    benchmark.group = f"engine step, {n_seq} sequence(s)"
    measure(benchmark, n_seq, n_right, 512, 0.0)


@pytest.mark.parametrize("n_vocab", [512, 32_000])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_loop_by_vocabulary(benchmark: Any, n_vocab: int, temperature: float) -> None:
    """What a large vocabulary and sampling add to a step."""
    benchmark.group = "engine step by vocabulary"
    measure(benchmark, 1, 2, n_vocab, temperature)


def test_step_does_not_grow_with_the_text() -> None:
    """After 100,000 tokens a step costs what it cost at the start (within noise). Both are timed in turns."""

    def ready(n_prompt: int) -> Callable[[], float]:
        target = Timed(Rule(n_vocab=512), n_ctx_seq=1 << 20, keep_log=False, n_batch=4096, n_ubatch=4096)
        drafter = Fixed(target, 2)
        engine = Engine(target, [drafter])
        seq = engine.submit(PROMPT * (n_prompt // len(PROMPT)), SamplingParams(max_tokens=1 << 18))
        while not seq.n_output:
            engine.step()

        def run() -> float:
            own = target.t_ns + drafter.t_ns
            start = thread_time_ns()
            for _ in range(50):
                engine.step()
            return (thread_time_ns() - start - (target.t_ns + drafter.t_ns - own)) / 50_000

        return run

    runs = ready(300), ready(100_000)
    times = [[run() for run in runs] for _ in range(10)]
    short, long = (min(pair[i] for pair in times) for i in range(2))
    assert long < 2 * short + 5, f"{short:.1f} us at 300 tokens, {long:.1f} us at 100,000"
