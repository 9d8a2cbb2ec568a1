"""``speculation="auto"`` on simulated costs: passes and drafts move a clock, so every decision is deterministic."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from fakes import FakeEvaluator, FakeVocab, Rule, advance

from pyspec.config import SamplingParams, SpeculationParams
from pyspec.control import AutoController
from pyspec.drafters.base import Drafter, Plan
from pyspec.engine import Engine
from pyspec.runtime import Batch
from pyspec.types import DraftRequest

PROMPT = FakeVocab.encode("Once upon a time there was a controller.")
US = 1000
ROW = 10_000 * US

#: How much longer passes take on average because a few of them take much longer.
NOISE = 1 + 0.02 * 2.75


def gpu(n: int) -> float:
    """Nanoseconds of a pass of ``n`` rows where rows are nearly free."""
    return ROW * (1 + 0.01 * (n - 1))


def cpu(n: int) -> float:
    return ROW * (1 + 0.25 * (n - 1))


def linear(n: int) -> float:
    return ROW * n


def steps(n: int) -> float:
    """Kernels that work on four rows at once."""
    return ROW * (1 + 0.5 * ((n - 1) // 4))


COSTS = {"gpu": gpu, "cpu": cpu, "linear": linear, "steps": steps}


class Clock:
    """Time that passes only when somebody says so."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


class Sim(Drafter):
    """Right with a probability that may change with the position in the text; tells how sure it is if ``honest``."""

    name: ClassVar[str] = "sim"

    def __init__(
        self,
        target: FakeEvaluator,
        clock: Clock,
        rate: Callable[[int], float],
        *,
        name: str = "sim",
        us: float = 0.0,
        cheap: bool = False,
        honest: bool = True,
        n_max: int = 8,
        seed: int = 1,
    ) -> None:
        super().__init__(target, None, SpeculationParams(n_max=n_max), target.n_seq_max)
        self.name, self.cheap = name, cheap  # type: ignore[misc]
        self.clock, self.rate, self.us, self.honest = clock, rate, us, honest
        self.rule = target.rule
        self.rng = random.Random(seed)
        self.n_tokens = 0
        self.asked_at: list[int] = []
        self._hash: dict[int, tuple[int, int]] = {}

    @classmethod
    def plan(cls, target: Any, draft: Any, params: SpeculationParams, n_seq: int) -> Plan:
        return Plan(n_max=params.n_max)

    def begin(self, seq: int, tokens: list[int]) -> None:
        self._hash[seq] = (0, self.rule.hash([]))

    def draft(self, requests: list[DraftRequest]) -> None:
        longest = 0
        for r in requests:
            n, h = self._hash[r.seq]
            h = self.rule.hash(r.tokens[n:], h)
            self._hash[r.seq] = (len(r.tokens), h)
            at = len(r.tokens) - len(PROMPT)
            self.asked_at.append(at)
            rate = self.rate(at)
            for _ in range(min(r.n_max, self.n_max)):
                token = self.rule.next(h)
                right = self.rng.random() < rate
                r.draft.append(token if right else 17)
                r.probs.append(max(0.02, min(0.99, rate + self.rng.uniform(-0.1, 0.1))) if self.honest else 0.95)
                h = advance(h, token)
                if not self.goes_on(r, self.n_max):
                    break
            longest = max(longest, len(r.draft))
        self.n_tokens += longest
        self.clock.ns += int(self.us * US * longest)


class Run:
    """One engine under control on a simulated machine."""

    def __init__(
        self,
        cost: Callable[[int], float],
        *makers: Callable[[FakeEvaluator, Clock], Sim],
        n_seq: int = 1,
        noise: float = 0.03,
        auto: bool = True,
        **options: Any,
    ) -> None:
        self.clock = clock = Clock()
        rng = random.Random(0)

        def spend(target: FakeEvaluator, batch: Batch) -> None:
            factor = rng.uniform(1 - noise, 1 + noise) * (rng.uniform(1.5, 6) if noise and rng.random() < 0.02 else 1)
            clock.ns += int(cost(batch.n) * factor)

        self.target = FakeEvaluator(Rule(), n_seq=n_seq, n_ctx_seq=1 << 16, before_decode=spend)
        self.drafters = [maker(self.target, clock) for maker in makers]
        self.control = AutoController(clock=clock, **options) if auto else None
        self.engine = Engine(self.target, self.drafters, control=self.control, clock=clock)
        self.n_seq = n_seq
        self.marks: list[tuple[int, int]] = []

    def generate(self, n: int) -> float:
        """Tokens per 10 ms (a pass of one row) of ``n`` tokens in each sequence."""
        seqs = [self.engine.submit(PROMPT, SamplingParams(max_tokens=n, ignore_eos=True)) for _ in range(self.n_seq)]
        while any(s.prompt_pending or s.id < 0 for s in seqs):
            self.engine.step()
        start = self.clock.ns
        done = sum(s.n_output for s in seqs)
        while not all(s.done for s in seqs):
            self.engine.step()
            self.marks.append((seqs[0].n_output, self.clock.ns))
        for s in seqs:
            assert s.output == self.target.rule.generate(PROMPT, n), "whatever is decided, the text is the target's"
        return (self.n_seq * n - done) / ((self.clock.ns - start) / ROW)


def model(rate: float | Callable[[int], float], us: float, **options: Any) -> Callable[[FakeEvaluator, Clock], Sim]:
    """A drafter that costs ``us`` microseconds a token (a pass of one row: 10,000)."""
    f = rate if callable(rate) else lambda _: rate
    return lambda target, clock: Sim(target, clock, f, us=us, **options)


def lookup(rate: float | Callable[[int], float], **options: Any) -> Callable[[FakeEvaluator, Clock], Sim]:
    """A drafter that costs next to nothing."""
    return model(rate, 1, name="lookup", cheap=True, **{"honest": False, **options})


def plain(cost: Callable[[int], float], n: int = 600, n_seq: int = 1) -> float:
    return Run(cost, auto=False, n_seq=n_seq).generate(n)


# ---- what it earns ---------------------------------------------------------------------


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize(
    "makers",
    [
        (model(0.0, 2000),),
        (model(0.0, 2000, honest=False),),
        (model(0.02, 9000, honest=False),),
        (model(0.3, 30_000),),
        (lookup(0.0),),
        (lookup(0.05), model(0.1, 3000)),
    ],
    ids=["useless", "useless-but-sure", "dear", "slower-than-the-target", "useless-lookup", "both-useless"],
)
def test_bad_drafts_cost_next_to_nothing(cost: Callable[[int], float], makers: Any) -> None:
    assert Run(cost, *makers).generate(600) >= 0.96 * plain(cost)


def best_fixed(cost: Callable[[int], float], rate: float, us: float) -> float:
    """Tokens a pass time of the best fixed length, in expectation."""
    best = 0.0
    for k in range(9):
        tokens = sum(rate**i for i in range(k + 1))
        best = max(best, tokens / ((cost(k + 1) * NOISE + k * us * US) / ROW))
    return best


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("us", [300, 1500])
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.95])
def test_near_the_best_fixed_length(cost: Callable[[int], float], us: float, rate: float) -> None:
    """With a drafter whose confidence says nothing about single tokens, nothing beats the best fixed length."""
    run = Run(cost, model(rate, us))
    got, best = run.generate(1500), best_fixed(cost, rate, us)
    assert got >= 0.9 * best, f"{got:.3f}, best fixed length {best:.3f}"
