"""Passes of an EAGLE-3 head that want no logits end before them, and leave everything else as it would be."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends_kit import context, decode, load

import pyspec
from pyspec.backends import ContextHandle, _context_base

HEAD = Path(__file__).resolve().parents[2] / "examples" / "data" / "smollm2-135m-eagle3.gguf"
PROMPT = [1, 80, 109, 296, 119, 330, 17, 5, 401, 33, 78]


def passes(c: ContextHandle, rng: np.random.Generator) -> list[np.ndarray]:
    """What can be seen of passes with and without outputs, in turns, with an encoder's pass between them."""
    n = len(PROMPT)
    g = rng.standard_normal((n, c.n_embd_decode), dtype=np.float32)
    features = rng.standard_normal((3, c.n_embd_encode), dtype=np.float32)
    c.embeddings_nextn(True, False)
    seen = []
    for at, end, output in ((0, 6, 0), (6, 7, 1), (7, 9, 0), (9, 11, 1)):
        decode(c, PROMPT[at:end], at, output=output, embd=np.ascontiguousarray(g[at:end]))
        assert c.n_outputs == output * (end - at)
        assert c._output.n_cut == (c.skips_logits and not output)
        seen += [np.array(c.nextn(end - at)), np.array(c.logits())]
        c.encode(features, 3)
        assert c._output.n_cut == 0
        seen.append(np.array(c.nextn(3)))
    return seen


@pytest.mark.parametrize("name", ["eagle3", "eagle3-d2t", "eagle3-own", "eagle3-options"])
def test_all_but_the_logits_is_as_without(name: str, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(tiny("target-llama")) as t, load(tiny(name)) as m, context(t) as target:
        with context(m, target) as c:
            assert c.skips_logits
            found = passes(c, np.random.default_rng(1))
        # as for a head on a GPU
        monkeypatch.setattr(_context_base, "devices_in_use", lambda params: ["GPU0"])
        with context(m, target) as c:
            assert not c.skips_logits
            wanted = passes(c, np.random.default_rng(1))
    assert any(len(rows) for rows in wanted)
    for a, b in zip(found, wanted, strict=True):
        assert np.array_equal(a, b)


def test_other_models_are_not_asked_at_every_node(tiny: Any) -> None:
    with load(tiny("target-llama")) as m, context(m) as c:
        assert not c.skips_logits


@pytest.mark.smollm2
def test_rows_without_outputs_are_cheap(smollm2: str) -> None:
    """Of the head of the real model: more than half of what a row costs are its logits and their place among 49,152."""
    with pyspec.LLM(smollm2, HEAD, n_max=31, n_ctx=512, n_threads=1, speculation="draft-eagle3") as llm:
        assembly = llm._assembly
        assert assembly is not None
        c = assembly.drafts[0].handle
        g = np.zeros((32, c.n_embd_decode), np.float32)

        def took(output: int) -> float:
            c.memory_clear()
            start = time.thread_time()
            decode(c, 32, output=output, embd=g)
            return time.thread_time() - start

        took(0), took(1)
        times = [(took(0), took(1)) for _ in range(9)]
    assert min(a for a, _ in times) < 0.7 * min(b for _, b in times), times
