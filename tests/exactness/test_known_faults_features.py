"""Known faults of other engines, B12, B13 and B20: features that are lost, or wrong, when speculation is on.

Ids are those of the project's list of public reports; the others are in ``test_known_faults*.py``.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from pairs import PROMPTS

import pyspec

#: One pair for each way to draft that a LoRA adapter of target-llama can be tried with.
WAYS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "draft-simple": ("draft-llama-half", {"speculation": "draft-simple"}),
    "draft-eagle3": ("eagle3-half", {"speculation": "draft-eagle3"}),
    "draft-dflash": ("dflash", {"speculation": "draft-dflash"}),
    "ngram-simple": (None, {"speculation": "ngram-simple", "size_n": 1, "size_m": 5}),
    "suffix": (None, {"speculation": "suffix", "suffix_min_match": 1}),
}

#: For log-probabilities: other kinds of memory too.
SCORED: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    **{way: ("target-llama", draft, options) for way, (draft, options) in WAYS.items()},
    "draft-mtp": ("target-mtp-half", None, {"speculation": "draft-mtp"}),
    "swa": ("target-swa", "draft-swa-half", {"speculation": "draft-simple"}),
    "recurrent": ("target-recurrent", "draft-recurrent-half", {"speculation": "draft-simple"}),
    "off": ("target-llama", None, {"speculation": "off"}),
}

# ---- B12: log-probabilities ------------------------------------------------------------------


def teacher_forced(path: str, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Log-softmax rows, float64 [len(tokens), n_vocab], of one pass over prompt and tokens, nothing drafted."""
    text = [*prompt, *tokens]
    with pyspec.Model(path) as model:
        params = pyspec.ContextParams(n_ctx=512, n_batch=512, n_threads=1, flash_attn=False)
        with pyspec.Context(model, params) as context:
            batch = pyspec.Batch(len(text))
            batch.extend(text, 0, 0, 1)
            context.decode(batch)
            rows = context.logits()[len(prompt) - 1 : len(text) - 1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("way", SCORED)
def test_b12_logprobs_are_the_models_own(way: str, temperature: float, tiny: Any, make_llm: Any) -> None:
    """One entry for each token; accepted, recovered and bonus tokens alike equal a plain pass over the same text."""
    target, draft, options = SCORED[way]
    llm = make_llm(tiny(target), tiny(draft) if draft else None, **options)
    result = llm.generate(PROMPTS[1], max_tokens=40, ignore_eos=True, temperature=temperature, seed=1, top_logprobs=3)
    entries = result.logprobs
    assert [e.token for e in entries] == result.tokens
    assert len(result.tokens) == 40
    wanted = teacher_forced(tiny(target), result.prompt_tokens, result.tokens)
    found = np.array([e.logprob for e in entries])
    np.testing.assert_allclose(found, wanted[np.arange(40), result.tokens], atol=1e-3)
    assert (found < -1e-3).sum() > 5, "never all zero"
    for entry, row in zip(entries, wanted, strict=True):
        values = [t.logprob for t in entry.top]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        np.testing.assert_allclose(values, [row[t.token] for t in entry.top], atol=1e-3)
        np.testing.assert_allclose(values, np.sort(row)[::-1][:3], atol=1e-3)
        if temperature == 0:
            assert entry.token == entry.top[0].token
    if llm.speculation and way not in ("suffix", "ngram-simple"):
        assert any(result.drafted), "some tokens were drafted"
        assert not all(result.drafted)


def test_b12_three_sequences(tiny: Any, make_llm: Any) -> None:
    """In one pass, two of three with log-probabilities, as many as each asks for."""
    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"), n_seq_max=3)
    streams = [
        llm.stream(p, max_tokens=30, ignore_eos=True, logprobs=n is not None, top_logprobs=n or 0)
        for p, n in zip(PROMPTS, (2, None, 0), strict=False)
    ]
    pieces: list[list[Any]] = [[], [], []]
    for _ in range(60):
        for mine, stream in zip(pieces, streams, strict=True):
            mine += [p for p in [next(stream, None)] if p is not None]
    for mine, n in zip(pieces, (2, None, 0), strict=True):
        result = mine[-1].result
        assert len(result.tokens) == 30
        entries = [e for p in mine for e in p.logprobs]
        if n is None:
            assert result.logprobs is None
            assert not entries
            continue
        assert entries == result.logprobs
        assert all(len(e.top) == n for e in entries)
        assert all(len(p.logprobs) == len(p.tokens) for p in mine)
        wanted = teacher_forced(tiny("target-llama"), result.prompt_tokens, result.tokens)
        np.testing.assert_allclose([e.logprob for e in entries], wanted[np.arange(30), result.tokens], atol=1e-3)


def test_b12_entries_end_where_the_text_ends(tiny: Any, make_llm: Any) -> None:
    """Stop string, end-of-generation token and max_tokens inside an accepted draft: one entry for each token kept."""
    target = tiny("target-llama-eos")
    llm = make_llm(target, target, n_max=8, speculation="draft-simple")
    free = llm.generate(PROMPTS[1], max_tokens=120, logprobs=True)
    assert free.finish_reason == "stop", "this target writes an end token"
    assert [e.token for e in free.logprobs] == free.tokens
    assert free.logprobs[-1].text == "<|endoftext|>"
    assert free.logprobs[-1].bytes == b""
    assert b"".join(e.bytes for e in free.logprobs).decode() == free.text
    shown = llm.generate(PROMPTS[1], max_tokens=120, logprobs=True, skip_special=False)
    assert b"".join(e.bytes for e in shown.logprobs[:-1]).decode() == shown.text  # the end token is never text
    n = len(free.tokens)
    for limit in range(1, n):
        cut = llm.generate(PROMPTS[1], max_tokens=limit, logprobs=True)
        assert [e.token for e in cut.logprobs] == cut.tokens == free.tokens[:limit]
        assert [e.logprob for e in cut.logprobs] == pytest.approx([e.logprob for e in free.logprobs[:limit]], abs=1e-4)
    for begin in range(0, len(free.text) - 3, 5):
        stop = free.text[begin : begin + 3]
        cut = llm.generate(PROMPTS[1], max_tokens=120, stop=stop, logprobs=True)
        assert cut.text == free.text[: free.text.find(stop)]
        assert [e.token for e in cut.logprobs] == cut.tokens
        assert b"".join(e.bytes for e in cut.logprobs).decode("utf-8", "ignore").startswith(cut.text)


@pytest.mark.parametrize(
    "options",
    [{"verification": "rejection"}, {"top_k": 5}, {"top_p": 0.9, "penalty_repeat": 1.3}, {"min_p": 0.1, "seed": 3}],
)
@pytest.mark.parametrize("way", ["draft-simple", "draft-eagle3", "ngram-simple", "off"])
def test_b12_processed(way: str, options: dict[str, Any], tiny: Any, make_llm: Any) -> None:
    """Those of what the token was drawn from: of the filtered, renormalised rows at this temperature."""
    target, draft, fixed = SCORED[way]
    llm = make_llm(tiny(target), tiny(draft) if draft else None, **fixed)
    more = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.8, "top_logprobs": 20, "logprobs_mode": "processed"}
    more["seed"] = 1
    result = llm.generate(PROMPTS[1], **(more | options))
    assert [e.token for e in result.logprobs] == result.tokens
    wanted = teacher_forced(tiny(target), result.prompt_tokens, result.tokens)
    for i, (entry, row) in enumerate(zip(result.logprobs, wanted, strict=True)):
        values = np.array([t.logprob for t in entry.top])
        ids = [t.token for t in entry.top]
        assert entry.logprob > -30
        assert list(values) == sorted(values, reverse=True)
        assert np.exp(values).sum() <= 1 + 1e-5
        if len(ids) < 20:
            assert np.exp(values).sum() == pytest.approx(1, abs=1e-5), f"token {i}: these are all that are left"
        if "penalty_repeat" not in options:
            # the ratio of two that are left depends on the temperature alone; a pass of other rows rounds otherwise
            np.testing.assert_allclose(values - values[0], (row[ids] - row[ids[0]]) / 0.8, atol=1e-2)
        if options.get("top_k"):
            assert len(ids) == 5
    greedy = llm.generate(PROMPTS[1], **(more | {"temperature": 0.0}))
    assert all(e.logprob == 0 and len(e.top) == 1 for e in greedy.logprobs)


def test_b12_up_to_twenty(tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"))
    result = llm.generate(PROMPTS[0], max_tokens=5, top_logprobs=20)
    for entry in result.logprobs:
        assert len({t.token for t in entry.top}) == 20
        assert sum(math.exp(t.logprob) for t in entry.top) <= 1 + 1e-6
    for bad in ({"top_logprobs": 21}, {"top_logprobs": -1}, {"logprobs": 3}, {"logprobs_mode": "cooked"}):
        with pytest.raises(pyspec.ConfigError, match="logprobs"):
            llm.generate(PROMPTS[0], **bad)


# ---- B13: grammars ---------------------------------------------------------------------------

OBJECT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("way", [*WAYS, "own"])
def test_b13_grammar_with_a_draft_that_breaks_it(way: str, tiny: Any, run_child: Any) -> None:
    """The output matches and equals the plain constrained run's; a finished grammar ends it; the process lives.

    The drafts know nothing of the grammar, and top_k=1 cuts to a token that it refuses, were the mask not first.
    """
    pytest.importorskip("llguidance", reason="structured output needs llguidance (extra 'grammar')")
    draft, options = WAYS.get(way, ("target-llama", {}))
    code = """
        import json, sys
        import pyspec
        from pairs import PROMPTS, SMALL

        target, draft, options, schema = sys.argv[1], sys.argv[2] or None, *map(json.loads, sys.argv[3:])
        requests = [
            {"grammar": 'root ::= "yes"'},
            {"grammar": 'root ::= "yes" | "yesterday" [a-z]*'},
            {"grammar": 'root ::= [a-z]+ " " [0-9]+ "!"'},
            {"json_schema": schema},
            {"json_schema": schema, "json_whitespace": False},
        ]
        off = pyspec.LLM(target, speculation="off", **SMALL)
        with off as plain, pyspec.LLM(target, draft, **options, **SMALL) as llm:
            for request in requests:
                for more in ({}, {"top_k": 1}, {"top_k": 1, "temperature": 0.7, "seed": 3}):
                    for prompt in PROMPTS[:2]:
                        wanted = plain.generate(prompt, max_tokens=60, **request, **more)
                        # the second time: only the drafter under test, forced tokens are not drafted by the grammar
                        for names in (None, [n for n in llm.speculation if n != "grammar"]):
                            found = llm.generate(prompt, max_tokens=60, speculation=names, **request, **more)
                            assert found.tokens == wanted.tokens, (request, more, found.text, wanted.text)
                            assert found.finish_reason == wanted.finish_reason
                        if "schema" in str(request) and found.finish_reason == "stop":
                            assert set(json.loads(found.text)) == {"ok", "n"}
                if request["grammar" if "grammar" in request else "json_schema"] == 'root ::= "yes"':
                    assert (found.text, found.finish_reason) == ("yes", "stop")
            for bad in ({"grammar": 'root ::= "yes'}, {"grammar": "root ::= none"}, {"json_schema": {"type": "x"}}):
                before = llm.stats.n_pass
                try:
                    llm.generate("a", **bad)
                except pyspec.GrammarError as e:
                    assert str(e)
                else:
                    raise AssertionError(bad)
                assert llm.stats.n_pass == before
            assert llm.generate("a", grammar='root ::= "yes"').text == "yes"
    """
    arguments = (tiny("target-llama"), tiny(draft) if draft else "", json.dumps(options), json.dumps(OBJECT))
    run_child(code, *arguments, timeout=120)


# ---- B20: LoRA on the target -----------------------------------------------------------------


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_b20_lora_is_on_the_target_only(way: str, n_seq: int, tiny: Any, make_llm: Any) -> None:
    """Tokens equal the adapted target's own, and differ from the bare one's; without the adapter they are its again."""
    draft, options = WAYS[way]
    target, lora, prompts = tiny("target-llama"), tiny("lora-llama"), PROMPTS[:n_seq]

    def tokens(llm: Any) -> list[list[int]]:
        return [r.tokens for r in llm.generate(prompts, max_tokens=60, ignore_eos=True)]

    off = make_llm(target, speculation="off")
    bare = tokens(off)
    adapted = tokens(make_llm(target, speculation="off", lora=lora))
    assert all(a != b for a, b in zip(adapted, bare, strict=True))
    llm = make_llm(target, tiny(draft) if draft else None, lora=[(lora, 1.0)], n_seq_max=n_seq, **options)
    assert tokens(llm) == adapted
    if draft:
        assert llm.stats.n_accepted > 0
    # the same prompts again: nothing of the cache of before may be used
    llm.set_lora(None)
    assert tokens(llm) == bare
    off.set_lora((lora, 0.5))
    half = tokens(off)
    llm.set_lora((lora, 0.5))
    assert tokens(llm) == half
    assert half not in (bare, adapted)


def test_b20_the_draft_writes_as_before(tiny: Any, make_llm: Any) -> None:
    """The target as its own draft: all is accepted without the adapter, and with it only what both happen to write.

    An adapter that changes next to nothing must leave acceptance where it was.
    """
    target = tiny("target-llama")
    rates = []
    for lora in (None, (tiny("lora-llama"), 1e-6), (tiny("lora-llama"), 1.0)):
        llm = make_llm(target, target, lora=lora, speculation="draft-simple")
        llm.generate(PROMPTS[:3], max_tokens=60, ignore_eos=True)
        rates.append(llm.stats.acceptance_rate)
    assert rates[0] == rates[1] == 1.0
    assert 0 < rates[2] < 0.9, "an adapted draft would have had all accepted"


def test_b20_adapters_that_fit_no_draft(tiny: Any, make_llm: Any) -> None:
    """An adapter for the target's four layers, with drafts of one and two layers."""
    for layers in (1, 2):
        llm = make_llm(tiny("target-llama"), tiny("draft-llama", layers=layers), lora=tiny("lora-llama"))
        plain = make_llm(tiny("target-llama"), speculation="off", lora=tiny("lora-llama"))
        assert llm.generate(PROMPTS[0], max_tokens=40).tokens == plain.generate(PROMPTS[0], max_tokens=40).tokens
