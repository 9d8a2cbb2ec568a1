"""Speculation keeps the distribution: chi-square over 50,000 texts for each verification, temperature and filter.

See ``tests/law.py`` for what is compared, and for the rate of false alarms: 1e-6 a comparison, 4 comparisons a test.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from law import World, Z, check, deviations, fails, planted

from pyspec import SamplingParams

N = 50_000

FILTERS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "penalties": {"penalty_repeat": 1.4, "penalty_freq": 0.3, "penalty_present": 0.2, "penalty_last_n": 4},
}

# some seconds a test, but a machine may have other things to do
pytestmark = [pytest.mark.statistical, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("verification", ["match", "rejection", "block"])
def test_same_distribution(verification: str, temperature: float, name: str, world: World) -> None:
    params = SamplingParams(temperature=temperature, verification=verification, **FILTERS[name])
    found = check(world, params, N)
    assert not fails(found), found
    # drafts do get accepted, and rejected
    assert 1.1 < found["length"] < 2.9


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize(
    "options",
    [
        {"mirostat": 2, "mirostat_tau": 1.5},
        {"xtc_probability": 0.4, "xtc_threshold": 0.15},
        {"typical_p": 0.7},
        {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    ],
)
def test_other_samplers(options: dict[str, Any], verification: str, world: World) -> None:
    params = SamplingParams(temperature=1.0, verification=verification, **options)
    found = check(world, params, N)
    assert not fails(found), found


def test_drafts_that_were_not_drawn(world: World) -> None:
    """Sample-and-match and rejection sampling are the same for them, in law and in fact."""
    for verification in ("match", "rejection", "block"):
        params = SamplingParams(temperature=1.0, verification=verification)
        found = check(world, params, N // 5, drawn=False)
        assert not fails(found), (verification, found)
    texts = [
        [text for text, _ in world.write(SamplingParams(temperature=1.0, verification=v), 300, drawn=False)]
        for v in ("match", "rejection")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("likeness", [0.0, 1.0])
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_drafts_that_are_useless_or_perfect(verification: str, likeness: float) -> None:
    other = World(likeness=likeness, n_draft=3)
    found = check(other, SamplingParams(temperature=1.0, verification=verification), N // 2)
    assert not fails(found), found
    if likeness == 1.0:
        # a step is enough for a text
        assert found["length"] == pytest.approx(3.0, abs=0.01)


def test_more_is_accepted_the_better_the_verification() -> None:
    world = World(n_draft=3, length=5, n_vocab=4)
    lengths = [
        check(world, SamplingParams(temperature=1.0, verification=v), N // 2)["length"]
        for v in ("match", "rejection", "block")
    ]
    assert lengths[0] < lengths[1] < lengths[2]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("q too small", {"verification": "rejection"}),
        ("draft believed", {"verification": "rejection"}),
        ("draft believed", {"verification": "match"}),
        ("state kept", {"verification": "rejection", **FILTERS["penalties"]}),
        ("state kept", {"verification": "match", **FILTERS["penalties"]}),
    ],
)
def test_faults_are_found(kind: str, options: dict[str, Any], world: World) -> None:
    params = SamplingParams(temperature=1.0, **options)
    found = check(world, params, N, verifier=planted(kind, world.n_draft))
    assert fails(found), found


# ---- the whole way, on tiny models -------------------------------------------------------------------------------


def texts(llm: Any, prompt: str, first_seed: int, n: int, **options: Any) -> Counter[tuple[int, ...]]:
    """Three tokens after ``prompt`` for each of ``n`` seeds, through the engine."""
    params = SamplingParams(temperature=1.0, top_k=3, max_tokens=3, ignore_eos=True, **options)
    engine, tokens = llm._running().engine, llm.tokenize(prompt)
    seqs = [engine.submit(tokens, params.override(seed=first_seed + i)) for i in range(n)]
    while engine.step():
        pass
    assert all(s.error is None for s in seqs)
    return Counter(tuple(s.output) for s in seqs)


@pytest.mark.parametrize("verification", ["match", "rejection", "block"])
@pytest.mark.parametrize("way", ["draft-simple", "draft-eagle3", "draft-mtp"])
def test_with_models(way: str, verification: str, tiny: Any, make_llm: Any) -> None:
    target, draft = {
        "draft-simple": ("target-llama", "draft-llama-half"),
        "draft-eagle3": ("target-llama", "eagle3-half"),
        "draft-mtp": ("target-mtp", None),
    }[way]
    n = 2000
    plain = make_llm(tiny(target), speculation="off", n_seq_max=8)
    llm = make_llm(tiny(target), tiny(draft) if draft else None, speculation=way, n_max=2, n_seq_max=8)
    for prompt in ("Numbers such as 1, 2, 3", "It is said that"):
        a = texts(plain, prompt, 0, n)
        b = texts(llm, prompt, 10**6, n, verification=verification)
        cells = [t for t in {*a, *b} if a[t] + b[t] >= 20]
        rest = [sum(c.values()) - sum(c[t] for t in cells) for c in (a, b)]
        pairs = [(a[t], b[t]) for t in cells] + ([(rest[0], rest[1])] if sum(rest) >= 10 else [])
        chi, k = sum((x - y) ** 2 / (x + y) for x, y in pairs), len(pairs) - 1
        assert k >= 2
        assert deviations(chi, k) < Z, (prompt, chi, k)
    assert 0 < llm.stats.n_accepted < llm.stats.n_draft
