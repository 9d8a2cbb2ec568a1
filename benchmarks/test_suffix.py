"""Speed and memory of the suffix index, against a prompt look-up that searches the whole text.

Limits (asserted with ``--benchmark-enable``): a draft takes at most 10 us at 128k tokens and at most twice what it
takes at 1k; a token costs at most 0.5 us and 128 bytes; searching with NumPy takes 50 times as long at 128k. Tokens are
counted in processor time, because a prompt takes long enough to be interrupted on a busy machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyspec import _suffix
from pyspec.config import SpeculationParams
from pyspec.drafters.prediction import Prediction
from pyspec.drafters.suffix import Suffix
from pyspec.testing import FakeEvaluator, Rule
from pyspec.types import DraftRequest

Compare = Callable[[Callable[[], object], Callable[[], object], str], "float | None"]

SIZES = (1_024, 8_192, 32_768, 131_072)
N_VOCAB = 20_001


def text_of(n: int, seed: int = 0) -> list[int]:
    """Tokens as in a language: few of them often, many seldom, and phrases that return."""
    rng = np.random.default_rng(seed)
    out: list[int] = []
    while len(out) < n:
        if out and rng.random() < 0.3:
            at = int(rng.integers(len(out)))
            out += out[at : at + int(rng.integers(4, 40))]
        else:
            out += np.minimum(rng.zipf(1.3, 20), N_VOCAB - 1).tolist()
    return out[:n]


def search(text: np.ndarray, n_gram: int = 2, n_max: int = 10) -> np.ndarray:
    """What llama-cpp-python's prompt look-up finds: what followed the first occurrence of the last tokens."""
    for n in range(min(n_gram, len(text) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text, n)
        found = np.nonzero(np.all(windows == text[-n:], axis=1))[0]
        for at in found.tolist():
            if at + n < len(text):
                return text[at + n : at + n + n_max]
    return text[:0]


def index_of(text: list[int]) -> _suffix.SuffixIndex:
    index = _suffix.SuffixIndex()
    index.extend(text)
    return index


def drafter_at(text: list[int]) -> tuple[Suffix, DraftRequest]:
    d = Suffix(FakeEvaluator(Rule(), n_batch=8), None, SpeculationParams(suffix_corpus_max=0), 1)
    d.begin(0, text)
    return d, DraftRequest(0, len(text) - 1, text[-1], text, 32)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.benchmark(group="suffix draft")
def test_draft(compare: Compare, n: int) -> None:
    """One call of the drafter, everything included, where there is something to propose."""
    # the last words are some that came before
    text = text_of(n)
    text += text[n // 2 : n // 2 + 8]
    d, request = drafter_at(text)
    array = np.array(text, np.int32)

    def draft() -> list[int]:
        request.draft.clear()
        request.probs.clear()
        d.draft([request])
        return request.draft

    assert draft()
    assert len(search(array))
    ratio = compare(draft, lambda: search(array), "search")
    if ratio is not None and n == SIZES[-1]:
        assert ratio >= 50


@pytest.mark.benchmark(group="suffix draft, flat")
def test_draft_does_not_grow_with_the_text(benchmark: Any) -> None:
    """Median over many places of a text, each followed by new tokens that match some older place."""
    found: dict[int, float] = {}
    for n in SIZES:
        text = text_of(n)
        index = index_of(text)
        times = []
        for i in range(300 if not benchmark.disabled else 10):
            at = (i * 7919) % (n - 40)
            index.extend(text[at : at + 9])
            start = time.perf_counter()
            index.draft(32)
            times.append(time.perf_counter() - start)
        found[n] = 1e6 * statistics.median(times)
    benchmark(index.draft, 32)
    benchmark.extra_info["draft_us"] = found
    if not benchmark.disabled:
        assert found[SIZES[-1]] <= 10
        assert found[SIZES[-1]] <= 2 * max(found[SIZES[0]], 0.5)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.benchmark(group="suffix update")
def test_update(benchmark: Any, n: int) -> None:
    """A whole text at once, and memory a token."""
    text = text_of(n)
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
    text = text_of(SIZES[-1])
    index = index_of(text)
    at = iter(range(10**9))

    def step() -> None:
        index.extend([text[next(at) % len(text)]])

    benchmark(step)


@pytest.mark.parametrize("n", [1_024, 131_072])
@pytest.mark.benchmark(group="prediction")
def test_prediction(benchmark: Any, n: int) -> None:
    """A step of the drafter while it has lost its place: the whole prediction is searched."""
    text = np.array(text_of(n), np.int32)
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
