"""Speed and memory of the suffix index.

    pytest benchmarks/test_suffix.py --benchmark-enable

Limits: a drafter's call takes at most 10 us at 128k tokens and at most twice what it takes at 1k (what it takes with
cold caches is recorded); a token costs at most 0.5 us (1 us with what is learned from it) and 128 bytes; no addition
to the corpus makes a generation wait. Tokens are counted in processor time, because a prompt takes long enough to be
interrupted on a busy machine. Against llama-cpp-python: ``test_lookup_peer.py``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from texts import zipf

from pyspec import _suffix
from pyspec._suffix import Confidence
from pyspec.config import SpeculationParams
from pyspec.drafters.prediction import Prediction
from pyspec.drafters.suffix import WEIGHTS, Suffix
from pyspec.drafters.suffix_corpus import SuffixCorpus
from pyspec.testing import FakeEvaluator, Rule
from pyspec.types import DraftRequest

SIZES = (1_024, 8_192, 32_768, 131_072)
N_VOCAB = 20_001


def index_of(text: list[int]) -> _suffix.SuffixIndex:
    index = _suffix.SuffixIndex()
    index.extend(text)
    return index


@pytest.mark.benchmark(group="suffix draft, flat")
def test_draft_does_not_grow_with_the_text(benchmark: Any, evict: Callable[[], None]) -> None:
    """The drafter's call at many places of a text that go on as some older place did. What became new there is taken in
    before: updates are counted below."""
    cold: dict[int, float] = {}
    warm: dict[int, float] = {}
    evaluator = FakeEvaluator(Rule(), n_batch=8)

    def draft(d: Suffix, request: DraftRequest) -> None:
        request.draft.clear()
        request.probs.clear()
        d.draft([request])

    for n in SIZES:
        for found, is_cold in ((cold, not benchmark.disabled), (warm, False)):
            text = zipf(n)
            d = Suffix(evaluator, None, SpeculationParams(suffix_corpus_max=0), 1)
            d.begin(0, text)
            times, n_found = [], 0
            for i in range(100 if not benchmark.disabled else 10):
                at = (i * 7919) % (n - 40)
                text += text[at : at + 9]
                request = DraftRequest(0, len(text) - 1, text[-1], text, 32)
                draft(d, request)
                if is_cold:
                    evict()
                start = time.perf_counter()
                draft(d, request)
                times.append(time.perf_counter() - start)
                n_found += bool(request.draft)
            assert n_found >= len(times) // 2
            found[n] = 1e6 * statistics.median(times)

    benchmark(draft, d, request)
    benchmark.extra_info |= {"draft_us": warm, "draft_us_cold": cold}
    if not benchmark.disabled:
        assert warm[SIZES[-1]] <= 10
        assert warm[SIZES[-1]] <= 2 * warm[SIZES[0]]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.benchmark(group="suffix update")
def test_update(benchmark: Any, n: int) -> None:
    """A whole text at once, and memory a token."""
    text = zipf(n)
    index = benchmark(index_of, text)
    benchmark.extra_info["bytes_per_token"] = index.n_bytes / n
    assert index.n_bytes <= 128 * n + 20_000
    if not benchmark.disabled:
        times = []
        for _ in range(5):
            start = time.thread_time()
            index_of(text)
            times.append(1e6 * (time.thread_time() - start) / n)
        benchmark.extra_info["us_per_token"] = statistics.median(times)
        assert statistics.median(times) <= 0.5


@pytest.mark.parametrize("kind", ["random", "two tokens", "one token"])
@pytest.mark.benchmark(group="suffix update, hard texts")
def test_update_of_hard_texts(benchmark: Any, kind: str) -> None:
    rng = np.random.default_rng(0)
    n = SIZES[-1]
    text = rng.integers(0, {"random": 50_000, "two tokens": 2, "one token": 1}[kind], n).tolist()
    index = benchmark(index_of, text)
    assert index.n_bytes <= 128 * n + 20_000
    benchmark.extra_info["bytes_per_token"] = index.n_bytes / n


@pytest.mark.benchmark(group="suffix update, step by step")
def test_update_by_one(benchmark: Any) -> None:
    """A call for each token of a long text, as in generation."""
    text = zipf(SIZES[-1])
    index = index_of(text)
    at = iter(range(10**9))

    def step() -> None:
        index.extend([text[next(at) % len(text)]])

    benchmark(step)


@pytest.mark.benchmark(group="suffix update, step by step")
def test_update_that_learns(benchmark: Any) -> None:
    """The same with a confidence that learns from each token: two more look-ups in an index larger than the caches."""
    text = zipf(SIZES[-1])
    index, learned = index_of(text), Confidence(WEIGHTS, 0.02)
    at = iter(range(10**9))

    def step() -> None:
        begin = next(at) * 64 % (len(text) - 64)
        index.extend(text[begin : begin + 64], 0, learned)

    benchmark(step)
    if not benchmark.disabled:
        per_token = benchmark.extra_info["us_per_token"] = 1e6 * benchmark.stats.stats.median / 64
        assert per_token <= 1.0


@pytest.mark.benchmark(group="suffix corpus")
def test_longest_pause(benchmark: Any) -> None:
    """A full corpus of 262,144 tokens: what a finished answer of 500 tokens costs, and the worst of all of them.

    The worst is where a table is made larger, or where the older half is dropped.
    """
    c = SuffixCorpus(262_144 if not benchmark.disabled else 8_192, N_VOCAB)
    text = np.array(zipf(262_144 if not benchmark.disabled else 16_384), np.int32)
    at = iter(range(10**9))
    times: list[float] = []

    def add() -> None:
        begin = next(at) * 500 % (len(text) - 500)
        start = time.perf_counter()
        c.add(text[begin : begin + 500])
        times.append(time.perf_counter() - start)

    for _ in range(1100 if not benchmark.disabled else 60):
        add()
    assert c.n_tokens <= c.max_tokens
    assert c.n_bytes <= 128 * c.n_tokens + 1_000_000
    benchmark(add)
    benchmark.extra_info["ms"] = {"median": 1e3 * statistics.median(times), "worst": 1e3 * max(times)}
    if not benchmark.disabled:
        assert max(times) <= 0.025


@pytest.mark.parametrize("n", [1_024, 131_072])
@pytest.mark.benchmark(group="prediction")
def test_prediction(benchmark: Any, n: int) -> None:
    """A step of the drafter while it has lost its place: the whole prediction is searched."""
    text = np.array(zipf(n), np.int32)
    d = Prediction(FakeEvaluator(Rule(), n_batch=8), None, SpeculationParams(), 1)
    d.begin(0, [1])
    tokens = [1, *text[:100].tolist()]
    request = DraftRequest(0, len(tokens) - 1, tokens[-1], tokens, 16, extra={"prediction": text})

    def step() -> None:
        tokens.append(N_VOCAB + 1)
        request.draft.clear()
        d.draft([request])

    benchmark.pedantic(step, rounds=200 if not benchmark.disabled else 2)
    assert not request.draft
    if not benchmark.disabled:
        assert 1e6 * benchmark.stats.stats.median <= 500
