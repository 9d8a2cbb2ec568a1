"""B16: every option of the n-gram methods has the effect it says, on drafts worked out by hand; no value hangs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from fakes import FakeEvaluator, Rule
from looptest import check, prompt, run_all

from pyspec.config import SamplingParams, SpeculationParams
from pyspec.drafters import registry
from pyspec.engine import Engine
from pyspec.errors import ConfigError
from pyspec.types import DraftRequest

A, B, C = 40, 41, 42
#: The text of the recipe: a b c a b c a b, in which b is the token that is not evaluated yet.
ABC = [A, B, C, A, B, C, A, B]
#: The same, long enough for drafts of eight.
LONG = [A, B, C] * 10 + [A, B]
NEXT = [C, A, B, C, A, B, C, A]


def drafts(method: str, text: list[int], n_calls: int = 1, **options: Any) -> list[list[int]]:
    """What is proposed after ``text``, and again each time it has gone on with c a b; everything is accepted."""
    text = list(text)
    d = registry.get(method)(FakeEvaluator(Rule()), None, SpeculationParams(**options), 1)
    d.run_begin(0, text)
    found = []
    for _ in range(n_calls):
        request = DraftRequest(0, len(text) - 1, text[-1], text, 1000)
        d.run_draft([request])
        found.append(request.draft)
        d.run_accept(0, len(request.draft), not request.draft, len(request.draft))
        text += [C, A, B]
    return found


@pytest.mark.parametrize(
    ("method", "n", "m", "short", "long"),
    [
        # b is at 1 and 4; of the text behind 4 only c and a are left, and 1 + 8 + 1 tokens have to come before
        ("ngram-simple", 1, 1, [C], [C]),
        ("ngram-simple", 1, 8, [], [C, A]),
        # a b at 3 (0 does not count): a draft of one is shorter than the n-gram, so it is not made
        ("ngram-simple", 2, 1, [], []),
        ("ngram-simple", 2, 8, [], [C, A]),
        # b c a b at 1: two tokens follow, four are needed
        ("ngram-simple", 4, 1, [], []),
        ("ngram-simple", 4, 8, [], []),
        # indexed are positions that n + m tokens follow: b at 4; the text has 7 tokens, 2 n + m are needed
        ("ngram-map-k", 1, 1, [C], [C]),
        ("ngram-map-k", 1, 8, [], NEXT),
        ("ngram-map-k", 2, 1, [C], [C]),
        ("ngram-map-k", 2, 8, [], NEXT),
        ("ngram-map-k", 4, 1, [], [C]),
        ("ngram-map-k", 4, 8, [], NEXT),
        # as above; there is one continuation, so it is more frequent than the others together
        ("ngram-map-k4v", 1, 1, [C], [C]),
        ("ngram-map-k4v", 1, 8, [], NEXT),
        ("ngram-map-k4v", 2, 1, [C], [C]),
        ("ngram-map-k4v", 2, 8, [], NEXT),
        ("ngram-map-k4v", 4, 1, [], [C]),
        ("ngram-map-k4v", 4, 8, [], NEXT),
        # from hash to hash: as far as it may
        ("ngram-mod", 1, 1, [C], [C]),
        ("ngram-mod", 1, 8, NEXT, NEXT),
        ("ngram-mod", 2, 1, [C], [C]),
        ("ngram-mod", 2, 8, NEXT, NEXT),
        ("ngram-mod", 4, 1, [C], [C]),
        ("ngram-mod", 4, 8, NEXT, NEXT),
    ],
)
def test_b16_n_and_m(method: str, n: int, m: int, short: list[int], long: list[int]) -> None:
    options = {"n_match": n, "mod_n_max": m, "mod_n_min": 0} if method == "ngram-mod" else {"size_n": n, "size_m": m}
    assert drafts(method, ABC, **options) == [short]
    assert drafts(method, LONG, **options) == [long]


def test_b16_ngram_cache_has_no_sizes() -> None:
    """Up to four tokens are looked up and eight proposed, as in llama.cpp; what is asked for limits it."""
    assert drafts("ngram-cache", ABC) == drafts("ngram-cache", LONG) == [NEXT]


@pytest.mark.parametrize(
    ("method", "min_hits", "short", "long"),
    [
        # b is found at 4 and 1 in the short text, and once more at each call; in the long one ten times
        ("ngram-simple", 1, [[C]] * 3, [[C]] * 3),
        ("ngram-simple", 3, [[], [C], [C]], [[C]] * 3),
        # counts how often the n-gram was asked for, this time included
        ("ngram-map-k4v", 1, [[C]] * 3, [[C]] * 3),
        ("ngram-map-k4v", 3, [[], [], [C]], [[], [], [C]]),
        # takes no notice of it, as in llama.cpp
        ("ngram-map-k", 3, [[C]] * 3, [[C]] * 3),
    ],
)
def test_b16_min_hits(method: str, min_hits: int, short: list[list[int]], long: list[list[int]]) -> None:
    options = {"size_n": 1, "size_m": 1, "min_hits": min_hits}
    assert drafts(method, ABC, 3, **options) == short
    assert drafts(method, LONG, 3, **options) == long


@pytest.mark.parametrize(("n_min", "proposed"), [(0, [50, 51, 52]), (3, [50, 51, 52]), (4, [])])
def test_b16_mod_n_min(n_min: int, proposed: list[int]) -> None:
    """Of the prompt three pairs are known, with what followed; the output is added 32 tokens at a time."""
    start = [A, B, 50, 51, 52]
    params = SpeculationParams(n_match=2, mod_n_max=8, mod_n_min=n_min)
    d = registry.get("ngram-mod")(FakeEvaluator(Rule()), None, params, 1)
    d.run_begin(0, start)
    text = [*start, 70, A, B]
    request = DraftRequest(0, len(text) - 1, B, text, 1000)
    d.run_draft([request])
    assert request.draft == proposed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size_n": 0}, "size_n"),
        ({"size_n": -1}, "size_n"),
        ({"size_m": 0}, "size_m"),
        ({"size_m": -8}, "size_m"),
        ({"size_m": 1025}, "size_m"),
        ({"size_n": 2**70}, "size_n"),
        ({"min_hits": 0}, "min_hits"),
        ({"min_hits": -3}, "min_hits"),
        ({"n_match": 0}, "n_match"),
        ({"n_match": -1}, "n_match"),
        ({"mod_n_max": 0}, "mod_n_max"),
        ({"mod_n_max": 2**40}, "mod_n_max"),
        ({"mod_n_max": 8, "mod_n_min": 9}, r"mod_n_min \(9\).*mod_n_max \(8\)"),
        ({"mod_n_min": -1}, "mod_n_min"),
        ({"n_max": 2, "n_min": 3}, r"n_min \(3\).*n_max \(2\)"),
        ({"n_max": -1}, "n_max"),
    ],
    ids=str,
)
def test_b16_bad_values_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculationParams(**options)


@pytest.mark.parametrize("method", ["ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod"])
def test_b16_n_longer_than_the_history(method: str) -> None:
    for n in (8, 9, 1024):
        assert drafts(method, ABC, size_n=n, size_m=1, n_match=n, mod_n_max=1, mod_n_min=0) == [[]]


@pytest.mark.parametrize("method", ["ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod"])
def test_b16_drafts_longer_than_a_pass(method: str) -> None:
    """m = 1024 with passes of four rows: drafts are cut, and the text is right."""
    rule = Rule()
    text = prompt(1, 12)
    rule.script(text, (text * 40)[: 12 * 40])
    target = FakeEvaluator(rule, n_batch=4)
    options = {"size_n": 2, "size_m": 1024, "n_match": 2, "mod_n_max": 1024, "mod_n_min": 0}
    engine = Engine(target, [registry.get(method)(target, None, SpeculationParams(**options), 1)])
    seq = engine.submit(text, SamplingParams(max_tokens=60, ignore_eos=True))
    run_all(engine)
    check(engine, [seq], 60)
    assert max(len(p.tokens) for p in seq.pieces) <= 4


@pytest.mark.parametrize("method", ["ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod"])
def test_b16_getters_return_what_was_set(method: str) -> None:
    options = {"size_n": 7, "size_m": 11, "min_hits": 3, "n_match": 17, "mod_n_max": 11, "mod_n_min": 5}
    params = SpeculationParams(**options)
    assert {name: getattr(params, name) for name in options} == options
    d: Any = registry.get(method)(FakeEvaluator(Rule()), None, params, 1)
    assert (d.params, d.n_max) == (params, 11)
    if method == "ngram-mod":
        assert (d.pool.n_match, d.pool.n_max, d.pool.n_min, d.n_min) == (17, 11, 5, 5)
    else:
        index = d.index(0)
        assert index.size_n == 7
        if method != "ngram-simple":
            assert (index.size_m, index.key_only) == (11, method == "ngram-map-k")
            assert index.min_hits == 3


HARD = """
import time
from pyspec import _ngram, _lookup, _suffix
import numpy as np

def run(text):
    for n, m in ((1, 1), (1, 1024), (4, 8), (1024, 1)):
        _ngram.NgramIndex(n).find(text)
        for key_only in (True, False):
            ngrams = _ngram.NgramMap(n, m, key_only)
            ngrams.begin(text)
            for _ in range(10):
                ngrams.draft(text, m)
                ngrams.accept(0)
        pool = _ngram.NgramPool(n, m, 0, 1)
        pool.begin(0, text)
        pool.draft(0, text, m)
    array = np.array(text, np.int32)
    counts = _lookup.LookupCache()
    counts.update(array, 0, len(array))
    _lookup.draft(counts, counts, counts, array, len(array), 8)
    index = _suffix.SuffixIndex()
    index.extend(text)
    index.draft(1024, p_min=0.001)

start = time.monotonic()
run([7] * 100_000)
run([])
run([7])
run([7, 8] * 50_000)
print(time.monotonic() - start)
"""


def test_b16_no_text_hangs() -> None:
    """One token 100,000 times, two in turns, one, none: all methods, small and large sizes, in 5 seconds."""
    result = subprocess.run([sys.executable, "-c", HARD], capture_output=True, text=True, timeout=60, check=True)
    assert float(result.stdout) < 5
