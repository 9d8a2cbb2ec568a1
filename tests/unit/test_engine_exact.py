"""Whatever is drafted and however the memory rolls back, the output is what the target alone says."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fakes import EOS, QUALITIES, FakeDrafter, FakeEvaluator, Rule
from looptest import MEMORY, check, check_counters, prompt, run_all

from pyspec.config import SamplingParams
from pyspec.engine import Engine
from pyspec.runtime import Sequence
from pyspec.types import RollbackKind


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("quality", QUALITIES)
def test_output_is_the_targets_own(quality: str, memory: str, n_seq: int) -> None:
    """More requests than slots; prompts of one token, of less and of more than a micro-batch."""
    target = FakeEvaluator(Rule(), n_seq=n_seq, **{"n_ubatch": 16, **MEMORY[memory]})
    drafter = FakeDrafter(target, quality)
    engine = Engine(target, [drafter], eog_tokens={EOS})
    params = SamplingParams(max_tokens=40)
    sequences = [engine.submit(prompt(i, n), params) for i, n in enumerate([1, 2, 5, 17, 70])]
    run_all(engine)
    check(engine, sequences, 40)
    assert all(s.finish_reason == "length" for s in sequences)
    assert drafter.n_end == len(sequences)
    stats = engine.stats
    if quality == "perfect":
        assert stats.acceptance_rate == 1.0
        assert stats.n_pass < stats.n_output / (1.3 if memory == "window-tight" else 2)
    elif quality in ("wrong", "first-wrong"):
        assert stats.n_accepted == 0
    elif quality in ("empty", "id-huge"):
        assert stats.n_draft == 0
        assert stats.acceptance_rate is None


@pytest.mark.parametrize(("quality", "low", "high"), [("half", 0.20, 0.29), ("most", 0.74, 0.81), ("short", 1, 1)])
def test_acceptance_is_the_drafters(quality: str, low: float, high: float) -> None:
    """Drafts of 4 right with p each: (p + p^2 + p^3 + p^4) / 4 is .234 for p = .5 and .774 for p = .9."""
    target = FakeEvaluator(Rule())
    engine = Engine(target, [FakeDrafter(target, quality)])
    sequence = engine.submit(prompt(1, 5), SamplingParams(max_tokens=2000))
    run_all(engine)
    check(engine, [sequence], 2000)
    assert low <= (sequence.stats.acceptance_rate or 0) <= high


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(3, 1), (3, 3), (4, 1), (4, 4), (8, 2), (8, 8), (64, 5)])
@pytest.mark.parametrize("n_max", [1, 3, 12])
def test_any_batch_size(memory: str, n_batch: int, n_ubatch: int, n_max: int) -> None:
    """B06: work is split; no pass is larger than n_batch, no draft larger than its share."""
    options = MEMORY[memory] | {"n_ubatch": n_ubatch}
    target = FakeEvaluator(Rule(), n_seq=3, n_batch=n_batch, **options)
    engine = Engine(target, [FakeDrafter(target, "most", n_max=n_max)])
    sequences = [engine.submit(prompt(i, 40), SamplingParams(max_tokens=30)) for i in range(4)]
    run_all(engine)
    check(engine, sequences, 30)
    assert max(sum(len(t) for _, t, _ in rows.values()) for rows in target.passes) <= n_batch


@pytest.mark.parametrize("n_outputs_max", [3, 4, 7])
def test_outputs_stay_within_the_context(n_outputs_max: int) -> None:
    target = FakeEvaluator(Rule(), n_seq=3, n_outputs_max=n_outputs_max)
    engine = Engine(target, [FakeDrafter(target, "most", n_max=8)])
    sequences = [engine.submit(prompt(i, 20), SamplingParams(max_tokens=30)) for i in range(3)]
    run_all(engine)
    check(engine, sequences, 30)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("n_seq", [1, 3])
def test_no_drafter_is_plain_decoding(memory: str, n_seq: int) -> None:
    target = FakeEvaluator(Rule(), n_seq=n_seq, **{"n_ubatch": 16, **MEMORY[memory]})
    engine = Engine(target)
    sequences = [engine.submit(prompt(i, 10), SamplingParams(max_tokens=25)) for i in range(4)]
    run_all(engine)
    check(engine, sequences, 25)
    assert all(s.stats.n_first == 1 and s.stats.n_pass == 24 for s in sequences)
    assert all(s.stats.n_draft == 0 and not any(s.drafted) for s in sequences)


@pytest.mark.parametrize("n_seq", [1, 3])
def test_memory_that_takes_nothing_back_gets_no_drafts(n_seq: int) -> None:
    target = FakeEvaluator(Rule(), n_seq=n_seq, kind=RollbackKind.NONE)
    engine = Engine(target, [FakeDrafter(target, "perfect")])
    sequences = [engine.submit(prompt(i, 10), SamplingParams(max_tokens=25)) for i in range(n_seq)]
    run_all(engine)
    check(engine, sequences, 25)
    assert engine.stats.n_draft == 0


def test_first_drafter_with_a_draft_wins_and_all_hear() -> None:
    target = FakeEvaluator(Rule(), n_seq=2)
    first = FakeDrafter(target, "seldom", seed=1)
    second = FakeDrafter(target, "half", seed=2)
    third = FakeDrafter(target, "perfect")
    engine = Engine(target, [first, second, third])
    sequences = [engine.submit(prompt(i, 8), SamplingParams(max_tokens=120)) for i in range(2)]
    run_all(engine)
    check(engine, sequences, 120)
    assert first.stats.n_gen_drafts
    assert second.stats.n_gen_drafts
    assert first.stats.acceptance_rate == 1.0
    # what the second always proposes for, the third is never asked; both hear of it
    assert third.stats.n_gen_drafts == 0
    n_verified = sum(s.stats.n_pass for s in sequences)
    assert len(first.heard) == len(second.heard) == len(third.heard) == n_verified
    assert all(other for _, _, other, _ in third.heard)
    assert sum(not other for _, _, other, _ in first.heard) == first.stats.n_gen_drafts
    for a, b in zip(first.heard, second.heard, strict=True):
        assert a[:2] == b[:2]
        assert a[2] or b[2], "two drafters cannot both have drafted"


def test_counters_per_sequence_name_their_drafter() -> None:
    class Second(FakeDrafter):
        name = "second"

    target = FakeEvaluator(Rule(), n_seq=2)
    engine = Engine(target, [FakeDrafter(target, "seldom"), Second(target, "half")])
    sequences = [engine.submit(prompt(i, 8), SamplingParams(max_tokens=60)) for i in range(3)]
    run_all(engine)
    check(engine, sequences, 60)
    for s in sequences:
        assert sum(d.n_gen_tokens for d in s.stats.drafters) == s.stats.n_draft
        assert sum(d.n_acc_tokens for d in s.stats.drafters) == s.stats.n_accepted
        assert {d.name for d in s.stats.drafters} <= {"fake", "second"}
    for drafter in engine.chain.drafters:
        per_sequence = [d for s in sequences for d in s.stats.drafters if d.name == drafter.name]
        assert sum(d.n_gen_tokens for d in per_sequence) == drafter.stats.n_gen_tokens
        assert sum(d.n_acc_drafts for d in per_sequence) == drafter.stats.n_acc_drafts


# ---- sampling: the same seed gives the same text, drafted or not ------------------------


def sampled(quality: str | None, memory: str = "partial", n_seq: int = 1, seeds: tuple[int, ...] = (42,)) -> list[Any]:
    target = FakeEvaluator(Rule(), n_seq=n_seq, **{"n_ubatch": 16, **MEMORY[memory]})
    engine = Engine(target, [FakeDrafter(target, quality)] if quality else [])
    sequences = [
        engine.submit(prompt(9, 6), SamplingParams(max_tokens=60, temperature=1.0, top_k=40, seed=s)) for s in seeds
    ]
    run_all(engine)
    assert not target.violations
    for s in sequences:
        check_counters(s)
    return [s.output for s in sequences]


@pytest.mark.parametrize("memory", ["partial", "bounded", "full", "window"])
@pytest.mark.parametrize("quality", ["perfect", "wrong", "half", "random", "empty"])
def test_sampling_does_not_depend_on_the_draft(quality: str, memory: str) -> None:
    plain = sampled(None)
    assert sampled(quality, memory) == plain
    assert sampled(quality, memory) == plain


def test_sampling_does_not_depend_on_the_batch() -> None:
    alone = [sampled(None, seeds=(s,))[0] for s in (42, 7, 43)]
    assert sampled("half", n_seq=3, seeds=(42, 7, 43, 42)) == [*alone, alone[0]]
    assert alone[0] != alone[1] != alone[2]


def test_without_a_seed_every_request_differs() -> None:
    target = FakeEvaluator(Rule(), n_seq=2)
    engine = Engine(target)
    params = SamplingParams(max_tokens=40, temperature=1.0)
    first, second = (engine.submit(prompt(9, 6), params) for _ in range(2))
    run_all(engine)
    assert first.output != second.output
    assert first.seed != second.seed


# ---- anything at any time ---------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_random_starts_and_stops(seed: int) -> None:
    """B04: sequences come, go, are cancelled and dropped while others run; none of it shows in their output."""
    rng = random.Random(seed)
    memory = rng.choice(list(MEMORY))
    target = FakeEvaluator(
        Rule(seed), n_seq=rng.randint(1, 4), n_batch=rng.randint(8, 64), **{"n_ubatch": 8, **MEMORY[memory]}
    )
    drafters = [FakeDrafter(target, rng.choice(list(QUALITIES)), n_max=rng.randint(1, 6), seed=i) for i in range(2)]
    engine = Engine(target, drafters)
    sequences: list[tuple[Sequence, int]] = []
    dropped: set[int] = set()
    for i in range(400):
        action = rng.random()
        if action < 0.08 and len(sequences) < 25:
            n = rng.randint(1, 40)
            sequences.append(
                (engine.submit(prompt(rng.randint(0, 5), rng.randint(1, 50)), SamplingParams(max_tokens=n)), n)
            )
        elif action < 0.10 and sequences:
            rng.choice(sequences)[0].cancelled = True
        elif action < 0.11 and sequences:
            at = rng.randrange(len(sequences))
            engine.release(sequences[at][0])
            dropped.add(at)
        else:
            engine.step()
        assert len({s.id for s in engine.active}) == len(engine.active) <= target.n_seq_max, i
    run_all(engine)
    assert not target.violations
    assert not [v for d in drafters for v in d.violations]
    for s, n in sequences:
        assert s.done
        assert s.output == target.rule.generate(s.tokens[: s.n_prompt], n)[: len(s.output)]
        if s.finish_reason == "length":
            assert len(s.output) == n
        else:
            assert s.finish_reason == "cancelled"
        check_counters(s)
    assert not engine.active
