"""The drafter "prediction": where it is in the predicted text, what it proposes, exact output on every memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from fakes import FakeDrafter, FakeEvaluator, Rule
from looptest import MEMORY, check, prompt, run_all

from pyspec.config import SamplingParams, SpeculationParams
from pyspec.drafters.prediction import SURE, Prediction
from pyspec.engine import Engine
from pyspec.errors import ConfigError
from pyspec.types import DraftRequest

TEXT = prompt(0, 400)
PROMPT = [60, 61, 62]


def drafter(n_seq: int = 1, **options: Any) -> Prediction:
    return Prediction(FakeEvaluator(Rule(), n_seq=n_seq), None, SpeculationParams(**options), n_seq)


def propose(d: Prediction, output: list[int], prediction: Any = TEXT, n_max: int = 1000, seq: int = 0) -> list[int]:
    tokens = [*PROMPT, *output]
    request = DraftRequest(seq, len(tokens) - 1, tokens[-1], tokens, n_max)
    request.extra = {} if prediction is None else {"prediction": prediction}
    d.run_draft([request])
    return request.draft


def test_follows_the_text() -> None:
    d = drafter()
    d.begin(0, PROMPT)
    assert propose(d, []) == TEXT[:16]
    assert propose(d, [], n_max=3) == TEXT[:3]
    assert propose(d, TEXT[:17]) == TEXT[17:33]
    assert propose(d, TEXT[:395]) == TEXT[395:]
    assert propose(d, TEXT) == []
    assert propose(d, [*TEXT, 1]) == []


@pytest.mark.parametrize("prediction", [None, [], np.zeros(0, np.int32), [5]])
def test_little_or_nothing_predicted(prediction: Any) -> None:
    d = drafter()
    d.begin(0, PROMPT)
    assert propose(d, [], prediction) == (list(prediction) if prediction is not None else [])
    assert propose(d, [9, 9], prediction) == []


@pytest.mark.parametrize(
    ("edit", "at"),
    [
        ([3], 101),  # one token replaced
        ([3, 4, 5], 103),  # three by three
        ([3, 4, 5, 6, 7, 8, 9], 101),  # one by seven
        ([3] * 30, 100),  # thirty inserted
        ([], 104),  # four left out
        ([], 300),  # two hundred left out
        ([3, 4], 20),  # back to an earlier place
    ],
)
def test_finds_back_after_an_edit(edit: list[int], at: int) -> None:
    """At the latest four tokens behind the edit; at once for small ones."""
    d = drafter()
    d.begin(0, PROMPT)
    output = [*TEXT[:100], *edit]
    propose(d, TEXT[:100])
    lost = propose(d, output)
    assert len(lost) <= 16
    for n in range(1, 9):
        if propose(d, [*output, *TEXT[at : at + n]]) == TEXT[at + n : at + n + 16]:
            break
    assert n <= SURE + 1


def test_unsure_places_propose_little() -> None:
    d = drafter()
    d.begin(0, PROMPT)
    propose(d, TEXT[:100])
    proposed = propose(d, [*TEXT[:100], 3, TEXT[101]])
    assert proposed == TEXT[102:104]
    # a token that occurs only far away is no place
    text = [*TEXT[:50], *([70] * 200), 7, 8]
    d = drafter()
    d.begin(0, PROMPT)
    assert propose(d, [*TEXT[:20], 7], text) == []


def test_start_over_and_end() -> None:
    d = drafter()
    d.begin(0, PROMPT)
    propose(d, TEXT[:50])
    d.begin(0, [*PROMPT, *TEXT[:50]])
    assert propose(d, TEXT[:51])[:3] == TEXT[51:54]
    d.end(0)
    d.begin(0, PROMPT)
    assert propose(d, [])[:3] == TEXT[:3]
    d.end(0)
    d.end(0)
    assert not d._places
    assert not d._n_prompt


def edited(text: list[int], seed: int) -> list[int]:
    """Some tokens replaced, inserted and left out."""
    rng = random.Random(seed)
    out: list[int] = []
    for token in text:
        r = rng.random()
        if r < 0.03:
            out.append(50)
        elif r < 0.06:
            out += [token, *[51] * rng.randrange(1, 6)]
        elif r > 0.04:
            out.append(token)
    return out


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("memory", MEMORY)
def test_exact(memory: str, n_seq: int) -> None:
    rule = Rule(3)
    texts = [prompt(100 + i, 80) for i in range(2 * n_seq)]
    for i, text in enumerate(texts):
        rule.script(prompt(i, 20), edited(text, i))
    target = FakeEvaluator(rule, n_seq=n_seq, **MEMORY[memory])
    d = Prediction(target, None, SpeculationParams(), n_seq)
    other = FakeDrafter(target, "seldom")
    engine = Engine(target, [d, other])
    # every third one brings no prediction, and one brings a useless one
    extras: list[dict[str, Any]] = [{} if i % 3 == 2 else {"prediction": text} for i, text in enumerate(texts)]
    extras[-1] = {"prediction": [7] * 50}
    seqs = [
        engine.submit(prompt(i, 20), SamplingParams(max_tokens=70, ignore_eos=True), None, extra)
        for i, extra in enumerate(extras)
    ]
    run_all(engine)
    check(engine, seqs, 70)
    assert d.stats.n_acc_tokens > 5
    assert d.stats.n_failed == 0
    assert not d._places


def test_sampled_output_does_not_change() -> None:
    """The same seed with the right prediction, a wrong one and none."""
    outputs = []
    for prediction in (None, TEXT, [9] * 50):
        target = FakeEvaluator(Rule(2))
        engine = Engine(target, [Prediction(target, None, SpeculationParams(), 1)])
        params = SamplingParams(max_tokens=50, temperature=1.0, seed=7, ignore_eos=True)
        seq = engine.submit(PROMPT, params, None, {"prediction": prediction})
        run_all(engine)
        outputs.append(seq.output)
        if prediction is None:
            text = seq.output
    assert outputs[0] == outputs[1] == outputs[2]
    target = FakeEvaluator(Rule(2))
    engine = Engine(target, [Prediction(target, None, SpeculationParams(), 1)])
    seq = engine.submit(PROMPT, params, None, {"prediction": text})
    run_all(engine)
    assert seq.output == text
    assert seq.stats.n_pass <= 4


@pytest.mark.parametrize("prediction", ["text", [2**40], [[1, 2]], 5, [1.5, None]])
def test_a_prediction_that_is_none_is_harmless(prediction: Any) -> None:
    """The LLM refuses these; whoever uses the engine gets the right text all the same."""
    rule = Rule(4)
    target = FakeEvaluator(rule)
    d = Prediction(target, None, SpeculationParams(), 1)
    engine = Engine(target, [d])
    seq = engine.submit(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True), None, {"prediction": prediction})
    run_all(engine)
    assert seq.output == rule.generate(PROMPT, 20)


@pytest.mark.parametrize("value", [0, 1025, 1.5, True, "4"])
def test_bad_options(value: Any) -> None:
    with pytest.raises(ConfigError, match="prediction_n_max"):
        SpeculationParams(prediction_n_max=value)
