"""Attention on the CPU (``build_support/flash_rows.c``) against double precision, for each instruction set.

It is compiled against ggml's headers, with tensors made by hand and a recorder in place of ggml's own kernel.
"""

from __future__ import annotations

import ctypes
import itertools
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends_kit import cpu_flags

ROOT = Path(__file__).resolve().parents[2]
GGML = ROOT / "vendor" / "ggml" / "llama.cpp" / "ggml"

DRIVER = """
#include "flash_rows.c"

static int n_passed_on;

void __real_ggml_compute_forward_flash_attn_ext(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    (void) params, (void) dst;
    n_passed_on++;
}

ggml_float ggml_vec_soft_max_f32(const int n, float * y, const float * x, float max) {
    ggml_float sum = 0;
    for (int i = 0; i < n; i++) {
        sum += y[i] = expf(x[i] - max);
    }
    return sum;
}

static void shape(struct ggml_tensor * t, enum ggml_type type, size_t size, const int64_t * ne, void * data) {
    memset(t, 0, sizeof(*t));
    t->type = type;
    t->data = data;
    t->nb[0] = size;
    for (int i = 0; i < 4; i++) {
        t->ne[i] = ne[i];
        t->nb[i + 1 < 4 ? i + 1 : 3] = i + 1 < 4 ? t->nb[i] * (size_t) ne[i] : t->nb[3];
    }
}

/* sizes: n_keys, n_values, rows, heads, key heads, cells, sequences, mask heads. types: q, k, v. op: as op_params.
 * Cells of all key heads lie side by side, as in a cache. Returns how often ggml's kernel was called. */
int attention(const int64_t * sizes, const int * types, const float * op, float * q, uint16_t * k, uint16_t * v,
              uint16_t * mask, float * sinks, float * out, int nth, int use_ref) {
    const int64_t n_keys = sizes[0], n_values = sizes[1], rows = sizes[2], heads = sizes[3], n_kv = sizes[4];
    const int64_t cells = sizes[5], seqs = sizes[6];
    struct ggml_tensor tq, tk, tv, tm, ts, dst;
    shape(&tq, types[0], 4, (int64_t[]) { n_keys, rows, heads, seqs }, q);
    shape(&tk, types[1], 2, (int64_t[]) { n_keys, cells, n_kv, seqs }, k);
    shape(&tv, types[2], 2, (int64_t[]) { n_values, cells, n_kv, seqs }, v);
    tk.nb[1] = 2 * (size_t) (n_keys * n_kv), tk.nb[2] = 2 * (size_t) n_keys;
    tv.nb[1] = 2 * (size_t) (n_values * n_kv), tv.nb[2] = 2 * (size_t) n_values;
    shape(&tm, GGML_TYPE_F16, 2, (int64_t[]) { cells, rows, sizes[7], seqs }, mask);
    shape(&ts, GGML_TYPE_F32, 4, (int64_t[]) { heads, 1, 1, 1 }, sinks);
    shape(&dst, GGML_TYPE_F32, 4, (int64_t[]) { n_values, heads, rows, seqs }, out);
    memcpy(dst.op_params, op, 3 * sizeof(float));
    dst.src[0] = &tq, dst.src[1] = &tk, dst.src[2] = &tv;
    dst.src[3] = mask == NULL ? NULL : &tm;
    dst.src[4] = sinks == NULL ? NULL : &ts;
    n_passed_on = 0;
    for (int ith = 0; ith < nth; ith++) {
        struct ggml_compute_params params = { .ith = ith, .nth = nth, .use_ref = use_ref };
        __wrap_ggml_compute_forward_flash_attn_ext(&params, &dst);
    }
    return n_passed_on;
}
"""

#: What a build for a CPU may use, and what this one must have to run it.
SETS = {
    "avx512": (["-march=skylake-avx512"], {"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "avx2": (["-march=haswell"], {"avx2", "fma", "f16c", "bmi2"}),
    "none": (["-march=x86-64"], set[str]()),
}
F32, F16, Q8_0 = 0, 1, 8


@pytest.fixture(scope="module", params=SETS)
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    flags, needs = SETS[request.param]
    compiler = shutil.which("cc") or shutil.which("gcc")
    if platform.machine() not in ("x86_64", "AMD64") or compiler is None or not needs <= cpu_flags():
        pytest.skip(f"cannot build or run {request.param} here")
    if not GGML.is_dir():
        pytest.skip("vendor/ggml/llama.cpp is not there: built with PYSPEC_LLAMA_SRC")
    folder = tmp_path_factory.mktemp("flash")
    (folder / "driver.c").write_text(DRIVER, encoding="utf-8")
    includes = [f"-I{ROOT / 'build_support'}", *(f"-I{GGML / x}" for x in ("include", "src", "src/ggml-cpu"))]
    subprocess.run(
        [compiler, "-std=gnu11", "-O2", *flags, "-fPIC", "-shared", *includes, str(folder / "driver.c"),
         "-o", str(folder / "driver.so"), "-lm"],
        check=True,
    )  # fmt: skip
    library = ctypes.CDLL(str(folder / "driver.so"))
    library.covers = request.param != "none"
    return library


class Case:
    """Random queries and cache; float32 [seqs, heads, rows, n_keys] and float16 [seqs, cells, key heads, n]."""

    def __init__(
        self, n_keys: int = 64, n_values: int = 64, rows: int = 5, heads: int = 6, n_kv: int = 2, cells: int = 512,
        seqs: int = 1, seed: int = 0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.sizes = [n_keys, n_values, rows, heads, n_kv, cells, seqs, 1]
        self.types = [F32, F16, F16]
        self.op = [n_keys**-0.5, 0.0, 0.0]
        self.q = rng.normal(0, 3, (seqs, heads, rows, n_keys)).astype(np.float32)
        self.k = rng.normal(0, 1, (seqs, cells, n_kv, n_keys)).astype(np.float16)
        self.v = rng.normal(0, 1, (seqs, cells, n_kv, n_values)).astype(np.float16)
        self.mask: np.ndarray[Any, Any] | None = np.zeros((seqs, 1, rows, cells), np.float16)
        self.sinks: np.ndarray[Any, Any] | None = None

    def causal(self, n_past: int, window: int = 1 << 30) -> Case:
        assert self.mask is not None
        for i in range(self.sizes[2]):
            self.mask[:, :, i, n_past + i + 1 :] = -np.inf
            self.mask[:, :, i, : max(0, n_past + i + 1 - window)] = -np.inf
        return self

    def only(self, row: int) -> Case:
        """The same with one row alone."""
        other = Case.__new__(Case)
        vars(other).update(vars(self))
        other.sizes = [*self.sizes[:2], 1, *self.sizes[3:]]
        other.q = np.ascontiguousarray(self.q[:, :, row : row + 1])
        other.mask = None if self.mask is None else np.ascontiguousarray(self.mask[:, :, row : row + 1])
        return other

    def run(self, library: ctypes.CDLL, nth: int = 1, use_ref: bool = False) -> tuple[np.ndarray[Any, Any], int]:
        """Output, float32 [seqs, rows, heads, n_values], and how often ggml's own kernel was called."""
        _, n_values, rows, heads, _, _, seqs, _ = self.sizes
        out = np.full((seqs, rows, heads, n_values), 7.0, np.float32)

        def at(x: np.ndarray[Any, Any] | None) -> Any:
            return None if x is None else x.ctypes.data_as(ctypes.c_void_p)

        sizes = (ctypes.c_int64 * 8)(*self.sizes)
        passed_on = library.attention(
            sizes, (ctypes.c_int * 3)(*self.types), (ctypes.c_float * 3)(*self.op), at(self.q), at(self.k), at(self.v),
            at(self.mask), at(self.sinks), at(out), nth, int(use_ref),
        )  # fmt: skip
        return out, passed_on

    def reference(self) -> np.ndarray[Any, Any]:
        _, n_values, rows, heads, n_kv, _, seqs, _ = self.sizes
        out = np.zeros((seqs, rows, heads, n_values))
        for s, h in itertools.product(range(seqs), range(heads)):
            group = h // (heads // n_kv)
            scores = self.q[s, h].astype(np.float64) @ self.k[s, :, group].astype(np.float64).T * self.op[0]
            if self.mask is not None:
                mask = self.mask[s, h % self.mask.shape[1]].astype(np.float64)
                scores = np.where(mask == -np.inf, -np.inf, scores + mask)
            sink = -np.inf if self.sinks is None else float(self.sinks[h])
            high = np.maximum(scores.max(axis=1, keepdims=True), sink)
            high = np.where(high == -np.inf, 0.0, high)
            p = np.exp(scores - high)
            total = p.sum(axis=1, keepdims=True) + np.exp(sink - high)
            values = np.where(p.max(axis=0)[:, None] > 0, self.v[s, :, group].astype(np.float64), 0.0)
            out[s, :, h] = p @ values / np.where(total == 0, 1.0, total)
        return out


def check(library: ctypes.CDLL, case: Case, atol: float = 2e-5) -> None:
    """Near the exact result; and the same in every bit for a row alone, and with more threads."""
    out, passed_on = case.run(library)
    if not library.covers:
        assert passed_on == 1
        return
    assert passed_on == 0
    np.testing.assert_allclose(out, case.reference(), atol=atol, rtol=1e-4)
    for nth in (2, 3, 16):
        assert np.array_equal(case.run(library, nth)[0], out), f"{nth} threads"
    for row in {0, case.sizes[2] // 2, case.sizes[2] - 1}:
        assert np.array_equal(case.only(row).run(library)[0][:, 0], out[:, row]), f"row {row} alone"


@pytest.mark.parametrize("rows", [1, 2, 7, 63, 64, 70])
@pytest.mark.parametrize("n", [(64, 64), (128, 128), (80, 96), (256, 256), (576, 512), (32, 32)])
def test_shapes_of_heads(build: ctypes.CDLL, n: tuple[int, int], rows: int) -> None:
    check(build, Case(*n, rows=rows).causal(400))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (2, 1), (9, 3), (8, 1), (7, 1)])
def test_heads_that_share_keys(build: ctypes.CDLL, heads: tuple[int, int]) -> None:
    check(build, Case(heads=heads[0], n_kv=heads[1], rows=11).causal(300))


@pytest.mark.parametrize("cells", [1, 3, 4, 5, 255, 256, 257, 1000, 1024])
def test_any_number_of_cells(build: ctypes.CDLL, cells: int) -> None:
    check(build, Case(cells=cells))
    no_mask = Case(cells=cells)
    no_mask.mask = None
    check(build, no_mask)


def test_sequences(build: ctypes.CDLL) -> None:
    check(build, Case(seqs=3, rows=4).causal(100))


@pytest.mark.parametrize("window", [1, 3, 40, 300])
def test_windows(build: ctypes.CDLL, window: int) -> None:
    """Rows that see none of the first blocks, and others that see parts of a block."""
    check(build, Case(cells=1024, rows=20).causal(900, window))


def test_cells_of_other_sequences_lie_between(build: ctypes.CDLL) -> None:
    case = Case(cells=768, rows=6)
    rng = np.random.default_rng(1)
    assert case.mask is not None
    case.mask[:] = np.where(rng.random(case.mask.shape) < 0.7, -np.inf, 0)
    check(build, case)


def test_a_mask_that_is_added(build: ctypes.CDLL) -> None:
    case = Case(rows=3)
    assert case.mask is not None
    case.mask[:] = np.random.default_rng(2).normal(0, 2, case.mask.shape)
    check(build, case)


def test_a_mask_for_each_head(build: ctypes.CDLL) -> None:
    case = Case(rows=3, heads=6, n_kv=2)
    rng = np.random.default_rng(3)
    case.sizes[7] = 6
    case.mask = np.where(rng.random((1, 6, 3, 512)) < 0.5, -np.inf, 0).astype(np.float16)
    case.mask[0, 1] = -np.inf
    check(build, case)


def test_what_masked_cells_hold_does_not_matter(build: ctypes.CDLL) -> None:
    """Also where it is no number: cells that were never written, or by a pass that went wrong."""
    case = Case(cells=512, rows=5).causal(300, 200)
    clean, _ = case.run(build)
    unseen = np.flatnonzero(np.isneginf(case.mask).all(axis=(0, 1, 2)))
    assert len(unseen) > 200
    case.k[:, unseen] = np.nan
    case.v[:, unseen] = np.inf
    assert np.array_equal(case.run(build)[0], clean)
    check(build, case)


def test_a_row_that_sees_nothing_is_zero(build: ctypes.CDLL) -> None:
    case = Case(rows=3)
    assert case.mask is not None
    case.mask[:, :, 1] = -np.inf
    check(build, case)
    if build.covers:
        assert not case.run(build)[0][:, 1].any()


def test_sinks(build: ctypes.CDLL) -> None:
    case = Case(rows=4).causal(200)
    case.sinks = np.array([-3.0, 0.0, 1.0, 5.0, 30.0, -40.0], np.float32)
    check(build, case)


def test_large_scores(build: ctypes.CDLL) -> None:
    """A single cell has all the weight, which moves from block to block. Scores of hundreds have fewer digits left."""
    case = Case(cells=1024, rows=9).causal(1000)
    case.q *= 60
    check(build, case, atol=1e-3)


def bias_by_position(case: Case) -> None:
    case.op[1] = 8.0


def soft_cap(case: Case) -> None:
    case.op[2] = 50.0


def other_keys(case: Case) -> None:
    case.types[1] = Q8_0


def other_values(case: Case) -> None:
    case.types[2] = Q8_0


@pytest.mark.parametrize("change", [bias_by_position, soft_cap, other_keys, other_values])
def test_what_is_not_covered_goes_on_to_ggml(build: ctypes.CDLL, change: Callable[[Case], None]) -> None:
    case = Case()
    change(case)
    out, passed_on = case.run(build)
    assert passed_on == 1
    assert (out == 7.0).all()


@pytest.mark.parametrize("n", [(72, 64), (64, 72), (640, 640), (8, 8)])
def test_heads_of_other_sizes(build: ctypes.CDLL, n: tuple[int, int]) -> None:
    """Covered where whole vectors fit; the rest goes on to ggml."""
    case = Case(*n)
    if case.run(build)[1]:
        assert case.run(build)[1] == 1
    else:
        check(build, case)


def test_the_reference_is_ggmls(build: ctypes.CDLL) -> None:
    """ggml's tests ask for its plain kernel."""
    assert Case().run(build, use_ref=True)[1] == 1
