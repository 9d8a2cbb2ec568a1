"""The hindsight bound: against every choice there is, and on the fakes."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
from fakes import FakeDrafter, FakeEvaluator, FakeVocab, Rule

from pyspec.config import SamplingParams
from pyspec.control.oracle import Drafts, Recorder, best_lengths, n_right
from pyspec.engine import Engine

PROMPT = FakeVocab.encode("What would have been best?")


def test_n_right() -> None:
    text = [1, 2, 3, 4]
    assert n_right([2, 3, 9], text, 1) == 2
    assert n_right([9], text, 0) == 0
    assert n_right([4, 5, 6], text, 3) == 1
    assert n_right([], text, 2) == 0


@pytest.mark.parametrize("seed", range(20))
def test_best_lengths_against_every_choice(seed: int) -> None:
    rng = random.Random(seed)
    n = 12
    drafts = []
    for _ in range(rng.randint(1, 2)):
        offered = [rng.randint(0, 5) for _ in range(n)]
        right = [min(n - i, rng.randint(0, k)) for i, k in enumerate(offered)]
        price = rng.uniform(0, 3)
        drafts.append(Drafts(offered, right, lambda k, p=price: p * k))  # type: ignore[misc]
    rows = [0.0, *sorted(rng.uniform(5, 20) for _ in range(8))]

    @lru_cache(None)
    def least(i: int) -> float:
        if i >= n:
            return 0.0
        found = [rows[1] + least(i + 1)]
        for d in drafts:
            for k in range(1, min(d.offered[i], n - i - 1) + 1):
                found.append(rows[k + 1] + d.us(k) + least(i + 1 + min(k, d.right[i])))
        return min(found)

    us, lengths = best_lengths(n, drafts, lambda k: rows[k])
    assert us == pytest.approx(least(0))
    assert len(lengths) == n
    assert us <= n * rows[1]


def test_best_lengths_without_a_proposal() -> None:
    assert best_lengths(3, [Drafts([0, 0, 0], [0, 0, 0], lambda k: 1.0)], lambda k: 10.0) == (30.0, [0, 0, 0])
    assert best_lengths(2, [], lambda k: 10.0) == (20.0, [0, 0])


def test_recorder_sees_every_position_and_verifies_nothing() -> None:
    target = FakeEvaluator(Rule())
    drafter = FakeDrafter(target, "half", n_max=4)
    engine = Engine(target, [drafter], control=Recorder())
    seq = engine.submit(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
    while engine.step():
        pass
    recorder = engine.control
    assert isinstance(recorder, Recorder)
    assert seq.output == target.rule.generate(PROMPT, 40)
    assert engine.stats.n_draft == 0
    # the first token comes with the prompt
    assert engine.stats.n_pass == len(recorder.positions) == 39
    right = [n_right(p.draft, seq.output, i) for i, p in enumerate(recorder.positions, 1)]
    assert [len(p.draft) for p in recorder.positions[:-5]] == [4] * 34
    assert 0.3 < sum(r > 0 for r in right) / 39 < 0.7
    assert all(p.pass_us > 0 for p in recorder.positions)
    assert not drafter.violations
