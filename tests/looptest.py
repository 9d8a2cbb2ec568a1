"""Running the engine on fakes, and what must hold afterwards whatever happened."""

from __future__ import annotations

import random
from typing import Any

from fakes import N_SPECIAL, FakeEvaluator

from pyspec.engine import Engine
from pyspec.runtime import Sequence
from pyspec.types import RollbackKind

#: Every kind of memory, as options of FakeEvaluator.
MEMORY: dict[str, dict[str, Any]] = {
    "partial": {"kind": RollbackKind.PARTIAL},
    "bounded": {"kind": RollbackKind.BOUNDED, "n_rs_seq": 4},
    "bounded-small": {"kind": RollbackKind.BOUNDED, "n_rs_seq": 2},
    "bounded-hybrid": {"kind": RollbackKind.BOUNDED, "n_rs_seq": 4, "hybrid": True},
    "full": {"kind": RollbackKind.FULL},
    "full-hybrid": {"kind": RollbackKind.FULL, "hybrid": True},
    "window": {"kind": RollbackKind.PARTIAL, "n_swa": 12, "n_ubatch": 8},
    "window-tight": {"kind": RollbackKind.PARTIAL, "n_swa": 5, "n_ubatch": 2},
}


def prompt(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(N_SPECIAL + 32, N_SPECIAL + 127) for _ in range(n)]


def run_all(engine: Engine) -> None:
    """Steps until nothing is left; far too many steps is a failure, not a hang."""
    for _ in range(20_000):
        if not engine.step():
            return
    raise AssertionError("the engine does not come to an end")


def check(engine: Engine, sequences: list[Sequence], n_tokens: int | list[int]) -> None:
    """Outputs are the rule's own, every call was in order, and the counters add up."""
    target = engine.target
    assert isinstance(target, FakeEvaluator)
    wanted = n_tokens if isinstance(n_tokens, list) else [n_tokens] * len(sequences)
    for s, n in zip(sequences, wanted, strict=True):
        assert s.output == target.rule.generate(s.tokens[: s.n_prompt], n)
        assert s.error is None
        check_counters(s)
    assert not target.violations
    for drafter in engine.chain.drafters:
        assert not getattr(drafter, "violations", [])
        assert 0 <= drafter.stats.n_acc_tokens <= drafter.stats.n_gen_tokens
        assert drafter.stats.n_acc_drafts <= drafter.stats.n_gen_drafts <= drafter.stats.n_call_draft * len(sequences)
    assert engine.stats.n_draft == sum(s.stats.n_draft for s in sequences)
    assert engine.stats.n_accepted == sum(s.stats.n_accepted for s in sequences)
    assert engine.stats.n_output == sum(len(s.output) for s in sequences)
    if engine.chain.drafters:
        assert engine.stats.n_draft == sum(d.stats.n_gen_tokens for d in engine.chain.drafters)
        assert engine.stats.n_accepted == sum(d.stats.n_acc_tokens for d in engine.chain.drafters)


def check_counters(s: Sequence) -> None:
    """B11: what is counted is what was delivered."""
    stats = s.stats
    pieces = list(s.pieces)
    assert [t for p in pieces for t in p.tokens] == s.output
    assert [d for p in pieces for d in p.drafted] == s.drafted
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == s.finish_reason
    assert stats.n_output == len(s.output) == len(s.drafted)
    assert stats.n_accepted == sum(s.drafted)
    assert 0 <= stats.n_accepted <= stats.n_draft
    assert stats.n_accepted == sum(stats.accepted_per_pos)
    assert stats.n_draft == sum(stats.drafted_per_pos)
    assert all(a <= d for a, d in zip(stats.accepted_per_pos, stats.drafted_per_pos, strict=False))
    assert stats.drafted_per_pos == sorted(stats.drafted_per_pos, reverse=True)
    assert stats.n_later == stats.n_output - stats.n_first
    assert stats.n_later - stats.n_accepted <= stats.n_pass <= stats.n_later
    rate = stats.acceptance_rate
    assert rate is None if not stats.n_draft else 0 <= rate <= 1
