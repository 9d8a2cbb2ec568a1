"""Grammars on a vocabulary of bytes and a few words, and in the loop on fakes: no native library."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np
import pytest
from fakes import BOS, EOS, EOT, N_SPECIAL, N_VOCAB, FakeDrafter, FakeEvaluator, FakeVocab, Rule
from looptest import MEMORY, prompt, run_all

from pyspec.config import GrammarSpec, SamplingParams, SpeculationParams
from pyspec.drafters.grammar import Grammar
from pyspec.engine import Engine
from pyspec.errors import ConfigError, GrammarError, SamplingError, UnsupportedError
from pyspec.runtime import TextStream
from pyspec.sampling.grammar import GrammarConstraint, Grammars, schema_error_path
from pyspec.types import CONSTRAINT, DraftRequest

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Vocab(FakeVocab):
    """Bytes behind the special tokens."""

    n_tokens = N_VOCAB
    bos, eos = BOS, EOS
    eog_tokens = frozenset({EOS, EOT})

    def is_control(self, token: int) -> bool:
        return token < N_SPECIAL

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:  # type: ignore[override]
        return FakeVocab.encode(text)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    pytest.importorskip("llguidance", reason="structured output needs llguidance (extra 'grammar')")
    return Grammars(Vocab())


def ids(text: str | bytes) -> list[int]:
    return FakeVocab.encode(text)


def spec(kind: str, source: Any, compact: bool = False) -> GrammarSpec:
    return GrammarSpec(kind, source if isinstance(source, str) else json.dumps(source), compact)


def allowed(constraint: GrammarConstraint) -> set[int]:
    bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
    assert not bits[N_VOCAB:].any()
    return set(np.flatnonzero(bits[:N_VOCAB]).tolist())


def take(constraint: GrammarConstraint, text: str) -> None:
    for token in ids(text):
        assert token in allowed(constraint)
        constraint.accept(token)


# ---- matching ---------------------------------------------------------------------------------


def test_mask_follows_the_text(grammars: Grammars) -> None:
    c = grammars.constraint(spec("choice", ["yes", "no", "never"]))
    assert allowed(c) == set(ids("yn"))
    take(c, "n")
    assert allowed(c) == set(ids("oe"))
    take(c, "o")
    assert c.stopped
    assert allowed(c) == {EOS, EOT}, "what ends a text is allowed where the text may end, and nowhere else"


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        (spec("regex", "[a-c]{2,3}!"), "abc!", "abcd"),
        (spec("regex", "(?i)yes"), "YeS", "no"),
        (spec("choice", ["red", 'with "quotes" and \\'], False), 'with "quotes" and \\', "blue"),
        (spec("grammar", 'root ::= "yes" | "no" ws\nws ::= [ \\t]+'), "no \t", "nono"),
        (spec("grammar", 'start: "a" NUMBER\nNUMBER: /[0-9]+/'), "a12", "ab"),
        (spec("json_schema", SCHEMA), '{ "name" : "B", "age": -3}', '{"age'),
        (spec("json_schema", SCHEMA, True), '{"name":"B","age":-3}', '{ "name"'),
        (spec("json_schema", {"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 2}), '["x", 1]', '["x","y"'),
        (spec("json_schema", {"$ref": "#/$defs/n", "$defs": {"n": {"type": "null"}}}), "null", "nil"),
        (spec("json_schema", {}), '{"any": [1, true, "Ü"]}', "any"),
    ],
)
def test_kinds(grammars: Grammars, given: GrammarSpec, good: str, bad: str) -> None:
    c = grammars.constraint(given)
    take(c, good)
    assert c.stopped or EOS in allowed(c)
    c = grammars.constraint(given)
    assert c.n_allowed(ids(bad)) < len(ids(bad))


def test_questions_do_not_change_the_state(grammars: Grammars) -> None:
    """Drafts are looked at, however they end; then everything is as before."""
    c = grammars.constraint(spec("json_schema", SCHEMA))
    take(c, '{"na')
    before = allowed(c)
    for _ in range(2):
        assert c.n_allowed(ids('me":1')) == 4
        assert c.n_allowed([]) == 0
        assert c.n_allowed([EOS]) == 0
        assert c.first_allowed(ids("me"), [EOS, *ids('x"')]) == 2
        assert c.first_allowed(ids("xx"), ids("x")) == -1
        assert c.forced() == ids('me"')
        assert c.forced_after(ids("m")) == ids('e"')
        assert c.forced_after(ids("zz")) == []
        assert allowed(c) == before
        assert c.n == 4


def test_rewind(grammars: Grammars) -> None:
    """As a sequence that starts over needs it, also from a finished text."""
    c = grammars.constraint(spec("regex", "(ab)+c"))
    masks = []
    for token in ids("ababc"):
        masks.append(allowed(c))
        c.accept(token)
    assert c.stopped
    for n in (4, 2, 0):
        c.rewind(n)
        assert c.n == n
        assert allowed(c) == masks[n]
        assert not c.stopped
    c.rewind(3)
    assert c.n == 0, "what was not accepted is not there to go back to"


def test_a_token_that_is_not_allowed(grammars: Grammars) -> None:
    c = grammars.constraint(spec("choice", ["yes"]))
    with pytest.raises(SamplingError, match="choice"):
        c.accept(ids("n")[0])


def test_constraints_are_independent(grammars: Grammars) -> None:
    """The same grammar is compiled once, each request has a state of its own."""
    one, two = (grammars.constraint(spec("regex", "abc")) for _ in range(2))
    take(one, "ab")
    assert allowed(two) == set(ids("a"))
    assert allowed(one) == set(ids("c"))


def test_many_grammars_do_not_pile_up(grammars: Grammars) -> None:
    for i in range(200):
        grammars.constraint(spec("choice", [f"word{i}"]))
    assert len(grammars._cache) <= 64


def test_forced_text_is_spelled_as_the_model_does() -> None:
    """SentencePiece puts a space in front of what it is given; a forced text in the middle must not get it."""
    pytest.importorskip("llguidance")

    class Spaced(Vocab):
        def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:  # type: ignore[override]
            return FakeVocab.encode(" " + text)

    c = Grammars(Spaced()).constraint(spec("choice", ["hello"]))
    assert c.forced() == ids("hello")


# ---- what is wrong, and where ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "source", "place"),
    [
        ("json_schema", {"type": "objct"}, r"at \$: .*objct"),
        (
            "json_schema",
            {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "x"}}}},
            r"at \$\.properties\.a\.items: ",
        ),
        (
            "json_schema",
            {"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "string", "pattern": "("}}, "type": "array"},
            r"at \$\.\$defs\.x: .*unclosed group",
        ),
        ("json_schema", {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/none"}]}, r"at \$\.anyOf\[1\]: .*/none"),
        ("json_schema", {"type": "integer", "minimum": 5, "maximum": 4}, r"at \$: Unsat"),
        ("json_schema", False, r"at \$: Unsat"),
        ("json_schema", {"enum": []}, r"at \$: Unsat"),
        ("regex", "(a", "unclosed group"),
        ("grammar", 'root ::= "yes', "line 1"),
        ("grammar", "root ::= foo", "'foo'"),
        ("grammar", "start: foo", r'1\(8\): unknown name: "foo"'),
        ("grammar", "hello", "line 1"),
        ("grammar", 'start: "a" (', r"1\("),
        ("regex", "[^\\x00-\\U0010ffff]", "admits no text"),
        ("grammar", "root ::= root", "admits no text"),
    ],
)
def test_errors_say_where(grammars: Grammars, kind: str, source: Any, place: str) -> None:
    with pytest.raises(GrammarError, match=f"(?s){kind} .*{place}"):
        grammars.constraint(spec(kind, source))


def test_error_path_is_the_smallest_part() -> None:
    def is_wrong(schema: Any) -> bool:
        return "BAD" in json.dumps({k: v for k, v in schema.items() if k not in ("$defs", "definitions")})

    bad = {"title": "BAD"}
    for schema, path in (
        (bad, "$"),
        ({"properties": {"a": {}, "b": {"allOf": [{}, bad]}}}, "$.properties.b.allOf[1]"),
        ({"patternProperties": {"x": {"not": bad}}}, "$.patternProperties.x.not"),
        ({"prefixItems": [{}, {"additionalProperties": bad}]}, "$.prefixItems[1].additionalProperties"),
        ({"const": "BAD", "properties": "not a mapping", "anyOf": None}, "$"),
    ):
        assert schema_error_path(schema, is_wrong) == path


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"json_schema": "{"}, "line 1, column 2"),
        ({"json_schema": "[1]"}, "JSON object"),
        ({"json_schema": 5}, "dict, JSON text"),
        ({"json_schema": {"a": {1, 2}}}, "cannot be written"),
        ({"json_schema": {"minimum": float("nan")}}, "cannot be written"),
        ({"regex": ""}, "non-empty"),
        ({"regex": 5}, "non-empty"),
        ({"grammar": b"x"}, "non-empty"),
        ({"choice": "yes"}, "list of strings"),
        ({"choice": ["a", ""]}, "non-empty strings"),
        ({"choice": [1]}, "non-empty strings"),
        ({"choice": ["a"], "regex": "b"}, "exclude each other"),
        ({"json_schema": {}, "grammar": "x"}, "exclude each other"),
        ({"json_whitespace": 1}, "True or False"),
        ({"speculation": 5}, "speculation"),
        ({"speculation": [""]}, "speculation"),
        ({"n_max": 0}, "n_max"),
        ({"p_min": 2}, "p_min"),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SamplingParams(**options)


def test_schemas_from_elsewhere() -> None:
    """A pydantic model class, or anything with its method; text; and overriding keeps them."""

    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return SCHEMA

    given = SamplingParams(json_schema=Model)
    assert given.grammar_spec == GrammarSpec("json_schema", json.dumps(SCHEMA))
    assert SamplingParams(json_schema=json.dumps(SCHEMA, indent=3)).grammar_spec == given.grammar_spec
    assert given.override(temperature=1.0).grammar_spec == given.grammar_spec
    assert given.override(json_whitespace=False).grammar_spec == GrammarSpec("json_schema", json.dumps(SCHEMA), True)
    assert SamplingParams().grammar_spec is None
    assert SamplingParams(json_schema={}).grammar_spec == GrammarSpec("json_schema", "{}")
    hash(given)


@pytest.mark.parametrize(
    "source",
    [
        '"grammar", "start: " + "(" * n + \'"a"\' + ")" * n',
        '"grammar", "root ::= " + "(" * n + \'"a"\' + ")" * n',
        '"grammar", "start: r0\\n" + "\\n".join(f"r{i}: r{i+1}" for i in range(n)) + f"\\nr{n}: \'a\'"',
        '"grammar", "start: R0\\n" + "\\n".join(f"R{i}: R{i+1}" for i in range(4000)) + "\\nR4000: /a/"',
        '"regex", "(" * n + "a" + ")" * n',
        '"regex", "(((((a{1,100}){1,100}){1,100}){1,100}){1,100}){1,100}"',
        '"json_schema", \'{"anyOf":[\' * n + "{}" + "]}" * n',
        '"json_schema", \'{"not":\' * n + "{}" + "}" * n',
        '"json_schema", \'{"$ref":"#"}\'',
        '"json_schema", json.dumps({"$ref": "#/$defs/a0", "$defs": {f"a{i}": {"type": "object", "properties": '
        '{"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(3000)} | {"a3000": {}}})',
        '"json_schema", json.dumps({"$ref": "#/$defs/a0", "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} '
        'for i in range(9000)} | {"a9000": {}}})',
        '"regex", "a" * (5 << 20)',
    ],
)
def test_nothing_ends_the_process(source: str, run_child: Any) -> None:
    """Grammars made to overflow a stack, or to take for ever: compiled, or refused in words."""
    pytest.importorskip("llguidance")
    run_child(
        f"""
        import json, sys
        from pyspec.config import GrammarSpec
        from pyspec.errors import GrammarError
        from pyspec.sampling.grammar import Grammars

        class Vocab:
            n_tokens, bos, eos, eog_tokens = 257, -1, 256, frozenset({{256}})
            def token_bytes(self, t, special=False): return bytes([t]) if t < 256 else b"<eos>"
            def is_control(self, t): return t == 256
            def encode(self, text, a=True, b=True): return list(text.encode())

        n = 100_000
        kind, text = {source}
        try:
            c = Grammars(Vocab()).constraint(GrammarSpec(kind, text))
            c.mask(), c.forced(), c.n_allowed(list(b"aaaa"))
        except GrammarError as e:
            assert kind in str(e) and len(str(e)) < 2000, e
        """,
        timeout=120,
    )


def test_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r"pyspec-llm\[grammar\]"):
        Grammars(Vocab())


def test_vocabulary_without_an_end() -> None:
    pytest.importorskip("llguidance")
    vocab = Vocab()
    vocab.eog_tokens = frozenset()  # type: ignore[misc]
    with pytest.raises(UnsupportedError, match="end-of-generation"):
        Grammars(vocab)


# ---- in the loop -------------------------------------------------------------------------------

PARAMS = SpeculationParams(grammar_n_max=8)


def make(target: FakeEvaluator, qualities: list[str], forced: bool) -> Engine:
    drafters: list[Any] = [Grammar(target, None, PARAMS, target.n_seq_max)] if forced else []
    drafters += [FakeDrafter(target, q) for q in qualities]
    return Engine(target, drafters, eog_tokens={EOS, EOT})


def submit(engine: Engine, grammars: Grammars, start: list[int], given: GrammarSpec, **options: Any) -> Any:
    constraint = grammars.constraint(given)
    params = SamplingParams(**{"max_tokens": 60, **options})
    text = TextStream(FakeVocab(), params.stop)
    return engine.submit(start, params, text, {CONSTRAINT: constraint}, constraint)


GIVEN = [
    spec("json_schema", SCHEMA, True),
    spec("regex", "[a-f]{3}(yes|no)(yes|no) the end\\."),
    spec("choice", ["first", "second", "third of all"]),
]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"penalty_repeat": 1.3, "top_k": 3}])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(("qualities", "forced"), [([], True), (["random"], False), (["half", "wrong"], True)])
def test_drafts_change_nothing(
    grammars: Grammars, qualities: list[str], forced: bool, memory: str, options: dict[str, Any]
) -> None:
    """Three sequences with grammars of their own and one without: as each alone, nothing drafted."""
    plain = []
    for i, given in enumerate(GIVEN):
        engine = make(FakeEvaluator(Rule()), [], False)
        plain.append(submit(engine, grammars, prompt(i, 5), given, **options))
        run_all(engine)
    target = FakeEvaluator(Rule(), n_seq=3, **{"n_ubatch": 16, **MEMORY[memory]})
    engine = make(target, qualities, forced)
    found = [submit(engine, grammars, prompt(i, 5), given, **options) for i, given in enumerate(GIVEN)]
    free = engine.submit(prompt(9, 4), SamplingParams(max_tokens=20))
    run_all(engine)
    for a, b in zip(found, plain, strict=True):
        assert a.error is b.error is None
        assert a.output == b.output
        assert a.finish_reason == b.finish_reason
    assert free.output == target.rule.generate(prompt(9, 4), 20)
    assert not target.violations


def test_forced_tokens_are_drafted_and_all_accepted(grammars: Grammars) -> None:
    target = FakeEvaluator(Rule(), n_seq=1)
    engine = make(target, ["empty"], True)
    seq = submit(engine, grammars, prompt(1, 5), spec("regex", "[0-9]{2} and some forced words[0-9]"))
    run_all(engine)
    text = FakeVocab.decode(seq.output)
    assert text[2:-1] == " and some forced words"
    assert seq.finish_reason == "stop"
    stats = {d.name: d for d in seq.stats.drafters}
    assert stats["grammar"].n_gen_tokens == stats["grammar"].n_acc_tokens > 15
    assert seq.stats.n_pass < len(seq.output) / 2
    assert engine.chain.drafters[0].stats.n_gen_tokens == stats["grammar"].n_gen_tokens


def test_a_draft_is_cut_at_the_first_token_that_is_refused(grammars: Grammars) -> None:
    """Its rows would be evaluated for nothing."""
    start = prompt(3, 5)
    rule = Rule().script(start, ids("ab12zz"))
    target = FakeEvaluator(rule)
    engine = make(target, ["perfect"], False)
    seq = submit(engine, grammars, start, spec("regex", "[a-c]{2}[0-9]{2}(zz|yy)?[0-9]*"), max_tokens=9)
    run_all(engine)
    assert FakeVocab.decode(seq.output).startswith("ab12")
    assert seq.stats.n_draft < 9


def test_end_token_inside_a_draft(grammars: Grammars) -> None:
    """Refused where the text is not complete; where it is, it ends it, and nothing after it is delivered."""
    for pattern, output, wanted in (
        ("a{3}b*", [*ids("aa"), EOS, *ids("ab"), EOS], None),
        ("a{2}b*", [*ids("aa"), EOS, *ids("b")], [*ids("aa"), EOS]),
    ):
        start = prompt(3, 5)
        target = FakeEvaluator(Rule().script(start, output))
        engine = make(target, ["perfect"], False)
        seq = submit(engine, grammars, start, spec("regex", pattern), max_tokens=12)
        run_all(engine)
        if wanted is None:
            assert seq.output[:3] == ids("aaa")
        else:
            assert seq.output == wanted
            assert seq.finish_reason == "stop"


def test_finished_in_the_middle_of_a_draft(grammars: Grammars) -> None:
    start = prompt(3, 5)
    target = FakeEvaluator(Rule().script(start, ids("yes or no")))
    engine = make(target, ["perfect"], False)
    seq = submit(engine, grammars, start, spec("regex", "yes|nope"))
    run_all(engine)
    assert seq.output == ids("yes")
    assert seq.finish_reason == "stop"
    # also when the limit is reached with the same token
    for limit, reason in ((3, "stop"), (2, "length")):
        engine = make(FakeEvaluator(Rule().script(start, ids("yes or no"))), ["perfect"], False)
        seq = submit(engine, grammars, start, spec("regex", "yes|nope"), max_tokens=limit)
        run_all(engine)
        assert (seq.output, seq.finish_reason) == (ids("yes")[:limit], reason)


@pytest.mark.parametrize("stop", ["d w", "rds", "and some forced words", "1 "])
def test_stop_string_across_accepted_tokens(grammars: Grammars, stop: str) -> None:
    texts = []
    for forced in (True, False):
        engine = make(FakeEvaluator(Rule()), ["half"], forced)
        seq = submit(engine, grammars, prompt(1, 5), spec("regex", "11 and some forced words[0-9]+"), stop=stop)
        run_all(engine)
        assert seq.finish_reason == "stop"
        texts.append(("".join(p.text for p in seq.pieces), seq.output))
    assert texts[0] == texts[1]
    assert stop not in texts[0][0]


def test_an_interrupt_leaves_the_state_as_it_was(grammars: Grammars) -> None:
    """The step is undone, the sequence starts over from its tokens, and the text is the same."""
    wanted = make(FakeEvaluator(Rule()), [], False)
    plain = submit(wanted, grammars, prompt(1, 5), GIVEN[0])
    run_all(wanted)
    engine = make(FakeEvaluator(Rule()), ["half"], True)
    seq = submit(engine, grammars, prompt(1, 5), GIVEN[0])
    rng = random.Random(1)

    def observer(*_: Any) -> None:
        if rng.random() < 0.4:
            raise KeyboardInterrupt

    engine.observer = observer
    for _ in range(500):
        try:
            if not engine.step():
                break
        except KeyboardInterrupt:
            pass
    assert seq.output == plain.output


# ---- per request -------------------------------------------------------------------------------


def test_which_drafters_a_request_may_use(grammars: Grammars) -> None:
    target = FakeEvaluator(Rule(), n_seq=4)
    engine = make(target, ["perfect"], True)
    name = engine.chain.drafters[1].name
    many = {
        "all": {},
        "off": {"speculation": "off"},
        "one": {"speculation": name},
        "other": {"speculation": ["grammar"]},
        "short": {"n_max": 1},
    }
    seqs = {k: engine.submit(prompt(i, 6), SamplingParams(max_tokens=30, **o)) for i, (k, o) in enumerate(many.items())}
    run_all(engine)
    for i, (key, seq) in enumerate(seqs.items()):
        assert seq.output == target.rule.generate(prompt(i, 6), 30), key
    assert seqs["off"].stats.n_draft == seqs["other"].stats.n_draft == 0
    assert seqs["all"].stats.n_draft == seqs["all"].stats.n_accepted > 0
    assert seqs["one"].stats.n_accepted > 0
    assert len(seqs["short"].stats.drafted_per_pos) == 1
    assert len(seqs["all"].stats.drafted_per_pos) > 1


def test_drafters_that_are_not_loaded() -> None:
    engine = make(FakeEvaluator(Rule()), ["perfect"], True)
    with pytest.raises(ConfigError, match=r"'suffix'.*loaded are grammar, "):
        engine.submit(prompt(1, 3), SamplingParams(speculation=["grammar", "suffix"]))
    with pytest.raises(ConfigError, match="no drafters"):
        Engine(FakeEvaluator(Rule())).submit(prompt(1, 3), SamplingParams(speculation="suffix"))


def test_drafter_without_a_grammar() -> None:
    target = FakeEvaluator(Rule())
    drafter = Grammar(target, None, PARAMS, 1)
    request = DraftRequest(0, 2, 5, [1, 2, 5], 4)
    drafter.draft([request])
    assert request.draft == []
