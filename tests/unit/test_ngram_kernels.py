"""The compiled n-gram look-ups against their slow twins, and what they do with bad input."""

from __future__ import annotations

import random
import time
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspec import _ngram, _ngram_reference

PROFILE = settings(derandomize=True, database=None, deadline=None, max_examples=300)
BOTH = pytest.mark.parametrize("kernels", [_ngram, _ngram_reference], ids=["compiled", "reference"])


@PROFILE
@given(
    size_n=st.integers(1, 4),
    size_m=st.integers(1, 6),
    key_only=st.booleans(),
    min_hits=st.integers(1, 4),
    n_letters=st.integers(1, 4),
    n_prompt=st.integers(0, 60),
    n_max=st.integers(0, 12),
    seed=st.integers(0, 2**32),
)
def test_map(
    size_n: int, size_m: int, key_only: bool, min_hits: int, n_letters: int, n_prompt: int, n_max: int, seed: int
) -> None:
    rng = random.Random(seed)
    pair = [k.NgramMap(size_n, size_m, key_only, min_hits) for k in (_ngram, _ngram_reference)]
    tokens = [rng.randrange(n_letters) for _ in range(n_prompt)]
    for each in pair:
        each.begin(tokens)
    for _ in range(30):
        ours, slow = (each.draft(tokens, n_max) for each in pair)
        assert ours == slow
        assert len(ours) <= n_max
        if ours and rng.random() < 0.8:
            n = rng.randint(0, len(ours))
            for each in pair:
                each.accept(n)
        tokens += [rng.randrange(n_letters) for _ in range(rng.randint(1, 5))]
        if rng.random() < 0.03:
            tokens = tokens[rng.randrange(len(tokens)) :]
            for each in pair:
                each.begin(tokens)


@PROFILE
@given(
    n_match=st.integers(1, 4),
    n_max=st.integers(1, 6),
    n_min=st.integers(0, 6),
    n_letters=st.integers(2, 4),
    n_prompt=st.integers(0, 60),
    wanted=st.integers(0, 12),
    n_entries=st.sampled_from([1, 16, 64, 1 << 14]),
    seed=st.integers(0, 2**32),
)
def test_pool(
    n_match: int, n_max: int, n_min: int, n_letters: int, n_prompt: int, wanted: int, n_entries: int, seed: int
) -> None:
    """Two sequences share it: what is in use and when it is emptied agrees too."""
    rng = random.Random(seed)
    pair = [k.NgramPool(n_match, n_max, min(n_min, n_max), 2, n_entries) for k in (_ngram, _ngram_reference)]
    texts = [[rng.randrange(n_letters) for _ in range(n_prompt)] for _ in range(2)]

    def both(call: str, *args: Any) -> Any:
        ours, slow = (getattr(each, call)(*args) for each in pair)
        assert ours == slow
        assert (pair[0].n_used, pair[0].n_reset) == (pair[1].n_used, pair[1].n_reset)
        return ours

    for seq in (0, 1):
        both("begin", seq, texts[seq])
    for _ in range(60):
        seq = rng.randrange(2)
        tokens = texts[seq]
        if rng.random() < 0.05:
            both("end", seq)
            tokens[:] = [rng.randrange(n_letters) for _ in range(n_prompt)]
            both("begin", seq, tokens)
        draft = both("draft", seq, tokens, wanted)
        if draft and rng.random() < 0.8:
            both("accept", seq, rng.choice([0, 0, 0, len(draft)]))
        tokens += [rng.randrange(n_letters) for _ in range(rng.randint(1, 9))]


@BOTH
@pytest.mark.parametrize("key_only", [True, False])
def test_map_by_hand(kernels: ModuleType, key_only: bool) -> None:
    """After an n-gram of which two of three tokens were accepted comes no draft of more than two."""
    ngrams = kernels.NgramMap(2, 3, key_only)
    text = [9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    ngrams.begin(text[:-1])
    assert ngrams.draft(text, 10) == [3, 4, 5]
    ngrams.accept(2)
    text += [3, 4, 6, 7, 8, 9, 1, 2]
    assert ngrams.draft(text, 10) == [3, 4]
    ngrams.accept(0)
    text += [3, 4, 5, 1, 2]
    assert ngrams.draft(text, 10) == []


@BOTH
def test_map_asks_for_a_clear_majority(kernels: ModuleType) -> None:
    """Continuations 3 3 4: twice as many 3s, so 3; with 3 4 nothing."""
    for pairs, expected in (([3, 3, 4], [3]), ([3, 4], [])):
        text = [0]
        for i, token in enumerate(pairs):
            text += [1, 2, token, 50 + i, 60 + i]
        # enough other tokens behind them, so that all are indexed
        text += [70, 71, 72, 1, 2]
        ngrams = kernels.NgramMap(2, 1, False)
        ngrams.begin(text)
        found = ngrams.draft(text, 5)
        # the tokens proposed are those behind the latest occurrence, as in llama.cpp
        assert (found != []) == (expected != []), pairs


@BOTH
def test_min_hits_counts_lookups(kernels: ModuleType) -> None:
    text = [0, 1, 2, 3, 4, 5, 6, 7, 1, 2]
    ngrams = kernels.NgramMap(2, 2, False, 3)
    ngrams.begin(text[:-1])
    assert ngrams.draft(text, 9) == []
    text += [8, 9, 1, 2]
    assert ngrams.draft(text, 9) == []
    text += [8, 9, 1, 2]
    assert ngrams.draft(text, 9) == [3, 4]


@BOTH
@pytest.mark.parametrize(
    ("size_n", "size_m", "min_hits"), [(0, 1, 1), (1, 0, 1), (1025, 1, 1), (1, 1025, 1), (-1, 1, 1), (1, 1, 0)]
)
def test_map_refuses(kernels: ModuleType, size_n: int, size_m: int, min_hits: int) -> None:
    with pytest.raises(ValueError, match=r"size_n|size_m|min_hits"):
        kernels.NgramMap(size_n, size_m, True, min_hits)


@BOTH
@pytest.mark.parametrize(
    "args", [(0, 1, 0, 1), (1, 0, 0, 1), (1, 1, 2, 1), (1, 1, -1, 1), (1, 1, 0, 0), (1, 1, 0, 1, 3), (1, 1, 0, 1, 0)]
)
def test_pool_refuses(kernels: ModuleType, args: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"n_match|n_max|n_min|n_seq|n_entries"):
        kernels.NgramPool(*args)


@BOTH
def test_histories_only_grow(kernels: ModuleType) -> None:
    ngrams, pool = kernels.NgramMap(2, 2, True), kernels.NgramPool(2, 4, 0, 1)
    ngrams.begin([1] * 20)
    pool.begin(0, [1] * 20)
    for call in (lambda: ngrams.draft([1] * 19, 3), lambda: pool.draft(0, [1] * 19, 3)):
        with pytest.raises(ValueError, match="19 tokens and had 20"):
            call()
    for seq in (-1, 1):
        with pytest.raises(IndexError):
            pool.begin(seq, [1])
    assert ngrams.draft([1] * 21, 9) != []
    assert pool.draft(0, [1] * 60, 9) != []


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**70, "x", None])
def test_no_token(token: Any) -> None:
    """What is no int32 is refused, and the index is as it was."""
    ngrams, pool = _ngram.NgramMap(2, 2, True), _ngram.NgramPool(2, 4, 0, 1)
    text = [1, 2, 3, 4] * 6
    ngrams.begin(text[:8])
    pool.begin(0, text[:8])
    for call in (lambda: ngrams.draft([*text[:9], token], 3), lambda: pool.draft(0, [*text[:9], token], 3)):
        with pytest.raises((OverflowError, TypeError)):
            call()
    assert ngrams.draft(text, 2) == [1, 2]
    assert len(pool.draft(0, [*text, *text], 3)) == 3


@BOTH
def test_longer_than_the_history(kernels: ModuleType) -> None:
    ngrams, pool = kernels.NgramMap(1024, 1024, False), kernels.NgramPool(1024, 1024, 0, 1, 1024)
    for n in (0, 1, 2, 1023, 1024, 1025):
        ngrams.begin([5] * n)
        pool.begin(0, [5] * n)
        assert ngrams.draft([5] * (n + 1), 9) == []
        assert pool.draft(0, [5] * (n + 1), 9) == [] or n >= 1024


@pytest.mark.parametrize("key_only", [True, False])
@pytest.mark.parametrize("size_n", [1, 12, 1024])
def test_one_token_a_hundred_thousand_times(key_only: bool, size_n: int) -> None:
    text = [7] * 100_000
    ngrams = _ngram.NgramMap(size_n, 48, key_only)
    start = time.perf_counter()
    ngrams.begin(text)
    assert ngrams.draft(text, 48) == [7] * 48
    for _ in range(500):
        text.append(7)
        assert ngrams.draft(text, 48) == [7] * 48
        ngrams.accept(48)
    assert time.perf_counter() - start < 5


def test_one_token_a_hundred_thousand_times_in_a_pool() -> None:
    text = [7] * 100_000
    pool = _ngram.NgramPool(24, 64, 48, 1)
    pool.begin(0, text)
    assert pool.n_used == 1
    assert pool.draft(0, text, 64) == [7] * 64


def test_bad_hashes_do_not_cost_time() -> None:
    """Many different n-grams of one hash: 1000 + 2654435761 * a is the same for these pairs (a, b)."""
    factor = 2654435761
    # b - b' = -factor * (a - a') modulo 2^32, as int32
    pairs = [(a, ((1000 - factor * a + 2**31) % 2**32) - 2**31) for a in range(60_000)]
    text = [t for pair in pairs for t in pair]
    ngrams = _ngram.NgramMap(2, 1, False)
    start = time.perf_counter()
    ngrams.begin(text)
    ngrams.draft(text, 5)
    assert time.perf_counter() - start < 5


def test_memory_of_a_map() -> None:
    """Bytes a token, beyond the fixed table, for a text without repetition."""
    sizes = []
    for key_only in (True, False):
        ngrams = _ngram.NgramMap(12, 48, key_only)
        text = [i * 2654435761 % 2**31 for i in range(131_072)]
        ngrams.begin(text)
        ngrams.draft(text, 48)
        sizes.append((ngrams.n_bytes - (1 << 20)) / len(text))
    assert sizes[0] <= 8
    assert sizes[1] <= 64


def test_pool_resets() -> None:
    pool = _ngram.NgramPool(4, 8, 0, 2, 64)
    rng = random.Random(0)
    # more than a quarter in use when a sequence begins
    assert pool.begin(0, [rng.randrange(1000) for _ in range(40)])
    assert pool.n_used == 0
    text = [1, 2, 3, 4, 5] * 4
    assert not pool.begin(0, text)
    n_reset = pool.n_reset
    for i in range(5):
        assert len(pool.draft(0, text, 8)) == 8
        # a better draft in between, or one of the other sequence, does not lengthen the row
        assert pool.accept(0, 1) == (i == 4)
    assert pool.n_reset == n_reset + 1
    assert pool.n_used == 0
    assert pool.draft(0, text, 8) == []
    pool.begin(0, text)
    for n in (0, 0, 0, 0, 2, 0, 0, 0, 0):
        assert pool.draft(0, text, 8)
        assert not pool.accept(0, n)


def test_pool_is_shared() -> None:
    """What one sequence said is proposed to the other."""
    pool = _ngram.NgramPool(4, 8, 1, 2)
    pool.begin(0, list(range(100)))
    pool.begin(1, [500, 20, 21, 22])
    assert pool.draft(1, [500, 20, 21, 22, 23], 8) == [24, 25, 26, 27, 28, 29, 30, 31]
    pool.end(0)
    assert pool.draft(1, [500, 20, 21, 22, 23], 3) == [24, 25, 26]


@PROFILE
@given(
    size_n=st.integers(1, 5),
    n_letters=st.integers(1, 4),
    n_times=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_index(size_n: int, n_letters: int, n_times: int, seed: int) -> None:
    """The index finds what its twin finds by going through the text."""
    rng = random.Random(seed)
    pair = [k.NgramIndex(size_n) for k in (_ngram, _ngram_reference)]
    tokens: list[int] = []
    for _ in range(40):
        ours, slow = (each.find(tokens, n_times) for each in pair)
        assert ours == slow
        tokens += [rng.randrange(n_letters) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.03:
            tokens = tokens[rng.randrange(len(tokens)) :]
            for each in pair:
                each.clear()


@BOTH
def test_index_refuses(kernels: ModuleType) -> None:
    for size_n in (0, -1, 1025):
        with pytest.raises(ValueError, match="size_n"):
            kernels.NgramIndex(size_n)
    index = kernels.NgramIndex(2)
    index.find([1, 2, 3, 1, 2])
    with pytest.raises(ValueError, match="4 tokens and had 5"):
        index.find([1, 2, 3, 1])
    index.clear()
    assert index.find([1]) == -1
    assert index.find([0, 1, 2, 3, 1, 2]) == 1


def test_index_of_one_token_a_hundred_thousand_times() -> None:
    text = [7] * 100_000
    index = _ngram.NgramIndex(12)
    start = time.perf_counter()
    assert index.find(text) == 100_000 - 12 - 2
    assert index.find(text, 10**9) == -1
    assert time.perf_counter() - start < 5
    assert index.n_bytes / len(text) < 64
