"""The sampler chain against its plain twin: every sampler, orders, states, forgetting, and bad input."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from pyspec import ConfigError, SamplingError, SamplingParams, _sample, _sample_reference
from pyspec.config import SAMPLERS
from pyspec.sampling import SamplerChain
from pyspec.sampling.breakers import make_breakers
from pyspec.testing.fakes import FakeVocab

S = _sample
NO_IDS, NO_BIAS = np.zeros(0, np.int32), np.zeros(0, np.float32)

STEPS: dict[str, list[tuple[Any, ...]]] = {
    "none": [],
    "top_k": [(S.TOP_K, 7)],
    "top_k_all": [(S.TOP_K, 10**6)],
    "top_k_big": [(S.TOP_K, 1500)],
    "top_p": [(S.TOP_P, 0.8, 0)],
    "top_p_keep": [(S.TOP_P, 0.05, 9)],
    "min_p": [(S.MIN_P, 0.05, 0)],
    "min_p_keep": [(S.MIN_P, 0.9, 12)],
    "typical": [(S.TYPICAL_P, 0.6, 0)],
    "typical_keep": [(S.TYPICAL_P, 0.01, 6)],
    "sigma": [(S.TOP_N_SIGMA, 1.5)],
    "xtc": [(S.TOP_K, 40), (S.XTC, 0.7, 0.05, 0)],
    "xtc_keep": [(S.TOP_K, 5), (S.XTC, 0.7, 0.01, 5)],
    "temperature": [(S.TEMPERATURE, 0.6)],
    "hot": [(S.TEMPERATURE, 3.0), (S.TOP_P, 0.7, 0), (S.MIN_P, 0.1, 0)],
    "greedy": [(S.TOP_K, 5), (S.TEMPERATURE, 0.0)],
    "dynatemp": [(S.TOP_K, 30), (S.DYNATEMP, 0.9, 0.6, 1.3)],
    "dynatemp_all": [(S.DYNATEMP, 0.9, 0.6, 0.7)],
    "mirostat": [(S.TEMPERATURE, 0.9), (S.MIROSTAT, 3.0, 0.1)],
    "mirostat2": [(S.TEMPERATURE, 1.2), (S.MIROSTAT2, 3.0, 0.3)],
    "penalties": [(S.PENALTIES, 1.3, 0.2, 0.4), (S.TOP_K, 40), (S.TEMPERATURE, 0.8)],
    "late_penalties": [(S.TOP_K, 50), (S.TEMPERATURE, 0.5), (S.PENALTIES, 1.2, 0.3, -0.1), (S.TOP_P, 0.9, 0)],
    "dry": [(S.DRY, 0.8, 1.75, 2), (S.TOP_K, 40)],
    "dry_short": [(S.DRY, 0.8, 1.0, 0), (S.MIN_P, 0.02, 0)],
    "everything": [
        (S.PENALTIES, 1.1, 0.1, 0.1), (S.DRY, 0.5, 1.5, 1), (S.TOP_N_SIGMA, 3.0), (S.TOP_K, 60), (S.TYPICAL_P, 0.95, 2),
        (S.TOP_P, 0.9, 2), (S.MIN_P, 0.02, 2), (S.XTC, 0.5, 0.08, 2), (S.TEMPERATURE, 0.8),
    ],
}  # fmt: skip


def rows(n: int, v: int, seed: int, spread: float = 2.0) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.normal(0, spread, (n, v)).astype(np.float32)
    x[rng.random((n, v)) < 0.05] = -np.inf
    return x


def pair(steps: Any, v: int, prompt: Any = (), bias: Any = (), **options: Any) -> tuple[Any, Any]:
    ids = np.array([t for t, _ in bias], np.int32)
    values = np.array([b for _, b in bias], np.float32)
    fast = S.Sampler(S.Scratch(v), steps, np.asarray(prompt, np.int32), ids, values, **options)
    slow = _sample_reference.Sampler(v, steps, prompt, ids.tolist(), values.tolist(), **options)
    return fast, slow


def assert_same(fast: Any, slow: Any, where: str = "") -> None:
    ids, p = fast.candidates()
    order = np.argsort(ids)
    wanted = np.argsort(slow.ids)
    assert ids[order].tolist() == slow.ids[wanted].tolist(), where
    np.testing.assert_allclose(p[order], slow.p[wanted], rtol=2e-4, atol=1e-7, err_msg=where)


@pytest.mark.parametrize("v", [5, 300, 5000])
@pytest.mark.parametrize("name", STEPS)
def test_every_chain_says_what_the_twin_says(name: str, v: int) -> None:
    rng = np.random.default_rng(v)
    steps = STEPS[name]
    prompt = rng.integers(0, min(v, 6), 40).tolist()
    fast, slow = pair(steps, v, prompt, [(2, 1.5), (3, -np.inf), (4, -2.0)], penalty_last_n=16, dry_last_n=30)
    logits = rows(60, v, seed=v)
    logits[:, 0] = 0.5
    for i in range(60):
        u = float(rng.random())
        assert fast.apply(logits, i, None, u) == slow.apply(logits, i, None, u) == S.OK
        assert_same(fast, slow, f"{name}, row {i}")
        fast.apply(logits, i, None, u)
        r = float(rng.random())
        token, wanted = fast.draw(r), slow.draw(r)
        if token != wanted:  # where u falls on an edge, rounding decides
            cdf = dict(zip(slow.ids.tolist(), np.cumsum(slow.p), strict=True))
            assert min(abs(cdf[wanted] - r), abs(cdf[token] - r)) < 1e-5
        # tokens that repeat, so that penalties and DRY have something to do
        token = wanted if rng.random() < 0.5 else prompt[i % 40]
        fast.accept(token)
        slow.accept(token)
        assert fast.mirostat_mu == pytest.approx(slow.mu, rel=1e-4)


def test_candidates_are_cut_on_any_shape_of_row() -> None:
    v = 4000
    flat, peak, step, tied = np.zeros((4, v), np.float32)
    peak[17] = 60.0
    step[: v // 2] = 5.0
    tied[::7] = 1.0
    logits = np.stack([flat, peak, step, tied])
    for name, row in itertools.product(STEPS, range(4)):
        if name.startswith("mirostat") or name == "everything":
            continue
        fast, slow = pair(STEPS[name], v)
        assert fast.apply(logits, row) == slow.apply(logits, row) == S.OK
        if name.startswith(("typical", "top_p")) or name in ("sigma", "hot"):
            # ties at the edge of a cut, where rounding decides how many: the sets differ by such ties only
            n = abs(len(fast.candidates()[0]) - len(slow.ids))
            assert n <= 1 + len(slow.ids) // 100, (name, row)
        else:
            assert_same(fast, slow, f"{name}, row {row}")


def test_mask_comes_first() -> None:
    v = 77
    logits = rows(1, v, 3)
    logits[0, :40] = np.sort(logits[0, :40])[::-1]
    allowed = np.zeros(v, bool)
    allowed[[1, 50, 51, 76]] = True
    logits[0, [1, 50, 51, 76]] = [-3.0, -9.0, -5.0, -4.0]
    mask = np.packbits(np.pad(allowed, (0, 96 - v)), bitorder="little").view(np.uint32)
    fast, slow = pair([(S.TOP_K, 2)], v)
    assert fast.apply(logits, 0, mask) == slow.apply(logits, 0, mask) == S.OK
    assert sorted(fast.candidates()[0].tolist()) == [1, 76]
    fast.apply(logits, 0, mask)
    assert fast.prob(0) == 0.0
    assert fast.prob(1) > fast.prob(76) > 0.0
    assert fast.apply(logits, 0, np.zeros(3, np.uint32)) == S.NOTHING_LEFT


def test_forgetting_is_exact() -> None:
    """State after accepting and taking back equals state that never heard of it, token by token."""
    v, rng = 40, np.random.default_rng(0)
    logits = rows(1, v, 5)
    steps = [(S.PENALTIES, 1.3, 0.2, 0.4), (S.DRY, 0.8, 1.75, 1), (S.MIROSTAT2, 3.0, 0.3)]
    prompt = rng.integers(0, 5, 9).tolist()
    fast, _ = pair(steps, v, prompt, penalty_last_n=6, dry_last_n=12)
    kept: list[int] = []
    for _ in range(200):
        for token in rng.integers(0, 5, rng.integers(0, 6)).tolist():
            fast.apply(logits, 0)
            fast.accept(token)
        fast.rewind(len(kept))
        fast.apply(logits, 0)
        token = int(rng.integers(0, 5))
        fast.accept(token)
        kept.append(token)
        fresh, _ = pair(steps, v, prompt, penalty_last_n=6, dry_last_n=12)
        for t in kept:
            fresh.apply(logits, 0)
            fresh.accept(t)
        assert fresh.mirostat_mu == fast.mirostat_mu
        assert fresh.apply(logits, 0) == S.OK
        a = fresh.candidates()
        assert fast.apply(logits, 0) == S.OK
        b = fast.candidates()
        assert a[0].tolist() == b[0].tolist()
        assert a[1].tolist() == b[1].tolist()
    with pytest.raises(ValueError, match="n must be in"):
        fast.rewind(len(kept) + 1)


@pytest.mark.parametrize("steps", ["none", "top_k", "top_p", "typical", "temperature"])
def test_residual_is_what_p_has_more_than_q(steps: str) -> None:
    v = 30
    logits = rows(1, v, 8)
    fast, slow = pair(STEPS[steps], v)
    slow.apply(logits, 0)
    ids = np.array([int(slow.ids[0]), int(slow.ids[-1]), 5, 7], np.int32)
    ids = np.array(list(dict.fromkeys(ids.tolist())), np.int32)
    q = np.full(len(ids), 1 / len(ids), np.float32)
    for a in (1.0, 0.6):
        wanted = _sample_reference.residual(slow.ids, slow.p, a, ids, q)
        fast.apply(logits, 0)
        left = a - fast.overlap(a, ids, q)
        assert left == pytest.approx(np.maximum(0, a * _dense(slow, v) - _dense_q(ids, q, v)).sum(), abs=1e-6)
        counts = np.zeros(v)
        n = 4000
        for i in range(n):
            fast.apply(logits, 0)
            counts[fast.residual(a, ids, q, (i + 0.5) / n)] += 1
        for token, share in zip(slow.ids.tolist(), wanted.tolist(), strict=True):
            assert counts[token] / n == pytest.approx(share, abs=2 / n)
        assert counts.sum() == counts[slow.ids].sum()


def _dense(slow: Any, v: int) -> Any:
    p = np.zeros(v)
    p[slow.ids] = slow.p
    return p


def _dense_q(ids: Any, q: Any, v: int) -> Any:
    dense = np.zeros(v)
    dense[ids] = q
    return dense


def test_draws_follow_the_probabilities() -> None:
    v = 2000
    logits = rows(1, v, 9, spread=1.0)
    for name in ("none", "top_p", "top_k", "temperature", "typical"):
        fast, slow = pair(STEPS[name], v)
        slow.apply(logits, 0)
        counts = np.zeros(v)
        n = 20000
        for i in range(n):
            fast.apply(logits, 0)
            counts[fast.draw((i + 0.5) / n)] += 1
        assert np.abs(counts / n - _dense(slow, v)).max() <= 2 / n, name


def test_looking_at_the_candidates_changes_no_draw() -> None:
    logits = rows(20, 1500, 21)
    for name in ("none", "top_p", "top_k", "temperature", "typical", "hot"):
        fast, _ = pair(STEPS[name], 1500)
        n_other = 0
        for i in range(200):
            u = (i + 0.5) / 200
            fast.apply(logits, i % 20)
            token = fast.draw(u)
            fast.apply(logits, i % 20)
            fast.candidates()
            n_other += fast.draw(u) != token
        # but where u is at the edge of a token, within rounding
        assert n_other <= 1, name


def test_a_trace_changes_nothing_and_holds_what_was_drawn_from() -> None:
    logits = rows(1, 300, 4)
    for options in ({"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 0.7, "top_k": 9}):
        one, other = chain(300, **options), chain(300, **options)
        other.trace = []
        for i in range(300):
            tokens = []
            for c in (one, other):
                c.look(logits, 0, i)
                tokens.append(c.sample((i + 0.5) / 300))
                c.accept(tokens[-1])
            assert tokens[0] == tokens[1]
            assert tokens[0] in other.trace[-1].ids
        assert len(other.trace) == 300


def test_greedy_rows() -> None:
    logits = rows(4, 1000, 1)
    best = logits.argmax(1).tolist()
    draft = [best[0], best[1], (best[2] + 1) % 1000]
    assert S.greedy_tokens(logits, 0, draft) == best[:3]
    assert S.greedy_tokens(logits, 0, best[:3]) == best
    assert S.greedy_tokens(logits, 3, []) == best[3:]
    assert S.greedy_tokens(logits, 2, [-1]) == best[2:3]
    # rows after the first wrong token do not matter
    logits[3, 5] = np.nan
    assert S.greedy_tokens(logits, 0, draft) == best[:3]
    assert S.greedy_tokens(logits, 0, best[:3]) == -4
    for value in (np.nan, np.inf):
        logits[1, 999] = value
        assert S.greedy_tokens(logits, 0, draft) == -2
    logits[0] = -np.inf
    assert S.greedy_tokens(logits, 0, draft) == -1
    for row in (-1, 2, 5):
        with pytest.raises(ValueError, match="rows"):
            S.greedy_tokens(logits, row, draft)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ((1.0, 1.0, 0.0), []),
        ((0.5, 0.8, 0.0), [(S.TOP_P, 0.8, 0), (S.TEMPERATURE, 0.5)]),
        ((2.0, 1.0, 0.2), [(S.MIN_P, 0.2, 0), (S.TEMPERATURE, 2.0)]),
        ((0.0, 0.9, 0.1), [(S.TEMPERATURE, 0.0)]),
    ],
)
def test_draft_rows(options: Any, steps: Any) -> None:
    """A proposal is drawn from what is handed out as q, whose tokens are known to the target."""
    v, k, n_known = 500, 40, 400
    logits = rows(2, v, 12)
    logits[:, n_known:] += 50
    ids, probs = np.zeros(k, np.int32), np.zeros(k, np.float32)
    slow = _sample_reference.Sampler(n_known, [(S.TOP_K, k), *steps])
    slow.apply(logits[:, :n_known], 1)
    counts = np.zeros(n_known)
    n = 2000
    for i in range(n):
        token, m, confidence = S.draft_row(logits, 1, n_known, *options, (i + 0.5) / n, ids, probs)
        counts[token] += 1
    assert ids[:m].tolist() == slow.ids.tolist()
    np.testing.assert_allclose(probs[:m], slow.p, rtol=1e-4)
    assert np.abs(counts - n * _dense(slow, n_known)).max() <= 2
    best = np.sort(logits[1, :n_known])[::-1][:10].astype(float)
    assert confidence == pytest.approx(1 / np.exp(best - best[0]).sum(), rel=1e-4)
    for bad in (-np.inf, np.nan, np.inf):
        logits[0] = bad
        assert S.draft_row(logits, 0, n_known, *options, 0.5, ids, probs)[:2] == (-1, 0)
    with pytest.raises(ValueError, match="row 2"):
        S.draft_row(logits, 2, n_known, *options, 0.5, ids, probs)


# ---- params -> chain ---------------------------------------------------------------------------------------------


def chain(v: int = 50, prompt: Any = (), **options: Any) -> SamplerChain:
    return SamplerChain(SamplingParams(**options), v, prompt, 1)


def test_order_of_samplers_matters() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    hot = {"temperature": 4.0, "min_p": 0.5}
    first = chain(4, **hot)
    first.look(logits, 0, 0)
    assert first.candidates().ids.tolist() == [0, 1]
    last = chain(4, **hot, samplers=("temperature", "min_p"))
    last.look(logits, 0, 0)
    assert last.candidates().ids.tolist() == [0, 1, 2, 3]
    assert last.candidates().probs.sum() == pytest.approx(1.0)


def test_temperature_0_takes_the_best_that_is_left() -> None:
    logits = rows(1, 50, 2)
    best = int(logits[0].argmax())
    for options in ({}, {"top_k": 1}, {"top_k": 3, "top_p": 0.1, "min_p": 0.9}, {"top_n_sigma": 0.1}):
        c = chain(temperature=0.0, **options)
        assert c.greedy
        c.look(logits, 0, 0)
        assert c.sample(0.99) == best
    c = chain(temperature=0.0, logit_bias={best: float("-inf")})
    assert not c.greedy
    c.look(logits, 0, 0)
    second = c.sample(0.0)
    assert second == int(np.argsort(-logits[0])[1])
    c = chain(temperature=0.0, prompt=[best], penalty_present=100.0)
    c.look(logits, 0, 0)
    assert c.sample(0.0) == second


def test_candidates_come_best_first_and_add_up() -> None:
    c = chain(300, temperature=0.9, top_p=0.9, typical_p=0.9)
    c.look(rows(1, 300, 4), 0, 0)
    got = c.candidates()
    assert (np.diff(got.probs) <= 0).all()
    assert got.probs.sum() == pytest.approx(1.0, abs=1e-5)


def test_bad_rows_are_errors_that_say_where() -> None:
    c = chain(temperature=1.0)
    logits = rows(3, 50, 1)
    logits[1, 7] = np.nan
    logits[2] = -np.inf
    with pytest.raises(SamplingError, match=r"token 12 .* NaN or \+inf .* id 7"):
        c.look(logits, 1, 12)
    with pytest.raises(SamplingError, match="no token is allowed"):
        c.look(logits, 2, 12)
    c.look(logits, 0, 12)
    c = chain(temperature=1.0, logit_bias=dict.fromkeys(range(50), float("-inf")))
    with pytest.raises(SamplingError, match="no token is allowed"):
        c.look(logits, 0, 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("inf")}, "finite"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"penalty_repeat": 0.0}, "penalty_repeat"),
        ({"penalty_freq": float("nan")}, "penalty_freq"),
        ({"penalty_last_n": -2}, "penalty_last_n"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"dry_sequence_breakers": ("",)}, "dry_sequence_breakers"),
        ({"mirostat": 3}, "mirostat"),
        ({"mirostat": 2, "top_k": 4}, "replaces 'top_k'"),
        ({"mirostat": 1, "temperature": 0.8, "dynatemp_range": 0.1}, "exclude"),
        ({"samplers": ("top_k", "beam")}, "unknown sampler 'beam'"),
        ({"samplers": ("top_k", "top_k")}, "twice"),
        ({"samplers": ("top_k",), "temperature": 0.7}, "leaves it out"),
        ({"samplers": (), "min_p": 0.1}, "leaves it out"),
        ({"samplers": "top_k"}, "list of names"),
        ({"samplers": 3}, "samplers"),
        ({"logit_bias": {-1: 1.0}}, "token id"),
        ({"logit_bias": {1: float("inf")}}, "finite"),
        ({"logit_bias": {1: float("nan")}}, "finite"),
        ({"logit_bias": {"1": 1.0}}, "token id"),
        ({"logit_bias": [1, 2]}, "dict"),
        ({"verification": "hope"}, "verification"),
        ({"verification": "greedy", "temperature": 1.0}, "temperature=0"),
        ({"xtc_threshold": -0.1}, "xtc_threshold"),
        ({"min_keep": -1}, "min_keep"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**options)


def test_bias_for_an_unknown_id() -> None:
    with pytest.raises(ConfigError, match="50 is out of range: the model has 50"):
        chain(50, logit_bias={50: 1.0})


def test_empty_samplers_is_plain_sampling() -> None:
    c = chain(temperature=1.0, samplers=())
    logits = rows(1, 50, 3)
    c.look(logits, 0, 0)
    assert len(c.candidates().ids) == np.isfinite(logits).sum()
    assert set(SAMPLERS) == set(SamplingParams().samplers)


def test_arguments_are_checked() -> None:
    s = S.Scratch(10)
    with pytest.raises(ValueError, match="n_vocab"):
        S.Scratch(0)
    with pytest.raises(ValueError, match="no step"):
        S.Sampler(s, [(99,)], NO_IDS, NO_IDS, NO_BIAS)
    with pytest.raises(ValueError, match="bias_ids"):
        S.Sampler(s, [], NO_IDS, np.array([10], np.int32), np.ones(1, np.float32))
    with pytest.raises(ValueError, match="prompt"):
        S.Sampler(s, [], np.array([-1], np.int32), NO_IDS, NO_BIAS)
    one, other = (S.Sampler(s, [], NO_IDS, NO_IDS, NO_BIAS) for _ in range(2))
    logits = np.zeros((2, 10), np.float32)
    with pytest.raises(ValueError, match="apply"):
        one.draw(0.5)
    one.apply(logits, 0)
    other.apply(logits, 1)
    with pytest.raises(ValueError, match="shared"):
        one.draw(0.5)
    with pytest.raises(ValueError, match="u must"):
        other.draw(1.0)
    del other
    with pytest.raises(ValueError, match="apply"):
        S.Sampler(s, [], NO_IDS, NO_IDS, NO_BIAS).draw(0.5)
    with pytest.raises(ValueError, match="row 2"):
        one.apply(logits, 2)
    with pytest.raises(ValueError, match="mask"):
        one.apply(logits, 0, np.zeros(0, np.uint32))
    with pytest.raises(ValueError, match="token"):
        one.accept(10)
    with pytest.raises(ValueError, match="breakers"):
        S.Sampler(s, [], NO_IDS, NO_IDS, NO_BIAS, breakers=(NO_IDS, NO_IDS, NO_IDS))


# ---- DRY's breakers ----------------------------------------------------------------------------------------------


class Words:
    """A vocabulary of some words; what is not one of them is spelled in letters."""

    words = ("a", "b", "c", "\n", ":", "ab:", "xa", "bc", "x", "ca")

    def token_bytes(self, token: int, special: bool = False) -> bytes:
        return self.words[token].encode()

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return [self.words.index(c) for c in text]


def pairs_of(breakers: Any) -> dict[int, list[tuple[int, ...]]]:
    first, start, tails = (x.tolist() for x in breakers)
    return {
        t: [tuple(tails[start[i] : start[i + 1]]) for i in range(first[t], first[t + 1])]
        for t in range(len(first) - 1)
        if first[t] < first[t + 1]
    }


def test_breakers_inside_tokens_and_across_them() -> None:
    w = Words.words
    got = pairs_of(make_breakers(Words(), len(w), ["\n", ":", "abc"]))
    assert got == {
        w.index("\n"): [()],
        w.index(":"): [()],
        w.index("ab:"): [()],
        w.index("a"): [(1, 2)],
        w.index("xa"): [(1, 2)],
        w.index("ca"): [(1, 2)],
    }


def test_dry_stops_at_breakers() -> None:
    v = len(Words.words)
    breakers = make_breakers(Words(), v, [":", "abc"])
    flat = [(t, tail) for t, tails in pairs_of(breakers).items() for tail in tails]
    rng = np.random.default_rng(1)
    logits = np.zeros((1, v), np.float32)
    steps = [(S.DRY, 1.0, 1.5, 1)]
    n_other = 0
    for _ in range(300):
        text = rng.choice(v, 24, p=[0.3, 0.2, 0.2, 0.04, 0.06, 0.04, 0.06, 0.04, 0.03, 0.03]).tolist()
        fast = S.Sampler(S.Scratch(v), steps, np.array(text, np.int32), NO_IDS, NO_BIAS, -1, -1, breakers)
        slow = _sample_reference.Sampler(v, steps, text, breakers=flat)
        fast.apply(logits, 0)
        slow.apply(logits, 0)
        assert_same(fast, slow, str(text))
        bare = _sample_reference.dry_penalties(text, 1.0, 1.5, 1)
        n_other += bare != _sample_reference.dry_penalties(text, 1.0, 1.5, 1, flat)
    assert n_other > 50


def test_breakers_of_the_fake_vocabulary() -> None:
    vocab = FakeVocab()
    got = pairs_of(make_breakers(vocab, 272, ["\n"]))
    assert got == {16 + 10: [()]}
