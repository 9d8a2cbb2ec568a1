"""The engine's observer, and log-probabilities taken through it."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import EOS, FakeDrafter, FakeEvaluator, Rule
from looptest import MEMORY, check, prompt, run_all

from pyspec.config import SamplingParams
from pyspec.engine import Engine
from pyspec.sampling import Logprobs


def expected(rule: Rule, tokens: list[int], n_prompt: int) -> list[float]:
    """Log-softmax of the rule's own row for each token after the prompt."""
    out = []
    row = np.zeros(rule.n_vocab, np.float32)
    for i in range(n_prompt, len(tokens)):
        rule.row(rule.hash(tokens[:i]), row)
        wide = row.astype(np.float64)
        out.append(wide[tokens[i]] - np.log(np.exp(wide - wide.max()).sum()) - wide.max())
    return out


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("quality", ["perfect", "half", "wrong", "empty"])
def test_logprobs_are_of_the_row_that_decided(quality: str, memory: str, temperature: float) -> None:
    """More sequences than slots; drafts accepted, rejected, and none."""
    target = FakeEvaluator(Rule(), n_seq=2, **{"n_ubatch": 16, **MEMORY[memory]})
    engine = Engine(target, [FakeDrafter(target, quality)], eog_tokens={EOS})
    engine.observer = logprobs = Logprobs()
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=3)
    sequences = [engine.submit(prompt(i, n), params) for i, n in enumerate([1, 7, 40])]
    run_all(engine)
    if not temperature:
        check(engine, sequences, 30)
    for seq in sequences:
        found = logprobs.values[seq][: seq.n_output]
        assert found == pytest.approx(expected(target.rule, seq.tokens, seq.n_prompt), abs=1e-5)


def test_observer_sees_every_verification() -> None:
    target = FakeEvaluator(Rule())
    engine = Engine(target, [FakeDrafter(target, "half", n_max=3)])
    seen: list[tuple[int, list[int]]] = []

    def observer(seq: object, logits: object, row: int, n_draft: int, emitted: list[int]) -> None:
        assert row == 0
        assert len(logits) == n_draft + 1  # type: ignore[arg-type]
        seen.append((n_draft, list(emitted)))

    engine.observer = observer
    sequence = engine.submit(prompt(1, 5), SamplingParams(max_tokens=50))
    run_all(engine)
    assert [t for _, emitted in seen for t in emitted][:50] == sequence.output
    assert len(seen) == sequence.stats.n_pass
    assert sum(n for n, _ in seen) == sequence.stats.n_draft


def test_output_after_the_end_is_emitted_and_not_committed() -> None:
    rule, start = Rule(), prompt(2, 5)
    rule.script(start, [EOS, *prompt(3, 4)])
    target = FakeEvaluator(rule)
    engine = Engine(target, [FakeDrafter(target, "perfect")], eog_tokens={EOS})
    engine.observer = logprobs = Logprobs()
    sequence = engine.submit(start, SamplingParams(max_tokens=50))
    run_all(engine)
    assert sequence.output == [EOS]
    assert len(logprobs.values[sequence]) > 1
    assert logprobs.values[sequence][0] == pytest.approx(0.0, abs=1e-3), "the script's tokens have a logit of 20"
