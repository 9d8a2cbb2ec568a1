"""Speed of the kernels, each against what NumPy or a plain copy needs for the same work."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyspec import _core

Compare = Callable[[Callable[[], object], Callable[[], object], str], "float | None"]
RatioOf = Callable[[Callable[[], object], Callable[[], object]], "dict[str, float]"]

LOGITS = pytest.mark.parametrize(("n", "v"), [(1, 49152), (4, 49152), (1, 262144), (4, 262144)])


def logit_rows(n: int, v: int) -> np.ndarray:
    """float32 [n, v], a long tail and a few likely tokens, as a language model's."""
    rng = np.random.default_rng(n + v)
    logits = rng.normal(0, 2, (n, v)).astype(np.float32)
    for row in logits:
        row[rng.choice(v, 50, replace=False)] += np.linspace(3, 12, 50, dtype=np.float32)
    return logits


# ---- rows of logits --------------------------------------------------------------------


@LOGITS
@pytest.mark.benchmark(group="argmax_rows")
def test_argmax(compare: Compare, n: int, v: int) -> None:
    logits, out = logit_rows(n, v), np.zeros(n, np.int32)
    compare(lambda: _core.argmax_rows(logits, out), lambda: logits.argmax(axis=1), "numpy")
    assert out.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.benchmark(group="argmax_rows")
def test_argmax_against_reading_the_row(benchmark: Any, ratio_of: RatioOf) -> None:
    """The greedy choice of a row of 262,144 logits costs at most 1.3 times reading it.

    Reading is the faster one of NumPy's maximum and sum over the same memory, both of which are loops of vector loads.
    """
    logits, out = logit_rows(1, 262144), np.zeros(1, np.int32)
    row = logits[0]
    benchmark(lambda: _core.argmax_rows(logits, out))
    assert out[0] == row.argmax()
    if benchmark.disabled:
        return
    reads = {name: ratio_of(lambda: _core.argmax_rows(logits, out), read) for name, read in
             (("max", row.max), ("sum", row.sum))}  # fmt: skip
    benchmark.extra_info.update({f"vs_read_{name}": r for name, r in reads.items()})
    # ratio: reading / ours
    assert min(r["ratio"] for r in reads.values()) >= 1 / 1.3, reads


@LOGITS
@pytest.mark.benchmark(group="topk_softmax_rows")
def test_topk_softmax(compare: Compare, n: int, v: int) -> None:
    logits, k = logit_rows(n, v), 10
    ids, probs = np.zeros((n, k), np.int32), np.zeros((n, k), np.float32)

    def with_numpy() -> np.ndarray:
        best = np.argpartition(logits, v - k, axis=1)[:, v - k :]
        top = np.take_along_axis(logits, best, 1)
        order = np.argsort(-top, axis=1)
        weights = np.exp(top - top.max(axis=1, keepdims=True))
        return np.take_along_axis(weights / weights.sum(axis=1, keepdims=True), order, 1)

    compare(lambda: _core.topk_softmax_rows(logits, ids, probs), with_numpy, "numpy")
    np.testing.assert_allclose(probs, with_numpy(), rtol=1e-5)


@LOGITS
@pytest.mark.benchmark(group="verify_greedy")
def test_verify_greedy(compare: Compare, n: int, v: int) -> None:
    logits, out = logit_rows(n, v), np.zeros(n, np.int32)
    draft = logits.argmax(axis=1)[: n - 1].astype(np.int32)

    def with_numpy() -> int:
        best = logits.argmax(axis=1)
        wrong = np.flatnonzero(best[: n - 1] != draft)
        return int(wrong[0]) if wrong.size else n - 1

    compare(lambda: _core.verify_greedy(logits, 0, draft, out), with_numpy, "numpy")
    assert out.tolist() == logits.argmax(axis=1).tolist()


@LOGITS
@pytest.mark.benchmark(group="logsumexp_rows")
def test_logsumexp(compare: Compare, n: int, v: int) -> None:
    logits, out = logit_rows(n, v), np.zeros(n)

    def with_numpy() -> np.ndarray:
        top = logits.max(axis=1, keepdims=True)
        return (np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]).astype(np.float64)

    compare(lambda: _core.logsumexp_rows(logits, out), with_numpy, "numpy")
    np.testing.assert_allclose(out, with_numpy(), atol=1e-4)


CHAINS = {
    "default": (0.8, 40, 0.95, 0.05),
    "temperature": (0.8, 0, 1.0, 0.0),
    "top_p": (0.8, 0, 0.95, 0.0),
    "min_p": (0.8, 0, 1.0, 0.05),
    "top_k_5000": (0.8, 5000, 0.95, 0.0),
}


@pytest.mark.parametrize("v", [49152, 262144])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.benchmark(group="sample_row")
def test_sample(compare: Compare, v: int, chain: str) -> None:
    row = logit_rows(1, v)[0]
    ids, p = np.zeros(v, np.int32), np.zeros(v, np.float32)
    temperature, top_k, top_p, min_p = CHAINS[chain]

    def with_numpy() -> int:
        order = np.argsort(-row)[: top_k or v]
        weights = np.exp(row[order] - row[order[0]])
        n = 1 + int((np.cumsum(weights) < top_p * weights.sum()).sum()) if top_p < 1 else len(order)
        n = min(n, int((weights >= min_p).sum()))
        cdf = np.cumsum(weights[:n] ** (1 / temperature))
        return int(order[np.searchsorted(cdf, 0.6 * cdf[-1])])

    compare(lambda: _core.sample_row(row, temperature, top_k, top_p, min_p, 0.6, ids, p), with_numpy, "numpy")
    assert _core.sample_row(row, temperature, top_k, top_p, min_p, 0.6, ids, p) == with_numpy()


# ---- rows of hidden states -------------------------------------------------------------


@pytest.mark.parametrize("d", [576, 4096])
@pytest.mark.benchmark(group="interleave_rows")
def test_interleave(compare: Compare, d: int) -> None:
    """At least 70 % of the speed of one plain copy of the same bytes."""
    n, k = 512, 3
    src = [np.full((n, d), j, np.float32) for j in range(k)]
    dst = np.zeros((n, k * d), np.float32)
    copy_from, copy_to = np.ones(n * k * d, np.float32), np.zeros(n * k * d, np.float32)
    a, b, size = copy_to.ctypes.data, copy_from.ctypes.data, copy_from.nbytes
    ratio = compare(lambda: _core.interleave_rows(dst, src, n), lambda: ctypes.memmove(a, b, size), "memcpy")
    assert (dst.reshape(n, k, d) == np.arange(k)[:, None]).all()
    if ratio is not None:
        assert ratio >= 0.7


@pytest.mark.parametrize("d", [576, 4096])
@pytest.mark.benchmark(group="shift_rows")
def test_shift(compare: Compare, d: int) -> None:
    n = 512
    src, dst, carry = np.ones((n, d), np.float32), np.zeros((n, d), np.float32), np.zeros(d, np.float32)

    def with_numpy() -> None:
        dst[1:] = src[:-1]
        dst[0] = carry
        carry[:] = src[-1]

    compare(lambda: _core.shift_rows(dst, src, carry, n), with_numpy, "numpy")


# ---- cost of a call --------------------------------------------------------------------

SMALL_LOGITS = np.zeros((1, 32), np.float32)
I32 = [np.zeros(64, np.int32) for _ in range(3)]
I8 = np.zeros(64, np.int8)
TOKENS = np.zeros(5, np.int32)
ONE = np.ones(1, np.int32)
DRAFTS = np.zeros((1, 4), np.int32)
HIDDEN = [np.zeros((4, 16), np.float32) for _ in range(3)]
WIDE, CARRY, OUT64 = np.zeros((4, 48), np.float32), np.zeros(16, np.float32), np.zeros(4)
CALLS: dict[str, Callable[[], Any]] = {
    "fill_batch": lambda: _core.fill_batch(*I32, I8, 0, TOKENS, 7, 1, 2),
    "fill_rows": lambda: _core.fill_rows(*I32, I8, ONE, DRAFTS, ONE, ONE, ONE),
    "interleave_rows": lambda: _core.interleave_rows(WIDE, HIDDEN, 4),
    "shift_rows": lambda: _core.shift_rows(HIDDEN[0], HIDDEN[0], CARRY, 4),
    "gather_rows": lambda: _core.gather_rows(HIDDEN[0], HIDDEN[1], ONE),
    "argmax_rows": lambda: _core.argmax_rows(SMALL_LOGITS, ONE),
    "verify_greedy": lambda: _core.verify_greedy(SMALL_LOGITS, 0, ONE[:0], ONE),
    "logsumexp_rows": lambda: _core.logsumexp_rows(SMALL_LOGITS, OUT64),
    "sample_row": lambda: _core.sample_row(SMALL_LOGITS[0], 0.8, 8, 0.95, 0.05, 0.5, I32[0], CARRY32),
    "philox_uniform": lambda: _core.philox_uniform(1, 2, 3),
}
CARRY32 = np.zeros(32, np.float32)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.benchmark(group="small call")
def test_small_call(benchmark: Any, name: str) -> None:
    benchmark(CALLS[name])
