"""The suffix automaton: the same answers as a search of the whole text, limits, bad input."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import zipf

from pyspec import _suffix, _suffix_reference

TEXTS = st.lists(st.integers(0, 3), max_size=60)
OPTIONS = st.fixed_dictionaries(
    {
        "n_max": st.integers(0, 20),
        "min_match": st.integers(1, 4),
        "factor": st.sampled_from([0.0, 0.5, 1.0, 4.0]),
        "offset": st.sampled_from([-1.0, 0.0, 3.0]),
        "p_min": st.sampled_from([0.01, 0.1, 0.4, 1.0]),
    }
)


#: (weights, rate) of a confidence, or None.
LEARNING = st.sampled_from(
    [None, ((0.0, 0.8, 0.5, 0.0), 0.1), ((-1.0, 1.0, 1.0, 0.5), 0.0), ((3.0, 2.0, 1.0, 0.0), 0.03)]
)


def confidences(learning: Any) -> tuple[Any, Any]:
    if learning is None:
        return None, None
    return _suffix.Confidence(*learning), _suffix_reference.Confidence(*learning)


def same(a: Any, b: Any) -> None:
    assert a[0] == b[0]
    np.testing.assert_allclose(a[1], b[1], rtol=1e-6)
    assert a[2] == pytest.approx(b[2], rel=1e-6)
    assert a[3] == b[3]


@settings(max_examples=300, deadline=None)
@given(TEXTS, OPTIONS, st.integers(1, 60), LEARNING)
def test_own_text(text: list[int], options: dict[str, Any], cut: int, learning: Any) -> None:
    ours, reference = _suffix.SuffixIndex(), _suffix_reference.SuffixIndex()
    fast, slow = confidences(learning)
    for part in (text[:cut], text[cut:]):
        ours.extend(part, 0, fast)
        reference.extend(part, 0, slow)
        same(ours.draft(**options, confidence=fast), reference.draft(**options, confidence=slow))
    assert ours.n_tokens == len(text)
    if fast is not None:
        np.testing.assert_allclose(fast.weights, slow.weights, rtol=1e-9, atol=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=4), TEXTS, OPTIONS, st.integers(0, 2), LEARNING)
def test_other_text(
    documents: list[list[int]], text: list[int], options: dict[str, Any], late: int, learning: Any
) -> None:
    """A text followed through a corpus that grows meanwhile."""
    fast, slow_fast = confidences(learning)
    ours, reference = _suffix.SuffixIndex(), _suffix_reference.SuffixIndex()
    follow, slow = _suffix.SuffixMatch(ours), _suffix_reference.SuffixMatch(reference)
    n = len(documents) - late
    half = len(text) // 2
    for group, part in ((documents[: max(n, 0)], text[:half]), (documents[max(n, 0) :], text[half:])):
        for document in group:
            for index in (ours, reference):
                index.extend(document)
                index.end_document()
            same(ours.draft(**options), ([], [], 0.0, 0))
        follow.extend(part, 0, fast)
        slow.extend(part, 0, slow_fast)
        assert follow.match_length == slow.match_length
        same(follow.draft(**options, confidence=fast), slow.draft(**options, confidence=slow_fast))
    if fast is not None:
        np.testing.assert_allclose(fast.weights, slow_fast.weights, rtol=1e-9, atol=1e-9)


def test_confidence_learns() -> None:
    """From a text in which long repeats hold and single tokens say nothing."""
    rng = random.Random(3)
    phrase = [rng.randrange(100, 200) for _ in range(30)]
    learned = _suffix.Confidence((0.0, 0.0, 0.0, 0.0), 0.1)
    index = _suffix.SuffixIndex()
    assert learned.chance(1, 1, 1) == learned.chance(20, 1, 1) == 0.5
    for _ in range(20):
        index.extend([rng.randrange(100, 200) for _ in range(30)] + phrase, 0, learned)
    assert learned.chance(20, 1, 1) > 0.9
    assert learned.chance(20, 1, 1) - learned.chance(1, 1, 1) > 0.3
    assert learned.chance(1, 1, 4) < 0.1
    fixed = _suffix.Confidence((0.5, 1.0, 1.0, 1.0), 0.0)
    index.extend(phrase, 0, fixed)
    assert fixed.weights == (0.5, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("weights", "rate"), [((1.0,), 0.1), ((0.0,) * 4, -0.1), ((0.0,) * 4, float("nan")), ((float("inf"),) * 4, 0.1)]
)
def test_confidence_refuses(weights: Any, rate: float) -> None:
    with pytest.raises(ValueError, match=r"weights|rate"):
        _suffix.Confidence(weights, rate)


@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 2, 1), (1, -1, 1), (1, 0, 0)])
def test_confidence_refuses_counts(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="no such counts"):
        _suffix.Confidence((0.0,) * 4, 0.1).chance(*counts)


@pytest.mark.parametrize("text", [[7] * 5000, [1, 2, 3] * 2000, list(range(5000)), [*[1] * 3000, 2, *[1] * 3000]])
def test_degenerate_texts(text: list[int]) -> None:
    """One token over and over, a short period, no repetition at all, and an edge from every state at once."""
    index = _suffix.SuffixIndex()
    index.extend(text)
    tokens, probs, score, length = index.draft(32, p_min=0.01)
    if len(set(text)) == len(text):
        assert (tokens, score, length) == ([], 0.0, 0)
    else:
        # 1 ... 1 was once followed by 2
        period = text[:3] if text[1] == 2 else [2, *[1] * 40] if 2 in text else text[:1]
        assert tokens == (period * 32)[:32]
        assert length >= 2999
        assert all(0 < p <= 1 for p in probs)
    assert index.n_bytes <= 128 * len(text) + 20_000


@pytest.mark.parametrize(("n", "vocab"), [(50_000, 20_000), (50_000, 50), (20_000, 2)])
def test_memory(n: int, vocab: int) -> None:
    rng = np.random.default_rng(1)
    for text in (zipf(n, vocab=vocab), rng.integers(0, vocab, n).tolist()):
        index = _suffix.SuffixIndex()
        index.extend(text)
        assert index.n_states <= 2 * n
        assert index.n_bytes <= 128 * n + 20_000


def test_clear_and_match_again() -> None:
    index = _suffix.SuffixIndex()
    index.extend([1, 2, 3, 4])
    index.end_document()
    follow = _suffix.SuffixMatch(index)
    follow.extend([1, 2])
    assert follow.draft(4, p_min=0.1)[0] == [3, 4]
    index.clear()
    assert follow.stale
    assert index.n_tokens == 0
    assert follow.draft(4) == ([], [], 0.0, 0)
    assert not follow.stale
    index.extend([2, 9])
    follow.extend(np.array([1, 2], np.int32))
    assert follow.draft(4)[0] == [9]


def test_growing_step_by_step_is_growing_at_once() -> None:
    text = zipf(3000, vocab=30)
    at_once, by_one = _suffix.SuffixIndex(), _suffix.SuffixIndex()
    at_once.extend(text)
    for i in range(len(text)):
        by_one.extend(text[: i + 1], i)
    assert at_once.n_states == by_one.n_states
    assert at_once.draft(64) == by_one.draft(64)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: x.extend([1, -1]), ValueError),
        (lambda x: x.extend([1, 2**31]), ValueError),
        (lambda x: x.extend([2**70]), OverflowError),
        (lambda x: x.extend([1, "a"]), TypeError),
        (lambda x: x.extend([1.5]), TypeError),
        (lambda x: x.extend(None), TypeError),
        (lambda x: x.extend(np.array([1], np.int64)), ValueError),
        (lambda x: x.extend(np.array([[1]], np.int32)), ValueError),
        (lambda x: x.extend(np.array([3, -2], np.int32)), ValueError),
        (lambda x: x.extend([1], 2), ValueError),
        (lambda x: x.extend([1], -1), ValueError),
        (lambda x: x.draft(-1), ValueError),
        (lambda x: x.draft(1025), ValueError),
        (lambda x: x.draft(4, 0), ValueError),
        (lambda x: x.draft(4, factor=float("nan")), ValueError),
        (lambda x: x.draft(4, factor=-1.0), ValueError),
        (lambda x: x.draft(4, offset=float("inf")), ValueError),
        (lambda x: x.draft(4, p_min=0.0), ValueError),
        (lambda x: x.draft(4, p_min=float("nan")), ValueError),
        (lambda x: x.draft(4, p_min=1.1), ValueError),
    ],
)
def test_bad_input(call: Any, error: type[Exception]) -> None:
    for make in (_suffix.SuffixIndex, lambda: _suffix.SuffixMatch(_suffix.SuffixIndex())):
        x = make()
        with pytest.raises(error):
            call(x)
        assert x.draft(4) == ([], [], 0.0, 0)


def test_threads() -> None:
    """Appending, following and drafting at the same time; the answers are those of some moment."""
    index = _suffix.SuffixIndex()
    text = zipf(20_000, vocab=100)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        follow = _suffix.SuffixMatch(index)
        try:
            for i in range(0, len(text), 400):
                index.extend(text[i : i + 400])
                follow.extend(text[i : i + rng.randrange(1, 50)])
                for tokens in (index.draft(16)[0], follow.draft(16)[0]):
                    assert all(0 <= t <= 20_000 for t in tokens)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert index.n_tokens == 4 * len(text)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 3), max_size=6), st.integers(0, 60))
def test_resync(text: list[int], tail: list[int], at: int) -> None:
    at = min(at, len(text))
    ours = _suffix.resync(np.array(text, np.int32), np.array(tail, np.int32), at)
    assert ours == _suffix_reference.resync(text, tail, at)


def test_resync_bad_input() -> None:
    a = np.zeros(3, np.int32)
    for at in (-1, 4):
        with pytest.raises(ValueError, match="at must be"):
            _suffix.resync(a, a, at)
