"""Kernels that move rows of hidden states: interleave_rows, shift_rows, gather_rows, compiled and NumPy."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspec import _core, _reference

PROFILE = settings(derandomize=True, database=None, deadline=None, max_examples=100)
BOTH = pytest.mark.parametrize("kernels", [_core, _reference], ids=["core", "reference"])
MARK = np.float32(-77.0)


def rows(n: int, d: int, first: int = 0) -> np.ndarray:
    """float32 [n, d] of distinct values."""
    return np.arange(first, first + n * d, dtype=np.float32).reshape(n, d)


def frozen(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def marked(*shape: int) -> np.ndarray:
    return np.full(shape, MARK, np.float32)


# ---- interleave_rows -------------------------------------------------------------------


@BOTH
def test_interleave_known(kernels: ModuleType) -> None:
    dst = marked(3, 4)
    a, b = frozen(rows(2, 2)), frozen(rows(2, 2, 10))
    kernels.interleave_rows(dst, [a, b], 2)
    assert dst.tolist() == [[0, 1, 10, 11], [2, 3, 12, 13], [MARK] * 4]


@PROFILE
@given(n=st.integers(0, 9), k=st.integers(1, 64), d=st.integers(0, 40), extra=st.integers(0, 3))
def test_interleave_parity(n: int, k: int, d: int, extra: int) -> None:
    src = tuple(rows(n + (j + extra) % 3, d, 1000 * j) for j in range(k))
    results = []
    for kernels in (_core, _reference):
        dst = marked(n + extra, k * d)
        kernels.interleave_rows(dst, src, n)
        results.append(dst)
    np.testing.assert_array_equal(*results)
    for j in range(k):
        np.testing.assert_array_equal(results[0][:n, j * d : (j + 1) * d], src[j][:n])


@pytest.mark.parametrize(
    ("n", "k", "d", "offset"), [(300, 3, 768, 0), (301, 3, 770, 0), (300, 3, 768, 1), (40, 64, 512, 4)]
)
def test_interleave_big(n: int, k: int, d: int, offset: int) -> None:
    """Results of more than 2 MB are written in another way where rows and addresses fit."""
    src = [rows(n + 1, d, 7 * j) for j in range(k)]
    buffer = marked(n * k * d + offset + 8)
    dst = buffer[offset : offset + n * k * d].reshape(n, k * d)
    _core.interleave_rows(dst, src, n - 1)
    for j in range(k):
        np.testing.assert_array_equal(dst[: n - 1, j * d : (j + 1) * d], src[j][: n - 1])
    assert (dst[n - 1] == MARK).all()
    assert (buffer[offset + n * k * d :] == MARK).all()


@BOTH
def test_interleave_refuses(kernels: ModuleType) -> None:
    a, b = rows(4, 3), rows(4, 3)
    bad = [
        (marked(4, 6), [], 4, "1 to 64"),
        (marked(4, 65 * 3), [a] * 65, 4, "1 to 64"),
        (marked(4, 6), [a, b], 5, "n must be"),
        (marked(4, 6), [a, b], -1, "n must be"),
        (marked(4, 7), [a, b], 4, r"columns|fit"),
        (marked(4, 6), [a, rows(4, 2)], 4, r"src\[1\]"),
        (marked(4, 6), [a, rows(3, 3)], 4, r"src\[1\]"),
        (marked(4, 6), [a, b.astype(np.float64)], 4, r"src\[1\]"),
        (marked(4, 6), [a, b.view(np.int32)], 4, r"src\[1\]"),
        (marked(4, 6), [a, b.reshape(-1)], 4, r"src\[1\]"),
        (marked(4, 6), [a, np.asfortranarray(b)], 4, "contiguous"),
        (marked(4, 6), [a, rows(4, 6)[:, :3]], 4, "contiguous"),
        (frozen(marked(4, 6)), [a, b], 4, "read-only"),
    ]
    for dst, src, n, message in bad:
        before = dst.copy()
        with pytest.raises(ValueError, match=message):
            kernels.interleave_rows(dst, src, n)
        np.testing.assert_array_equal(dst, before)


@BOTH
def test_interleave_refuses_shared_memory(kernels: ModuleType) -> None:
    buffer = rows(10, 4)
    dst, src = buffer[:4], buffer[3:8].reshape(10, 2)
    with pytest.raises(ValueError, match="shares memory"):
        kernels.interleave_rows(dst, [rows(4, 2), src], 4)
    with pytest.raises(TypeError):
        kernels.interleave_rows(rows(2, 2), [None], 1)


def test_interleave_releases_its_sources() -> None:
    """A refused call must not keep buffers exported: resizing in place would fail."""
    good, bad = rows(2, 2), rows(2, 3)
    with pytest.raises(ValueError, match=r"src\[1\]"):
        _core.interleave_rows(marked(2, 4), [good, bad], 2)
    _core.interleave_rows(marked(2, 4), [good, good], 2)
    exported = bytearray(16)
    view = np.frombuffer(exported, np.float32).reshape(2, 2)
    _core.interleave_rows(marked(2, 2), [view], 2)
    del view
    exported.extend(b"x")  # BufferError while anything is exported


# ---- shift_rows ------------------------------------------------------------------------


@BOTH
def test_shift_known(kernels: ModuleType) -> None:
    dst, src, carry = marked(4, 2), frozen(rows(3, 2)), np.array([100, 101], np.float32)
    kernels.shift_rows(dst, src, carry, 3)
    assert dst.tolist() == [[100, 101], [0, 1], [2, 3], [MARK, MARK]]
    assert carry.tolist() == [4, 5]


@BOTH
@pytest.mark.parametrize("d", [1, 5, 511, 512, 513, 1500])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_shift_in_place(kernels: ModuleType, n: int, d: int) -> None:
    buffer, carry = rows(n + 1, d), rows(1, d, 10**6)[0]
    expected = np.concatenate([carry[None], buffer[: n - 1]])
    last, after = buffer[n - 1].copy(), buffer[n].copy()
    kernels.shift_rows(buffer, buffer, carry, n)
    np.testing.assert_array_equal(buffer[:n], expected)
    np.testing.assert_array_equal(carry, last)
    np.testing.assert_array_equal(buffer[n], after)


@BOTH
@pytest.mark.parametrize("in_place", [False, True])
def test_shift_in_chunks_is_shift_at_once(kernels: ModuleType, in_place: bool) -> None:
    """What the carry is for: a stream of rows cut anywhere is shifted by one row."""
    stream = rows(12, 3)
    carry = marked(3)
    out = []
    for begin, end in [(0, 1), (1, 1), (1, 6), (6, 12)]:
        src = stream[begin:end].copy()
        dst = src if in_place else np.empty_like(src)
        kernels.shift_rows(dst, src, carry, end - begin)
        out.append(dst)
    np.testing.assert_array_equal(np.concatenate(out), np.concatenate([marked(1, 3), stream[:-1]]))
    np.testing.assert_array_equal(carry, stream[-1])


@PROFILE
@given(n=st.integers(0, 8), d=st.integers(0, 20), in_place=st.booleans(), more=st.integers(0, 2))
def test_shift_parity(n: int, d: int, in_place: bool, more: int) -> None:
    results = []
    for kernels in (_core, _reference):
        src = rows(n + more, d)
        dst, carry = (src if in_place else marked(n, d)), rows(1, d, 500)[0]
        kernels.shift_rows(dst, src, carry, n)
        results.append((dst, carry))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


@BOTH
def test_shift_refuses(kernels: ModuleType) -> None:
    buffer = rows(6, 2)
    bad = [
        (marked(3, 2), rows(3, 3), marked(2), 3, "width"),
        (marked(3, 2), rows(3, 2), marked(3), 3, "width"),
        (marked(3, 2), rows(2, 2), marked(2), 3, "n must be"),
        (marked(2, 2), rows(3, 2), marked(2), 3, "n must be"),
        (marked(2, 2), rows(3, 2), marked(2), -1, "n must be"),
        (buffer[1:4], buffer[:3], marked(2), 3, "overlap"),
        (buffer[:3], buffer[1:4], marked(2), 3, "overlap"),
        (marked(3, 2), buffer[:3], buffer[1], 3, "carry"),
        (buffer[:3], rows(3, 2), buffer[1], 3, "carry"),
        (frozen(marked(3, 2)), rows(3, 2), marked(2), 3, "read-only"),
        (marked(3, 2), rows(3, 2), frozen(marked(2)), 3, "read-only"),
    ]
    for dst, src, carry, n, message in bad:
        before = dst.copy(), carry.copy()
        with pytest.raises(ValueError, match=message):
            kernels.shift_rows(dst, src, carry, n)
        np.testing.assert_array_equal(dst, before[0])
        np.testing.assert_array_equal(carry, before[1])


# ---- gather_rows -----------------------------------------------------------------------


@PROFILE
@given(data=st.data(), n=st.integers(1, 9), d=st.integers(0, 30), m=st.integers(0, 12))
def test_gather_parity(data: st.DataObject, n: int, d: int, m: int) -> None:
    idx = frozen(np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=m, max_size=m)), np.int32))
    src = frozen(rows(n, d))
    for kernels in (_core, _reference):
        dst = marked(m + 1, d)
        kernels.gather_rows(dst, src, idx)
        np.testing.assert_array_equal(dst[:m], src[idx])
        assert (dst[m] == MARK).all()


@BOTH
def test_gather_refuses(kernels: ModuleType) -> None:
    src = rows(3, 2)
    bad = [
        (marked(2, 2), src, [0, 3], "idx"),
        (marked(2, 2), src, [-1, 0], "idx"),
        (marked(2, 2), rows(0, 2), [0], "idx"),
        (marked(1, 2), src, [0, 1], "do not fit"),
        (marked(2, 3), src, [0, 1], "width"),
        (src[:2], src, [0, 1], "shares memory"),
        (frozen(marked(2, 2)), src, [0, 1], "read-only"),
    ]
    for dst, source, idx, message in bad:
        before = dst.copy()
        with pytest.raises(ValueError, match=message):
            kernels.gather_rows(dst, source, np.array(idx, np.int32))
        np.testing.assert_array_equal(dst, before)
    with pytest.raises(ValueError, match=r"dtype|int32"):
        kernels.gather_rows(marked(2, 2), src, np.array([0, 1]))


@BOTH
def test_memory_map_as_source(kernels: ModuleType, tmp_path: object) -> None:
    path = f"{tmp_path}/rows.bin"
    rows(8, 4).tofile(path)
    mapped = np.memmap(path, np.float32, mode="r", shape=(8, 4))
    dst = marked(2, 4)
    kernels.gather_rows(dst, mapped, np.array([7, 0], np.int32))
    np.testing.assert_array_equal(dst, rows(8, 4)[[7, 0]])
    kernels.interleave_rows(marked(8, 8), [mapped, mapped], 8)
