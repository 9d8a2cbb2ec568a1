"""The engine's observer, and log-probabilities taken through it."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import EOS, FakeDrafter, FakeEvaluator, Rule
from looptest import MEMORY, check, prompt, run_all

from pyspec.config import SamplingParams
from pyspec.engine import Engine
from pyspec.errors import ConfigError
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
    # the first token is no draft's: it comes with the prompt
    assert seen[0] == (0, sequence.output[:1])
    assert len(seen) == sequence.stats.n_pass + 1
    assert sum(n for n, _ in seen) == sequence.stats.n_draft


def test_output_after_the_end_is_emitted_and_not_committed() -> None:
    rule, start = Rule(), prompt(2, 5)
    rule.script(start, [*prompt(4, 1), EOS, *prompt(3, 4)])
    target = FakeEvaluator(rule)
    engine = Engine(target, [FakeDrafter(target, "perfect")], eog_tokens={EOS})
    engine.observer = logprobs = Logprobs()
    sequence = engine.submit(start, SamplingParams(max_tokens=50))
    run_all(engine)
    assert sequence.output == [*prompt(4, 1), EOS]
    assert len(logprobs.values[sequence]) > 2
    assert logprobs.values[sequence][0] == pytest.approx(0.0, abs=1e-3), "the script's tokens have a logit of 20"


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("quality", ["perfect", "half", "wrong", "empty"])
def test_pieces_carry_an_entry_for_each_token(quality: str, memory: str) -> None:
    """What the engine gives with the pieces: only where asked for, and nothing for tokens after the end."""
    target = FakeEvaluator(Rule(), n_seq=3, **{"n_ubatch": 16, **MEMORY[memory]})
    engine = Engine(target, [FakeDrafter(target, quality)], eog_tokens={EOS})
    many = [
        SamplingParams(max_tokens=30, logprobs=True),
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=23, top_logprobs=4),
    ]
    sequences = [engine.submit(prompt(i, n), p) for i, (n, p) in enumerate(zip([1, 7, 40], many, strict=True))]
    run_all(engine)
    for seq, n_top in zip(sequences, [0, None, 4], strict=True):
        entries = [e for p in seq.pieces for e in p.logprobs]
        if n_top is None:
            assert not entries
            continue
        assert [e.token for e in entries] == seq.output
        assert all(len(p.logprobs) == len(p.tokens) for p in seq.pieces)
        assert [e.logprob for e in entries] == pytest.approx(expected(target.rule, seq.tokens, seq.n_prompt), abs=1e-5)
        for entry in entries:
            assert len(entry.top) == n_top
            if n_top:
                assert entry.top[0] == (entry.token, pytest.approx(entry.logprob)), "greedy: the token is the best"


def test_entries_after_the_end_are_dropped() -> None:
    rule, start = Rule(), prompt(2, 5)
    rule.script(start, [40, EOS, *prompt(3, 4)])
    target = FakeEvaluator(rule)
    engine = Engine(target, [FakeDrafter(target, "perfect")], eog_tokens={EOS})
    sequence = engine.submit(start, SamplingParams(max_tokens=50, top_logprobs=2))
    run_all(engine)
    assert [e.token for p in sequence.pieces for e in p.logprobs] == sequence.output == [40, EOS]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"logprobs": 3}, "True or False"),
        ({"top_logprobs": 21}, "between 0 and 20"),
        ({"top_logprobs": True}, "integer"),
        ({"logprobs_mode": "x"}, "'raw' or 'processed'"),
    ],
)
def test_wrong_options(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_top_logprobs_imply_logprobs() -> None:
    assert SamplingParams(top_logprobs=1).logprobs
    assert not SamplingParams().logprobs
