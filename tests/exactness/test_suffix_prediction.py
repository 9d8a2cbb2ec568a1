"""``suffix`` and predicted outputs on tiny models: the text of plain decoding, on every kind of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pairs import SMALL, TARGETS

import pyspec

#: Text that repeats, so that there is something to look up.
REPEATING = [
    "for i in range(10): print(i, add(i, 1))\n" * 3,
    "The model predicts the next token from the tokens before it. " * 3,
    "apple trees and stories, apple trees and songs, apple trees and",
]
N = 60


@pytest.fixture(scope="module")
def plain(tiny: Any) -> Any:
    made: dict[str, list[list[int]]] = {}

    def get(target: str) -> list[list[int]]:
        if target not in made:
            with pyspec.LLM(tiny(target), speculation="off", **SMALL) as llm:
                made[target] = [llm.generate(p, max_tokens=N, ignore_eos=True).tokens for p in REPEATING]
        return made[target]

    return get


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("kind", TARGETS)
def test_suffix(kind: str, n_seq: int, tiny: Any, make_llm: Any, plain: Any) -> None:
    target = TARGETS[kind]
    llm = make_llm(tiny(target), speculation="suffix", n_seq_max=n_seq, suffix_min_match=1, suffix_p_min=0.1)
    results = llm.generate(REPEATING, max_tokens=N, ignore_eos=True)
    assert [r.tokens for r in results] == plain(target)
    assert llm.stats.n_draft > 10
    # the same again: every answer is in the corpus, so it takes a few passes
    n_pass = llm.stats.n_pass
    again = llm.generate(REPEATING, max_tokens=N, ignore_eos=True)
    assert [r.tokens for r in again] == plain(target)
    assert llm.stats.n_pass - n_pass < n_pass
    assert llm.stats.drafters[0].n_failed == 0


def test_suffix_corpus_file(tiny: Any, make_llm: Any, plain: Any, tmp_path: Path) -> None:
    file = tmp_path / "corpus.bin"
    options = {"speculation": "suffix", "suffix_corpus": str(file)}
    n_pass = []
    for _ in range(2):
        with pyspec.LLM(tiny("target-llama"), **(SMALL | options)) as llm:
            assert llm.generate(REPEATING[0], max_tokens=N, ignore_eos=True).tokens == plain("target-llama")[0]
            n_pass.append(llm.stats.n_pass)
        assert file.exists()
    assert n_pass[1] < n_pass[0] // 2
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(pyspec.DataFileError, match=r"corpus\.bin"):
        make_llm(tiny("target-llama"), **options)
