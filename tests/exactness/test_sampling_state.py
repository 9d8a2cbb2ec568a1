"""Penalties, bias, DRY and mirostat under speculation: token for token the text of a plain run (B14)."""

from __future__ import annotations

from typing import Any

import pytest
from pairs import PROMPTS

LOOP = "one two three one two three one two three one two three one two"

#: Each with the settings that are enough to change the text.
SETTINGS: dict[str, dict[str, Any]] = {
    "repeat": {"penalty_repeat": 1.5},
    "repeat_short": {"penalty_repeat": 1.8, "penalty_last_n": 3},
    "frequency": {"penalty_freq": 0.7, "penalty_last_n": -1},
    "presence": {"penalty_present": 2.0},
    "dry": {"dry_multiplier": 4.0, "dry_allowed_length": 1, "dry_penalty_last_n": -1},
    "mirostat2": {"mirostat": 2, "mirostat_tau": 3.0, "temperature": 0.8, "seed": 5},
    "mirostat1": {"mirostat": 1, "mirostat_tau": 3.0, "temperature": 0.8, "seed": 5},
    "mirostat2-greedy": {"mirostat": 2, "penalty_repeat": 1.2},
    "all": {
        "penalty_repeat": 1.2, "penalty_freq": 0.2, "dry_multiplier": 1.0, "temperature": 0.9, "seed": 6, "top_k": 30,
        "typical_p": 0.95, "xtc_probability": 0.3, "top_n_sigma": 4.0, "dynatemp_range": 0.3,
    },
}  # fmt: skip

DRAFTS = {
    "itself": ("target-llama", {}),
    "half": ("draft-llama-half", {}),
    "bad": ("draft-llama", {"agreement": 0.0}),
}

OPTIONS: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("draft", DRAFTS)
def test_b14_state_advances_by_emitted_tokens_only(draft: str, n_seq: int, tiny: Any, make_llm: Any) -> None:
    name, params = DRAFTS[draft]
    off = make_llm(tiny("target-llama"), speculation="off")
    llm = make_llm(tiny("target-llama"), tiny(name, **params), n_seq_max=n_seq, n_max=5, speculation="draft-simple")
    prompts = [LOOP, PROMPTS[0], PROMPTS[2]][:n_seq]
    bare = [off.generate(p, **OPTIONS).tokens for p in prompts]
    for what, setting in SETTINGS.items():
        wanted = [off.generate(p, **OPTIONS, **setting).tokens for p in prompts]
        assert wanted != bare, f"{what} changes nothing"
        got = [r.tokens for r in llm.generate(prompts, **OPTIONS, **setting)]
        assert got == wanted, what
    # -inf on the favourites
    favourites = {t: float("-inf") for t in set(bare[0][:20])}
    wanted = [off.generate(p, **OPTIONS, logit_bias=favourites).tokens for p in prompts]
    assert not set(wanted[0]) & set(favourites)
    assert [r.tokens for r in llm.generate(prompts, **OPTIONS, logit_bias=favourites)] == wanted
    assert llm.stats.n_draft > 0
    if draft != "bad":
        assert llm.stats.n_accepted > 0


@pytest.mark.parametrize("way", ["ngram-simple", "suffix", "draft-eagle3", "draft-mtp", "exact"])
def test_b14_with_every_kind_of_drafter(way: str, tiny: Any, make_llm: Any) -> None:
    target = "target-mtp" if way == "draft-mtp" else "target-llama"
    options: dict[str, Any] = {"exact": True, "n_max": 4} if way == "exact" else {}
    draft = {"draft-eagle3": "eagle3-half", "exact": "draft-llama-half"}.get(way)
    speculation = "draft-simple" if way == "exact" else way
    off = make_llm(tiny(target), speculation="off", **options)
    if way == "ngram-simple":
        options["size_n"] = 1
    llm = make_llm(tiny(target), tiny(draft) if draft else None, speculation=speculation, **options)
    for setting in ("repeat", "dry", "mirostat2", "all"):
        wanted = off.generate(LOOP, **OPTIONS, **SETTINGS[setting]).tokens
        assert llm.generate(LOOP, **OPTIONS, **SETTINGS[setting]).tokens == wanted, setting
    assert llm.stats.n_draft > 0


def test_b15_four_seeds_in_a_batch(tiny: Any, make_llm: Any) -> None:
    """Requests with seeds and without share passes: those with one say what they say alone."""
    from pyspec import SamplingParams

    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"), n_seq_max=4)
    hot = SamplingParams(temperature=1.0, max_tokens=64, ignore_eos=True)
    alone = {seed: llm.generate(PROMPTS[0], hot, seed=seed).tokens for seed in (42, 7)}
    assert alone[42] == llm.generate(PROMPTS[0], hot, seed=42).tokens != alone[7]
    engine = llm._running().engine
    free = []
    for _ in range(2):
        tokens = llm.tokenize(PROMPTS[0])
        seqs = [engine.submit(tokens, hot.override(seed=s)) for s in (42, None, 42, 7)]
        while not all(s.done for s in seqs):
            engine.step()
        assert [s.output for s in seqs][::2] == [alone[42]] * 2
        assert seqs[3].output == alone[7]
        free.append(seqs[1].output)
    assert free[0] != free[1]


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize("way", ["draft-simple", "draft-eagle3", "draft-mtp"])
def test_a_seed_repeats_rejection_sampling_too(way: str, verification: str, tiny: Any, make_llm: Any) -> None:
    target, draft = {
        "draft-simple": ("target-llama", "draft-llama-half"),
        "draft-eagle3": ("target-llama", "eagle3-half"),
        "draft-mtp": ("target-mtp", None),
    }[way]
    hot = {"temperature": 1.0, "max_tokens": 50, "ignore_eos": True, "verification": verification}
    llm = make_llm(tiny(target), tiny(draft) if draft else None, speculation=way, n_seq_max=3)
    one = llm.generate(PROMPTS[0], seed=3, **hot).tokens
    assert [r.tokens for r in llm.generate([PROMPTS[1], PROMPTS[0], PROMPTS[2]], seed=3, **hot)][1] == one
    assert llm.generate(PROMPTS[0], seed=4, **hot).tokens != one
    assert 0 < llm.stats.n_accepted < llm.stats.n_draft


def test_unfit_rows_end_their_request_only(tiny: Any, make_llm: Any) -> None:
    from pyspec import ConfigError, SamplingError, SamplingParams

    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"), n_seq_max=2)
    engine = llm._running().engine
    n_vocab = llm.model.n_vocab
    nothing = SamplingParams(max_tokens=10, logit_bias=dict.fromkeys(range(n_vocab), float("-inf")))
    good = llm.generate(PROMPTS[0], max_tokens=30, ignore_eos=True).tokens
    tokens = llm.tokenize(PROMPTS[0])
    bad, fine = engine.submit(tokens, nothing), engine.submit(tokens, SamplingParams(max_tokens=30, ignore_eos=True))
    while not (bad.done and fine.done):
        engine.step()
    assert isinstance(bad.error, SamplingError)
    assert fine.output == good
    with pytest.raises(SamplingError, match="no token is allowed"):
        llm.generate(PROMPTS[0], nothing)
    with pytest.raises(ConfigError, match=f"the model has {n_vocab} tokens"):
        llm.generate(PROMPTS[0], logit_bias={n_vocab: 1.0})
    assert llm.generate(PROMPTS[0], max_tokens=30, ignore_eos=True).tokens == good
    exact = make_llm(tiny("target-llama"), exact=True)
    with pytest.raises(ConfigError, match="exact=True"):
        exact.generate(PROMPTS[0], temperature=1.0, verification="rejection")
