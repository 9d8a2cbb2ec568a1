"""Mistakes would show: acceptance of the right code, and of drafters that are given wrong rows on purpose.

The tiny models are made so that a wrong hidden row costs acceptance. Expected values are those of the same mistakes
made in calls of libllama itself (greedy, drafts of 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pairs import method_of

import pyspec
from pyspec.drafters.draft_mtp import DraftMtp
from pyspec.runtime import Context
from pyspec.types import F32Array

PROMPTS = [
    "The quick brown fox jumps over the lazy dog",
    "When the morning comes, the river carries",
    "A computer program is a list of instructions.",
    "It is said that in the beginning there was nothing",
    "Explain how a compiler works to a ten year old.",
    "Once upon a time there was a fox",
]


def acceptance(tiny: Any, target: str, draft: str | None, **options: Any) -> float:
    """Share of proposals that were accepted over all prompts; the output is checked against plain decoding."""
    base: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "flash_attn": False}
    options = base | options
    options["speculation"] = method_of(tiny, draft)
    with pyspec.LLM(tiny(target), draft=draft and tiny(draft), **options) as llm:
        results = llm.generate(PROMPTS, max_tokens=100, ignore_eos=True)
    n_draft = sum(r.stats.n_draft for r in results)
    with pyspec.LLM(tiny(target), speculation="off", **base) as plain:
        assert [r.tokens for r in results] == [
            r.tokens for r in plain.generate(PROMPTS, max_tokens=100, ignore_eos=True)
        ]
    assert n_draft > 300
    assert all(d.n_failed == 0 for r in results for d in r.stats.drafters)
    return sum(r.stats.n_accepted for r in results) / n_draft


Rows = Callable[[Context, int, F32Array], F32Array]


def zeros(context: Context, layer: int, rows: F32Array) -> F32Array:
    return np.zeros_like(rows)


def shifted(context: Context, layer: int, rows: F32Array) -> F32Array:
    """Every row gets that of the row before."""
    return np.ascontiguousarray(rows[np.maximum(np.arange(len(rows)) - 1, 0)])


def ahead(context: Context, layer: int, rows: F32Array) -> F32Array:
    """Every row gets that of the row after: MTP without its shift."""
    return np.ascontiguousarray(rows[np.minimum(np.arange(len(rows)) + 1, len(rows) - 1)])


def give(monkeypatch: pytest.MonkeyPatch, change: Rows) -> None:
    """Hidden rows of target contexts pass through ``change``."""
    layer_input, nextn = Context.layer_input, Context.nextn
    is_target = lambda c: c.params.ctx_type == "default" and c.other is None  # noqa: E731

    def changed_layer_input(self: Context, layer: int, n_rows: int) -> F32Array:
        return change(self, layer, layer_input(self, layer, n_rows))

    def changed_nextn(self: Context, n_rows: int) -> F32Array:
        rows = nextn(self, n_rows)
        return change(self, -1, rows) if is_target(self) else rows

    monkeypatch.setattr(Context, "layer_input", changed_layer_input)
    monkeypatch.setattr(Context, "nextn", changed_nextn)


def no_rebase(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection the draft goes on with the last row of the verification, not with the last accepted one."""
    accept = DraftMtp.accept

    def wrong(self: DraftMtp, seq: int, n_accepted: int, is_other: bool) -> None:
        last = self._stash[seq, self._states[seq].n - 1].copy()
        accept(self, seq, n_accepted, is_other)
        self._stash[seq, self._states[seq].n - 1] = last

    monkeypatch.setattr(DraftMtp, "accept", wrong)


def offset_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps of a chain run its first block."""
    from pyspec.backends import ContextHandle

    set_offset = ContextHandle.nextn_layer_offset
    monkeypatch.setattr(ContextHandle, "nextn_layer_offset", lambda self, offset: set_offset(self, 0))


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "none": lambda m: None,
    "zeroed": lambda m: give(m, zeros),
    "shifted": lambda m: give(m, shifted),
    "ahead": lambda m: give(m, ahead),
    "no rebase": no_rebase,
    "offset zero": offset_zero,
}

CASES = [
    ("target-llama", "eagle3", {"none": 0.98, "zeroed": 0.54, "shifted": 0.41}),
    ("target-llama", "dflash", {"none": 0.52, "zeroed": 0.51, "shifted": 0.27}),
    ("target-llama", "dspark", {"none": 0.72, "zeroed": 0.60, "shifted": 0.38}),
    ("target-mtp", None, {"none": 0.91, "zeroed": 0.72, "ahead": 0.77, "no rebase": 0.88}),
    ("target-mtp-dense", None, {"none": 0.95, "zeroed": 0.53, "ahead": 0.66, "no rebase": 0.83}),
    ("target-mtp-chain", None, {"none": 0.95, "zeroed": 0.53, "ahead": 0.66, "no rebase": 0.87, "offset zero": 0.95}),
    ("target-mtp-chain-fade", None, {"none": 0.58, "offset zero": 0.95}),
    ("target-gemma4", "draft-gemma4-assistant", {"none": 0.87, "zeroed": 0.54, "no rebase": 0.69}),
]


#: Acceptance without mistakes, measured once.
RIGHT: dict[tuple[str, str | None], float] = {}


@pytest.mark.parametrize(
    ("target", "draft", "mistake", "expected"),
    [(t, d, m, e) for t, d, table in CASES for m, e in table.items()],
    ids=[f"{d or t}-{m}" for t, d, table in CASES for m in table],
)
def test_acceptance_shows_the_mistake(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, target: str, draft: str | None, mistake: str, expected: float
) -> None:
    if (target, draft) not in RIGHT:
        RIGHT[target, draft] = acceptance(tiny, target, draft)
    right, right_expected = RIGHT[target, draft], next(v["none"] for t, d, v in CASES if (t, d) == (target, draft))
    if mistake == "none":
        assert right == pytest.approx(expected, abs=0.07)
        return
    MISTAKES[mistake](monkeypatch)
    rate = acceptance(tiny, target, draft)
    if expected >= right_expected:
        assert rate == pytest.approx(expected, abs=0.07)
    else:
        # ours sit in one place and for all rows, so they cost more or less than those of the table
        assert right - rate > 0.5 * (right_expected - expected)


@pytest.mark.parametrize("n_ubatch", [8, 32])
@pytest.mark.parametrize(
    ("target", "draft", "least"),
    [
        ("target-llama", "draft-llama", 0.9),
        ("target-llama", "eagle3", 0.85),
        ("target-hybrid", "eagle3-hybrid", 0.7),
        ("target-llama-calm", "dflash-calm", 0.75),
        ("target-llama", "dspark", 0.6),
        ("target-mtp", None, 0.75),
        ("target-mtp-chain", None, 0.85),
        ("target-gemma4", "draft-gemma4-assistant", 0.7),
        ("target-recurrent", "draft-recurrent", 0.9),
    ],
)
def test_rows_stay_with_their_sequence(tiny: Any, target: str, draft: str | None, least: float, n_ubatch: int) -> None:
    """Three sequences, prompts longer than a micro-batch: passes are split, rows are not mixed up."""
    one = acceptance(tiny, target, draft, n_seq_max=1)
    three = acceptance(tiny, target, draft, n_seq_max=3, n_ubatch=n_ubatch, n_batch=64)
    assert three >= least
    # small micro-batches make windowed caches forget sooner, which may help the assistant that reads them
    assert three > one - 0.02
