"""The number of threads may change between passes: who lets it, and what it does to the output."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pytest
from backends_kit import OWN_ATTENTION
from pairs import PROMPTS

from pyspec.config import ContextParams, ModelParams, default_n_threads
from pyspec.runtime import ALL, Batch, Context, Model

TWO = pytest.mark.skipif(default_n_threads() < 2, reason="needs two CPUs")


@TWO
def test_who_adapts_threads(tiny: Any, make_llm: Any) -> None:
    def governor(**options: Any) -> Any:
        return make_llm(tiny("target-llama"), **({"n_threads": 2} | options))._running().engine.threads

    assert governor().n_threads == 2
    assert governor(speculation="off").n_threads == 2
    assert governor(adapt_threads=False) is None
    assert governor(exact=True, n_max=3) is None
    assert governor(n_threads=1) is None


@TWO
def test_a_change_between_passes_reaches_target_and_draft(tiny: Any, make_llm: Any) -> None:
    """The text stays what it was while threads come and go at every step."""
    llm = make_llm(tiny("target-llama"), tiny("draft-llama"), speculation="auto", n_threads=2)
    expected = make_llm(tiny("target-llama"), speculation="off").generate(PROMPTS[0], max_tokens=60, ignore_eos=True)
    engine = llm._running().engine
    governor = engine.threads

    class Restless:
        n = 0

        def passed(self, n_rows: int, ns: int) -> None:
            self.n += 1
            governor._apply(1 + self.n % 2)

    engine.threads = Restless()
    result = llm.generate(PROMPTS[0], max_tokens=60, ignore_eos=True)
    assert engine.threads.n > 5
    assert engine.control.n_threads in (1, 2)
    assert result.tokens == expected.tokens


@TWO
@pytest.mark.parametrize("n_past", [40, 700])
@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("n_rows", [1, 4])
def test_bits_by_number_of_threads(tiny: Any, n_past: int, flash_attn: bool, n_rows: int) -> None:
    """Rounding depends on the number of threads in one place only: ggml's flash attention of a row over 512 cells.

    It sums parts of the cache by thread, which is why exact mode keeps the number. Where pyspec's own attention is in
    its place (``build_support/flash_rows.c``), nothing depends on it.
    """
    rows = []
    with Model(tiny("target-llama"), ModelParams()) as model:
        for n in (1, 2):
            params = ContextParams(n_ctx=1024, n_threads=n, n_threads_batch=1, flash_attn=flash_attn)
            with Context(model, params) as context:
                batch = Batch(512)
                for at in range(0, n_past, 100):
                    batch.clear()
                    batch.extend([5 + i % 90 for i in range(at, min(n_past, at + 100))], at, 0)
                    context.decode(batch)
                context.handle.set_n_threads(n, n)
                batch.clear()
                batch.extend([7] * n_rows, n_past, 0, ALL)
                context.decode(batch)
                rows.append(context.logits().copy())
    if flash_attn and n_rows == 1 and n_past >= 512 and not OWN_ATTENTION:
        np.testing.assert_allclose(rows[0], rows[1], rtol=1e-2, atol=1e-2)
    else:
        np.testing.assert_array_equal(rows[0], rows[1])


@TWO
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="affinity masks are Linux's")
def test_beside_real_load(tiny: Any, run_child: Any) -> None:
    """Two busy children on the same two CPUs: generation goes on, and its text is the same."""
    code = """
        import os, subprocess, sys
        cpus = sorted(os.sched_getaffinity(0))[:2]
        os.sched_setaffinity(0, cpus)
        import pyspec
        from pairs import PROMPTS
        options = dict(n_ctx=512, speculation="off", n_threads=2, flash_attn=False)
        with pyspec.LLM(sys.argv[1], **options) as llm:
            quiet = llm.generate(PROMPTS[0], max_tokens=200, ignore_eos=True)
            load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cpus]
            try:
                busy = llm.generate(PROMPTS[0], max_tokens=200, ignore_eos=True)
            finally:
                for process in load:
                    process.kill()
                for process in load:
                    process.wait()
        assert busy.tokens == quiet.tokens
    """
    run_child(code, tiny("target-llama"), timeout=300)


def test_thread_count_is_a_limit(tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), n_threads=os.cpu_count() or 1)
    threads = llm._running().engine.threads
    assert threads is None or threads.n_threads <= default_n_threads()
