"""Sliding-window caches: the margin that rejected drafts need, to the row; and caches of other types."""

from __future__ import annotations

from typing import Any

import pytest
from pairs import LOOKUPS, PROMPTS, SMALL

import pyspec

#: For each way to draft: target, draft (None: none, or the target itself), options. Drafts of three.
WAYS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "draft-simple": ("target-swa", "draft-swa-half", {}),
    "draft-mtp-dense": ("target-mtp-dense", None, {}),
    "draft-mtp-chain": ("target-mtp-chain-half", None, {}),
    "draft-mtp-shared": ("target-gemma4", "draft-gemma4-assistant-half", {}),
    **{
        name: (
            "target-swa",
            None,
            {"speculation": name, **options, "size_m": 3, "suffix_n_max": 3, "mod_n_max": 3, "mod_n_min": 0},
        )
        for name, options in LOOKUPS.items()
    },
}
N_MAX = 3
#: Window and length of output. libllama rounds window + n_ubatch up to 256 cells: 252 + 4 leaves not one to spare.
WINDOWS = {32: 140, 252: 320}


def make(way: str, window: int, tiny: Any, make_llm: Any, **options: Any) -> Any:
    target, draft, fixed = WAYS[way]
    pair = tiny(target, window=window), tiny(draft, window=window) if draft else None
    return make_llm(*pair, **(fixed | options))


def watch_rollbacks(llm: Any) -> list[tuple[int, int]]:
    """(wanted, kept) of every rollback from now on that kept less than was wanted, in the target and the drafts."""
    lost: list[tuple[int, int]] = []

    def watch(memory: Any) -> None:
        rollback = memory.rollback

        def watched(seq: int, n_keep: int, n_now: int) -> int:
            kept: int = rollback(seq, n_keep, n_now)
            if kept < min(n_keep, n_now):
                lost.append((n_keep, kept))
            return kept

        memory.rollback = watched

    for context in (llm._assembly.target, *llm._assembly.drafts):
        watch(context.memory)
    return lost


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kv_unified", [False, True], ids=["split", "unified"])
@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_the_exact_margin(way: str, n_seq: int, kv_unified: bool, window: int, tiny: Any, make_llm: Any) -> None:
    """With n_ubatch = n_max + 1 output is plain, nothing is evaluated twice, drafts are as good as with all cells."""
    prompts = [PROMPTS[5] * 2, *PROMPTS[: n_seq - 1]]
    cache = {"n_seq_max": n_seq, "kv_unified": kv_unified, "n_ctx": SMALL["n_ctx"] * (n_seq if kv_unified else 1)}
    off = make_llm(tiny(WAYS[way][0], window=window), speculation="off", **cache)
    full = make(way, window, tiny, make_llm, swa_full=True, **cache)
    small = make(way, window, tiny, make_llm, n_ubatch=N_MAX + 1, **cache)
    assert small._assembly.target.n_ubatch == N_MAX + 1
    assert small._assembly.target.memory_bytes()["context"] < full._assembly.target.memory_bytes()["context"]
    lost = watch_rollbacks(small)
    sampling = {"max_tokens": WINDOWS[window], "ignore_eos": True}
    found = [[r.tokens for r in llm.generate(prompts, **sampling)] for llm in (off, full, small)]
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert not lost
    assert small.stats.n_draft > 0
    assert small.stats.drafters[0].n_failed == 0
    # counts are those of the full cache: no draft was cut short. What the sequences of suffix and ngram-mod tell each
    # other depends on who shares a pass: small micro-batches read prompts one after the other (61 and 63 accepted)
    rel = 0.05 if n_seq > 1 and way in ("suffix", "ngram-mod") else 0
    assert small.stats.n_draft == pytest.approx(full.stats.n_draft, rel=rel, abs=0)
    assert small.stats.n_accepted == pytest.approx(full.stats.n_accepted, rel=rel, abs=0)


@pytest.mark.parametrize("way", WAYS)
def test_one_less_than_the_margin_is_refused(way: str, tiny: Any, make_llm: Any) -> None:
    with pytest.raises(pyspec.ConfigError, match=r"n_ubatch=3 is too small .*=3.* has 4\. Raise n_ubatch .* swa_full"):
        make(way, 32, tiny, make_llm, n_ubatch=N_MAX)
    make(way, 32, tiny, make_llm, n_ubatch=N_MAX, swa_full=True)
