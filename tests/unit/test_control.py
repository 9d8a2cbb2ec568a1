"""``speculation="auto"`` on simulated costs: passes and drafts move a clock, so every decision is deterministic."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import fmean
from time import perf_counter_ns
from typing import Any, ClassVar

import numpy as np
import pytest
from fakes import FakeEvaluator, FakeVocab, Rule, advance
from pace import at_pace

from pyspec.config import SamplingParams, SpeculationParams
from pyspec.control import AutoController
from pyspec.control.belief import Mood, Trust
from pyspec.control.cost import Curve, PassCost
from pyspec.drafters.base import Drafter, Plan
from pyspec.engine import Engine
from pyspec.runtime import Batch
from pyspec.types import DraftRequest, DraftSampling

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
        calibrated: bool = False,
        n_max: int = 8,
        seed: int = 1,
    ) -> None:
        super().__init__(target, None, SpeculationParams(n_max=n_max), target.n_seq_max)
        self.name, self.cheap, self.calibrated = name, cheap, calibrated  # type: ignore[misc]
        self.clock, self.rate, self.us, self.honest = clock, rate, us, honest
        self.rule = target.rule
        self.rng = random.Random(seed)
        self.n_tokens = 0
        self.lengths: dict[int, int] = {}
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
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.clock = clock = Clock()
        rng = random.Random(seed)

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
        (lookup(0.0, calibrated=True),),
        (lookup(0.05), model(0.1, 3000)),
    ],
    ids=[
        "useless",
        "useless-but-sure",
        "dear",
        "slower-than-the-target",
        "useless-lookup",
        "useless-lookup-that-claims-to-be-calibrated",
        "both-useless",
    ],
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


@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_a_prompt_tells_what_rows_cost_before_any_draft_was_paid_for(rate: float) -> None:
    """Where rows are as dear as passes, the first sixty tokens are not the price of finding out."""
    speeds = [Run(linear, lookup(rate, honest=True, calibrated=True, seed=s)).generate(60) for s in range(8)]
    assert sum(speeds) / 8 >= 0.85 * plain(linear)


def steady(run: Run, n_from: int, n_to: int) -> float:
    """Tokens a pass time between two places of the text."""
    inside = [(n, ns) for n, ns in run.marks if n_from <= n <= n_to]
    (n0, ns0), (n1, ns1) = inside[0], inside[-1]
    return (n1 - n0) / ((ns1 - ns0) / ROW)


@pytest.mark.parametrize("cheap", [True, False], ids=["lookup", "model"])
def test_a_drafter_that_turns_good_is_used_within_fifty_tokens(cheap: bool) -> None:
    make = lookup if cheap else model
    args = () if cheap else (1000,)
    change = 500

    def rate(at: int) -> float:
        return 0.95 if at >= change else 0.0

    run = Run(cpu, make(rate, *args))
    run.generate(1200)
    late = steady(run, change + 300, 1190)
    assert late > 1.5
    assert steady(run, change + 50, change + 250) >= 0.85 * late, "fifty tokens after the change it is in full use"


@pytest.mark.parametrize("cheap", [True, False], ids=["lookup", "model"])
def test_a_drafter_that_turns_bad_is_dropped_within_fifty_tokens(cheap: bool) -> None:
    make = lookup if cheap else model
    args = () if cheap else (2000,)
    change = 500

    def rate(at: int) -> float:
        return 0.95 if at < change else 0.0

    run = Run(cpu, make(rate, *args, honest=False))
    run.generate(1200)
    assert steady(run, change + 50, 1190) >= 0.96 * plain(cpu)
    drafter = run.drafters[0]
    if not cheap:
        asked = [at for at in drafter.asked_at if change + 60 <= at]
        assert len(asked) <= (1200 - change) / 20, "parked, and tried less and less often"


def test_tries_are_bounded_in_price() -> None:
    """A draft of one token takes four passes: trying it must wait until the time for that has been saved."""
    run = Run(gpu, model(0.0, 40_000))
    assert run.generate(3000) >= 0.97 * plain(gpu, 3000)
    assert 3 <= len(run.drafters[0].asked_at) <= 25


def test_of_two_drafters_the_better_one_is_used() -> None:
    """First the look-up finds everything, then nothing; the model is good all the time, but costs."""
    run = Run(cpu, lookup(lambda at: 0.98 if at < 500 else 0.0), model(0.8, 800))
    run.generate(1000)
    models = run.drafters[1]
    early = [at for at in models.asked_at if 60 < at < 500]
    late = [at for at in models.asked_at if at > 560]
    assert len(early) < 10
    assert len(late) > 60
    assert steady(run, 600, 990) >= 0.85 * best_fixed(cpu, 0.8, 800)


def test_sequences_share_a_pass() -> None:
    """Three sequences, rows that cost: what is verified is what is most likely, and it beats plain decoding."""
    speeds = [Run(cpu, model(0.8, 500), n_seq=3, seed=s).generate(500) for s in range(8)]
    assert fmean(speeds) >= 1.1 * plain(cpu, 500, 3)
    useless = Run(cpu, model(0.0, 2000, honest=False), n_seq=3)
    assert useless.generate(500) >= 0.96 * plain(cpu, 500, 3)


def test_equal_times_give_equal_decisions() -> None:
    def story() -> tuple[int, list[int], Any]:
        run = Run(steps, lookup(0.4), model(0.6, 900), n_seq=2)
        run.generate(300)
        assert run.control is not None
        return run.clock.ns, run.drafters[1].asked_at, run.control.publish()

    assert story() == story()


def test_a_machine_that_slows_down_as_a_whole_changes_no_decision() -> None:
    factor = 1.0

    def cost(n: int) -> float:
        return factor * cpu(n)

    run = Run(cost, lookup(0.9), noise=0.0)
    run.generate(300)
    before = run.engine.stats.n_draft / run.engine.stats.n_pass
    n_draft, n_pass = run.engine.stats.n_draft, run.engine.stats.n_pass
    factor = 3.0
    run.generate(300)
    after = (run.engine.stats.n_draft - n_draft) / (run.engine.stats.n_pass - n_pass)
    assert after == pytest.approx(before, rel=0.15)


def test_padded_passes_verify_all_that_is_proposed() -> None:
    """In exact mode rows are there anyway."""
    run = Run(lambda n: linear(4), lookup(0.1, n_max=3), padded=True)
    run.generate(200)
    assert run.engine.stats.n_draft > 0.8 * 3 * run.engine.stats.n_pass
    slow = Run(lambda n: linear(4), model(0.02, 6000, n_max=3), padded=True)
    assert slow.generate(400) >= 0.96 * plain(lambda n: linear(4), 400)


class Drawn(Sim):
    """Draws its tokens: which of them are verified must not depend on what was drawn."""

    def draft(self, requests: list[DraftRequest]) -> None:
        super().draft(requests)
        for r in requests:
            r.q = [(np.array([token], np.int32), np.ones(1, np.float32)) for token in r.draft]
            self.lengths[r.seq] = len(r.draft)


def test_a_drawn_draft_is_verified_whole() -> None:
    seen: list[tuple[int, int]] = []

    def make(target: FakeEvaluator, clock: Clock) -> Sim:
        return Drawn(target, clock, lambda _: 0.5, us=500)

    run = Run(cpu, lookup(0.5), make)
    drafter: Any = run.drafters[1]
    control = run.control
    assert control is not None
    choose = control.draft

    def check(chain: Any, requests: Any, n_seq: int) -> Any:
        n = len(drafter.asked_at)
        for r in requests:
            r.sampling = DraftSampling(1.0, 0, 1.0, 0.0, 1, 0)
        winners = choose(chain, requests, n_seq)
        if len(drafter.asked_at) > n:
            assert winners[0] is drafter
            seen.append((len(requests[0].draft), drafter.lengths[0]))
            assert len(requests[0].q) == len(requests[0].draft)
        for r in requests:
            r.sampling, r.q = None, []
        return winners

    control.draft = check  # type: ignore[method-assign]
    run.generate(200)
    assert len(seen) > 20
    assert all(a == b for a, b in seen)


def test_a_parked_drafter_is_told_to_rest() -> None:
    run = Run(cpu, model(lambda at: 0.9 if at >= 300 else 0.0, 1000))
    told: list[bool] = []
    run.drafters[0].rest = lambda seq, value: told.append(value)  # type: ignore[method-assign]
    run.generate(200)
    assert told == [True]
    run.generate(600)
    assert told[1:3] == [True, False], "at the start of a text, too, until it turns good"


def test_a_drafter_that_cannot_be_told_is_off() -> None:
    run = Run(cpu, model(0.0, 1000))
    run.drafters[0].rest = None  # type: ignore[method-assign, assignment]
    run.generate(100)
    assert run.drafters[0].stats.n_failed == 1


def test_what_was_learned_is_handed_on() -> None:
    first = Run(cpu, model(0.0, 3000, honest=False))
    first.generate(400)
    second = Run(cpu, model(0.0, 3000, honest=False))
    assert first.control is not None
    assert second.control is not None
    second.control.inherit(first.control)
    second.generate(100)
    assert len(second.drafters[0].asked_at) <= 4, "parked from the start"


def test_stats_say_what_was_chosen_and_why() -> None:
    run = Run(cpu, lookup(lambda at: 0.9 if at < 150 else 0.0), model(0.0, 2000))
    run.generate(300)
    assert run.control is not None
    stats = run.control.publish()
    assert stats.n_steps == run.engine.stats.n_pass
    plain_steps = stats.n_nothing + stats.n_not_worth + stats.n_measuring
    assert sum(stats.chosen.values()) + plain_steps == stats.n_steps
    assert stats.row_us == pytest.approx(10_000, rel=0.05)
    assert stats.pass_us[3] == pytest.approx(15_000, rel=0.1)
    assert stats.drafters["sim"]["value"] < 0 < stats.drafters["sim"]["asked"]
    assert stats.drafters["sim"]["draft_us"][1] == pytest.approx(2000, rel=0.1)


# ---- costs -----------------------------------------------------------------------------


def test_curve_ignores_single_bad_moments() -> None:
    curve = Curve(1, 1.0, 0.15)
    curve.add(5, 9.0)
    assert curve.at(5) < 3, "a first measurement is not believed beyond reason"
    for cost in (1.4, 1.41, 8.0, 1.4, 1.39):
        curve.add(5, cost)
    assert curve.at(5) == pytest.approx(1.4, abs=0.02)
    assert 1.0 <= curve.at(2) <= curve.at(3) <= curve.at(5) <= curve.at(6) <= curve.at(200)


def test_curve_forgets_what_it_has_not_seen_for_long() -> None:
    curve = Curve(1, 1.0, 0.15)
    for _ in range(3):
        curve.add(4, 5.0)
    for i in range(1000):
        curve.add(2 + 6 * (i % 2), 1.1 + 0.2 * (i % 2))
    assert curve.at(4) < 1.4


def test_pass_cost_follows_the_machine() -> None:
    cost = PassCost()
    for n, ns in [(1, 100), (1, 100), (4, 200), (4, 200), (4, 200), (1, 900), (1, 100)]:
        cost.add(n, ns, n == 1)
    assert cost.unit_ns == pytest.approx(100, rel=0.02), "one pass that was disturbed"
    for _ in range(5):
        cost.add(4, 600, False)
    assert cost.unit_ns == pytest.approx(300, rel=0.05)
    assert cost.curve.at(4) == pytest.approx(2.0, rel=0.05)
    cost.select("long")
    cost.add(1, 1000, True)
    cost.select(None)
    assert cost.unit_ns == pytest.approx(300, rel=0.05), "each kind of pass has its own unit"


@pytest.mark.parametrize(
    ("n_rows", "ns", "row"), [(100, 2_000, 0.2), (400, 2_000, 0.05), (20, 9_000, 1.0), (9, 1, 0.15)]
)
def test_a_prompt_tells_what_rows_cost(n_rows: int, ns: int, row: float) -> None:
    cost = PassCost()
    cost.prefilled(n_rows, ns)
    cost.add(1, 100, True)
    assert cost.curve.at(5) == pytest.approx(1 + 4 * row)
    for _ in range(3):
        cost.add(5, 180, False)
    cost.prefilled(n_rows, ns // 2)
    assert cost.curve.at(5) == pytest.approx(1.8, rel=0.05), "what was measured counts"


def test_calibrated_probabilities_are_taken_as_they_are() -> None:
    trust, mood = Trust(joint=True), Mood()
    joint = [0.9, 0.72, 0.36]
    assert trust.weigh(3, joint, mood)[1] == pytest.approx(joint, abs=0.01)
    assert trust.weigh(3, joint[:2], mood)[1] == pytest.approx(joint[:2], abs=0.01), "no probability, no chance"
    assert Trust(joint=False).weigh(2, [0.9, 0.5], mood)[1] == pytest.approx([0.9, 0.45], abs=0.01)
    for right, n in ((False, 8), (True, 40)):
        for _ in range(n):
            trust.add(trust.weigh(1, [0.9], mood)[0][0], right, mood)
        chance = trust.weigh(1, [0.9], mood)[1][0]
        assert chance > 0.85 if right else chance < 0.5, "until they turn out wrong in this text"
    assert trust.rates()[6] == (0.9, 40 / 48)


@pytest.mark.parametrize("makers", [(lookup(0.0),), (lookup(0.9),), (lookup(0.5), model(0.0, 100))], ids=range(3))
def test_deciding_takes_microseconds(makers: Any) -> None:
    """The cheaper steps of a run, without the drafters' own time, at the machine's pace."""

    def us() -> float:
        run = Run(cpu, *makers)
        control = run.control
        assert control is not None
        spent: list[int] = []

        def timed(f: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                start = perf_counter_ns()
                out = f(*args)
                spent.append(perf_counter_ns() - start - asked[0])
                asked[0] = 0
                return out

            return call

        asked = [0]
        ask = run.engine.chain.ask

        def timed_ask(*args: Any) -> None:
            start = perf_counter_ns()
            ask(*args)
            asked[0] += perf_counter_ns() - start

        run.engine.chain.ask = timed_ask  # type: ignore[method-assign]
        control.draft = timed(control.draft)  # type: ignore[method-assign]
        control.accept = timed(control.accept)  # type: ignore[method-assign]
        control.passed = timed(control.passed)  # type: ignore[method-assign]
        run.generate(400)
        calls = sorted(sum(spent[i : i + 3]) for i in range(0, len(spent) - 2, 3))
        return calls[len(calls) // 4] / 1000

    times = at_pace(us, 5)
    assert times[len(times) // 2] < 60, times
