"""Exact mode: passes of one shape, so that the logits that decide a token are the same bits whatever was drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyspec

PROMPTS = ["The quick brown fox", "abc def ghi jkl", "x"]
HEAD = Path(__file__).resolve().parents[2] / "examples" / "data" / "smollm2-135m-eagle3.gguf"


def generate(llm: pyspec.LLM, prompts: list[str], n: int) -> tuple[list[list[int]], list[np.ndarray]]:
    """Tokens of each prompt, and the logits row that decided each of its tokens."""
    rows: dict[int, list[np.ndarray]] = {}

    def observe(seq: Any, logits: np.ndarray, row: int, n_draft: int, emitted: list[int]) -> None:
        rows.setdefault(id(seq), []).extend(logits[row : row + len(emitted)].copy())

    tokens, decided = [], []
    for prompt in prompts:
        rows.clear()
        llm._assembly.engine.observer = observe  # type: ignore[union-attr]
        tokens.append(llm.generate(prompt, max_tokens=n, ignore_eos=True).tokens)
        (found,) = rows.values()
        decided.append(np.stack(found[:n]))
    return tokens, decided


CASES = [
    ("target-llama", "draft-llama-half", {}),
    ("target-llama", "eagle3-half", {}),
    ("target-llama", "dspark", {}),
    ("target-llama", None, {"speculation": "ngram-simple", "size_n": 2}),
    ("target-llama", "draft-llama-half", {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attn": True}),
    ("target-llama", "draft-llama-half", {"flash_attn": False}),
    ("target-swa", "draft-swa-half", {}),
    ("target-swa", "draft-swa-half", {"swa_full": True}),
    ("target-swa", "draft-swa-half", {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}),
    ("target-swa", "draft-swa-half", {"n_ubatch": 4}),
    ("target-hybrid", "draft-mtp-only", {"cache_type_k": "q8_0", "cache_type_v": "q4_0"}),
    ("target-llama", "draft-llama-half", {"flash_attn": True}),
    ("target-llama", "draft-llama-half", {"n_ubatch": 5, "n_batch": 7}),
    ("target-llama", "draft-llama-half", {"n_threads": 2}),
    ("target-hybrid", "draft-mtp-only", {}),
    ("target-mtp", None, {"speculation": "draft-mtp"}),
    ("target-gemma4", "draft-gemma4-assistant-half", {}),
]


@pytest.mark.native
@pytest.mark.parametrize(("target", "draft", "options"), CASES, ids=lambda v: str(v))
def test_logits_are_the_same_bits(tiny: Any, target: str, draft: str | None, options: dict[str, Any]) -> None:
    options = {"n_threads": 1} | options
    base = {"n_ctx": 256, "exact": True}
    n = 60 if draft or target == "target-mtp" else 200  # a text without repeats gives n-gram look-up nothing to do
    plain_options = {k: v for k, v in options.items() if k not in ("speculation", "size_n")}
    with pyspec.LLM(tiny(target), speculation="off", **base, **plain_options) as llm:
        tokens, logits = generate(llm, PROMPTS, n)
    with pyspec.LLM(tiny(target), tiny(draft) if draft else None, **base, **options) as llm:
        found, found_logits = generate(llm, PROMPTS, n)
        assert llm.stats.n_draft > 0
        assert all(d.n_failed == 0 for d in llm.stats.drafters)
    assert found == tokens
    for a, b in zip(found_logits, logits, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.native
@pytest.mark.parametrize("kv_unified", [False, True])
def test_who_else_runs_does_not_show(tiny: Any, kv_unified: bool) -> None:
    options = {"n_ctx": 256, "n_threads": 1, "exact": True, "n_seq_max": 3, "kv_unified": kv_unified}
    with pyspec.LLM(tiny("target-llama"), tiny("draft-llama-half"), **options) as llm:
        alone = [llm.generate(p, max_tokens=60, ignore_eos=True).tokens for p in PROMPTS]
        together = llm.generate(PROMPTS, max_tokens=60, ignore_eos=True)
    assert [r.tokens for r in together] == alone


@pytest.mark.native
@pytest.mark.parametrize("kv_unified", [False, True], ids=["split", "unified"])
@pytest.mark.parametrize("n_seq", [2, 4])
@pytest.mark.parametrize(("target", "draft"), [("target-llama", "draft-llama-half"), ("target-swa", "draft-swa-half")])
def test_several_sequences_are_the_same_bits(target: str, draft: str, n_seq: int, kv_unified: bool, tiny: Any) -> None:
    """With drafts and beside others, against the same sequence alone and without drafts, in the same cache."""
    prompts = [*PROMPTS, "one two"][:n_seq]
    options = {
        "n_ctx": 256 * (n_seq if kv_unified else 1), "n_threads": 1, "exact": True, "n_seq_max": n_seq,
        "kv_unified": kv_unified,
    }  # fmt: skip
    with pyspec.LLM(tiny(target), speculation="off", **options) as llm:
        tokens, logits = generate(llm, prompts, 60)
    with pyspec.LLM(tiny(target), tiny(draft), **options) as llm:
        engine = llm._assembly.engine
        sampling = pyspec.SamplingParams(max_tokens=60, ignore_eos=True)
        seqs = [engine.submit(llm.tokenize(p), sampling) for p in prompts]
        rows: dict[int, list[np.ndarray]] = {id(s): [] for s in seqs}

        def observe(seq: Any, found: np.ndarray, row: int, n_draft: int, emitted: list[int]) -> None:
            rows[id(seq)].extend(found[row : row + len(emitted)].copy())

        engine.observer = observe
        while not all(s.done for s in seqs):
            engine.step()
        assert 0 < engine.stats.n_accepted < engine.stats.n_draft
        assert [s.output for s in seqs] == tokens
        for seq, wanted in zip(seqs, logits, strict=True):
            assert np.array_equal(np.stack(rows[id(seq)][:60]), wanted)
            engine.release(seq)


@pytest.mark.native
def test_the_context_can_be_filled_to_the_end(tiny: Any) -> None:
    """The rows of padding have room behind the last token."""
    results = []
    for options in ({"speculation": "off"}, {"speculation": "ngram-simple", "size_n": 2}):
        with pyspec.LLM(tiny("target-llama"), n_ctx=64, n_threads=1, exact=True, n_max=7, **options) as llm:
            results.append(llm.generate(PROMPTS[0], ignore_eos=True))
    assert results[0].tokens == results[1].tokens
    assert results[0].finish_reason == "length"
    assert results[0].usage.total_tokens == 65


@pytest.mark.native
def test_refused_where_it_cannot_be_promised(tiny: Any) -> None:
    with pytest.raises(pyspec.UnsupportedError, match="exact=True"):
        pyspec.LLM(tiny("target-recurrent"), exact=True, speculation="off", n_threads=1)
    with pytest.raises(pyspec.ConfigError, match="n_max <= 3"):
        pyspec.LLM(tiny("target-swa"), exact=True, n_max=4, n_ubatch=4, n_batch=64, n_threads=1)
    with pyspec.LLM(tiny("target-swa"), exact=True, n_max=3, n_ubatch=4, n_batch=64, n_threads=1) as llm:
        assert llm.generate("x", max_tokens=5).usage.completion_tokens == 5


@pytest.mark.smollm2
@pytest.mark.slow
def test_k_quants(smollm2: str, tmp_path: Path) -> None:
    """K-quants on CPU compute rows of a large pass otherwise than single rows; one shape gives one text."""
    target, draft = tmp_path / "k.gguf", tmp_path / "d.gguf"
    pyspec.quantize(smollm2, target, "Q4_K_M", n_threads=1)
    pyspec.quantize(smollm2, draft, "Q4_0", n_threads=1)
    found = []
    for options in ({"speculation": "off"}, {"draft": draft}, {"draft": HEAD}):
        with pyspec.LLM(target, n_ctx=256, n_threads=1, exact=True, **options) as llm:
            found.append(generate(llm, ["Rainbows form when"], 40))
    for tokens, logits in found[1:]:
        assert tokens == found[0][0]
        assert np.array_equal(logits[0], found[0][1][0])
