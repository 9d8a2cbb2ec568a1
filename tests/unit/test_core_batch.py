"""Kernels that fill batches: fill_batch and fill_rows, compiled and NumPy."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspec import _core, _reference

PROFILE = settings(derandomize=True, database=None, deadline=None, max_examples=150)
BOTH = pytest.mark.parametrize("kernels", [_core, _reference], ids=["core", "reference"])
INT32_MAX = 2**31 - 1


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def new_batch(cap: int) -> list[np.ndarray]:
    """Empty tokens, pos, seq, output, filled with a mark that no test writes."""
    return [np.full(cap, -77, np.int32) for _ in range(3)] + [np.full(cap, -77, np.int8)]


def columns(batch: list[np.ndarray]) -> list[list[int]]:
    return [column.tolist() for column in batch]


def both(name: str, cap: int, *args: Any) -> tuple[Any, Any]:
    """Results of the two implementations: (return value or exception type, batch columns)."""
    results = []
    for kernels in (_core, _reference):
        batch = new_batch(cap)
        try:
            value: Any = getattr(kernels, name)(*batch, *args)
        except ValueError:
            value = ValueError
        results.append((value, columns(batch)))
    return results[0], results[1]


# ---- fill_batch ------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(("mode", "flags"), [(0, [0, 0, 0]), (1, [1, 1, 1]), (2, [0, 0, 1])])
def test_fill_batch_known(kernels: ModuleType, mode: int, flags: list[int]) -> None:
    batch = new_batch(6)
    assert kernels.fill_batch(*batch, 2, i32(5, 6, 7), 40, 3, mode) == 5
    rest = [-77]
    assert columns(batch) == [
        rest * 2 + [5, 6, 7] + rest,
        rest * 2 + [40, 41, 42] + rest,
        rest * 2 + [3, 3, 3] + rest,
        rest * 2 + flags + rest,
    ]


@BOTH
def test_fill_batch_no_rows(kernels: ModuleType) -> None:
    batch = new_batch(2)
    assert kernels.fill_batch(*batch, 2, i32(), 0, 0, 2) == 2
    assert kernels.fill_batch(*new_batch(0), 0, i32(), 0, 0, 1) == 0
    assert columns(batch) == columns(new_batch(2))


@BOTH
def test_fill_batch_last_positions(kernels: ModuleType) -> None:
    batch = new_batch(2)
    assert kernels.fill_batch(*batch, 0, i32(1, 2), INT32_MAX - 1, INT32_MAX, 1) == 2
    assert batch[1].tolist() == [INT32_MAX - 1, INT32_MAX]


@BOTH
@pytest.mark.parametrize(
    ("start", "n", "pos0", "seq_id", "mode", "message"),
    [
        (0, 5, 0, 0, 1, "do not fit"),
        (4, 1, 0, 0, 1, "do not fit"),
        (5, 0, 0, 0, 1, "do not fit"),
        (-1, 1, 0, 0, 1, "do not fit"),
        (0, 1, -1, 0, 1, "positions"),
        (0, 2, INT32_MAX, 0, 1, "positions"),
        (0, 1, 2**40, 0, 1, "positions"),
        (0, 1, 0, -1, 1, "seq_id"),
        (0, 1, 0, 2**31, 1, "seq_id"),
        (0, 1, 0, 0, 3, "output_mode"),
        (0, 1, 0, 0, -1, "output_mode"),
    ],
)
def test_fill_batch_refuses(
    kernels: ModuleType, start: int, n: int, pos0: int, seq_id: int, mode: int, message: str
) -> None:
    batch = new_batch(4)
    with pytest.raises(ValueError, match=message):
        kernels.fill_batch(*batch, start, np.ones(n, np.int32), pos0, seq_id, mode)
    assert columns(batch) == columns(new_batch(4)), "something was written"


@PROFILE
@given(
    cap=st.integers(0, 12),
    start=st.integers(-2, 14),
    tokens=st.lists(st.integers(-(2**31), INT32_MAX), max_size=14),
    pos0=st.one_of(st.integers(-2, 100), st.integers(INT32_MAX - 5, INT32_MAX + 2)),
    seq_id=st.integers(-1, 4),
    mode=st.integers(-1, 3),
)
def test_fill_batch_parity(cap: int, start: int, tokens: list[int], pos0: int, seq_id: int, mode: int) -> None:
    core, reference = both("fill_batch", cap, start, np.array(tokens, np.int32), pos0, seq_id, mode)
    assert core == reference


# ---- fill_rows -------------------------------------------------------------------------


@BOTH
def test_fill_rows_known(kernels: ModuleType) -> None:
    batch = new_batch(7)
    drafts = np.array([[10, 11, 12], [20, 21, 22], [30, 31, 32]], np.int32)
    assert kernels.fill_rows(*batch, i32(1, 2, 3), drafts, i32(2, 0, 1), i32(5, 100, 7), i32(4, 0, 9)) == 6
    assert columns(batch) == [
        [1, 10, 11, 2, 3, 30, -77],
        [5, 6, 7, 100, 7, 8, -77],
        [4, 4, 4, 0, 9, 9, -77],
        [1, 1, 1, 1, 1, 1, -77],
    ]


@BOTH
def test_fill_rows_without_drafts(kernels: ModuleType) -> None:
    batch = new_batch(1)
    assert kernels.fill_rows(*batch, i32(3), np.zeros((1, 0), np.int32), i32(0), i32(8), i32(2)) == 1
    assert columns(batch) == [[3], [8], [2], [1]]
    assert kernels.fill_rows(*batch, i32(), np.zeros((0, 4), np.int32), i32(), i32(), i32()) == 0


@BOTH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_draft": i32(3, 0)}, "n_draft"),
        ({"n_draft": i32(0, -1)}, "n_draft"),
        ({"pos0": i32(-1, 0)}, "pos0"),
        ({"pos0": i32(0, INT32_MAX)}, "pos0"),
        ({"seq_ids": i32(0, -1)}, "seq_ids"),
        ({"n_draft": i32(2, 2)}, "do not fit"),
        ({"n_draft": i32(1)}, "one length"),
        ({"drafts": np.zeros((3, 2), np.int32)}, "one length"),
    ],
)
def test_fill_rows_refuses(kernels: ModuleType, change: dict[str, np.ndarray], message: str) -> None:
    args = {
        "last_tokens": i32(1, 2),
        "drafts": np.ones((2, 2), np.int32),
        "n_draft": i32(1, 1),
        "pos0": i32(0, 0),
        "seq_ids": i32(0, 1),
    }
    batch = new_batch(5)
    with pytest.raises(ValueError, match=message):
        kernels.fill_rows(*batch, *(args | change).values())
    assert columns(batch) == columns(new_batch(5)), "something was written"


@PROFILE
@given(data=st.data(), cap=st.integers(0, 20), m=st.integers(0, 4), k_max=st.integers(0, 5))
def test_fill_rows_parity(data: st.DataObject, cap: int, m: int, k_max: int) -> None:
    def ints(low: int, high: int, n: int = m) -> np.ndarray:
        return np.array(data.draw(st.lists(st.integers(low, high), min_size=n, max_size=n)), np.int32)

    drafts = ints(0, 1000, m * k_max).reshape(m, k_max)
    args = (ints(0, 1000), drafts, ints(0, k_max), ints(0, 50), ints(0, 3))
    core, reference = both("fill_rows", cap, *args)
    assert core == reference


# ---- types -----------------------------------------------------------------------------


@BOTH
def test_inputs_may_be_read_only(kernels: ModuleType) -> None:
    new = i32(1, 2)
    drafts = np.ones((1, 1), np.int32)
    for array in (new, drafts):
        array.flags.writeable = False
    assert kernels.fill_batch(*new_batch(2), 0, new, 0, 0, 1) == 2
    assert kernels.fill_rows(*new_batch(2), new[:1], drafts, new[:1], new[:1], new[:1]) == 2


@BOTH
@pytest.mark.parametrize("position", range(4))
def test_outputs_are_checked(kernels: ModuleType, position: int) -> None:
    def call(column: np.ndarray) -> None:
        batch = new_batch(4)
        batch[position] = column
        kernels.fill_batch(*batch, 0, i32(1), 0, 0, 1)

    good = new_batch(4)[position]
    call(good)
    read_only = good.copy()
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        call(read_only)
    with pytest.raises(ValueError, match="one length"):
        call(good[:3].copy())
    for bad in (good.astype(np.int64), good.astype(np.float32), np.repeat(good, 2)[::2], good.reshape(2, 2)):
        with pytest.raises(ValueError, match=r"dtype|dimensions|contiguous|-d"):
            call(bad)
    with pytest.raises(TypeError):
        call(None)  # type: ignore[arg-type]
