"""ngram-simple: what is proposed, by hand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from fakes import FakeEvaluator, Rule

from pyspec.config import SpeculationParams
from pyspec.drafters.ngram_cache import History
from pyspec.drafters.ngram_simple import NgramSimple
from pyspec.types import DraftRequest

A, B, C, X, Y = 40, 41, 42, 50, 51


def drafter(n_seq: int = 1, **options: Any) -> NgramSimple:
    return NgramSimple(FakeEvaluator(Rule(), n_seq=n_seq), None, SpeculationParams(**options), n_seq)


def propose(d: NgramSimple, tokens: list[int], n_max: int = 1000, seq: int = 0) -> list[int]:
    request = DraftRequest(seq, len(tokens) - 1, tokens[-1], tokens, n_max)
    d.run_draft([request])
    return request.draft


def reference(tokens: list[int], n: int, m: int, min_hits: int = 1) -> list[int]:
    """llama.cpp's rules, said slowly."""
    n_past = len(tokens) - 1
    if n_past <= n + m + 1:
        return []
    pattern = tokens[len(tokens) - n :]
    starts = [j for j in range(1, n_past - n) if tokens[j : j + n] == pattern]
    if not starts:
        return []
    out = tokens[starts[-1] + n :][: min(m, n_past - (starts[-1] + n))]
    return out if len(out) >= n and min_hits == 1 else []


ABC = [A, B, C, A, B, C, A, B]


@pytest.mark.parametrize(
    ("n", "m", "tokens", "proposed"),
    [
        # the last B was seen at 4 and 1; the later one wins, and C followed it
        (1, 1, ABC, [C]),
        # m larger than the text allows: it has to be longer than n + m + 1
        (1, 8, ABC, []),
        (1, 5, ABC, []),
        (1, 4, ABC, [C, A]),
        # A B was seen at 3 and 0; what followed the later one: C A (the last token itself is not proposed)
        (2, 1, ABC, []),  # fewer than n tokens follow in a proposal of one
        (2, 3, ABC, [C, A]),
        # B C A B: seen at 1, and only C A follows: fewer than n
        (4, 1, ABC, []),
        (4, 2, ABC, []),
        # an occurrence at the very start does not count
        (1, 1, [B, C, A, X, Y, B], []),
        (1, 1, [X, B, C, A, X, Y, B], [C]),
        # nothing seen before
        (1, 1, [A, B, C, X, Y, 60, 61], []),
        # longer than the text
        (20, 1, ABC, []),
        (1, 100, ABC, []),
        # a run of one token: the latest occurrence that counts is two before, so one token follows it
        (1, 2, [X, A, A, A, A, A], [A]),
    ],
)
def test_by_hand(n: int, m: int, tokens: list[int], proposed: list[int]) -> None:
    assert propose(drafter(size_n=n, size_m=m), tokens) == proposed
    assert reference(tokens, n, m) == proposed


@pytest.mark.parametrize(
    ("min_hits", "proposed"), [(1, [C]), (2, [C]), (3, []), (1000, [])], ids=["1", "2", "3", "1000"]
)
def test_min_hits(min_hits: int, proposed: list[int]) -> None:
    """The last B was seen twice before."""
    assert propose(drafter(size_n=1, size_m=1, min_hits=min_hits), ABC) == proposed


def test_every_parameter_counts() -> None:
    """B16: parameters that are clamped to nonsense would give one and the same draft."""
    rng = random.Random(1)
    phrase = [rng.randrange(40, 60) for _ in range(40)]
    text = [*phrase, 99, *phrase[:20], 98, *phrase[:30]]
    seen = {}
    for n in (2, 4, 8):
        for m in (8, 9, 16, 48):
            seen[n, m] = propose(drafter(size_n=n, size_m=m), text)
            assert seen[n, m] == reference(text, n, m)
    assert len({len(v) for v in seen.values()}) >= 3
    assert drafter(size_n=4, size_m=9).n_max == 9


@pytest.mark.parametrize("seed", range(20))
def test_same_as_the_slow_rules_on_random_text(seed: int) -> None:
    rng = random.Random(seed)
    n, m = rng.randint(1, 4), rng.randint(1, 10)
    d = drafter(size_n=n, size_m=m)
    tokens = [rng.randrange(40, 44)]
    d.run_begin(0, tokens)
    for _ in range(200):
        tokens.append(rng.randrange(40, 43))
        assert propose(d, tokens) == reference(tokens, n, m)


def test_defaults_need_62_tokens() -> None:
    period = list(range(40, 55))
    text = (period * 10)[:62]
    assert not propose(drafter(), text)
    assert propose(drafter(), [*text, text[-15]]) == reference([*text, text[-15]], 12, 48) != []


def test_request_limits_the_draft() -> None:
    text = list(range(40, 60)) * 4
    full = propose(drafter(size_n=3, size_m=10), text)
    assert len(full) == 10
    assert propose(drafter(size_n=3, size_m=10), text, n_max=4) == full[:4]


def test_sequences_do_not_mix_and_restart() -> None:
    d = drafter(n_seq=2, size_n=1, size_m=1)
    one, two = ABC, [X, C, Y, X, B, A, C]
    requests = [DraftRequest(i, len(t) - 1, t[-1], t, 9) for i, t in enumerate((one, two))]
    d.run_draft(requests)
    assert [r.draft for r in requests] == [[C], [Y]]
    # a sequence that ends and starts over with a shorter text knows nothing of the old one
    d.end(0)
    d.run_begin(0, [A, B])
    assert propose(d, [A, B]) == []
    # a restart of the same sequence with other tokens, without end
    d.run_begin(1, [B])
    assert propose(d, ABC, seq=1) == [C]


def test_history_converts_only_what_is_new() -> None:
    h = History(4)
    tokens = [1, 2, 3]
    assert h.follow(tokens).tolist() == tokens
    tokens += [4, 5, 6]
    view = h.follow(tokens)
    assert view.tolist() == tokens
    assert view.dtype == np.int32
    # what is held already is not read again
    tokens[0] = 77
    assert h.follow([*tokens, 7]).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert h.follow([9]).tolist() == [9]


def test_plan_needs_no_draft_model() -> None:
    assert NgramSimple.plan(None, None, SpeculationParams(size_m=7), 1).n_max == 7  # type: ignore[arg-type]
    assert NgramSimple.plan(None, None, SpeculationParams(), 1).draft_context is None  # type: ignore[arg-type]
    # in a chain the draft model is another drafter's
    assert NgramSimple.plan(None, object(), SpeculationParams(), 1).draft_context is None  # type: ignore[arg-type]


def test_long_text_is_quick() -> None:
    """B16: a long text without a match, many calls."""
    rng = random.Random(0)
    tokens = [rng.randrange(1 << 30) for _ in range(50_000)]
    d = drafter(size_n=3, size_m=8, min_hits=3)
    d.run_begin(0, tokens)
    for _ in range(200):
        tokens.append(rng.randrange(1 << 30))
        assert propose(d, tokens) == []
    assert d.stats.t_draft_us / d.stats.n_call_draft < 5000
    assert d.stats.n_call_draft == 200
    assert d.stats.n_call_begin == 1
