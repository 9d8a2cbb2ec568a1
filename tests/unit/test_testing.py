"""``pyspec.testing``: good drafters pass, bad ones are told what they did, and a broken loop would be found out."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pyspec.config import SpeculationParams
from pyspec.drafters.base import Drafter, Plan
from pyspec.drafters.registry import BUILTIN, get
from pyspec.runtime.cache import Rollback
from pyspec.testing import MEMORY, FakeEvaluator, Rule, assert_exact
from pyspec.types import DraftRequest

#: Built-in drafters that need neither a model nor hidden rows.
MODEL_FREE = [name for name in BUILTIN if not name.startswith("draft-")]
OPTIONS: dict[str, dict[str, Any]] = {
    "ngram-simple": {"size_n": 1, "size_m": 5},
    "suffix": {"suffix_min_match": 1},
}


@pytest.mark.parametrize("name", MODEL_FREE)
def test_built_in_drafters(name: str) -> None:
    extras = [{"prediction": list(range(60, 90)) * 3}] * 2
    report = assert_exact(get(name), params=SpeculationParams(**OPTIONS.get(name, {})), extras=extras)
    assert report.n_runs == len(MEMORY) * 2 * 2
    assert report.n_output == report.n_runs * 6 * 48
    assert not report.problems
    if name in OPTIONS:
        assert report.n_accepted > 50
        assert 0 < (report.acceptance_rate or 0) <= 1
        assert report.draft_us_max > 0


class Mine(Drafter):
    """Not hashable, made without a target, with a method to be replaced."""

    name = "mine"
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, propose: Any) -> None:
        self.propose = propose

    def __eq__(self, other: object) -> bool:
        return True

    def draft(self, requests: list[DraftRequest]) -> None:
        for r in requests:
            self.propose(r)


def fails(r: DraftRequest) -> None:
    raise KeyError("nothing there")


def changes_tokens(r: DraftRequest) -> None:
    r.tokens[0:1] = r.tokens[0:1] * 2
    del r.tokens[0]
    r.n_past += 1


BAD: dict[str, tuple[Any, str]] = {
    "raises": (fails, "draft raised KeyError"),
    "too long": (lambda r: r.draft.extend([60] * 100), "100 tokens, n_max is"),
    "id too large": (lambda r: r.draft.extend([60, 10**6]), "token id 1000000"),
    "id negative": (lambda r: r.draft.extend([-1]), "token id -1"),
    "no id": (lambda r: r.draft.extend([60, "a"]), "no token id"),
    "fraction": (lambda r: r.draft.extend([1.5]), "no token id"),
    "probabilities": (lambda r: (r.draft.extend([60]), r.probs.extend([0.5, 0.5])), "probabilities"),
    "probability above 1": (lambda r: (r.draft.extend([60]), r.probs.extend([7.0])), "probabilities"),
    "request changed": (changes_tokens, "changed what it was given"),
}
SHORT: dict[str, Any] = {"n_seq": [2], "temperatures": [0.0], "memory": ["partial", "full"], "n_tokens": 20}


@pytest.mark.parametrize("kind", BAD)
def test_bad_drafters_are_found_and_harm_nothing(kind: str) -> None:
    propose, message = BAD[kind]
    with pytest.raises(AssertionError, match=f"breaks its contract(.|\n)*memory 'partial', 2(.|\n)*{message}"):
        assert_exact(lambda: Mine(propose), **SHORT)
    report = assert_exact(lambda: Mine(propose), strict=False, **SHORT)
    assert report.problems


@pytest.mark.parametrize("verb", ["begin", "process", "accept", "end", "close"])
def test_other_verbs_that_raise(verb: str) -> None:
    def make() -> Drafter:
        drafter = Mine(lambda r: r.draft.extend([60][: r.n_max]))

        def bad(*args: Any) -> None:
            raise RuntimeError("no")

        setattr(drafter, verb, bad)
        return drafter

    with pytest.raises(AssertionError, match=f"{verb} raised RuntimeError: no"):
        assert_exact(make, **SHORT)


def test_a_slow_drafter_is_slow_and_right() -> None:
    def sleep(r: DraftRequest) -> None:
        time.sleep(0.003)
        r.draft.append(60)

    report = assert_exact(lambda: Mine(sleep), **(SHORT | {"n_tokens": 5}))
    assert report.draft_us_max >= 3000


@pytest.mark.parametrize("factory", [lambda: None, lambda: 5, lambda: Mine])
def test_what_is_no_drafter(factory: Any) -> None:
    with pytest.raises(TypeError, match=r"not a pyspec\.Drafter"):
        assert_exact(factory, **SHORT)


def test_a_wrong_rollback_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof can fail: a cache that keeps one row too many changes the output, or the next pass is refused."""
    real = Rollback.rollback

    def wrong(self: Rollback, seq: int, n_keep: int, n_now: int) -> int:
        return real(self, seq, n_keep, n_now) if n_keep >= n_now else n_keep

    monkeypatch.setattr(Rollback, "rollback", wrong)
    with pytest.raises(Exception, match=r"differs|positions|error"):
        assert_exact(lambda: Mine(lambda r: r.draft.extend([60, 61][: r.n_max])), **SHORT)


def test_wrong_output_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspec.sampling import Verifier

    real = Verifier.__call__

    def credulous(self: Verifier, logits: Any, row: int, draft: Any, *rest: Any) -> tuple[int, list[int]]:
        n, emitted = real(self, logits, row, draft, *rest)
        return (n, emitted) if not draft else (len(draft), [*draft, 70])

    monkeypatch.setattr(Verifier, "__call__", credulous)
    with pytest.raises(AssertionError, match=r"memory 'partial', 2 sequence.*text \d differs from token \d+ on"):
        assert_exact(lambda: Mine(lambda r: r.draft.extend([60, 61][: r.n_max])), **SHORT)


def test_own_texts() -> None:
    """A drafter that knows the answer needs few passes."""
    answer = list(range(60, 100))
    prompt = [50, 51, 52]

    def know(r: DraftRequest) -> None:
        n = len(r.tokens) - len(prompt)
        r.draft.extend(answer[n : n + r.n_max])

    class Long(Mine):
        @classmethod
        def plan(cls, target: Any, draft: Any, params: SpeculationParams, n_seq: int) -> Plan:
            return Plan(n_max=8)

    report = assert_exact(
        lambda: Long(know), texts=[(prompt, answer)], n_seq=[1], memory=["partial"], temperatures=[0.0], n_tokens=40
    )
    assert report.acceptance_rate == 1.0
    assert report.n_pass <= 14


def test_the_same_drafter_may_be_used_for_all_runs() -> None:
    drafter = Mine(lambda r: r.draft.append(60))
    report = assert_exact(lambda: drafter, **SHORT)
    assert report.n_runs == 2
    assert set(vars(drafter)) & {"draft", "begin", "process", "accept", "end", "close"} == set()


def test_attach_gives_new_counters() -> None:
    drafter = Mine(fails)
    for n_seq in (1, 3):
        drafter.attach(FakeEvaluator(Rule(), n_seq=n_seq), None, SpeculationParams(), n_seq)
        assert drafter.n_seq == n_seq
        assert drafter.stats.n_failed == 0
        drafter.stats.n_failed += 1
