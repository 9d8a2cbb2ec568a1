"""The loop with models on a GPU. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest

import pyspec

pytestmark = [pytest.mark.native, pytest.mark.device]

PROMPTS = ["The quick brown fox", "abc def ghi jkl", "x"]


@pytest.fixture(scope="module")
def gpu() -> str:
    found = [d.name for d in pyspec.devices() if d.kind in ("gpu", "igpu")]
    if not found:
        pytest.skip("no GPU: pyspec.devices() lists CPUs only")
    return found[0]


@pytest.mark.parametrize(
    ("target", "draft"),
    [("target-llama", "draft-llama-half"), ("target-llama", "eagle3-half"), ("target-swa", "draft-swa-half")],
)
@pytest.mark.parametrize("where", ["both", "target", "draft"])
def test_same_tokens(tiny: Any, gpu: str, target: str, draft: str, where: str) -> None:
    options: dict[str, Any] = {
        "devices": (gpu,) if where != "draft" else (),
        "draft_devices": (gpu,) if where != "target" else (),
        "n_ctx": 256,
        "n_threads": 1,
    }
    with pyspec.LLM(tiny(target), speculation="off", devices=options["devices"], n_ctx=256, n_threads=1) as llm:
        plain = [llm.generate(p, max_tokens=60, ignore_eos=True).tokens for p in PROMPTS]
    with pyspec.LLM(tiny(target), tiny(draft), **options) as llm:
        found = [r.tokens for r in llm.generate(PROMPTS, max_tokens=60, ignore_eos=True)]
        assert llm.stats.n_accepted > 0
    assert found == plain
