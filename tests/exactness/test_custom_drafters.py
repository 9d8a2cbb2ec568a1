"""Drafters of the user's own in an LLM: classes, instances, chains; and everything they can do wrong."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

import pyspec
from pyspec.drafters import Plan
from pyspec.drafters.ngram_simple import NgramSimple
from pyspec.types import DraftRequest

TEXT = "The model predicts the next token from the tokens before it. " * 3
N = 48


class Knows(pyspec.Drafter):
    """Knows the answer; made with it."""

    name = "knows"

    def __init__(self, prompt: list[int], answer: list[int]) -> None:
        self.prompt, self.answer = prompt, answer
        self.n_close = 0

    @classmethod
    def plan(cls, target: Any, draft: Any, params: Any, n_seq: int) -> Plan:
        return Plan(n_max=8)

    def draft(self, requests: list[DraftRequest]) -> None:
        for r in requests:
            if r.tokens[: len(self.prompt)] == self.prompt:
                n = len(r.tokens) - len(self.prompt)
                r.draft.extend(self.answer[n : n + r.n_max])

    def close(self) -> None:
        self.n_close += 1


@pytest.fixture
def answer(tiny: Any, make_llm: Any) -> tuple[list[int], list[int]]:
    llm = make_llm(tiny("target-llama"), speculation="off")
    result = llm.generate(TEXT, max_tokens=N, ignore_eos=True)
    return result.prompt_tokens, result.tokens


@pytest.mark.parametrize("target", ["target-llama", "target-recurrent", "target-swa"])
def test_instance(target: str, tiny: Any, make_llm: Any) -> None:
    plain = make_llm(tiny(target), speculation="off").generate(TEXT, max_tokens=N, ignore_eos=True)
    drafter = Knows(plain.prompt_tokens, plain.tokens)
    llm = make_llm(tiny(target), speculation=drafter)
    result = llm.generate(TEXT, max_tokens=N, ignore_eos=True)
    assert result.tokens == plain.tokens
    assert llm.speculation == ("knows",)
    assert llm.describe()["speculation"] == ["knows"]
    assert result.stats.acceptance_rate == 1.0
    assert result.stats.n_pass <= N // 9 + 1
    # contexts for more sequences: attached anew
    again = llm.generate([TEXT, "other", TEXT], max_tokens=N, ignore_eos=True)
    assert [r.tokens for r in again[::2]] == [plain.tokens] * 2
    assert llm.n_seq_max == 3
    assert drafter.n_close == 1
    assert llm.stats.n_accepted == llm.stats.drafters[0].n_acc_tokens > 0
    llm.close()
    assert drafter.n_close == 2


def test_chain_of_own_and_built_in(tiny: Any, make_llm: Any, answer: Any) -> None:
    prompt, tokens = answer
    llm = make_llm(
        tiny("target-llama"), tiny("draft-llama-half"), speculation=[Knows(prompt, tokens[:20]), "draft-simple"]
    )
    assert llm.generate(TEXT, max_tokens=N, ignore_eos=True).tokens == tokens
    first, second = llm.stats.drafters
    assert (first.name, second.name) == ("knows", "draft-simple")
    assert first.n_acc_tokens >= 16
    assert second.n_gen_tokens > 0


def test_class(tiny: Any, make_llm: Any, answer: Any) -> None:
    class Short(NgramSimple):
        name = "short"

    llm = make_llm(tiny("target-llama"), speculation=[Short], size_n=1, size_m=4)
    assert llm.generate(TEXT, max_tokens=N, ignore_eos=True).tokens == answer[1]
    assert llm.speculation == ("short",)
    assert llm.stats.n_draft > 0


def make(draft: Any = None, **members: Any) -> pyspec.Drafter:
    members = {"name": "bad", "draft": draft or (lambda self, requests: None)} | members
    return type("Bad", (pyspec.Drafter,), {"__init__": lambda self: None} | members)()


def each(f: Any) -> Any:
    def draft(self: Any, requests: list[DraftRequest]) -> None:
        for r in requests:
            f(r)

    return draft


def fail(*args: Any) -> Any:
    raise RuntimeError("out of order")


@pytest.mark.parametrize(
    "drafter",
    [
        make(each(fail)),
        make(each(lambda r: r.draft.extend([3] * 5000))),
        make(each(lambda r: r.draft.extend([10**9, 1]))),
        make(each(lambda r: r.draft.extend([-1, 2**70]))),
        make(each(lambda r: setattr(r, "draft", None))),
        make(each(lambda r: setattr(r, "draft", iter(int, 1)))),
        make(each(lambda r: setattr(r, "n_max", 10**6))),
        make(each(lambda r: time.sleep(0.002))),
        make(begin=fail),
        make(process=fail),
        make(accept=fail),
        make(end=fail),
        make(close=fail),
    ],
)
def test_mistakes_do_not_matter(drafter: Any, tiny: Any, make_llm: Any, answer: Any) -> None:
    llm = make_llm(tiny("target-llama"), speculation=[drafter, "ngram-simple"], size_n=1, size_m=4)
    for _ in range(2):
        assert llm.generate(TEXT, max_tokens=N, ignore_eos=True).tokens == answer[1]
    assert llm.stats.drafters[1].n_gen_tokens >= 0
    llm.close()


def test_a_failure_is_counted_and_logged(
    tiny: Any, make_llm: Any, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(tiny("target-llama"), speculation=make(each(fail)))
    with caplog.at_level(logging.WARNING, "pyspec"):
        assert llm.generate(TEXT, max_tokens=N, ignore_eos=True).tokens == answer[1]
    assert llm.stats.drafters[0].n_failed == 1
    assert "bad failed and is off" in caplog.text
    assert "out of order" in caplog.text


def test_a_slow_drafter_shows_in_the_times(tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), speculation=make(each(lambda r: time.sleep(0.005))))
    stats = llm.generate(TEXT, max_tokens=6, ignore_eos=True).stats
    assert stats.times.draft_us >= 4 * 5000


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"plan": classmethod(fail)}, "plan failed: RuntimeError: out of order"),
        ({"plan": classmethod(lambda *a: None)}, "must return a Plan"),
        ({"plan": classmethod(lambda *a: Plan(n_max=0))}, "n_max"),
        ({"plan": classmethod(lambda *a: Plan(n_max="3"))}, "n_max"),
        ({"attach": fail}, "cannot be made: RuntimeError: out of order"),
        ({"name": ""}, "needs a class attribute 'name'"),
        ({"name": 5}, "needs a class attribute 'name'"),
        ({"name": "draft-simple"}, "is taken"),
        ({"name": "auto"}, "is taken"),
    ],
    ids=str,
)
def test_refused(members: Any, message: str, tiny: Any, make_llm: Any) -> None:
    with pytest.raises(pyspec.ConfigError, match=message):
        make_llm(tiny("target-llama"), speculation=make(**members))


@pytest.mark.parametrize("speculation", [[make(), make()], [make(), "off"], [make(), 5], [object()], object(), [int]])
def test_odd_lists_are_refused(speculation: Any, tiny: Any, make_llm: Any) -> None:
    with pytest.raises(pyspec.ConfigError, match="speculation"):
        make_llm(tiny("target-llama"), speculation=speculation)


def test_a_draft_model_that_nobody_uses(tiny: Any, make_llm: Any) -> None:
    with pytest.raises(pyspec.ConfigError, match="does not use one"):
        make_llm(tiny("target-llama"), tiny("draft-llama"), speculation=make())
