"""Sampling with a seed: the same text drafted or not, alone or in a batch; another seed, another text (B15)."""

from __future__ import annotations

from typing import Any

import pytest
from pairs import PROMPTS, method_of

PAIRS = {
    "draft-simple": ("target-llama", "draft-llama-half"),
    "draft-eagle3": ("target-llama", "eagle3-half"),
    "draft-mtp": ("target-mtp", None),
    "draft-dspark": ("target-llama", "dspark-half"),
    "recurrent": ("target-recurrent", "draft-recurrent-half"),
}

HOT: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "max_tokens": 64,
    "ignore_eos": True,
}


@pytest.mark.parametrize("way", PAIRS)
def test_b15_seed_decides_the_text(way: str, tiny: Any, make_llm: Any) -> None:
    target, draft = PAIRS[way]
    off = make_llm(tiny(target), speculation="off")
    llm = make_llm(tiny(target), tiny(draft) if draft else None, speculation=method_of(tiny, draft), n_seq_max=3)
    wanted = [off.generate(p, seed=42, **HOT).tokens for p in PROMPTS]
    assert [r.tokens for r in llm.generate(PROMPTS, seed=42, **HOT)] == wanted
    # one alone, after an unrelated call, and as a stream
    llm.generate("something else", seed=1, **HOT)
    assert llm.generate(PROMPTS[1], seed=42, **HOT).tokens == wanted[1]
    assert [t for p in llm.stream(PROMPTS[2], seed=42, **HOT) for t in p.tokens] == wanted[2]
    assert llm.generate(PROMPTS[1], seed=43, **HOT).tokens != wanted[1]
    assert 0 < llm.stats.n_accepted < llm.stats.n_draft


def test_b15_new_process_same_text(tiny: Any, make_llm: Any, run_child: Any) -> None:
    llm = make_llm(tiny("target-llama"), tiny("draft-llama"))
    here = llm.generate(PROMPTS[0], seed=7, temperature=1.0, max_tokens=30).tokens
    code = """
        import sys, pyspec
        from pairs import SMALL, PROMPTS
        with pyspec.LLM(sys.argv[1], **(SMALL | {"speculation": "off"})) as llm:
            print(llm.generate(PROMPTS[0], seed=7, temperature=1.0, max_tokens=30).tokens)
    """
    assert run_child(code, tiny("target-llama")).strip() == str(here)


def test_b15_no_seed_is_a_new_one_each_time(tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), tiny("draft-llama"), n_seq_max=4)
    results = llm.generate([PROMPTS[0]] * 4, temperature=2.0, max_tokens=40, ignore_eos=True)
    again = llm.generate(PROMPTS[0], temperature=2.0, max_tokens=40, ignore_eos=True)
    assert len({str(r.tokens) for r in [*results, again]}) == 5


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
def test_nearly_greedy_is_greedy(temperature: float, tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"))
    wanted = llm.generate(PROMPTS[0], max_tokens=40, ignore_eos=True).tokens
    assert llm.generate(PROMPTS[0], max_tokens=40, ignore_eos=True, temperature=temperature).tokens == wanted
    assert llm.generate(PROMPTS[0], max_tokens=40, ignore_eos=True, temperature=1.0, top_k=1).tokens == wanted
