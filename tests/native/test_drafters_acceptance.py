"""Acceptance of every drafter on its tiny pair, against llama.cpp's own.

``by_llama_cpp``: accepted / drafted of ``llama-speculative-simple`` of the pinned tree, the same six prompts, 128
tokens each, drafts of 3, greedy, flash attention off, draft sampled on the CPU. (Recurrent targets: its figure counts
restored drafts twice, so the one of its server is given, other prompts.)
"""

from __future__ import annotations

from typing import Any

import pytest
from pairs import method_of

import pyspec

PROMPTS = [
    "The quick brown fox jumps over the lazy dog",
    "When the morning comes, the river carries",
    "def add(a, b): return a + b\nfor i in range(10):",
    "It is said that in the beginning there was nothing",
    "A computer program is a list of instructions.",
    "1, 2, 3, 10, 100 and 2024",
]

# target, draft (None: the target's own file), drafter, by_llama_cpp
PAIRS = [
    ("target-llama", "draft-llama", "draft-simple", 0.974),
    ("target-llama", "draft-llama-half", "draft-simple", 0.542),
    ("target-llama", "draft-llama-zero", "draft-simple", 0.0),
    ("target-llama", "draft-okvocab-size", "draft-simple", 0.974),
    ("target-llama", "draft-okvocab-text", "draft-simple", 0.974),
    ("target-llama-spm", "draft-llama-spm", "draft-simple", 0.970),
    ("target-llama-eos", "draft-llama-eos", "draft-simple", 0.956),
    ("target-swa", "draft-swa", "draft-simple", 0.980),
    ("target-swa", "draft-swa-half", "draft-simple", 0.492),
    ("target-recurrent", "draft-recurrent", "draft-simple", 0.993),
    ("target-llama", "eagle3", "draft-eagle3", 0.922),
    ("target-llama", "eagle3-half", "draft-eagle3", 0.526),
    ("target-llama", "eagle3-zero", "draft-eagle3", 0.0),
    ("target-llama", "eagle3-own", "draft-eagle3", 0.922),
    ("target-llama", "eagle3-wide", "draft-eagle3", 0.922),
    ("target-llama", "eagle3-options", "draft-eagle3", 0.946),
    ("target-llama", "eagle3-d2t", "draft-eagle3", 0.832),
    ("target-hybrid", "eagle3-hybrid", "draft-eagle3", 0.852),
    ("target-llama", "dflash", "draft-dflash", 0.547),
    ("target-llama", "dflash-own", "draft-dflash", 0.547),
    ("target-llama", "dflash-d2t", "draft-dflash", 0.494),
    ("target-llama", "dflash-zero", "draft-dflash", 0.0),
    ("target-llama-calm", "dflash-calm", "draft-dflash", 0.917),
    ("target-llama-calm", "dflash-calm-half", "draft-dflash", 0.532),
    ("target-llama", "dflash2", "draft-dflash", 0.529),
    ("target-llama", "dspark", "draft-dspark", 0.721),
    ("target-llama", "dspark-half", "draft-dspark", 0.538),
    ("target-llama", "dspark-own", "draft-dspark", 0.721),
    ("target-llama", "dspark-noconf", "draft-dspark", 0.721),
    ("target-llama", "dspark-bonus", "draft-dspark", 0.721),
    ("target-llama-calm", "dspark-calm", "draft-dspark", 0.917),
    ("target-mtp", None, "draft-mtp", 0.895),
    ("target-mtp-half", None, "draft-mtp", 0.510),
    ("target-mtp-zero", None, "draft-mtp", 0.0),
    ("target-mtp-dense", None, "draft-mtp", 0.940),
    ("target-mtp-chain", None, "draft-mtp", 0.951),
    ("target-mtp-chain-half", None, "draft-mtp", 0.656),
    ("target-mtp-chain-fade", None, "draft-mtp", 0.637),
    ("target-hybrid", "draft-mtp-only", "draft-mtp", 0.895),
    ("target-gemma4", "draft-gemma4-assistant", "draft-mtp", 0.860),
    ("target-gemma4", "draft-gemma4-assistant-half", "draft-mtp", 0.510),
]


def measure(tiny: Any, target: str, draft: str | None, n_seq: int, **options: Any) -> tuple[float, int, str]:
    """Accepted share, proposed tokens, and the drafter's name."""
    options = {"n_ctx": 256, "n_threads": 1, "flash_attn": False, "n_seq_max": n_seq} | options
    options = {"speculation": method_of(tiny, draft)} | options
    with pyspec.LLM(tiny(target), draft=draft and tiny(draft), **options) as llm:
        results = llm.generate(PROMPTS, max_tokens=128, ignore_eos=True)
    names = {d.name for r in results for d in r.stats.drafters}
    assert all(d.n_failed == 0 for r in results for d in r.stats.drafters)
    n_draft = sum(r.stats.n_draft for r in results)
    return sum(r.stats.n_accepted for r in results) / n_draft, n_draft, names.pop()


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize(
    ("target", "draft", "drafter", "by_llama_cpp"), PAIRS, ids=[f"{t}+{d}" if d else t for t, d, _, _ in PAIRS]
)
def test_acceptance_is_llama_cpps(
    tiny: Any, target: str, draft: str | None, drafter: str, by_llama_cpp: float, n_seq: int
) -> None:
    """The drafter is chosen by the files; one sequence at a time and three together give the same."""
    rate, n_draft, name = measure(tiny, target, draft, n_seq)
    assert name == drafter
    assert n_draft >= 3 * 6 * 30
    assert rate == pytest.approx(by_llama_cpp, abs=0.03)


@pytest.mark.parametrize(
    ("target", "draft", "n_max", "p_min", "by_llama_cpp"),
    [
        ("target-llama", "eagle3", 6, 0.8, 1.0),
        ("target-llama", "eagle3", 12, 0.0, 0.771),
        ("target-llama", "dspark", 6, 0.8, 0.543),
        ("target-llama", "dspark", 6, 0.0, 0.455),
        ("target-llama", "dflash", 6, 0.5, 0.417),
        ("target-llama", "dflash2", 6, 0.5, 0.377),
        ("target-mtp", None, 6, 0.8, 1.0),
        ("target-mtp", None, 12, 0.0, 0.677),
        ("target-mtp-chain-half", None, 3, 0.5, 0.670),
        ("target-gemma4", "draft-gemma4-assistant", 6, 0.5, 0.806),
        ("target-llama", "draft-llama-half", 6, 0.5, 0.490),
    ],
)
def test_other_lengths_and_p_min(
    tiny: Any, target: str, draft: str | None, n_max: int, p_min: float, by_llama_cpp: float
) -> None:
    rate, _, _ = measure(tiny, target, draft, 1, n_max=n_max, p_min=p_min)
    assert rate == pytest.approx(by_llama_cpp, abs=0.03)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_unified": True, "n_ctx": 768},
        {"n_batch": 32, "n_ubatch": 16},
        {"draft_cache_type_k": "q8_0", "draft_cache_type_v": "q8_0", "flash_attn": True},
        {"backend_sampling": False},
    ],
    ids=["unified", "small batches", "q8 draft cache", "no device sampling"],
)
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("target-llama", "draft-llama"),
        ("target-llama", "eagle3"),
        ("target-hybrid", "eagle3-hybrid"),
        ("target-llama", "dflash"),
        ("target-llama", "dspark"),
        ("target-mtp", None),
        ("target-mtp-chain", None),
        ("target-gemma4", "draft-gemma4-assistant"),
    ],
)
def test_settings_cost_no_acceptance(tiny: Any, target: str, draft: str | None, options: dict[str, Any]) -> None:
    """B19 and its kind: a setting that makes drafts worse in silence."""
    expected = next(rate for t, d, _, rate in PAIRS if (t, d) == (target, draft))
    rate, _, _ = measure(tiny, target, draft, 3, **options)
    assert rate > expected - 0.04
