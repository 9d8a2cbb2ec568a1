"""Structured output on tiny models: what is drafted changes nothing, whatever drafts it, and the text fits."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from pairs import LOOKUPS, MATRIX, PROMPTS, SMALL, TARGETS, Pair

import pyspec
from pyspec.errors import ConfigError, GrammarError

pytest.importorskip("llguidance", reason="structured output needs llguidance (extra 'grammar')")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}

#: Options of a request, and a check of its text.
GIVEN: list[dict[str, Any]] = [
    {"json_schema": PERSON, "json_whitespace": False},
    {"regex": r"([a-z]{2,5} ){3}[0-9]{2}(yes|no)+ the end\."},
    {"grammar": 'root ::= "the " word " is " ("red" | "blue") " and " word "."\nword ::= [a-z]+'},
]

#: A middling and a useless draft of each method and kind of memory.
PAIRS = [p for p in MATRIX if p.page < 0.95]


def fits(options: dict[str, Any], text: str) -> None:
    if "json_schema" in options:
        value = json.loads(text)
        assert list(value) == ["name", "tags", "age"]
        assert len(value["name"]) <= 12
        assert set(value["tags"]) <= {"red", "green", "blue"}
        assert 0 <= value["age"] <= 99
    elif "regex" in options:
        assert re.fullmatch(options["regex"], text)
    else:
        assert re.fullmatch(r"the [a-z]+ is (red|blue) and [a-z]+\.", text)


def outputs(llm: Any, n_seq: int, **more: Any) -> list[Any]:
    """Each request has a grammar of its own; all share the passes."""
    many = [pyspec.SamplingParams(max_tokens=150, **options, **more) for options in GIVEN[:n_seq]]
    return llm.generate(PROMPTS[:n_seq], many)


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: p.id)
def test_every_draft_model(pair: Pair, n_seq: int, tiny: Any, make_llm: Any) -> None:
    plain = outputs(make_llm(tiny(pair.target, **pair.target_params), speculation="off"), n_seq)
    llm = pair.make(tiny, make_llm, n_seq_max=n_seq, speculation=pair.method)
    found = outputs(llm, n_seq)
    for a, b, options in zip(found, plain, GIVEN, strict=False):
        assert a.tokens == b.tokens
        assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
        if a.finish_reason == "stop":
            fits(options, a.text)
    assert llm.speculation[0] == "grammar"
    forced = llm.stats.drafters[0]
    assert forced.n_gen_tokens > 0
    assert forced.n_acc_tokens == forced.n_gen_tokens, "nothing else was allowed"


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("name", [*LOOKUPS, "grammar"])
@pytest.mark.parametrize("kind", ["full", "swa", "recurrent", "hybrid"])
def test_every_lookup(kind: str, name: str, n_seq: int, tiny: Any, make_llm: Any) -> None:
    target = tiny(TARGETS[kind])
    plain = outputs(make_llm(target, speculation="off"), n_seq)
    llm = make_llm(target, speculation=name, n_seq_max=n_seq, **LOOKUPS.get(name, {}))
    found = outputs(llm, n_seq)
    assert [r.tokens for r in found] == [r.tokens for r in plain]
    assert llm.stats.n_accepted > 0


def test_texts_fit_at_any_temperature(tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"), n_seq_max=3)
    off = make_llm(tiny("target-llama"), speculation="off", n_seq_max=3)
    for seed in range(5):
        found = outputs(llm, 3, temperature=1.2, seed=seed)
        for result, options in zip(found, GIVEN, strict=True):
            if result.finish_reason == "stop":
                fits(options, result.text)
        # a seed asks for sample-and-match: the same text without drafts
        assert [r.tokens for r in found] == [r.tokens for r in outputs(off, 3, temperature=1.2, seed=seed)]
    for verification in ("rejection", "block"):
        for result, options in zip(outputs(llm, 3, temperature=1.2, verification=verification), GIVEN, strict=True):
            if result.finish_reason == "stop":
                fits(options, result.text)


@pytest.mark.statistical
def test_distribution_is_that_of_plain_decoding(tiny: Any, make_llm: Any) -> None:
    """Drawn drafts with a grammar, verified by rejection: chi-square over first and second tokens of 3,000 texts.

    The thresholds are 1e-6 quantiles, so a right program fails less than once in 400,000 runs.
    """
    options: dict[str, Any] = {"regex": "[a-t]+", "max_tokens": 3, "temperature": 4.0}
    counts: list[list[Counter[int]]] = []
    n = 3000
    for speculation in ("off", "draft-simple"):
        draft = None if speculation == "off" else tiny("draft-llama-half")
        llm = make_llm(tiny("target-llama"), draft, speculation=speculation, n_seq_max=8)
        # the tokens that grammars force are left out, so that it is the drawn drafts that are looked at
        params = pyspec.SamplingParams(
            **options, speculation=speculation, verification="rejection" if draft else "auto"
        )
        many = [params.override(seed=len(counts) * n + i) for i in range(n)]
        texts = [r.tokens for i in range(0, n, 500) for r in llm.generate([PROMPTS[0]] * 500, many[i : i + 500])]
        counts.append([Counter(t[i] if i < len(t) else -1 for t in texts) for i in range(2)])
        if draft:
            assert llm.stats.n_accepted > 100
    for plain, drawn in zip(*counts, strict=True):
        cells: list[list[int]] = [[0, 0]]
        for key in {*plain, *drawn}:
            pair = [plain[key], drawn[key]]
            if sum(pair) >= 20:
                cells.append(pair)
            else:
                cells[0] = [x + y for x, y in zip(cells[0], pair, strict=True)]
        cells = [c for c in cells if sum(c)]
        chi2 = sum((x - y) ** 2 / (x + y) for x, y in cells)
        freedom = len(cells) - 1
        assert freedom > 3
        # Wilson and Hilferty's approximation of the quantile at 4.75 standard deviations
        limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3
        assert chi2 < limit, f"chi2 {chi2:.1f} over {limit:.1f} with {freedom} degrees of freedom"


# ---- requests ---------------------------------------------------------------------------------


def test_stream_chat_and_logprobs(tiny: Any, make_llm: Any) -> None:
    """The same through every door; log-probabilities are the model's own, not those of the masked rows."""
    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"))
    messages = [{"role": "user", "content": "Who?"}]
    whole = llm.chat(messages, **GIVEN[0], max_tokens=150, top_logprobs=2)
    pieces = list(llm.chat(messages, stream=True, **GIVEN[0], max_tokens=150, top_logprobs=2))
    assert "".join(p.text for p in pieces) == whole.text
    assert [e for p in pieces for e in p.logprobs] == whole.logprobs
    fits(GIVEN[0], whole.text)
    assert [e.token for e in whole.logprobs] == whole.tokens
    assert any(e.logprob < e.top[1].logprob for e in whole.logprobs), "the grammar chose against the model"


def test_chat_hands_tools_and_documents_to_the_template(tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), speculation="off")
    template = "{{ tools[0].name }} {{ documents[0].title }} {{ messages[0].content }}"
    given = {"tools": [{"name": "weather"}], "documents": [{"title": "sky"}]}
    for result in (
        llm.chat([{"role": "user", "content": "Hi"}], template=template, max_tokens=2, **given),
        list(llm.chat([{"role": "user", "content": "Hi"}], template=template, max_tokens=2, stream=True, **given))[
            -1
        ].result,
    ):
        assert llm.detokenize(result.prompt_tokens) == "weather sky Hi"


def test_one_grammar_for_all_prompts(tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), speculation="ngram-simple")
    results = llm.generate(PROMPTS[:4], choice=["red", "green", "blue"])
    assert {r.text for r in results} <= {"red", "green", "blue"}
    assert all(r.finish_reason == "stop" for r in results)


def test_contexts_with_room_are_made_once(tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), speculation="ngram-simple")
    assert llm.speculation == ("ngram-simple",)
    llm.generate("a", max_tokens=3)
    assert llm.speculation == ("ngram-simple",)
    llm.generate("a", choice=["yes"])
    assert llm.speculation == ("grammar", "ngram-simple")
    engine = llm._assembly.engine
    llm.generate("a", regex="[a-z]{3}")
    assert llm._assembly.engine is engine
    assert make_llm(tiny("target-llama"), speculation=["grammar", "suffix"]).speculation == ("grammar", "suffix")


def test_no_drafts_where_speculation_is_off(tiny: Any, make_llm: Any) -> None:
    off = make_llm(tiny("target-llama"), speculation="off")
    result = off.generate("a", choice=["yes indeed"])
    assert (result.text, result.stats.n_draft, off.speculation) == ("yes indeed", 0, ())
    llm = make_llm(tiny("target-llama"), tiny("draft-llama"), speculation="draft-simple")
    for chosen, n in (("off", 0), ("draft-simple", None), ("grammar", None)):
        result = llm.generate("a", choice=["yes indeed"], speculation=chosen)
        assert result.text == "yes indeed"
        if n is not None:
            assert result.stats.n_draft == n
        else:
            # the tiny draft proposes what the grammar refuses; what is forced is proposed always
            names = [d.name for d in result.stats.drafters]
            assert names == [chosen] if chosen == "grammar" else set(names) <= {chosen}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"json_schema": {"type": "objct"}}, GrammarError, r"at \$"),
        ({"json_schema": "{"}, GrammarError, "column 2"),
        ({"regex": "("}, GrammarError, "unclosed"),
        ({"grammar": 'root ::= "yes'}, GrammarError, "line 1"),
        ({"grammar": "root ::= root"}, GrammarError, "admits no text"),
        ({"choice": ["a"], "regex": "a"}, ConfigError, "exclude"),
        ({"choice": ["a"], "speculation": "suffix"}, ConfigError, "loaded are"),
    ],
)
def test_refused_before_anything_runs(
    options: dict[str, Any], error: type[Exception], text: str, tiny: Any, make_llm: Any
) -> None:
    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"))
    for call in (llm.generate, llm.stream, lambda p, **o: llm.generate([p, p], **o)):
        with pytest.raises(error, match=text):
            call("a", **options)
    assert llm.stats.n_pass == 0
    assert llm.generate("a", choice=["fine"]).text == "fine"


def test_impossible_together(tiny: Any, make_llm: Any) -> None:
    """A bias that forbids what the grammar demands: that request fails in words, the other goes on."""
    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"), n_seq_max=2)
    token = llm.tokenize("y", add_special=False)[0]
    bad = pyspec.SamplingParams(choice=["y"], logit_bias={token: float("-inf")})
    good = pyspec.SamplingParams(choice=["no"])
    with pytest.raises(pyspec.SamplingError, match="no token is allowed"):
        llm.generate(["a", "b"], [bad, good])
    assert llm.generate("a", good).text == "no"


# ---- settings per request ----------------------------------------------------------------------


def test_each_prompt_its_own_settings(tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), tiny("draft-llama"), n_seq_max=4, speculation="draft-simple", n_max=3)
    off = make_llm(tiny("target-llama"), speculation="off")
    many = [
        pyspec.SamplingParams(max_tokens=30, ignore_eos=True),
        pyspec.SamplingParams(max_tokens=20, ignore_eos=True, speculation="off"),
        pyspec.SamplingParams(max_tokens=25, ignore_eos=True, n_max=1),
        pyspec.SamplingParams(max_tokens=25, ignore_eos=True, p_min=1.0),
    ]
    results = llm.generate(PROMPTS[:4], many)
    for result, prompt, params in zip(results, PROMPTS, many, strict=False):
        assert result.tokens == off.generate(prompt, params.override(speculation=None)).tokens
    assert len(results[0].stats.drafted_per_pos) == 3
    assert results[1].stats.n_draft == 0
    assert len(results[2].stats.drafted_per_pos) == 1
    assert results[3].stats.n_draft < results[0].stats.n_draft, "few proposals are certain"
    with pytest.raises(ConfigError, match="list of 2 for 3 prompts"):
        llm.generate(PROMPTS[:3], many[:2])
    with pytest.raises(ConfigError, match="one prompt"):
        llm.generate(PROMPTS[0], many[:1])


@pytest.mark.parametrize("method", ["draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark"])
def test_p_min_of_a_request(method: str, tiny: Any, make_llm: Any) -> None:
    """As if loaded so: shorter drafts with it, and longer ones than those of an LLM that was loaded with it."""
    pair = next(p for p in MATRIX if p.method == method and 0.4 < p.page < 0.95)
    strict, free = (pair.make(tiny, make_llm, p_min=p, speculation=method) for p in (0.9, 0.0))
    drafted = []
    for llm, p_min in ((strict, None), (free, 0.9), (strict, 0.0), (free, None)):
        results = [llm.generate(p, max_tokens=60, ignore_eos=True, p_min=p_min) for p in PROMPTS[:3]]
        drafted.append(sum(r.stats.n_draft for r in results))
    if method != "draft-dspark":  # loaded without p_min it has no confidences, and goes by probabilities
        assert drafted[0] == drafted[1]
    assert drafted[1] < drafted[3]
    assert drafted[2] == drafted[3]


def test_seeds_of_a_batch(tiny: Any, make_llm: Any) -> None:
    """B15: items 0 and 2 equal their solo run, item 1 varies between calls."""
    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"), n_seq_max=4)
    options = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
    runs = [llm.generate([PROMPTS[0]] * 4, seed=[42, None, 42, 7], **options) for _ in range(3)]
    solo = llm.generate(PROMPTS[0], seed=42, **options).tokens
    for run in runs:
        assert run[0].tokens == run[2].tokens == solo
        assert run[3].tokens == runs[0][3].tokens != solo
    assert len({tuple(r[1].tokens) for r in runs}) == 3
    with pytest.raises(ConfigError, match="seed is a list of 3"):
        llm.generate([PROMPTS[0]] * 4, seed=[1, 2, 3])


def test_what_the_command_line_has(tiny: Any, run_child: Any, tmp_path: Any) -> None:
    code = "import sys; from pyspec.cli import main; sys.exit(main(sys.argv[1:]))"
    base = ["generate", tiny("target-llama"), "-p", "a", "-t", "1", "-c", str(SMALL["n_ctx"]), "-n", "150", "--json"]
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(PERSON))
    out = json.loads(run_child(code, *base, "--json-schema", str(schema), "--compact-json", stderr=None))
    fits(GIVEN[0], out["text"])
    out = json.loads(run_child(code, *base, "--json-schema", json.dumps({"const": 5}), stderr=None))
    assert json.loads(out["text"]) == 5
    out = json.loads(run_child(code, *base, "--choice", "red", "--choice", "blue", "--top-logprobs", "2", stderr=None))
    assert out["text"] in ("red", "blue")
    assert [e["token"] for e in out["logprobs"]] == out["tokens"]
    assert len(out["logprobs"][0]["top"]) == 2
    grammar = tmp_path / "g.gbnf"
    grammar.write_text('root ::= "so be it"')
    assert json.loads(run_child(code, *base, "--grammar-file", str(grammar), stderr=None))["text"] == "so be it"
    assert json.loads(run_child(code, *base, "--regex", "[0-9]{3}", stderr=None))["text"].isdigit()
    run_child(code, *base, "--regex", "(", exit_code=1, stderr=None)
