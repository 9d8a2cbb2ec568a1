"""Known faults of other engines, B01 and B02: greedy text with a draft against the text without.

Ids are those of the project's list of public reports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pairs import PROMPTS

import pyspec
from pyspec.bench import make_settings
from pyspec.prompts import Prompt
from pyspec.verify import Verify

LENGTHS = [1, 3, 8, 16]


# ---- B01: quantised targets --------------------------------------------------------------------


@pytest.fixture(scope="module")
def quantised(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A quantised copy of a tiny model."""
    folder = tmp_path_factory.mktemp("quantised")

    def make(name: str, kind: str) -> str:
        path = folder / f"{name}-{kind}.gguf"
        if not path.exists():
            pyspec.quantize(tiny(name), path, kind, n_threads=1)
        return str(path)

    return make


def compare(target: str, draft: str, n: int, prompts: list[Prompt], **options: Any) -> list[Any]:
    settings = make_settings(["draft-simple"], LENGTHS, [draft])
    with Verify(
        target, [draft], settings, prompts, n_tokens=n, raw=True, options={"n_threads": 1, **options}
    ) as verify:
        return verify.run()


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_b01_quantised_targets(kind: str, quantised: Any, tiny: Any) -> None:
    """200 tokens; where the first difference is one, it is no larger than rounding."""
    target, draft = quantised("target-llama", kind), tiny("draft-llama-half")
    outcomes = compare(target, draft, 200, [Prompt("fox", PROMPTS[0])])
    assert len(outcomes) == len(LENGTHS)
    for o in outcomes:
        assert o.verdict in ("identical", "tie"), o
        assert 0.2 < o.acceptance[1] < 0.9 or o.right.endswith(("8", "16")), "a draft that is neither good nor useless"


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("n_max", LENGTHS)
def test_b01_two_runs_are_the_same_bytes(kind: str, n_max: int, quantised: Any, tiny: Any, make_llm: Any) -> None:
    target, draft = quantised("target-llama", kind), tiny("draft-llama-half")
    runs = []
    for _ in range(2):
        llm = make_llm(target, draft, n_max=n_max, flash_attn="auto")
        runs += [llm.generate(PROMPTS[0], max_tokens=200, ignore_eos=True) for _ in range(2)]
    assert len({(r.text, tuple(r.tokens)) for r in runs}) == 1
    assert len(runs[0].tokens) == 200


@pytest.mark.smollm2
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_K_M"])
def test_b01_a_real_model(kind: str, smollm2: str, tmp_path: Path) -> None:
    target = tmp_path / "target.gguf"
    pyspec.quantize(smollm2, target, kind, n_threads=1)
    settings = make_settings(["suffix"], [1, 3, 8])
    prompt = Prompt("list", "A list of the numbers from one to twenty: one, two, three,")
    with Verify(str(target), [], settings, [prompt], n_tokens=80, raw=True, options={"n_threads": 1}) as verify:
        outcomes = verify.run()
    assert {o.verdict for o in outcomes} <= {"identical", "tie"}, outcomes
    if kind in ("Q8_0", "Q4_0"):
        assert {o.verdict for o in outcomes} == {"identical"}, "these kernels agree bit by bit"


# ---- B02: a window that is full -----------------------------------------------------------------


@pytest.mark.parametrize("n_max", [3, 8])
@pytest.mark.parametrize("long_prompt", [False, True], ids=["prompt-20", "prompt-beyond-the-window"])
@pytest.mark.parametrize("agreement", [0.1, 0.3])
def test_b02_rejection_across_the_edge_of_the_window(
    agreement: float, long_prompt: bool, n_max: int, tiny: Any, make_llm: Any
) -> None:
    """Window 32, a bad draft, 150 tokens: from token 32 on every round rejects where old cells are overwritten."""
    draft = tiny("draft-swa", agreement=agreement)
    off = make_llm(tiny("target-swa"), speculation="off")
    prompt = off.tokenize(PROMPTS[5] * 3)[: 90 if long_prompt else 20]
    wanted = off.generate(prompt, max_tokens=150, ignore_eos=True).tokens
    for n_ubatch in (512, n_max + 1):
        llm = make_llm(tiny("target-swa"), draft, n_max=n_max, n_ubatch=n_ubatch)
        result = llm.generate(prompt, max_tokens=150, ignore_eos=True)
        assert result.tokens == wanted
        assert result.stats.acceptance_rate is not None
        assert result.stats.acceptance_rate < 0.45
        rejected = sum(d - a for d, a in zip(result.stats.drafted_per_pos, result.stats.accepted_per_pos, strict=False))
        assert rejected > 100, "rows were taken back all the time"
