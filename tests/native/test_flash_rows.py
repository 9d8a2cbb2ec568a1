"""pyspec's attention on the CPU, inside a model: what rows hold does not depend on how many share a pass.

``tests/packaging/test_flash_rows.py`` has the arithmetic. ggml's own kernel is another one for 64 rows and more, and it
splits one row's sums over 512 cells by thread: both would fail here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends_kit import OWN_ATTENTION

from pyspec.config import ContextParams
from pyspec.runtime import ALL, NONE, Batch, Context, Model

pytestmark = pytest.mark.skipif(not OWN_ATTENTION, reason="attention is ggml's own on this CPU")

N_ROWS = 72


def logits(context: Context, text: list[int], n_past: int, size: int) -> np.ndarray[Any, Any]:
    """Rows of the tokens behind ``n_past``, in one or two passes of ``size``. float32 [n_rows, n_vocab]."""
    batch, out = Batch(512), []
    context.memory.clear(0)
    n_rows = size if size == N_ROWS else 2 * size
    for begin, end, step, output in ((0, n_past, 100, NONE), (n_past, n_past + n_rows, size, ALL)):
        for at in range(begin, end, step):
            batch.clear()
            batch.extend(text[at : min(at + step, end)], at, 0, output)
            context.decode(batch)
            if output == ALL:
                out.append(context.logits().copy())
    return np.concatenate(out)


@pytest.mark.smollm2
@pytest.mark.parametrize("n_past", [40, 700])
def test_rows_are_the_same_in_passes_of_any_size(smollm2: str, n_past: int) -> None:
    """Weights in Q4_1, whose kernels agree too."""
    with Model(smollm2) as model:
        text = [(7919 * i) % 40_000 + 200 for i in range(n_past + N_ROWS)]
        found = {}
        for n_threads in (1, 2):
            params = ContextParams(n_ctx=1024, n_threads=n_threads, n_outputs_max=N_ROWS, flash_attn=True)
            with Context(model, params) as context:
                for size in (1, 3, 4, N_ROWS):
                    found[n_threads, size] = logits(context, text, n_past, size)
    whole = found[1, N_ROWS]
    for key, rows in found.items():
        np.testing.assert_array_equal(rows, whole[: len(rows)], err_msg=f"(threads, rows) = {key}")


@pytest.mark.parametrize("name", ["target-llama", "target-swa"])
def test_near_the_attention_without_it(tiny: Any, name: str) -> None:
    """Nothing but rounding lies between it and the product of whole matrices."""
    text = [5 + i * 7 % 90 for i in range(600 + N_ROWS)]
    rows = []
    with Model(tiny(name)) as model:
        for flash_attn in (True, False):
            params = ContextParams(n_ctx=1024, n_threads=1, n_outputs_max=N_ROWS, flash_attn=flash_attn, swa_full=True)
            with Context(model, params) as context:
                rows.append(logits(context, text, 600, 5))
    spread = rows[1].max() - rows[1].min()
    assert np.abs(rows[0] - rows[1]).max() < 2e-3 * spread
