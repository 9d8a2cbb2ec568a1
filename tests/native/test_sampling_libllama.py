"""The same candidates and probabilities as libllama's samplers on the same rows, with the same history."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from libsamplers import LibChain, as_lib

from pyspec import _sample as S

NO_IDS, NO_BIAS = np.zeros(0, np.int32), np.zeros(0, np.float32)

CHAINS: dict[str, list[tuple[Any, ...]]] = {
    "top_k": [(S.TOP_K, 7)],
    "top_p": [(S.TOP_P, 0.8, 0)],
    "top_p_keep": [(S.TOP_P, 0.05, 9)],
    "min_p": [(S.MIN_P, 0.05, 0)],
    "min_p_keep": [(S.MIN_P, 0.9, 12)],
    "typical": [(S.TYPICAL_P, 0.6, 0)],
    "typical_keep": [(S.TOP_K, 50), (S.TYPICAL_P, 0.01, 6)],
    "sigma": [(S.TOP_N_SIGMA, 1.5), (S.TEMPERATURE, 0.7)],
    "xtc": [(S.TOP_K, 40), (S.XTC, 1.0, 0.05, 0)],
    "xtc_keep": [(S.TOP_K, 5), (S.XTC, 1.0, 0.01, 5)],
    "temperature": [(S.TEMPERATURE, 0.6)],
    "greedy": [(S.TOP_K, 5), (S.TEMPERATURE, 0.0)],
    "hot": [(S.TEMPERATURE, 3.0), (S.TOP_P, 0.7, 0), (S.MIN_P, 0.1, 0)],
    "dynatemp": [(S.TOP_K, 30), (S.DYNATEMP, 0.9, 0.6, 1.3)],
    "dynatemp_all": [(S.DYNATEMP, 0.9, 0.6, 0.7)],
    "penalties": [(S.PENALTIES, 1.3, 0.2, 0.4), (S.TOP_K, 40), (S.TEMPERATURE, 0.8)],
    "late_penalties": [(S.TOP_K, 50), (S.TEMPERATURE, 0.5), (S.PENALTIES, 1.2, 0.3, -0.1), (S.TOP_P, 0.9, 0)],
    "dry": [(S.DRY, 0.8, 1.75, 2), (S.TOP_K, 40)],
    "dry_short": [(S.DRY, 0.8, 1.0, 0), (S.MIN_P, 0.02, 0)],
    "default": [
        (S.PENALTIES, 1.1, 0.1, 0.1), (S.DRY, 0.5, 1.5, 1), (S.TOP_N_SIGMA, 3.0), (S.TOP_K, 60), (S.TYPICAL_P, 0.95, 2),
        (S.TOP_P, 0.9, 2), (S.MIN_P, 0.02, 2), (S.XTC, 1.0, 0.08, 2), (S.TEMPERATURE, 0.8),
    ],
}  # fmt: skip


@pytest.mark.parametrize("v", [300, 5000])
@pytest.mark.parametrize("name", CHAINS)
def test_same_as_libllama(name: str, v: int) -> None:
    rng = np.random.default_rng(v)
    prompt = rng.integers(0, 6, 40).tolist()
    ours = S.Sampler(S.Scratch(v), CHAINS[name], np.array(prompt, np.int32), NO_IDS, NO_BIAS, 16, 30)
    lib = LibChain(v, [as_lib(s, v, 16, 30) for s in CHAINS[name]])
    try:
        for token in prompt:
            lib.accept(token)
        logits = rng.normal(0, 2, (40, v)).astype(np.float32)
        for i in range(40):
            lib.fill(logits[i])
            lib.apply()
            ids, values = lib.candidates()
            assert ours.apply(logits, i, None, 0.0) == S.OK
            mine, p = ours.candidates()
            order, theirs = np.argsort(mine), np.argsort(ids)
            assert mine[order].tolist() == ids[theirs].tolist(), i
            weights = np.exp(values.astype(np.float64) - values.max())
            # libllama adds up in float32
            np.testing.assert_allclose(p[order], (weights / weights.sum())[theirs], rtol=3e-4)
            token = int(ids[rng.integers(len(ids))]) if rng.random() < 0.5 else prompt[i]
            lib.accept(token)
            ours.accept(token)
    finally:
        lib.close()


@pytest.mark.parametrize("version", [S.MIROSTAT, S.MIROSTAT2])
def test_mirostat_takes_the_same_way(version: int) -> None:
    """libllama draws by itself: ours is told what it drew, and must have the same candidates at every row."""
    v, rng = 3000, np.random.default_rng(4)
    steps: list[tuple[Any, ...]] = [(S.TEMPERATURE, 1.1), (version, 4.0, 0.2)]
    ours = S.Sampler(S.Scratch(v), steps, NO_IDS, NO_IDS, NO_BIAS)
    lib = LibChain(v, [as_lib(s, v, 0, 0) for s in steps])
    try:
        logits = rng.normal(0, 2, (60, v)).astype(np.float32)
        for i in range(60):
            lib.fill(logits[i])
            lib.apply()
            ids, values = lib.candidates()
            assert ours.apply(logits, i) == S.OK
            mine, p = ours.candidates()
            # a limit of surprise within float32 rounding of a token's: one token more or less
            both = set(mine.tolist()) ^ set(ids.tolist())
            assert len(both) <= 1, (i, len(mine), len(ids))
            if not both:
                order, theirs = np.argsort(mine), np.argsort(ids)
                weights = np.exp(values.astype(np.float64) - values.max())
                np.testing.assert_allclose(p[order], (weights / weights.sum())[theirs], rtol=3e-4)
            assert lib.selected in mine.tolist()
            ours.apply(logits, i)
            ours.accept(lib.selected)
    finally:
        lib.close()
