"""ngram_find_last, compiled and NumPy, against the search of llama.cpp's ngram-simple written out."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspec import _core, _reference

PROFILE = settings(derandomize=True, database=None, deadline=None, max_examples=400)
BOTH = pytest.mark.parametrize("kernels", [_core, _reference], ids=["core", "reference"])


def find(kernels: ModuleType, text: str, size_n: int) -> int:
    history = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    history.flags.writeable = False
    found: int = kernels.ngram_find_last(history, len(history), size_n)
    return found


def by_the_rule(text: list[int], size_n: int) -> int:
    """Candidate starts from high to low; an occurrence is followed by two tokens at least, and start 0 is no match."""
    pattern = text[len(text) - size_n :]
    for start in range(len(text) - size_n - 2, 0, -1):
        if text[start : start + size_n] == pattern:
            return start
    return -1


@BOTH
@pytest.mark.parametrize(
    ("text", "size_n", "start"),
    [
        ("_ab1_ab2_ab", 2, 5),  # the latest of several
        ("ab1_2_ab", 2, -1),  # start 0 is never found
        ("_ab1ab", 2, 1),
        ("_abab", 2, 1),  # two tokens follow: the pattern itself
        ("_xbxb", 3, -1),
        ("_aaa", 1, 1),
        ("__aa", 1, -1),  # only one token follows
        ("_aaaaa", 2, 2),  # occurrence and pattern overlap
        ("_abcabd", 3, -1),
        ("abcdef", 2, -1),
        ("a", 1, -1),
        ("", 1, -1),
        ("ab", 5, -1),
    ],
)
def test_known(kernels: ModuleType, text: str, size_n: int, start: int) -> None:
    assert find(kernels, text, size_n) == start


@PROFILE
@given(text=st.lists(st.integers(0, 3), max_size=60), size_n=st.integers(1, 6), unused=st.integers(0, 5))
def test_parity(text: list[int], size_n: int, unused: int) -> None:
    history = np.array(text + [0] * unused, np.int32)
    expected = by_the_rule(text, size_n) if len(text) >= size_n else -1
    for kernels in (_core, _reference):
        assert kernels.ngram_find_last(history, len(text), size_n) == expected


def test_long_history() -> None:
    history = np.arange(200_000, dtype=np.int32)
    history[7:19] = history[-12:]
    assert _core.ngram_find_last(history, len(history), 12) == 7
    assert _core.ngram_find_last(history, len(history) - 1, 12) == -1


@BOTH
def test_refuses(kernels: ModuleType) -> None:
    history = np.zeros(8, np.int32)
    for n_hist, size_n, message in [(9, 1, "n_hist"), (-1, 1, "n_hist"), (8, 0, "size_n"), (8, -3, "size_n")]:
        with pytest.raises(ValueError, match=message):
            kernels.ngram_find_last(history, n_hist, size_n)
    with pytest.raises(ValueError, match=r"dtype|-d"):
        kernels.ngram_find_last(history.astype(np.int64), 8, 1)
