"""Synthetic acceptance: the rates that were asked for, whatever is drafted, and loud marks that output is not valid."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest
from fakes import EOS, FakeDrafter, FakeEvaluator, Rule
from looptest import MEMORY, prompt, run_all

from pyspec.config import SamplingParams, SpeculationParams
from pyspec.engine import Engine
from pyspec.errors import ConfigError
from pyspec.sampling import synthetic_rates


@pytest.mark.parametrize("n_max", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.99, 1.0])
def test_rates_of_a_length(n_max: int, share: float) -> None:
    length = 1 + share * n_max
    rates = synthetic_rates(SpeculationParams(synth_len=length), n_max)
    assert len(rates) == n_max
    assert 1 + math.fsum(rates) == pytest.approx(length, rel=1e-9)
    assert all(0 <= b <= a <= 1 for a, b in itertools.pairwise(rates))
    # the same chance at every position
    assert rates == pytest.approx([rates[0] ** i for i in range(1, n_max + 1)])


def test_rates_are_taken_as_they_are() -> None:
    assert synthetic_rates(SpeculationParams(synth_rates=[0.9, 0.5, 0]), 3) == [0.9, 0.5, 0.0]
    assert synthetic_rates(SpeculationParams(), 3) == []
    assert synthetic_rates(SpeculationParams(), 0) == []


@pytest.mark.parametrize(
    ("options", "n_max"),
    [
        ({"synth_len": 2.0}, 0),
        ({"synth_rates": [0.5]}, 0),
        ({"synth_len": 4.01}, 3),
        ({"synth_rates": [0.5]}, 2),
        ({"synth_rates": [0.5, 0.5, 0.1]}, 2),
    ],
)
def test_what_does_not_fit_the_drafter(options: dict[str, Any], n_max: int) -> None:
    with pytest.raises(ConfigError, match="synth"):
        synthetic_rates(SpeculationParams(**options), n_max)


@pytest.mark.parametrize(
    "options",
    [
        {"synth_len": 0.9},
        {"synth_len": float("nan")},
        {"synth_len": float("inf")},
        {"synth_len": "2"},
        {"synth_len": -1.0},
        {"synth_rates": [0.5, 0.6]},
        {"synth_rates": [1.1]},
        {"synth_rates": [-0.1]},
        {"synth_rates": [float("nan")]},
        {"synth_rates": ["a"]},
        {"synth_rates": "0.5"},
        {"synth_rates": 0.5},
        {"synth_rates": [0.5], "synth_len": 1.5},
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="synth"):
        SpeculationParams(**options)


def run(quality: str, n: int, n_seq: int = 1, memory: str = "partial", seed: int = 1, **options: Any) -> Engine:
    target = FakeEvaluator(Rule(1), n_seq=n_seq, n_ctx_seq=n + 100, keep_log=False, **MEMORY[memory])
    drafter = FakeDrafter(target, quality, n_max=4)
    engine = Engine(target, [drafter], speculation=SpeculationParams(**options))
    params = SamplingParams(max_tokens=n, ignore_eos=True, seed=seed)
    seqs = [engine.submit(prompt(i, 10), params) for i in range(n_seq)]
    run_all(engine)
    assert [len(s.output) for s in seqs] == [n] * n_seq
    assert all(s.stats.synthetic and s.stats.to_dict()["synthetic"] for s in seqs)
    assert not target.violations
    return engine


@pytest.mark.statistical
@pytest.mark.parametrize("quality", ["perfect", "wrong", "random"])
@pytest.mark.parametrize("memory", ["partial", "bounded", "full-hybrid", "window"])
def test_acceptance_is_what_was_asked_for(quality: str, memory: str) -> None:
    """4000 tokens: rates within five standard deviations, whatever the drafts are worth."""
    if memory != "partial":
        run(quality, 200, memory=memory, synth_len=2.5)
        return
    if quality == "random":  # shorter drafts
        engine = run(quality, 500, synth_len=2.0)
        assert 0 < (engine.stats.acceptance_rate or 0) < 1
        return
    rates = [0.9, 0.6, 0.6, 0.1]
    engine = run(quality, 4000, synth_rates=rates)
    stats = engine.stats
    n = stats.drafted_per_pos[0]
    for k, rate in enumerate(rates):
        assert stats.accepted_per_pos[k] / n == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / n) + 0.002)
    engine = run(quality, 4000, synth_len=3.0)
    assert engine.stats.mean_accepted_length == pytest.approx(3.0, abs=0.2)


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("memory", MEMORY)
def test_ends_of_the_scale(memory: str, n_seq: int) -> None:
    """1: nothing is accepted, so the output is the target's own. n_max + 1: everything is, though it is wrong."""
    engine = run("wrong", 30, n_seq, memory, synth_len=1.0)
    assert engine.stats.n_accepted == 0
    n_max = engine.n_draft_max
    engine = run("wrong", 30, n_seq, memory, synth_len=float(n_max + 1))
    assert engine.stats.n_accepted == engine.stats.n_draft > 0


def test_the_same_seed_gives_the_same_lots() -> None:
    a, b, c = (run("wrong", 200, seed=seed, synth_len=2.0) for seed in (5, 5, 6))
    assert a.stats.accepted_per_pos == b.stats.accepted_per_pos != c.stats.accepted_per_pos


def test_a_drafted_end_is_not_accepted() -> None:
    target = FakeEvaluator(Rule(1))
    drafter = FakeDrafter(target, lambda r, right, rng: [right[0], EOS, EOS, EOS][: r.n_max])
    engine = Engine(target, [drafter], [EOS], speculation=SpeculationParams(synth_len=5.0))
    seq = engine.submit(prompt(1, 10), SamplingParams(max_tokens=40))
    run_all(engine)
    assert seq.finish_reason == "length"
    assert EOS not in seq.output


def test_marks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pyspec"):
        run("wrong", 5, synth_len=2.0)
    assert [r for r in caplog.records if "NOT VALID" in r.message and r.levelno == logging.WARNING]
    caplog.clear()
    engine = Engine(FakeEvaluator(Rule()), [], speculation=SpeculationParams())
    assert not engine.stats.synthetic
    assert not caplog.records
    with pytest.raises(ConfigError, match="synth_len"):
        Engine(FakeEvaluator(Rule()), [], speculation=SpeculationParams(synth_len=1.0))
