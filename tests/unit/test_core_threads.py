"""What all kernels share: the GIL is released, threads do not disturb each other, nothing is allocated."""

from __future__ import annotations

import inspect
import re
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pyspec import _core, _reference

Call = Callable[[], object]
NAMES = [name for name, f in vars(_reference).items() if inspect.isfunction(f) and name[0] != "_"]
NAMES = [name for name in NAMES if name not in ("candidates", "philox4x32")]


def make_call(name: str, size: int, seed: int = 0) -> tuple[Call, list[np.ndarray]]:
    """A call of a kernel on arrays of its own, and the arrays it writes. At size 100 it takes 0.1 ms or more."""
    rng = np.random.default_rng(seed)
    k, d, v, n = 3, 64, 1000 * size, 30 * size
    hidden = [rng.normal(size=(n, d)).astype(np.float32) for _ in range(k)]
    logits = rng.normal(0, 3, (4, v)).astype(np.float32)
    best = logits.argmax(axis=1).astype(np.int32)
    ids = rng.integers(0, 9, n, np.int32)
    batch: list[np.ndarray] = [np.zeros(2 * n, np.int32) for _ in range(3)]
    batch.append(np.zeros(2 * n, np.int8))
    wide, carry = np.zeros((n, k * d), np.float32), np.zeros(d, np.float32)
    i4, f4 = np.zeros(4, np.int32), np.zeros(4)
    top_ids, top_probs = np.zeros((4, 10), np.int32), np.zeros((4, 10), np.float32)
    top_lp = np.zeros((4, 10))
    scratch_ids, scratch_p = np.zeros(v, np.int32), np.zeros(v, np.float32)
    calls: dict[str, tuple[tuple[object, ...], list[np.ndarray]]] = {
        "fill_batch": ((*batch, 1, ids, 5, 2, 2), batch),
        "fill_rows": ((*batch, ids, ids[:, None].copy(), ids * 0 + 1, ids, ids), batch),
        "interleave_rows": ((wide, hidden, n), [wide]),
        "shift_rows": ((hidden[0], hidden[0], carry, n), [hidden[0], carry]),
        "gather_rows": ((hidden[0], hidden[1], ids), [hidden[0]]),
        "argmax_rows": ((logits, i4), [i4]),
        "topk_softmax_rows": ((logits, top_ids, top_probs), [top_ids, top_probs]),
        "verify_greedy": ((logits, 0, best[:3].copy(), i4), [i4]),
        "logsumexp_rows": ((logits, f4), [f4]),
        "logprob_rows": ((logits, best, f4), [f4]),
        "top_logprob_rows": ((logits, best, f4, top_ids, top_lp), [f4, top_ids, top_lp]),
        "sample_row": ((logits[0], 0.8, 1500, 0.95, 0.0, 0.3, scratch_ids, scratch_p), [scratch_ids, scratch_p]),
        "philox_uniform": ((1, 2, 3), []),
    }
    args, outputs = calls[name]
    return partial(getattr(_core, name), *args), outputs


def test_every_kernel_is_here() -> None:
    compiled = {name for name, f in vars(_core).items() if callable(f) and name[0] != "_" and inspect.getdoc(f)}
    assert compiled == set(NAMES)
    for name in NAMES:
        make_call(name, 1)[0]()


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_equal(name: str) -> None:
    """Parameter names of the compiled function, of its twin and of the stub."""
    import ast

    parameters = list(inspect.signature(getattr(_reference, name)).parameters)
    assert list(inspect.signature(getattr(_core, name)).parameters) == parameters
    stub = ast.parse(Path(_reference.__file__).with_name("_core.pyi").read_text(encoding="utf-8"))
    found = [node for node in stub.body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert [a.arg for a in found[0].args.args] == parameters


# ---- threads ---------------------------------------------------------------------------


def runs_beside(call: Call, seconds: float) -> bool:
    """Does this thread get to run while another one calls a kernel over and over and never gives up the GIL itself?"""
    inside = done = seen = False

    def work() -> None:
        nonlocal inside, done
        end = time.perf_counter() + seconds
        inside = True
        while not seen and time.perf_counter() < end:
            call()
        inside = False
        done = True

    call()
    worker = threading.Thread(target=work)
    before = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        worker.start()
        while not done:
            seen |= inside
            time.sleep(0)
    finally:
        sys.setswitchinterval(before)
    worker.join()
    return seen


HOLD_THE_GIL = {"fill_batch", "fill_rows", "philox_uniform"}  # too short to be worth a release


@pytest.mark.parametrize("name", [name for name in NAMES if name not in HOLD_THE_GIL])
def test_gil_is_released(name: str) -> None:
    assert runs_beside(make_call(name, 100)[0], 30)


def test_a_kept_gil_would_show() -> None:
    """The control for the test above: beside calls that keep the GIL nothing else runs."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        pytest.skip("this Python has no GIL")
    assert not runs_beside(make_call("fill_batch", 100)[0], 0.3)


@pytest.mark.parametrize("name", NAMES)
def test_threads_get_what_one_thread_gets(name: str) -> None:
    n_threads, rounds = 4, 25
    made = [make_call(name, 3, seed) for seed in range(n_threads)]
    alone = [make_call(name, 3, seed) for seed in range(n_threads)]

    def run(call: Call) -> list[object]:
        return [call() for _ in range(rounds)]

    expected = [run(call) for call, _ in alone]
    with ThreadPoolExecutor(n_threads) as pool:
        assert list(pool.map(run, [call for call, _ in made])) == expected
    for (_, outputs), (_, right) in zip(made, alone, strict=True):
        for array, good in zip(outputs, right, strict=True):
            np.testing.assert_array_equal(array, good)


def test_threads_share_one_input() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (2, 50_000)).astype(np.float32)
    logits.flags.writeable = False
    ids, p = np.zeros(50_000, np.int32), np.zeros(50_000, np.float32)
    right = _core.sample_row(logits[0], 0.8, 0, 0.9, 0.0, 0.37, ids, p)

    def run(_: int) -> set[int]:
        ids, p = np.zeros(50_000, np.int32), np.zeros(50_000, np.float32)
        return {_core.sample_row(logits[0], 0.8, 0, 0.9, 0.0, 0.37, ids, p) for _ in range(50)}

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(4))) == [{right}] * 4


# ---- memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_allocated_or_kept(name: str) -> None:
    """10000 calls keep nothing, and no call takes more than a few small objects (views, numbers) on the way."""
    call = make_call(name, 1)[0]
    for _ in range(50):
        call()
    tracemalloc.start()
    try:
        call()
        start = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in range(10_000):
            call()
        end, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert end - start < 1024
    assert peak - start < 4096


def test_loops_call_no_allocator() -> None:
    """tracemalloc does not see C's malloc; so the sources must not use it."""
    folder = Path(_reference.__file__).parent
    for name in ("_core.pyx", "_kernels.h"):
        text = (folder / name).read_text(encoding="utf-8")
        assert not re.findall(r"\b(?:\w*alloca?|PyMem_\w+|PyObject_Malloc|np|numpy)\s*[(.]", text), name
