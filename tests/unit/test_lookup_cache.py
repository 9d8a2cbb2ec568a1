"""Counts of n-grams: the compiled cache against its twin, and its files: whole, damaged, foreign."""

from __future__ import annotations

import os
import random
import struct
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from fakes import N_VOCAB, FakeEvaluator, Rule
from hypothesis import given, settings
from hypothesis import strategies as st
from looptest import check, prompt, run_all

from pyspec import _lookup, _ngram_reference
from pyspec._lookup import LookupCache
from pyspec.config import SamplingParams, SpeculationParams
from pyspec.drafters.ngram_cache import NgramCache, read_cache, write_cache
from pyspec.engine import Engine
from pyspec.errors import ConfigError, DataFileError
from pyspec.types import DraftRequest

PROFILE = settings(derandomize=True, database=None, deadline=None, max_examples=300)
KERNELS = (_lookup, _ngram_reference)
BOTH = pytest.mark.parametrize("kernels", KERNELS, ids=["compiled", "reference"])


def array(tokens: Any) -> np.ndarray:
    return np.array(tokens, np.int32)


def counted(tokens: Any, n_min: int = 1, n_max: int = 4) -> LookupCache:
    cache = LookupCache()
    cache.update(array(tokens), 0, len(tokens), n_min, n_max)
    return cache


def contents(cache: Any) -> list[Any]:
    return [(ngram, list(counts.items())) for ngram, counts in cache.items()]


@PROFILE
@given(seed=st.integers(0, 2**32), n_letters=st.integers(1, 6))
def test_parity(seed: int, n_letters: int) -> None:
    """Updates in parts, merges, files, drafts from three levels."""
    rng = random.Random(seed)

    def text(n: int) -> np.ndarray:
        return array([rng.randrange(n_letters) for _ in range(n)])

    ours, slow = ([k.LookupCache() for _ in range(3)] for k in KERNELS)
    for i, (n_min, n_max) in enumerate([(1, 4), (1, 4), (2, 2)]):
        tokens = text(rng.randint(0, 80))
        n = rng.randint(0, len(tokens))
        for cache in (ours[i], slow[i]):
            cache.update(tokens, 0, n, n_min, n_max)
            cache.update(tokens, n, len(tokens), n_min, n_max)
        assert contents(ours[i]) == contents(slow[i])
        assert contents(ours[i]) == contents(counted(tokens, n_min, n_max))
        data = ours[i].to_bytes()
        assert data == slow[i].to_bytes()
        for k in KERNELS:
            assert contents(k.LookupCache.from_bytes(data)) == contents(ours[i])
    if rng.random() < 0.5:
        for caches in (ours, slow):
            caches[1].merge(caches[0])
        assert contents(ours[1]) == contents(slow[1])
    assert [len(c) for c in ours] == [len(c) for c in slow]
    assert [c.n_continuations for c in ours] == [c.n_continuations for c in slow]
    for _ in range(20):
        tokens, n_draft = text(rng.randint(0, 12)), rng.randint(0, 10)
        expected = _ngram_reference.draft(*slow, tokens, len(tokens), n_draft)
        assert _lookup.draft(*ours, tokens, len(tokens), n_draft) == expected


@BOTH
def test_by_hand(kernels: ModuleType) -> None:
    cache, empty = kernels.LookupCache(), kernels.LookupCache()
    cache.update(array([1, 2, 3, 1, 2, 4, 1, 2, 4]), 0, 9)
    assert dict(cache.items())[1, 2] == {3: 1, 4: 2}
    assert dict(cache.items())[2,] == {3: 1, 4: 2}
    assert (1, 2, 3, 1) in dict(cache.items())

    def say(levels: Any, tokens: list[int], n: int = 1) -> list[int]:
        found: list[int] = kernels.draft(*levels, array(tokens), len(tokens), n)
        return found

    # two of three is enough for a text's own counts, three of four of another text's
    assert say((cache, empty, empty), [9, 1, 2]) == [4]
    assert say((empty, cache, empty), [9, 1, 2]) == [4]
    assert say((empty, empty, cache), [9, 1, 2]) == [4]
    once = kernels.LookupCache()
    once.update(array([7, 1, 2, 3]), 0, 4)
    # a pair seen once is too little, three tokens are not
    assert say((once, empty, empty), [9, 1, 2]) == []
    assert say((once, empty, empty), [7, 1, 2]) == [3]
    # the longest n-gram decides; what is proposed is the text to go on from
    assert say((cache, empty, empty), [1, 2, 3], 3) == [1, 2, 4]
    assert say((cache, empty, empty), [1]) == []
    assert say((cache, empty, empty), []) == []
    assert say((cache, empty, empty), [1, 2], 0) == []
    # the static level turns the scale
    corpus = kernels.LookupCache()
    corpus.update(array([1, 2, 3, 1, 2, 3]), 0, 6, 2, 2)
    even = kernels.LookupCache()
    even.update(array([8, 1, 2, 3, 8, 1, 2, 4]), 0, 8)
    assert say((even, empty, empty), [8, 1, 2]) == [4]
    assert say((even, empty, corpus), [8, 1, 2]) == [3]


@BOTH
def test_refuses(kernels: ModuleType) -> None:
    cache = kernels.LookupCache()
    tokens = array([1, 2, 3])
    for begin, end in ((-1, 2), (2, 1), (0, 4)):
        with pytest.raises(ValueError, match="of 3"):
            cache.update(tokens, begin, end)
    for n_min, n_max in ((0, 4), (1, 5), (3, 2)):
        with pytest.raises(ValueError, match="lengths of n-grams"):
            cache.update(tokens, 0, 3, n_min, n_max)
    with pytest.raises(ValueError, match="negative"):
        cache.update(array([1, -1, 3]), 0, 3)
    with pytest.raises(ValueError, match="itself"):
        cache.merge(cache)
    with pytest.raises(ValueError, match="n_tokens"):
        kernels.draft(cache, cache, cache, tokens, 4, 1)
    assert len(cache) == 0


def test_one_token_a_hundred_thousand_times() -> None:
    start = time.perf_counter()
    cache = counted([7] * 100_000)
    assert len(cache) == 4
    assert dict(cache.items())[7,] == {7: 99_999}
    empty = LookupCache()
    assert _lookup.draft(cache, empty, empty, array([7] * 5), 5, 8) == [7] * 8
    assert time.perf_counter() - start < 5


def test_counts_do_not_overflow() -> None:
    most = 2**31 - 1
    head = struct.pack("=7i", 5, -1, -1, -1, 1, 6, most - 1)
    one, other = LookupCache.from_bytes(head), LookupCache.from_bytes(head)
    one.merge(other)
    assert dict(one.items()) == {(5,): {6: most}}
    one.update(array([5, 6]), 0, 2)
    assert dict(one.items()) == {(5,): {6: most}}


# ---- files ------------------------------------------------------------------------------------

GOOD = struct.pack("=7i", 1, 2, -1, -1, 1, 3, 4) + struct.pack("=9i", 1, 2, 3, 4, 2, 3, 1, 9, 7)


@BOTH
def test_file_format(kernels: ModuleType) -> None:
    cache = kernels.LookupCache.from_bytes(GOOD)
    assert contents(cache) == [((1, 2), [(3, 4)]), ((1, 2, 3, 4), [(3, 1), (9, 7)])]
    assert cache.to_bytes() == GOOD
    assert len(kernels.LookupCache.from_bytes(b"")) == 0
    # twice the same n-gram, or continuation: the first counts
    twice = GOOD + struct.pack("=7i", 1, 2, -1, -1, 1, 8, 8) + struct.pack("=9i", 5, -1, -1, -1, 2, 6, 1, 6, 9)
    assert contents(kernels.LookupCache.from_bytes(twice)) == [*contents(cache), ((5,), [(6, 1)])]


@BOTH
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (GOOD[:-1], "ends inside"),
        (GOOD[:-4], "ends inside"),
        (GOOD[:-8], "ends inside"),
        (GOOD[:3], "ends inside"),
        (GOOD[:16], "ends inside"),
        (GOOD[:20], "ends inside"),
        (GOOD + b"\0\0\0", "ends inside"),
        (struct.pack("=7i", -1, -1, -1, -1, 1, 3, 4), "token id"),
        (struct.pack("=7i", 1, -2, -1, -1, 1, 3, 4), "token id"),
        (struct.pack("=7i", 1, -1, 2, -1, 1, 3, 4), "gap"),
        (struct.pack("=7i", 1, 2, -1, -1, 0, 3, 4), "0 continuations"),
        (struct.pack("=7i", 1, 2, -1, -1, -5, 3, 4), "-5 continuations"),
        (struct.pack("=7i", 1, 2, -1, -1, 2**31 - 1, 3, 4), "ends inside"),
        (struct.pack("=7i", 1, 2, -1, -1, 1, -1, 4), "token id -1"),
        (struct.pack("=7i", 1, 2, -1, -1, 1, 100, 4), "token id 100"),
        (struct.pack("=7i", 1, 200, -1, -1, 1, 3, 4), "not in"),
        (struct.pack("=7i", 1, 2, -1, -1, 1, 3, 0), "count of 0"),
        (struct.pack("=7i", 1, 2, -1, -1, 1, 3, -7), "count of -7"),
        (b"not a cache file at all, but text", "token id"),
    ],
)
def test_damaged(kernels: ModuleType, data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.LookupCache.from_bytes(data, 100)


@PROFILE
@given(data=st.binary(max_size=200) | st.builds(lambda cut, at, b: (GOOD * 3)[:cut][:at] + b + (GOOD * 3)[at:],
       st.integers(0, 200), st.integers(0, 200), st.binary(max_size=8)))  # fmt: skip
def test_any_bytes(data: bytes) -> None:
    """Both read it alike, or both refuse it."""
    results = []
    for kernels in KERNELS:
        try:
            results.append(contents(kernels.LookupCache.from_bytes(data, 1000)))
        except ValueError:
            results.append(None)
    assert results[0] == results[1]


def save(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def make(n_seq: int = 1, **options: Any) -> NgramCache:
    return NgramCache(FakeEvaluator(Rule(), n_seq=n_seq), None, SpeculationParams(**options), n_seq)


OPTIONS = pytest.mark.parametrize("option", ["lookup_cache_static", "lookup_cache_dynamic"])


@OPTIONS
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (GOOD[:-5], "damaged, or no lookup cache"),
        (b"GGUF" + bytes(60), "damaged, or no lookup cache"),
        (np.frombuffer(GOOD, np.int32).byteswap().tobytes(), "other byte order"),
        (struct.pack("=7i", 1, N_VOCAB, -1, -1, 1, 3, 4), f"another model: this vocabulary has {N_VOCAB} tokens"),
    ],
    ids=["cut", "another-file", "byte-order", "vocabulary"],
)
def test_bad_files(option: str, data: bytes, message: str, tmp_path: Path) -> None:
    """A typed error that says what is wrong; the file is as it was."""
    path = save(tmp_path / "cache.bin", data)
    with pytest.raises(DataFileError, match=message) as caught:
        make(**{option: path})
    assert "cache.bin" in str(caught.value)
    assert path.read_bytes() == data


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match="no file"):
        NgramCache.plan(None, None, SpeculationParams(lookup_cache_static=tmp_path / "x"), 1)  # type: ignore[arg-type]
    with pytest.raises(DataFileError, match="cannot be read"):
        make(lookup_cache_static=str(tmp_path / "x"))
    with pytest.raises(DataFileError, match="cannot be read"):
        make(lookup_cache_static=tmp_path)
    make(lookup_cache_dynamic=str(tmp_path / "new")).close()
    # nothing was generated, so nothing is written
    assert not (tmp_path / "new").exists()
    for value in (7, "", b"x"):
        with pytest.raises(ConfigError, match="file name"):
            SpeculationParams(lookup_cache_static=value)  # type: ignore[arg-type]


def test_dynamic_level_learns_and_is_kept(tmp_path: Path) -> None:
    """What one sequence has said is proposed to later ones, in this process and the next."""
    path = tmp_path / "dynamic.bin"
    text = [*range(40, 60)]
    request = DraftRequest(1, 3, 43, [99, 41, 42, 43], 6)
    drafter = make(2, lookup_cache_dynamic=path)
    for _ in range(2):
        drafter.run_begin(0, text)
        drafter.end(0)
        assert not path.exists()
    drafter.run_draft([request])
    assert request.draft == [44, 45, 46, 47, 48, 49]
    drafter.close()
    drafter.close()
    assert sorted(tmp_path.iterdir()) == [path]
    assert dict(read_cache(path).items())[40, 41, 42, 43] == {44: 2}
    again = make(2, lookup_cache_dynamic=path)
    request.draft.clear()
    again.run_draft([request])
    assert request.draft == [44, 45, 46, 47, 48, 49]
    before = path.stat()
    again.close()
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    # without the option nothing goes from one sequence to the next
    alone = make(2)
    for _ in range(2):
        alone.run_begin(0, text)
        alone.end(0)
    request.draft.clear()
    alone.run_draft([request])
    assert request.draft == []


def test_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "cache.bin", GOOD)
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(DataFileError, match="No space left"):
        write_cache(path, counted([1, 2, 3]))
    assert path.read_bytes() == GOOD
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    write_cache(path, counted([1, 2, 3]))
    assert contents(read_cache(path)) == contents(counted([1, 2, 3]))
    with pytest.raises(DataFileError, match="cannot be written"):
        write_cache(tmp_path / "no" / "folder", counted([1, 2]))


def test_all_levels_in_the_engine(tmp_path: Path) -> None:
    """Exact with files whose counts are of another text, and the engine's close writes the dynamic one."""
    static, dynamic = tmp_path / "static.bin", tmp_path / "dynamic.bin"
    write_cache(static, counted(prompt(5, 400), 2, 2))
    write_cache(dynamic, counted(prompt(6, 400)))
    target = FakeEvaluator(Rule(), n_seq=2)
    params = SpeculationParams(lookup_cache_static=static, lookup_cache_dynamic=dynamic)
    engine = Engine(target, [NgramCache(target, None, params, 2)])
    n = len(read_cache(dynamic))
    sequences = [engine.submit(prompt(i, 30), SamplingParams(max_tokens=40)) for i in range(3)]
    run_all(engine)
    check(engine, sequences, 40)
    engine.close()
    assert len(read_cache(dynamic, N_VOCAB)) > n
    assert len(read_cache(static, N_VOCAB)) == len(counted(prompt(5, 400), 2, 2))
