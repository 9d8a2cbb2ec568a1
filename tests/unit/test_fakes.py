"""The fakes do notice mistakes: without this, a green engine test would say little."""

from __future__ import annotations

import pytest
from fakes import EMPTY, FakeEvaluator, FakeVocab, Rule, advance

from pyspec.errors import InvalidBatchError
from pyspec.runtime import ALL, Batch, Evaluator
from pyspec.types import RollbackKind

PROMPT = [20, 30, 40, 50, 60, 70]


def run(evaluator: FakeEvaluator, tokens: list[int], pos0: int = 0, seq: int = 0) -> list[int]:
    """Evaluate rows with outputs; gives the most likely next token of each."""
    batch = Batch(evaluator.n_batch)
    batch.extend(tokens, pos0, seq, ALL)
    evaluator.decode(batch)
    return [int(i) for i in evaluator.logits().argmax(1)]


KINDS = {
    "partial": {"kind": RollbackKind.PARTIAL},
    "bounded": {"kind": RollbackKind.BOUNDED, "n_rs_seq": 4},
    "bounded-hybrid": {"kind": RollbackKind.BOUNDED, "n_rs_seq": 4, "hybrid": True},
    "full": {"kind": RollbackKind.FULL},
    "full-hybrid": {"kind": RollbackKind.FULL, "hybrid": True},
    "window": {"kind": RollbackKind.PARTIAL, "n_swa": 4, "n_ubatch": 3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_is_an_evaluator_and_follows_the_rule(kind: str) -> None:
    rule = Rule()
    evaluator = FakeEvaluator(rule, **KINDS[kind])
    assert isinstance(evaluator, Evaluator)
    assert run(evaluator, PROMPT) == [rule.next(rule.hash(PROMPT[: i + 1])) for i in range(len(PROMPT))]


def test_every_token_of_the_history_counts() -> None:
    rule = Rule()
    seen = {rule.hash([*PROMPT[:i], other, *PROMPT[i + 1 :]]) for i in range(len(PROMPT)) for other in range(20, 40)}
    assert len(seen) > 100
    assert rule.hash([1, 2]) != rule.hash([2, 1])
    assert rule.generate(PROMPT, 20) == rule.generate(PROMPT, 30)[:20]
    assert rule.generate(PROMPT, 20) != Rule(seed=1).generate(PROMPT, 20)


def test_script() -> None:
    rule = Rule().script(PROMPT, [7, 8, 9])
    assert rule.generate(PROMPT, 3) == [7, 8, 9]
    assert rule.generate([*PROMPT[:-1], 71], 3) != [7, 8, 9]
    assert advance(EMPTY, 3) != advance(EMPTY, 4)


def test_wrong_rows_are_refused() -> None:
    evaluator = FakeEvaluator(Rule(), n_seq=2, n_batch=8, n_ctx_seq=10)
    run(evaluator, PROMPT)
    for tokens, pos, seq in [([20], 5, 0), ([20], 7, 0), ([20], 6, 2), ([999], 6, 0), ([20] * 5, 6, 0)]:
        with pytest.raises(InvalidBatchError):
            run(evaluator, tokens, pos, seq)
    assert len(evaluator.violations) == 5


def test_positions_beyond_the_limits_come_back_wrong() -> None:
    """As in libllama: ``seq_rm`` says yes, and the state is wrong."""
    rule = Rule()
    bounded = FakeEvaluator(rule, kind=RollbackKind.BOUNDED, n_rs_seq=4)
    run(bounded, PROMPT)
    run(bounded, [80, 81], 6)
    right = rule.next(rule.hash([*PROMPT, 90]))
    assert bounded.cells.seq_rm(0, 5, -1)
    assert run(bounded, [60, 70, 90], 5)[-1] != right

    window = FakeEvaluator(rule, n_swa=3, n_ubatch=2)
    run(window, PROMPT)
    assert window.cells.seq_rm(0, 2, -1)
    assert run(window, [*PROMPT[2:], 90], 2)[-1] != right

    full = FakeEvaluator(rule, kind=RollbackKind.FULL)
    run(full, PROMPT)
    assert not full.cells.seq_rm(0, 5, -1)
    assert full.cells.seq_rm(0, -1, -1)
    assert run(full, [*PROMPT, 90])[-1] == right


def test_vocab() -> None:
    vocab = FakeVocab()
    assert vocab.decode(vocab.encode("höher 東")) == "höher 東"
    assert vocab.token_bytes(2) == b""
