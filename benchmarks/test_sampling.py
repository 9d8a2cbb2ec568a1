"""Verification and sampling of five rows of 262,144 logits, against libllama's sampler chain on the same rows.

``llama_sampler_sample`` writes a list of 12 bytes a token from the logits row, then applies the chain to it. Its loop
is stood in for by a plain copy of a ready-made list (``memcpy``: the same bytes written, more of them read). The
variant "apply" leaves that out and times ``llama_sampler_apply`` alone; it is printed, not asserted. One thread, both
sides in turns.

    pytest benchmarks/test_sampling.py --benchmark-enable
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from pyspec import SamplingParams
from pyspec.sampling import SamplerChain, Verifier

N_ROWS, N_VOCAB = 5, 262_144

#: Least ratio of libllama's time to ours.
BAR = 3.0

Compare = Callable[[Callable[[], object], Callable[[], object], str], "float | None"]

CHAINS: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]]]] = {
    "greedy": ({}, [("greedy",)]),
    "top_k 40, top_p, min_p": (
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
        [("top_k", 40), ("top_p", 0.95, 0), ("min_p", 0.05, 0), ("temp", 0.8), ("dist", 1)],
    ),
    "top_p": (
        {"temperature": 1.0, "top_p": 0.95},
        [("top_p", 0.95, 0), ("temp", 1.0), ("dist", 1)],
    ),
    "plain": ({"temperature": 1.0}, [("temp", 1.0), ("dist", 1)]),
    "penalties, top_k 40": (
        {"temperature": 0.8, "top_k": 40, "penalty_repeat": 1.1},
        [("penalties", N_VOCAB, 64, 1.1, 0.0, 0.0), ("top_k", 40), ("temp", 0.8), ("dist", 1)],
    ),
}


def make_rows() -> Any:
    """float32 [5, 262144]: a long tail and fifty likely tokens, as a language model's."""
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (N_ROWS, N_VOCAB)).astype(np.float32)
    for row in logits:
        row[rng.choice(N_VOCAB, 50, replace=False)] += np.linspace(3, 12, 50, dtype=np.float32)
    return logits


def ratio_of(ours: Callable[[], object], restore: Callable[[], object], theirs: Callable[[], object]) -> dict[str, Any]:
    """CPU times of both in turns; ``restore``, untimed, comes before ``theirs``: samplers write into the list."""
    ours(), restore(), theirs()
    pairs = []
    for _ in range(41):
        t0 = time.thread_time()
        ours(), ours(), ours()
        t1 = time.thread_time()
        restore()
        t2 = time.thread_time()
        theirs()
        pairs.append(((t1 - t0) / 3, time.thread_time() - t2))
    ratios = sorted(b / a for a, b in pairs)
    return {
        "ours_us": 1e6 * statistics.median(a for a, _ in pairs),
        "baseline_us": 1e6 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[-len(ratios) // 4]],
    }


@pytest.mark.native
@pytest.mark.parametrize("listed", [False, True], ids=["apply", "sample"])
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.benchmark(group="verification of 5 rows of 262144")
def test_against_libllama(benchmark: Any, name: str, listed: bool) -> None:
    from libsamplers import LibChain

    options, samplers = CHAINS[name]
    logits = make_rows()
    verify = Verifier()
    prompt = list(range(1000, 1064))
    chain = SamplerChain(SamplingParams(seed=1, **options), N_VOCAB, prompt, 1)
    # accepted as a whole, so that every row is looked at
    tokens = [verify(logits[i : i + 1], 0, (), chain, i)[1][0] for i in range(N_ROWS - 1)]
    chain.rewind(0)
    while True:  # with penalties, what is accepted changes what comes next
        n_acc, emitted = verify(logits, 0, tokens, chain, 0)
        chain.rewind(0)
        if n_acc == N_ROWS - 1:
            break
        tokens[n_acc] = emitted[n_acc]

    def ours() -> None:
        n_acc, _ = verify(logits, 0, tokens, chain, 0)
        chain.rewind(0)
        assert n_acc == N_ROWS - 1

    theirs = [LibChain(N_VOCAB, samplers) for _ in range(N_ROWS)]
    for lib in theirs:
        for token in prompt:
            lib.accept(token)

    for lib, row in zip(theirs, logits, strict=True):
        lib.fill(row)
    lists = [lib.data.copy() for lib in theirs]

    def fill() -> None:
        for lib, ready in zip(theirs, lists, strict=True):
            lib.put_back(ready)

    def apply() -> None:
        for lib in theirs:
            lib.apply()

    def both() -> None:
        fill()
        apply()

    benchmark(ours)
    fill()
    apply()
    if name == "greedy":
        assert [lib.selected for lib in theirs][: N_ROWS - 1] == tokens
    if not benchmark.disabled:
        found = ratio_of(ours, (lambda: None) if listed else fill, both if listed else apply)
        benchmark.extra_info["vs_libllama"] = found
        print(f"\n{name}, {'sample' if listed else 'apply alone'}: {found}")
        if listed and name in ("greedy", "top_k 40, top_p, min_p"):
            assert found["ratio"] >= BAR, f"{name}: {found['ratio']:.2f} times libllama's speed, the bar is {BAR:g}"
    for lib in theirs:
        lib.close()


@pytest.mark.parametrize("k", [0, 40])
@pytest.mark.benchmark(group="rejection of 4 drafted tokens of 262144")
def test_rejection(compare: Compare, k: int) -> None:
    """Rejection sampling against sample-and-match, all tokens accepted."""
    logits = make_rows()
    verify = Verifier()
    chains = [
        SamplerChain(SamplingParams(temperature=1.0, top_k=k, seed=1, verification=v), N_VOCAB, (), 1)
        for v in ("rejection", "match")
    ]
    tokens = [verify(logits[i : i + 1], 0, (), chains[1], i)[1][0] for i in range(N_ROWS - 1)]
    q = [(np.array([t], np.int32), np.array([1e-9], np.float32)) for t in tokens]
    compare(
        lambda: verify(logits, 0, tokens, chains[0], 0, q), lambda: verify(logits, 0, tokens, chains[1], 0), "match"
    )
