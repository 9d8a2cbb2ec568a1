"""Kernels over rows of logits: argmax, top-k softmax, greedy verification, log-sum-exp, compiled and NumPy."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from pyspec import _core, _reference

PROFILE = settings(derandomize=True, database=None, deadline=None, max_examples=150)
BOTH = pytest.mark.parametrize("kernels", [_core, _reference], ids=["core", "reference"])
NAN, INF = math.nan, math.inf
#: A probability comes from a difference of two float32 of up to 88, rounded to float32: half a unit there is 3.8e-6.
RTOL = 5e-6

# Few distinct values give ties, specials give the rest. Lengths around the lane count (64) of the compiled loops.
LOGIT = st.one_of(
    st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1.0]), st.integers(-3, 3).map(float), st.floats(-60, 60, width=32)
)
LENGTH = st.one_of(st.integers(1, 9), st.sampled_from([63, 64, 65, 128, 255, 256, 257, 300, 1023, 1024, 1025]))


@st.composite
def logit_rows(draw: st.DrawFn, max_rows: int = 3) -> np.ndarray:
    shape = (draw(st.integers(0, max_rows)), draw(LENGTH))
    return draw(npst.arrays(np.float32, shape, elements=LOGIT, fill=st.sampled_from([-INF, 0.0, -2.0, NAN])))


def f32(*rows: list[float]) -> np.ndarray:
    return np.array(rows, np.float32)


def normal(n: int, v: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (n, v)).astype(np.float32)


# ---- argmax_rows -----------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("row", "best"),
    [
        ([3.0], 0),
        ([1, 3, 3, 2], 1),
        ([NAN, 1, NAN], 1),
        ([NAN, -INF], 1),
        ([NAN, NAN], 0),
        ([-INF, -INF], 0),
        ([0, INF, INF], 1),
        ([-0.0, 0.0], 0),
        ([0.0, NAN, -0.0], 0),
        ([-5, -4, -4], 1),
    ],
)
def test_argmax_known(kernels: ModuleType, row: list[float], best: int) -> None:
    out = np.full(2, -1, np.int32)
    kernels.argmax_rows(f32(row), out)
    assert out.tolist() == [best, -1]


@pytest.mark.parametrize("v", [1, 63, 64, 65, 1024, 4097, 49152, 262144, 262147])
@pytest.mark.parametrize("kind", ["one", "tie", "nan"])
def test_argmax_finds_every_place(v: int, kind: str) -> None:
    out = np.empty(1, np.int32)
    row = np.linspace(-4, -3, v, dtype=np.float32)[None]
    for best in {0, 1, 62, 63, 64, 1023, 1024, 1025, v // 2, v - 2, v - 1}:
        if not 0 <= best < v:
            continue
        logits = row.copy()
        logits[0, best] = 1.5
        if kind == "tie":
            logits[0, best + 1 :: 7] = 1.5
        if kind == "nan":
            logits[0, :best:3] = NAN
            logits[0, best + 1 :: 5] = NAN
        _core.argmax_rows(logits, out)
        assert out[0] == best


@PROFILE
@given(logits=logit_rows())
def test_argmax_parity(logits: np.ndarray) -> None:
    outs = [np.full(len(logits), -1, np.int32) for _ in range(2)]
    _core.argmax_rows(logits, outs[0])
    _reference.argmax_rows(logits, outs[1])
    np.testing.assert_array_equal(*outs)


# ---- topk_softmax_rows -----------------------------------------------------------------


def topk(kernels: ModuleType, logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    ids, probs = np.full((len(logits), k), -1, np.int32), np.full((len(logits), k), -1, np.float32)
    kernels.topk_softmax_rows(logits, ids, probs)
    return ids, probs


@BOTH
@pytest.mark.parametrize(
    ("row", "ids", "probs"),
    [
        ([0, math.log(3), 0], [1, 0], [0.75, 0.25]),  # softmax over the two kept, tie by id
        ([2, 2, 2], [0, 1], [0.5, 0.5]),
        ([-INF, NAN, 1], [2, 0], [1, 0]),
        ([NAN, NAN, NAN], [0, 1], [0, 0]),
        ([-INF, -INF, NAN], [0, 1], [0, 0]),
        ([INF, 3, INF], [0, 2], [0.5, 0.5]),
        ([3, INF, NAN], [1, 0], [1, 0]),
        ([-1000, 0, -1000], [1, 0], [1, 0]),
        ([-3e38, 3e38, 0], [1, 2], [1, 0]),
    ],
)
def test_topk_known(kernels: ModuleType, row: list[float], ids: list[int], probs: list[float]) -> None:
    got_ids, got_probs = topk(kernels, f32(row), 2)
    assert got_ids.tolist() == [ids]
    np.testing.assert_allclose(got_probs, [probs], rtol=5e-7, atol=1e-30)


@PROFILE
@given(logits=logit_rows(), data=st.data())
def test_topk_parity(logits: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, min(logits.shape[1], 40)))
    core, reference = topk(_core, logits, k), topk(_reference, logits, k)
    np.testing.assert_array_equal(core[0], reference[0])
    np.testing.assert_allclose(core[1], reference[1], rtol=RTOL, atol=1e-30)


@pytest.mark.parametrize(("v", "k"), [(49152, 10), (262144, 10), (262144, 1), (5000, 5000), (5000, 4999)])
@pytest.mark.parametrize("order", ["random", "rising", "falling", "coarse"])
def test_topk_big(v: int, k: int, order: str) -> None:
    logits = normal(2, v)
    if order == "coarse":
        logits = np.round(logits)
    elif order != "random":
        logits = np.sort(logits, axis=1)[:, :: 1 if order == "rising" else -1].copy()
    core, reference = topk(_core, logits, k), topk(_reference, logits, k)
    np.testing.assert_array_equal(core[0], reference[0])
    np.testing.assert_allclose(core[1], reference[1], rtol=RTOL)
    np.testing.assert_allclose(core[1].sum(axis=1), 1, rtol=1e-5)


@BOTH
def test_topk_refuses(kernels: ModuleType) -> None:
    logits = f32([1, 2, 3], [1, 2, 3])
    for ids_shape, probs_shape in [
        ((2, 2), (2, 3)),
        ((2, 4), (2, 4)),
        ((2, 0), (2, 0)),
        ((1, 2), (2, 2)),
        ((2, 2), (1, 2)),
    ]:
        with pytest.raises(ValueError, match=r"columns|room"):
            kernels.topk_softmax_rows(logits, np.zeros(ids_shape, np.int32), np.zeros(probs_shape, np.float32))


# ---- verify_greedy ---------------------------------------------------------------------


def one_hot(*best: int, v: int = 70) -> np.ndarray:
    logits = np.zeros((len(best), v), np.float32)
    logits[range(len(best)), best] = 1
    return logits


@BOTH
@pytest.mark.parametrize(
    ("draft", "accepted", "emitted"),
    [
        ([], 0, [5]),
        ([5], 1, [5, 6]),
        ([4], 0, [5]),
        ([5, 6, 7], 3, [5, 6, 7, 8]),
        ([5, 9, 7], 1, [5, 6]),
        ([5, 6, -1], 2, [5, 6, 7]),
    ],
)
@pytest.mark.parametrize("row0", [0, 2])
def test_verify_known(kernels: ModuleType, row0: int, draft: list[int], accepted: int, emitted: list[int]) -> None:
    logits = np.concatenate([one_hot(*[1] * row0), one_hot(5, 6, 7, 8)]) if row0 else one_hot(5, 6, 7, 8)
    out = np.full(6, -1, np.int32)
    assert kernels.verify_greedy(logits, row0, np.array(draft, np.int32), out) == accepted
    assert out[: accepted + 1].tolist() == emitted
    assert (out[accepted + 1 :] == -1).all()


@PROFILE
@given(data=st.data(), k=st.integers(0, 6), row0=st.integers(0, 3), v=st.sampled_from([1, 2, 5, 64, 100]))
def test_verify_parity(data: st.DataObject, k: int, row0: int, v: int) -> None:
    logits = normal(row0 + k + 1, v, data.draw(st.integers(0, 99)))
    best = logits.argmax(axis=1)
    wrong_at = data.draw(st.integers(0, k))
    draft = best[row0 : row0 + k].astype(np.int32)
    draft[wrong_at:] = data.draw(st.integers(0, v - 1))
    results = []
    for kernels in (_core, _reference):
        out = np.full(k + 1, -1, np.int32)
        results.append((kernels.verify_greedy(logits, row0, draft, out), out.tolist()))
    assert results[0] == results[1]
    n_accepted, emitted = results[0]
    assert n_accepted >= wrong_at
    assert emitted[: n_accepted + 1] == best[row0 : row0 + n_accepted + 1].tolist()


@BOTH
def test_verify_refuses(kernels: ModuleType) -> None:
    draft = np.array([1, 2], np.int32)
    out = np.full(3, -1, np.int32)
    for row0 in (-1, 2, 5):
        with pytest.raises(ValueError, match="rows"):
            kernels.verify_greedy(one_hot(1, 2, 3, 4), row0, draft, out)
    with pytest.raises(ValueError, match="room"):
        kernels.verify_greedy(one_hot(1, 2, 3), 0, draft, out[:2])
    assert (out == -1).all()


# ---- logsumexp_rows, logprob_rows ------------------------------------------------------


def lse(kernels: ModuleType, logits: np.ndarray) -> np.ndarray:
    out = np.full(len(logits), 7.0)
    kernels.logsumexp_rows(logits, out)
    return out


@BOTH
@pytest.mark.parametrize(
    ("row", "value"),
    [
        ([2.5], 2.5),
        ([0, 0, 0, 0], math.log(4)),
        ([1000, 1000], 1000 + math.log(2)),
        ([-1000, -1000], -1000 + math.log(2)),
        ([-INF, 3, NAN], 3.0),
        ([-INF, -INF], -INF),
        ([NAN], -INF),
        ([INF, 1], INF),
        ([0, -200], 0.0),
        ([3e38, -3e38], float(np.float32(3e38))),
    ],
)
def test_logsumexp_known(kernels: ModuleType, row: list[float], value: float) -> None:
    np.testing.assert_allclose(lse(kernels, f32(row)), [value], rtol=1e-12, atol=1e-7)


@PROFILE
@given(logits=logit_rows())
def test_logsumexp_parity(logits: np.ndarray) -> None:
    np.testing.assert_allclose(lse(_core, logits), lse(_reference, logits), rtol=0, atol=1e-6)


@pytest.mark.parametrize("v", [49152, 262144, 262147])
@pytest.mark.parametrize("scale", [0.01, 3, 30])
def test_logsumexp_big(v: int, scale: float) -> None:
    logits = normal(2, v) * np.float32(scale)
    np.testing.assert_allclose(lse(_core, logits), lse(_reference, logits), rtol=0, atol=3e-7)


def test_exponential_is_accurate() -> None:
    """exp over its whole range, seen through the second probability of a pair: p1 / p0 = exp(d)."""
    d = np.linspace(-87.6, 0, 20011, dtype=np.float32)
    ids, probs = topk(_core, np.stack([np.zeros_like(d), d], axis=1), 2)
    assert (ids == [0, 1]).all()
    expected = np.exp(d.astype(np.float64))
    np.testing.assert_allclose(probs[:, 1], expected / (1 + expected), rtol=3e-7)
    assert (topk(_core, f32([0, -87.8], [0, -1e4], [0, -3e38]), 2)[1] == [1, 0]).all()


def test_the_same_bits_on_every_machine() -> None:
    """Sampled text is to be the same everywhere, so no result may depend on vector width or fused multiply-adds."""
    hashed = np.arange(4 * 5003, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(2**32)
    logits = (hashed.astype(np.float64) / 2**27 - 16).astype(np.float32).reshape(4, 5003)
    ids, probs = topk(_core, logits, 5003)
    assert (zlib.crc32(ids.astype("<i4").tobytes()), zlib.crc32(probs.astype("<f4").tobytes())) == (
        176202684,
        2119962073,
    )
    # with fused multiply-adds these differ by 4e-10
    known = [21.049579783911444, 21.051244765469942, 21.05298864619965, 21.048706199841064]
    np.testing.assert_allclose(lse(_core, logits), known, rtol=0, atol=1e-12)


@BOTH
def test_logprob_known(kernels: ModuleType) -> None:
    logits = f32([0, 0, -INF], [0, 0, -INF], [5, INF, NAN], [5, INF, NAN], [5, INF, NAN], [-INF, NAN, NAN])
    out = np.full(6, 7.0)
    kernels.logprob_rows(logits, np.array([1, 2, 0, 1, 2, 0], np.int32), out)
    np.testing.assert_allclose(out, [-math.log(2), -INF, -INF, 0, -INF, -INF], rtol=1e-12)


@PROFILE
@given(logits=logit_rows(), data=st.data())
def test_logprob_parity(logits: np.ndarray, data: st.DataObject) -> None:
    n, v = logits.shape
    ids = np.array(data.draw(st.lists(st.integers(0, v - 1), min_size=n, max_size=n)), np.int32)
    outs = [np.full(n, 7.0) for _ in range(2)]
    _core.logprob_rows(logits, ids, outs[0])
    _reference.logprob_rows(logits, ids, outs[1])
    np.testing.assert_allclose(*outs, rtol=0, atol=1e-6)
    assert (outs[0] <= 1e-6).all()


@BOTH
@pytest.mark.parametrize("ids", [[0, 3], [-1, 0], [0], [0, 0, 0]])
def test_logprob_refuses(kernels: ModuleType, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="ids"):
        kernels.logprob_rows(f32([1, 2, 3], [1, 2, 3]), np.array(ids, np.int32), np.zeros(3))


# ---- top_logprob_rows ------------------------------------------------------------------


def top_logprobs(kernels: ModuleType, logits: np.ndarray, ids: np.ndarray, k: int) -> tuple[np.ndarray, ...]:
    n = len(logits)
    outs = (np.full(n, 7.0), np.full((n, k), 7, np.int32), np.full((n, k), 7.0))
    kernels.top_logprob_rows(logits, ids, *outs)
    return outs


@BOTH
def test_top_logprobs_known(kernels: ModuleType) -> None:
    logits = f32([0, 1, 0], [0, -INF, NAN], [5, INF, NAN], [NAN, -INF, NAN])
    out, ids, top = top_logprobs(kernels, logits, np.array([0, 1, 1, 0], np.int32), 2)
    lse = math.log(2 + math.e)
    np.testing.assert_array_equal(ids, [[1, 0], [0, -1], [1, 0], [-1, -1]])
    np.testing.assert_allclose(out, [-lse, -INF, 0, -INF], rtol=1e-6)
    np.testing.assert_allclose(top, [[1 - lse, -lse], [0, -INF], [0, -INF], [-INF, -INF]], rtol=1e-6)


@PROFILE
@given(logits=logit_rows(), data=st.data(), k=st.integers(1, 20))
def test_top_logprobs_parity(logits: np.ndarray, data: st.DataObject, k: int) -> None:
    n, v = logits.shape
    ids = np.array(data.draw(st.lists(st.integers(0, v - 1), min_size=n, max_size=n)), np.int32)
    found, wanted = (top_logprobs(m, logits, ids, k) for m in (_core, _reference))
    np.testing.assert_array_equal(found[1], wanted[1])
    for a, b in zip(found[::2], wanted[::2], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_top_logprobs_of_a_large_row() -> None:
    """The row of Gemma's vocabulary: best first, and the same numbers as taking everything."""
    logits = normal(2, 262_144)
    out, ids, top = top_logprobs(_core, logits, np.array([5, 262_143], np.int32), 20)
    wide = logits.astype(np.float64)
    wanted = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(ids, np.argsort(-wide, axis=1, kind="stable")[:, :20])
    np.testing.assert_allclose(top, np.take_along_axis(wanted, ids.astype(np.int64), 1), atol=1e-6)
    np.testing.assert_allclose(out, [wanted[0, 5], wanted[1, -1]], atol=1e-6)


@BOTH
@pytest.mark.parametrize("k", [(0, 0), (65, 65), (3, 2)])
def test_top_logprobs_refuses(kernels: ModuleType, k: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="top_ids and top"):
        kernels.top_logprob_rows(
            normal(1, 8), np.zeros(1, np.int32), np.zeros(1), np.zeros((1, k[0]), np.int32), np.zeros((1, k[1]))
        )


# ---- all of them -----------------------------------------------------------------------

Call = Callable[[ModuleType, np.ndarray], Any]
CALLS: dict[str, Call] = {
    "argmax_rows": lambda m, x: m.argmax_rows(x, np.zeros(4, np.int32)),
    "topk_softmax_rows": lambda m, x: m.topk_softmax_rows(x, np.zeros((4, 2), np.int32), np.zeros((4, 2), np.float32)),
    "verify_greedy": lambda m, x: m.verify_greedy(x, 0, np.zeros(1, np.int32), np.zeros(4, np.int32)),
    "logsumexp_rows": lambda m, x: m.logsumexp_rows(x, np.zeros(4)),
    "logprob_rows": lambda m, x: m.logprob_rows(x, np.zeros(len(x), np.int32), np.zeros(4)),
    "top_logprob_rows": lambda m, x: m.top_logprob_rows(
        x, np.zeros(len(x), np.int32), np.zeros(4), np.zeros((4, 3), np.int32), np.zeros((4, 3))
    ),
}


@BOTH
@pytest.mark.parametrize("name", CALLS)
def test_logits_are_checked(kernels: ModuleType, name: str) -> None:
    call, good = CALLS[name], normal(3, 8)
    read_only = good.copy()
    read_only.flags.writeable = False
    call(kernels, good)
    call(kernels, read_only)
    strided = normal(3, 16)[:, ::2]
    for bad in (good.astype(np.float64), good.astype(np.float16), good.reshape(-1), strided, np.asfortranarray(good)):
        with pytest.raises(ValueError, match=r"dtype|dimensions|contiguous|-d"):
            call(kernels, bad)
    with pytest.raises(ValueError, match="column"):
        call(kernels, np.zeros((3, 0), np.float32))


@BOTH
@pytest.mark.parametrize(
    "name", ["argmax_rows", "topk_softmax_rows", "logsumexp_rows", "logprob_rows", "top_logprob_rows"]
)
def test_no_rows_and_too_many_rows(kernels: ModuleType, name: str) -> None:
    CALLS[name](kernels, np.zeros((0, 8), np.float32))
    with pytest.raises(ValueError, match="room"):
        CALLS[name](kernels, normal(5, 8))


@pytest.mark.parametrize("name", ["argmax_rows", "logsumexp_rows"])
def test_output_dtype_is_checked(name: str) -> None:
    for kernels in (_core, _reference):
        with pytest.raises(ValueError, match=r"dtype|-d"):
            getattr(kernels, name)(normal(1, 8), np.zeros(1, np.int64))
        read_only = np.zeros(1, np.int32 if name == "argmax_rows" else np.float64)
        read_only.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            getattr(kernels, name)(normal(1, 8), read_only)
