"""Token texts for the indexes that look for repeats, in tests and benchmarks."""

from __future__ import annotations

import numpy as np


def zipf(n: int, seed: int = 0, vocab: int = 20_000) -> list[int]:
    """Tokens as in a language: few of them often, many seldom, and phrases that return. Ids up to ``vocab``."""
    rng = np.random.default_rng(seed)
    out: list[int] = []
    while len(out) < n:
        if out and rng.random() < 0.3:
            at = int(rng.integers(len(out)))
            out += out[at : at + int(rng.integers(4, 40))]
        else:
            out += np.minimum(rng.zipf(1.3, 20), vocab).tolist()
    return out[:n]
