"""Greedy text does not depend on the draft: every method, every kind of memory, good and bad drafts, 1 and 3 sequences.

The tiny models are context-sensitive: a stale cache cell, a wrong position or a wrong recurrent state changes what
follows. Acceptance shows what greedy text cannot: that a draft got the right hidden rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pairs import FORMS, LOOKUPS, MATRIX, PROMPTS, SMALL, TARGETS, Pair

import pyspec
from pyspec.drafters import registry
from pyspec.errors import ConfigError, UnsupportedError

Plain = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def plain(tiny: Any) -> Plain:
    """Output of plain decoding by target, made once."""
    made: dict[Any, list[list[int]]] = {}

    def get(target: str, prompts: list[Any] = PROMPTS, n: int = 128, **params: Any) -> list[list[int]]:
        key = (target, str(prompts), n, str(params))
        if key not in made:
            with pyspec.LLM(tiny(target, **params), speculation="off", **SMALL) as llm:
                made[key] = [llm.generate(p, max_tokens=n, ignore_eos=True).tokens for p in prompts]
        return made[key]

    return get


def test_every_method_is_here() -> None:
    """A method with a draft that is registered has a place in this table; those without have files of their own."""
    assert {p.method for p in MATRIX} == {name for name in registry.BUILTIN if name.startswith("draft-")}


def check(llm: Any, pair: Pair, plain: Plain, n_prompts: int, n: int, slack: float) -> None:
    results = llm.generate(PROMPTS[:n_prompts], max_tokens=n, ignore_eos=True)
    assert [r.tokens for r in results] == [t[:n] for t in plain(pair.target, **pair.target_params)[:n_prompts]]
    assert llm.speculation == (pair.method,)
    stats = llm.stats
    assert stats.n_draft > 0
    assert stats.n_accepted == sum(sum(r.drafted) for r in results)
    assert stats.acceptance_rate == pytest.approx(pair.page, abs=slack)
    assert stats.drafters[0].n_failed == 0
    # a useless draft costs passes, a good one saves them
    assert stats.mean_accepted_length is not None
    assert sum(r.stats.n_pass for r in results) <= n * n_prompts


@pytest.mark.parametrize("pair", MATRIX, ids=lambda p: p.id)
def test_three_sequences(pair: Pair, tiny: Any, make_llm: Any, plain: Plain) -> None:
    check(pair.make(tiny, make_llm, n_seq_max=3), pair, plain, 6, 128, pair.slack)


@pytest.mark.parametrize("pair", MATRIX, ids=lambda p: p.id)
def test_one_sequence(pair: Pair, tiny: Any, make_llm: Any, plain: Plain) -> None:
    check(pair.make(tiny, make_llm, n_seq_max=1), pair, plain, 3, 64, 0.15)


@pytest.mark.parametrize("pair", FORMS, ids=lambda p: p.id)
def test_other_forms(pair: Pair, tiny: Any, make_llm: Any, plain: Plain) -> None:
    check(pair.make(tiny, make_llm, n_seq_max=3), pair, plain, 6, 128, pair.slack)


#: Text that repeats, so that there is something to look up.
REPEATING = [
    "for i in range(10): print(i, add(i, 1))\n" * 3,
    "The model predicts the next token from the tokens before it. " * 3,
    "apple trees and stories, apple trees and songs, apple trees and",
]

#: One pair of each method and kind of memory, neither perfect nor useless where there is one.
MIDDLING = list({(p.method, p.kind): p for p in MATRIX if 0.3 < p.page < 0.9}.values())


#: One pair of each method and kind of memory; a perfect one where there is no other.
EACH = list({(p.method, p.kind): p for p in [*(p for p in MATRIX if p.page > 0.3), *MIDDLING]}.values())


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("pair", EACH, ids=lambda p: p.id)
def test_a_few_tokens(pair: Pair, n_seq: int, tiny: Any, make_llm: Any, plain: Plain) -> None:
    """Short enough for software devices: ``make test-vulkan`` runs this, with target and draft in different places."""
    if pair.is_apart(tiny):
        with pytest.raises(ConfigError, match="of its own and uses its target's, which lies on"):
            pair.make(tiny, make_llm, n_seq_max=n_seq)
        return
    llm = pair.make(tiny, make_llm, n_seq_max=n_seq)
    prompts = PROMPTS[: max(2, n_seq)]  # two, so that the second starts where the first was
    results = llm.generate(prompts, max_tokens=24, ignore_eos=True)
    assert [r.tokens for r in results] == plain(pair.target, PROMPTS[:3], 24, **pair.target_params)[: len(prompts)]
    assert llm.stats.n_accepted > 0


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("kind", ["full", "swa", "recurrent", "hybrid"])
@pytest.mark.parametrize("method", ["ngram-simple", "suffix"])
def test_a_few_tokens_looked_up(method: str, kind: str, n_seq: int, tiny: Any, make_llm: Any, plain: Plain) -> None:
    """The same for methods without a draft model."""
    target = TARGETS[kind]
    llm = make_llm(tiny(target), speculation=method, n_seq_max=n_seq, **LOOKUPS[method])
    prompts = REPEATING[: max(2, n_seq)]
    results = llm.generate(prompts, max_tokens=24, ignore_eos=True)
    assert [r.tokens for r in results] == plain(target, REPEATING, 24)[: len(prompts)]
    assert llm.stats.n_draft > 0


@pytest.mark.parametrize("pair", MIDDLING, ids=lambda p: p.id)
@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(32, 16), (64, 8)])
def test_prompts_longer_than_a_micro_batch(
    pair: Pair, n_batch: int, n_ubatch: int, tiny: Any, make_llm: Any, plain: Plain
) -> None:
    """Rows of three sequences in passes that are split: hidden rows stay with their sequence."""
    llm = pair.make(tiny, make_llm, n_seq_max=3, n_batch=n_batch, n_ubatch=n_ubatch)
    # prompts of 8 to 50 tokens, then output
    check(llm, pair, plain, 6, 48, 0.15)


@pytest.mark.parametrize("pair", MIDDLING, ids=lambda p: p.id)
@pytest.mark.parametrize("options", [{"n_max": 1}, {"n_max": 6}, {"n_max": 3, "n_min": 2}], ids=str)
def test_draft_lengths(pair: Pair, options: dict[str, int], tiny: Any, make_llm: Any, plain: Plain) -> None:
    llm = pair.make(tiny, make_llm, n_seq_max=3, **options)
    results = llm.generate(PROMPTS[:3], max_tokens=48, ignore_eos=True)
    assert [r.tokens for r in results] == [t[:48] for t in plain(pair.target, **pair.target_params)[:3]]
    per_pos = llm.stats.drafted_per_pos
    assert 1 <= len(per_pos) <= options["n_max"]
    if options.get("n_min"):
        assert per_pos[0] == per_pos[1]


@pytest.mark.parametrize("pair", MIDDLING, ids=lambda p: p.id)
def test_p_min_makes_drafts_shorter_and_better(pair: Pair, tiny: Any, make_llm: Any, plain: Plain) -> None:
    rates, drafted = [], []
    for p_min in (0.0, 0.9):
        llm = pair.make(tiny, make_llm, n_seq_max=3, n_max=6, p_min=p_min)
        results = llm.generate(PROMPTS, max_tokens=64, ignore_eos=True)
        assert [r.tokens for r in results] == [t[:64] for t in plain(pair.target, **pair.target_params)]
        rates.append(llm.stats.acceptance_rate or 0.0)
        drafted.append(llm.stats.n_draft)
    assert drafted[1] < drafted[0]
    assert rates[1] >= rates[0]


@pytest.mark.parametrize("pair", MIDDLING, ids=lambda p: p.id)
@pytest.mark.parametrize(
    "options",
    [{"kv_unified": True, "n_ctx": 1024}, {"flash_attn": True}, {"swa_full": True}, {"backend_sampling": False}],
    ids=str,
)
def test_context_options(pair: Pair, options: dict[str, Any], tiny: Any, make_llm: Any, plain: Plain) -> None:
    llm = pair.make(tiny, make_llm, n_seq_max=3, **options)
    results = llm.generate(PROMPTS[:4], max_tokens=64, ignore_eos=True)
    assert [r.tokens for r in results] == [t[:64] for t in plain(pair.target, **pair.target_params)[:4]]
    assert llm.stats.acceptance_rate == pytest.approx(pair.page, abs=0.15)


# ---- methods that need no model, on any target ----------------------------------------------


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("method", LOOKUPS)
def test_lookups(method: str, kind: str, n_seq: int, tiny: Any, make_llm: Any, plain: Plain) -> None:
    target = TARGETS[kind]
    llm = make_llm(tiny(target), speculation=method, n_seq_max=n_seq, **LOOKUPS[method])
    results = llm.generate(REPEATING, max_tokens=100, ignore_eos=True)
    assert [r.tokens for r in results] == plain(target, REPEATING, 100)
    assert llm.stats.n_draft > 20
    assert llm.stats.drafters[0].n_failed == 0
    # a second time what was learned from the first text is there too
    assert [r.tokens for r in llm.generate(REPEATING, max_tokens=100, ignore_eos=True)] == plain(target, REPEATING, 100)


@pytest.mark.parametrize("kind", ["full", "swa", "hybrid"])
def test_chain_of_methods(kind: str, tiny: Any, make_llm: Any, plain: Plain) -> None:
    """A look-up first, the draft model where that finds nothing."""
    pair = next(p for p in MIDDLING if p.kind == kind)
    llm = pair.make(tiny, make_llm, n_seq_max=3, speculation=["ngram-simple", pair.method], size_n=1, size_m=4, n_max=3)
    results = llm.generate(REPEATING, max_tokens=80, ignore_eos=True)
    assert [r.tokens for r in results] == plain(pair.target, REPEATING, 80, **pair.target_params)
    first, second = llm.stats.drafters
    assert first.n_gen_tokens > 0
    assert second.n_gen_tokens > 0
    assert first.n_acc_tokens + second.n_acc_tokens == llm.stats.n_accepted


# ---- what a method cannot do ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("target-swa", "eagle3-own"),
        ("target-recurrent", "eagle3-own"),
        ("target-mtp-chain", "eagle3-own"),
        ("target-swa", "dflash-own"),
        ("target-recurrent", "dflash-own"),
        ("target-mtp-chain", "dspark-own"),
        ("target-llama", "draft-mtp-only"),
        ("target-llama", "draft-gemma4-assistant"),
        ("target-swa", "draft-gemma4-assistant"),
    ],
)
def test_unsupported_pairs_say_so_at_construction(target: str, draft: str, tiny: Any) -> None:
    with pytest.raises((UnsupportedError, pyspec.ConfigError)) as caught:
        pyspec.LLM(tiny(target), tiny(draft), **SMALL)
    assert len(str(caught.value)) > 20


@pytest.mark.parametrize("method", ["draft-mtp", "draft-eagle3", "draft-simple", "draft-dflash", "draft-dspark"])
def test_method_without_what_it_needs(method: str, tiny: Any) -> None:
    """A llama target has no MTP blocks, and no draft was given."""
    with pytest.raises((UnsupportedError, pyspec.ConfigError), match=method):
        pyspec.LLM(tiny("target-llama"), speculation=method, **SMALL)
