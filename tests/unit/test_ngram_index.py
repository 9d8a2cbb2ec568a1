"""Where ``NgramIndex`` finds an n-gram: the compiled one and its twin, against llama.cpp's search written out."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspec import _ngram, _ngram_reference

PROFILE = settings(derandomize=True, database=None, deadline=None, max_examples=400)
BOTH = pytest.mark.parametrize("kernels", [_ngram, _ngram_reference], ids=["compiled", "reference"])


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
    assert kernels.NgramIndex(size_n).find(list(text.encode())) == start


@PROFILE
@given(text=st.lists(st.integers(0, 3), max_size=60), size_n=st.integers(1, 6))
def test_parity(text: list[int], size_n: int) -> None:
    expected = by_the_rule(text, size_n) if len(text) >= size_n else -1
    for kernels in (_ngram, _ngram_reference):
        assert kernels.NgramIndex(size_n).find(text) == expected


def test_long_history() -> None:
    tokens = list(range(200_000))
    tokens[7:19] = tokens[-12:]
    assert _ngram.NgramIndex(12).find(tokens) == 7
    assert _ngram.NgramIndex(12).find(tokens[:-1]) == -1
