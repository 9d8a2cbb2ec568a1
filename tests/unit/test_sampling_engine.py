"""Sampling in the loop, on fakes: bad rows, constraints, interrupted steps, drafts that say how they were drawn."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from fakes import FakeEvaluator, Rule

from pyspec import ConfigError, SamplingError, SamplingParams, SpeculationParams
from pyspec.drafters.base import Drafter, Plan
from pyspec.drafters.chain import DrafterChain
from pyspec.engine import Engine
from pyspec.types import DraftRequest, DraftSampling

PROMPT = [50, 51, 52, 53, 54, 55]
V = Rule().n_vocab


class Sampled(Drafter):
    """Draws from a distribution over three letters, or says so falsely."""

    name: ClassVar[str] = "sampled"

    def __init__(self, target: Any, q: Any = "right") -> None:
        super().__init__(target, None, SpeculationParams(n_max=3), target.n_seq_max)
        self.q = q
        self.seen: list[DraftSampling | None] = []

    @classmethod
    def plan(cls, target: Any, draft: Any, params: SpeculationParams, n_seq: int) -> Plan:
        return Plan(n_max=3)

    def draft(self, requests: list[DraftRequest]) -> None:
        for r in requests:
            self.seen.append(r.sampling)
            r.draft = [60, 61, 62][: r.n_max]
            ids, probs = np.array([60, 61, 62], np.int32), np.array([0.2, 0.3, 0.5], np.float32)
            if self.q == "right":
                r.q = [(ids, probs)] * len(r.draft)
            elif self.q == "short":
                r.q = [(ids, probs)] * (len(r.draft) - 1)
            elif self.q == "other":
                r.q = [(ids + 20, probs)] * len(r.draft)
            elif self.q == "shape":
                r.q = [(ids, probs[:2])] * len(r.draft)


def run(engine: Engine, *seqs: Any) -> None:
    for _ in range(2000):
        if not engine.step():
            break
    assert all(s.done for s in seqs)


def outputs(params: SamplingParams, q: Any = None, n_seq: int = 1, prompts: Any = (PROMPT,)) -> list[list[int]]:
    target = FakeEvaluator(Rule(), n_seq=n_seq)
    engine = Engine(target, [Sampled(target, q)] if q is not None else [])
    seqs = [engine.submit(p, params) for p in prompts]
    run(engine, *seqs)
    assert not target.violations
    return [s.output for s in seqs]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"temperature": 0.0}, False),
        ({"temperature": 1.0}, True),
        ({"temperature": 1.0, "seed": 1}, False),
        ({"temperature": 1.0, "verification": "match"}, False),
        ({"temperature": 1.0, "seed": 1, "verification": "rejection"}, True),
        ({"temperature": 1.0, "seed": 1, "verification": "block"}, True),
    ],
)
def test_when_drafts_are_drawn(options: dict[str, Any], asked: bool) -> None:
    target = FakeEvaluator(Rule())
    drafter = Sampled(target)
    engine = Engine(target, [drafter])
    seq = engine.submit(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True, **options))
    run(engine, seq)
    assert {s is not None for s in drafter.seen} == {asked}
    if options.get("verification") == "block":
        assert len({s.stream for s in drafter.seen if s}) == len(drafter.seen)
    elif asked:
        assert len({(s.seed, s.stream) for s in drafter.seen if s}) == 1


@pytest.mark.parametrize("q", ["short", "other", "shape", "none"])
def test_what_cannot_be_is_verified_as_not_drawn(q: str) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5, verification="rejection", ignore_eos=True)
    assert outputs(params, q) == outputs(params.override(verification="match"))


def test_checked_q_is_cut_with_the_draft() -> None:
    target = FakeEvaluator(Rule())
    chain = DrafterChain([Sampled(target)], V)
    request = DraftRequest(0, 5, 55, PROMPT, 2, sampling=DraftSampling(1.0, 0, 1.0, 0.0, 1, 2))
    chain.draft([request])
    assert request.draft == [60, 61]
    assert len(request.q) == 2
    assert all(ids.dtype == np.int32 and probs.dtype == np.float32 for ids, probs in request.q)


def test_n_min_leaves_drawn_drafts_alone() -> None:
    drafter = Sampled(FakeEvaluator(Rule()))
    drafter.n_min = 5
    requests = [DraftRequest(0, 5, 55, PROMPT, 2, draft=[1, 2]), DraftRequest(1, 5, 55, PROMPT, 2, draft=[1, 2])]
    requests[1].q = [(np.array([1], np.int32), np.ones(1, np.float32))] * 2
    drafter.drop_short(requests)
    assert [r.draft for r in requests] == [[], [1, 2]]


@pytest.mark.parametrize("verification", ["match", "rejection", "block"])
def test_a_request_says_the_same_in_any_company(verification: str) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=9, verification=verification, penalty_repeat=1.3)
    alone = outputs(params, "right")[0]
    others = ([70, 71, 72], PROMPT, [80] * 9)
    assert outputs(params, "right", 3, others)[1] == alone


# ---- rows that are no good -----------------------------------------------------------------------------------------


class Broken(FakeEvaluator):
    """Puts NaN into the rows of one sequence after some passes."""

    at = 6

    def decode(self, batch: Any) -> None:
        super().decode(batch)
        if self.n_decode > self.at and 0 in batch.rows():
            begin, end = batch.rows()[0]
            self._logits[begin:end, 5] = np.nan


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_ends_one_request_with_a_reason(temperature: float) -> None:
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=1, ignore_eos=True)
    good = outputs(params, prompts=([70, 71, 72],))[0]
    target = Broken(Rule(), n_seq=2)
    engine = Engine(target, [Sampled(target)])
    bad, fine = engine.submit(PROMPT, params), engine.submit([70, 71, 72], params)
    run(engine, bad, fine)
    assert isinstance(bad.error, SamplingError)
    assert "NaN" in str(bad.error)
    assert bad.finish_reason == "cancelled"
    assert 0 < len(bad.output) < 30
    assert fine.error is None
    assert fine.output == good
    # the slot is free again
    Broken.at, again = 10**9, engine.submit([70, 71, 72], params)
    run(engine, again)
    Broken.at = 6
    assert again.output == good


def test_every_token_forbidden() -> None:
    engine = Engine(FakeEvaluator(Rule()))
    seq = engine.submit(PROMPT, SamplingParams(logit_bias=dict.fromkeys(range(V), float("-inf"))))
    run(engine, seq)
    with pytest.raises(SamplingError, match="token 6 of the sequence: no token is allowed"):
        raise seq.error
    with pytest.raises(ConfigError, match="out of range"):
        engine.submit(PROMPT, SamplingParams(logit_bias={V: 1.0}))


def test_exact_mode_takes_no_drawn_drafts() -> None:
    target = FakeEvaluator(Rule())
    drafter = Sampled(target)
    engine = Engine(target, [drafter], speculation=SpeculationParams(exact=True))
    seq = engine.submit(PROMPT, SamplingParams(max_tokens=10, temperature=1.0))
    run(engine, seq)
    assert set(drafter.seen) == {None}
    with pytest.raises(ConfigError, match="exact=True"):
        engine.submit(PROMPT, SamplingParams(temperature=1.0, verification="block"))


# ---- constraints ---------------------------------------------------------------------------------------------------


class Spell:
    """Only the letters of a word, one after the other; then the text is complete."""

    def __init__(self, word: list[int]) -> None:
        self.word, self.heard = word, []  # type: tuple[list[int], list[int]]

    def mask(self) -> Any:
        allowed = np.zeros(-(-V // 32) * 32, bool)
        allowed[self.word[len(self.heard)]] = True
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        assert token == self.word[len(self.heard)]
        self.heard.append(token)

    def forced(self) -> list[int]:
        return self.word[len(self.heard) :]

    @property
    def stopped(self) -> bool:
        return len(self.heard) == len(self.word)


@pytest.mark.parametrize("verification", ["auto", "match", "rejection", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_hears_emitted_tokens_only(temperature: float, verification: str) -> None:
    word = [60, 61, 90, 91, 60, 61, 62, 77]
    target = FakeEvaluator(Rule())
    engine = Engine(target, [Sampled(target)])
    params = SamplingParams(max_tokens=50, temperature=temperature, verification=verification, top_k=1)
    spell = Spell(word)
    seq = engine.submit(PROMPT, params, constraint=spell)
    run(engine, seq)
    assert seq.error is None
    assert seq.output == spell.heard == word
    assert seq.finish_reason == "stop"
    assert seq.stats.n_accepted > 0


# ---- interrupted steps ---------------------------------------------------------------------------------------------


def test_an_interrupt_between_verification_and_commit_leaves_the_state_as_it_was() -> None:
    params = SamplingParams(
        max_tokens=40, temperature=0.8, seed=3, penalty_repeat=1.5, mirostat=2, mirostat_tau=3.0, ignore_eos=True
    )
    wanted = outputs(params, "right")[0]
    target = FakeEvaluator(Rule())
    engine = Engine(target, [Sampled(target)])
    seq = engine.submit(PROMPT, params)
    calls = 0

    def interrupt(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise KeyboardInterrupt

    engine.observer = interrupt
    while not seq.done:
        try:
            engine.step()
        except KeyboardInterrupt:
            assert seq.sampler.n == seq.n_output
    assert seq.output == wanted
    assert calls > 10
