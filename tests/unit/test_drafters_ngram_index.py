"""The n-gram drafters with an index, in the engine: exact whatever they propose, on every kind of memory."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from fakes import N_SPECIAL, FakeEvaluator, Rule
from looptest import MEMORY, check, prompt, run_all

from pyspec.config import SamplingParams, SpeculationParams
from pyspec.drafters import registry
from pyspec.drafters.base import Drafter
from pyspec.engine import Engine
from pyspec.errors import ConfigError
from pyspec.types import DraftRequest

#: Method -> options with which it drafts in short texts.
METHODS: dict[str, dict[str, Any]] = {
    "ngram-map-k": {"size_n": 1, "size_m": 4},
    "ngram-map-k4v": {"size_n": 1, "size_m": 3},
    "ngram-mod": {"n_match": 2, "mod_n_max": 6, "mod_n_min": 1},
    "ngram-cache": {},
}
#: For texts that repeat themselves at length.
LONG: dict[str, dict[str, Any]] = {
    "ngram-map-k": {"size_n": 4, "size_m": 12},
    "ngram-map-k4v": {"size_n": 4, "size_m": 12},
    "ngram-mod": {"n_match": 6},
    "ngram-cache": {},
}


class Looping(Rule):
    """Goes through a few letters again and again, with a slip where the whole history says so."""

    def next(self, h: int) -> int:
        return self.best[h % 5]

    def row(self, h: int, out: Any) -> None:
        out[:] = self.table[h % 5]


def make(name: str, target: FakeEvaluator, **options: Any) -> Drafter:
    return registry.get(name)(target, None, SpeculationParams(**(METHODS[name] | options)), target.n_seq_max)


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", METHODS)
def test_output_is_the_targets_own(name: str, memory: str, n_seq: int) -> None:
    """Few letters, so that something is found; what is proposed is mostly wrong."""
    target = FakeEvaluator(Looping(), n_seq=n_seq, **{"n_ubatch": 16, **MEMORY[memory]})
    drafter = make(name, target)
    engine = Engine(target, [drafter])
    sequences = [engine.submit(prompt(i, n), SamplingParams(max_tokens=120)) for i, n in enumerate([1, 2, 17, 70, 5])]
    run_all(engine)
    check(engine, sequences, 120)
    assert drafter.stats.n_failed == 0
    assert drafter.stats.n_gen_tokens > 0 or memory == "window-tight"


@pytest.mark.parametrize("name", METHODS)
def test_repetition_is_accepted(name: str) -> None:
    """A script that repeats itself: most tokens come from drafts."""
    phrase = prompt(3, 40)
    text = phrase * 5
    target = FakeEvaluator(Rule().script(text[:60], text[60:]), n_ubatch=16)
    engine = Engine(target, [make(name, target, **LONG[name])])
    sequence = engine.submit(text[:60], SamplingParams(max_tokens=140))
    run_all(engine)
    check(engine, [sequence], 140)
    assert sequence.output == text[60:]
    assert sequence.stats.n_accepted > 70
    assert sequence.stats.acceptance_rate > 0.7


@pytest.mark.parametrize("name", METHODS)
def test_wins_in_a_chain_and_hears_of_others(name: str) -> None:
    phrase = prompt(3, 40)
    text = phrase * 5
    target = FakeEvaluator(Rule().script(text[:60], text[60:]), n_ubatch=16)
    simple = registry.get("ngram-simple")(target, None, SpeculationParams(size_n=2, size_m=2), 1)
    indexed = make(name, target)
    engine = Engine(target, [indexed, simple])
    sequence = engine.submit(text[:60], SamplingParams(max_tokens=140))
    run_all(engine)
    check(engine, [sequence], 140)
    assert indexed.stats.n_gen_tokens > 0
    assert indexed.stats.n_acc_tokens + simple.stats.n_acc_tokens == sequence.stats.n_accepted


@pytest.mark.parametrize("name", METHODS)
def test_sequence_without_begin_and_restart(name: str) -> None:
    """A slot's next sequence knows nothing of the last one's history, even if it is shorter."""
    target = FakeEvaluator(Rule(), n_seq=2)
    drafter = make(name, target)
    long = [40, 41, 42, 43, 44, 45] * 20
    requests = [DraftRequest(0, len(long) - 1, long[-1], long, 3)]
    drafter.run_draft(requests)
    drafter.run_begin(0, long)
    requests = [DraftRequest(0, len(long) - 1, long[-1], long, 3)]
    drafter.run_draft(requests)
    assert requests[0].draft == [40, 41, 42]
    drafter.end(0)
    short = [90, 91, 92]
    drafter.run_begin(0, short)
    request = DraftRequest(0, 2, 92, short, 3)
    drafter.run_draft([request])
    assert request.draft == []
    drafter.close()


@pytest.mark.parametrize("name", METHODS)
def test_request_limits_the_draft(name: str) -> None:
    target = FakeEvaluator(Rule())
    text = [40, 41, 42, 43, 44, 45] * 20
    for n_max in (1, 2, 3):
        drafter = make(name, target)
        drafter.run_begin(0, text[:-1])
        request = DraftRequest(0, len(text) - 1, text[-1], text, n_max)
        drafter.run_draft([request])
        assert request.draft == [40, 41, 42][:n_max]


def test_map_is_told_only_of_its_own_drafts() -> None:
    target = FakeEvaluator(Rule())
    drafter = make("ngram-map-k", target)
    text = [40, 41, 42, 43, 44, 45] * 20
    drafter.run_begin(0, text[:-1])

    def propose() -> list[int]:
        text.extend([40, 41, 42, 43, 44, 45])
        request = DraftRequest(0, len(text) - 1, text[-1], text, 10)
        drafter.run_draft([request])
        return request.draft

    assert len(propose()) == 4
    drafter.run_accept(0, 0, True, 3)
    assert len(propose()) == 4
    drafter.run_accept(0, 2, False, 4)
    assert len(propose()) == 2


def test_pool_of_two_sequences_and_low_acceptance(caplog: pytest.LogCaptureFixture) -> None:
    target = FakeEvaluator(Rule(), n_seq=2)
    drafter: Any = make("ngram-mod", target, n_match=16)
    text = [*range(100, 200)]
    drafter.run_begin(0, text)
    drafter.run_begin(1, text[:20])
    request = DraftRequest(1, 19, text[19], text[:20], 6)
    with caplog.at_level(logging.INFO, "pyspec"):
        for i in range(5):
            request.draft.clear()
            drafter.run_draft([request])
            assert request.draft == [*range(120, 126)]
            drafter.run_accept(1, 0, False, 6)
            assert ("emptied" in caplog.text) == (i == 4)
    request.draft.clear()
    drafter.run_draft([request])
    assert request.draft == []


def test_pool_is_of_one_engine() -> None:
    """Two engines, two vocabularies: nothing of one is proposed in the other; nor is an id that the target lacks."""
    small = FakeEvaluator(Rule(n_vocab=N_SPECIAL + 140))
    large = FakeEvaluator(Rule())
    one: Any = make("ngram-mod", small)
    other: Any = make("ngram-mod", large)
    other.run_begin(0, [270, 271, 265, 266] * 10)
    assert one.pool.n_used == 0
    assert one.pool is not other.pool
    # ids of the large vocabulary in the small one's pool: cut by the chain
    one.pool.begin(0, [40, 41, 270, 271, 42, 43, 44])
    engine = Engine(small, [one])
    request = DraftRequest(0, 1, 41, [40, 41], 6)
    one.pool.end(0)
    engine.chain.draft([request])
    assert request.draft == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size_n": 0}, "size_n"),
        ({"size_m": 0}, "size_m"),
        ({"min_hits": 0}, "min_hits"),
        ({"n_match": 0}, "n_match"),
        ({"n_match": 1025}, "n_match"),
        ({"mod_n_max": 0}, "mod_n_max"),
        ({"mod_n_max": 8, "mod_n_min": 9}, r"mod_n_min \(9\).*mod_n_max \(8\)"),
        ({"mod_n_min": -1}, "mod_n_min"),
        ({"n_match": 2.0}, "n_match"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculationParams(**options)


def test_defaults_are_llama_cpps() -> None:
    p = SpeculationParams()
    assert (p.size_n, p.size_m, p.min_hits, p.n_match, p.mod_n_max, p.mod_n_min) == (12, 48, 1, 24, 64, 48)
    for name, n_max in (("ngram-map-k", 48), ("ngram-map-k4v", 48), ("ngram-mod", 64), ("ngram-cache", 8)):
        assert registry.get(name).plan(None, object(), p, 1).n_max == n_max  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ngram-map-k", "ngram-map-k4v", "ngram-mod"])
def test_every_parameter_counts(name: str) -> None:
    """B16: parameters that are clamped to nonsense would give one and the same draft."""
    rng = random.Random(1)
    phrase = [rng.randrange(40, 90) for _ in range(40)]
    text = [7, *phrase, 99, *phrase[:20], 98, *phrase, 97, *phrase[:9]]
    target = FakeEvaluator(Rule())
    seen: dict[Any, int] = {}
    for n in (1, 3, 8, 12):
        for m in (1, 8, 24):
            options = {"size_n": n, "size_m": m} if "map" in name else {"n_match": n, "mod_n_max": m, "mod_n_min": 0}
            drafter = make(name, target, **options)
            drafter.run_begin(0, text[:-1])
            request = DraftRequest(0, len(text) - 1, text[-1], text, 1000)
            drafter.run_draft([request])
            seen[n, m] = len(request.draft)
            assert drafter.n_max == m
    assert {seen[3, m] for m in (1, 8, 24)} == {1, 8, 24}
    assert seen[12, 8] == 0
    assert seen[8, 8] == 8
