"""Greedy text does not depend on the draft: the n-gram methods with an index, on every kind of target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pairs import SMALL, TARGETS

import pyspec
from pyspec.drafters import registry

#: Method -> options with which it drafts in short texts.
METHODS: dict[str, dict[str, Any]] = {
    "ngram-map-k": {"size_n": 1, "size_m": 6},
    "ngram-map-k4v": {"size_n": 1, "size_m": 3},
    "ngram-mod": {"n_match": 2, "mod_n_max": 6, "mod_n_min": 1},
    "ngram-cache": {},
}

#: Text that repeats, so that there is something to look up.
REPEATING = [
    "for i in range(10): print(i, add(i, 1))\n" * 3,
    "The model predicts the next token from the tokens before it. " * 3,
    "apple trees and stories, apple trees and songs, apple trees and",
]


@pytest.fixture(scope="module")
def plain(tiny: Any) -> Callable[[str], list[list[int]]]:
    made: dict[str, list[list[int]]] = {}

    def get(target: str) -> list[list[int]]:
        if target not in made:
            with pyspec.LLM(tiny(target), speculation="off", **SMALL) as llm:
                made[target] = [llm.generate(p, max_tokens=100, ignore_eos=True).tokens for p in REPEATING]
        return made[target]

    return get


def test_every_method_is_here() -> None:
    """``ngram-simple`` is in test_greedy.py."""
    assert set(METHODS) == {name for name in registry.BUILTIN if name.startswith("ngram-")} - {"ngram-simple"}


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("method", METHODS)
def test_same_text(method: str, kind: str, n_seq: int, tiny: Any, make_llm: Any, plain: Any) -> None:
    target = TARGETS[kind]
    llm = make_llm(tiny(target), speculation=method, n_seq_max=n_seq, **METHODS[method])
    results = llm.generate(REPEATING, max_tokens=100, ignore_eos=True)
    assert [r.tokens for r in results] == plain(target)
    assert llm.stats.n_draft > 10
    assert llm.stats.drafters[0].n_failed == 0


@pytest.mark.parametrize("method", METHODS)
def test_sampled_text(method: str, tiny: Any, make_llm: Any) -> None:
    """The same seed gives the same text as without drafts."""
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "top_k": 20, "seed": 7, "ignore_eos": True}
    texts = []
    for speculation, more in ((method, METHODS[method]), ("off", {})):
        llm = make_llm(tiny("target-llama"), speculation=speculation, n_seq_max=1, **more)
        texts.append([llm.generate(p, **options).tokens for p in REPEATING])
    assert texts[0] == texts[1]
