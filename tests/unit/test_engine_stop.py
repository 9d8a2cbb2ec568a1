"""What ends a sequence: end-of-generation tokens, stop strings, max_tokens, a full context. Nothing leaks past it."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import EOS, EOT, FakeDrafter, FakeEvaluator, FakeVocab, Rule
from looptest import check_counters, prompt, run_all

from pyspec.config import SamplingParams
from pyspec.engine import Engine
from pyspec.runtime import Sequence, TextStream
from pyspec.types import RollbackKind

PROMPT = prompt(3, 6)
TEXT = "one two three four five six seven eight nine ten eleven twelve thirteen"
encode = FakeVocab.encode

KINDS: dict[str, dict[str, Any]] = {
    "partial": {},
    "bounded": {"kind": RollbackKind.BOUNDED, "n_rs_seq": 12},
    "full": {"kind": RollbackKind.FULL},
}


def generate(
    output: list[int],
    quality: str | None = "perfect",
    *,
    n_max: int = 8,
    memory: dict[str, Any] | None = None,
    skip_special: bool = True,
    eog: tuple[int, ...] = (EOS, EOT),
    **params: Any,
) -> tuple[Sequence, str]:
    """Run ``PROMPT`` on a target that continues it with ``output``. Gives the sequence and its joined text."""
    target = FakeEvaluator(Rule().script(PROMPT, output), **(memory or {}))
    drafters = [FakeDrafter(target, quality, n_max=n_max)] if quality else []
    engine = Engine(target, drafters, eog_tokens=eog)
    made = SamplingParams(**({"max_tokens": 200} | params))
    seq = engine.submit(PROMPT, made, TextStream(FakeVocab(), made.stop, skip_special))
    run_all(engine)
    assert not target.violations
    assert not [v for d in drafters for v in d.violations]
    assert seq.error is None
    check_counters(seq)
    return seq, "".join(p.text for p in seq.pieces)


# ---- B08: end-of-generation tokens -------------------------------------------------------


@pytest.mark.parametrize("memory", KINDS)
@pytest.mark.parametrize("eog", [EOS, EOT])
@pytest.mark.parametrize("at", range(12))
def test_b08_eog_anywhere_in_a_draft(at: int, eog: int, memory: str) -> None:
    """With drafts of 8: the end as first token, as accepted token 0 to 7, as bonus token, and in the second round."""
    script = [*encode(TEXT[:at]), eog, *encode("MUST NOT BE SEEN")]
    seq, text = generate(script, memory=KINDS[memory])
    assert seq.output == script[: at + 1]
    assert text == TEXT[:at]
    assert seq.finish_reason == "stop"
    assert seq.stats.n_output == at + 1


@pytest.mark.parametrize("quality", ["perfect", "wrong", "half", "random", "too-long", None])
@pytest.mark.parametrize("at", [0, 3, 7, 20])
def test_b08_eog_with_any_drafter(quality: str | None, at: int) -> None:
    script = [*encode(TEXT[:at]), EOS, *encode("MUST NOT BE SEEN")]
    seq, text = generate(script, quality)
    assert (seq.output, text, seq.finish_reason) == (script[: at + 1], TEXT[:at], "stop")


def test_b08_scripted_draft_with_eog_in_the_middle() -> None:
    """The draft of the first round goes on behind the end; the target would have agreed with all of it."""
    script = [*encode("ab"), EOS, *encode("xy")]
    seq, text = generate(script, n_max=4)
    assert (seq.output, text) == ([*encode("ab"), EOS], "ab")
    # what was accepted behind the end does not count
    assert seq.stats.n_accepted == sum(seq.drafted) == 2
    assert seq.stats.n_draft == 4


@pytest.mark.parametrize("quality", ["perfect", "half", None])
def test_b08_ignore_eos(quality: str | None) -> None:
    script = [*encode("ab"), EOS, *encode("cd"), EOT, *encode("efgh")]
    seq, text = generate(script, quality, ignore_eos=True, max_tokens=9)
    assert (seq.output, text, seq.finish_reason) == (script[:9], "abcdefg", "length")


@pytest.mark.parametrize("quality", ["perfect", "wrong", None])
def test_b08_model_without_eog(quality: str | None) -> None:
    script = [*encode("ab"), EOS, *encode("cd")]
    seq, text = generate(script, quality, eog=(), max_tokens=5)
    assert (seq.output, text, seq.finish_reason) == (script, "abcd", "length")


def test_special_tokens_are_shown_when_asked_for() -> None:
    script = [*encode("ab"), 7, *encode("cd"), EOS]
    assert generate(script)[1] == "abcd"
    assert generate(script, skip_special=False)[1] == "ab<7>cd"


# ---- B09: stop strings ------------------------------------------------------------------


def plain_and_drafted(script: list[int], **params: Any) -> tuple[Sequence, str]:
    """The same with every quality of draft; gives the plain result."""
    plain = generate(script, None, **params)
    for quality in ("perfect", "wrong", "half", "last-wrong", "short"):
        seq, text = generate(script, quality, **params)
        assert (seq.output, text, seq.finish_reason) == (plain[0].output, plain[1], plain[0].finish_reason)
    return plain


@pytest.mark.parametrize("offset", range(0, 18))
def test_b09_stop_string_at_each_offset(offset: int) -> None:
    """Completing as accepted token 0 to 7, as bonus token, and over two rounds (drafts of 8, string of 3)."""
    script = encode(TEXT[:offset] + "@#$" + TEXT)
    seq, text = plain_and_drafted(script, stop=("@#$",))
    assert text == TEXT[:offset]
    assert seq.finish_reason == "stop"
    assert len(seq.output) == offset + 3


@pytest.mark.parametrize("behind", [-3, -2, -1, 0, 1, 5])
@pytest.mark.parametrize("offset", [0, 3, 5, 7, 8, 9, 14])
def test_b09_max_tokens_around_a_stop_string(offset: int, behind: int) -> None:
    """max_tokens before, on and after the end of the stop string. The stop string wins where both are met."""
    script = encode(TEXT[:offset] + "@#$" + TEXT)
    n = offset + 3 + behind
    if n == 0:
        return
    seq, text = plain_and_drafted(script, stop=("@#$",), max_tokens=n)
    if behind >= 0:
        assert (text, seq.finish_reason, len(seq.output)) == (TEXT[:offset], "stop", offset + 3)
    else:
        assert (text, seq.finish_reason, len(seq.output)) == ((TEXT[:offset] + "@#$")[:n], "length", n)


def test_b09_text_that_may_become_a_stop_string_is_held_back() -> None:
    script = encode("aaab aaac aaa")
    target = FakeEvaluator(Rule().script(PROMPT, script))
    engine = Engine(target)
    params = SamplingParams(max_tokens=len(script), stop=("aaaac",))
    seq = engine.submit(PROMPT, params, TextStream(FakeVocab(), params.stop))
    shown = ""
    while engine.step():
        shown = "".join(p.text for p in seq.pieces)
        done = FakeVocab.decode(seq.output)
        assert done.startswith(shown)
        if not seq.done:
            held = done[len(shown) :]
            assert held == "aaaac"[: len(held)]
    assert shown == "aaab aaac aaa"


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("abcabd", ("abd",), "abc"),
        ("aab", ("ab",), "a"),
        ("aaaaab", ("aab",), "aaa"),
        ("xxENDyy", ("END", "xE"), "x"),
        ("one two", ("two", "one"), ""),
        ("one. two", (". ", "two"), "one"),
        ("ababac", ("abac",), "ab"),
        ("nothing", ("none", "notes"), "nothing"),
        ("Grüße aus 東京!", ("東",), "Grüße aus "),
        ("ends with EN", ("END",), "ends with EN"),
        ("stop at once", ("s",), ""),
    ],
)
def test_b09_stop_strings(text: str, stop: tuple[str, ...], shown: str) -> None:
    script = [*encode(text), EOS]
    seq, found = plain_and_drafted(script, stop=stop)
    assert found == shown
    assert seq.finish_reason == "stop"


def test_b09_stop_string_before_eog_and_cap_in_one_round() -> None:
    """One round passes a stop string, then the end, then the cap."""
    script = [*encode("ab@#cd"), EOS, *encode("xx")]
    seq, text = plain_and_drafted(script, stop=("@#",), max_tokens=7)
    assert (text, seq.finish_reason, len(seq.output)) == ("ab", "stop", 4)


def test_stop_needs_text() -> None:
    """Without a text stream there is no text to look at; the engine alone does not look for stop strings."""
    target = FakeEvaluator(Rule().script(PROMPT, encode(TEXT)))
    engine = Engine(target)
    seq = engine.submit(PROMPT, SamplingParams(max_tokens=10, stop=("two",)))
    run_all(engine)
    assert len(seq.output) == 10
    assert [p.text for p in seq.pieces] == [""] * len(seq.pieces)


# ---- B10: characters made of several tokens -----------------------------------------------


@pytest.mark.parametrize("n_max", range(1, 12))
@pytest.mark.parametrize("word", ["é", "歪", "👩\u200d👩\u200d👧", "aé歪b👩c"])
def test_b10_bytes_split_at_every_round_edge(word: str, n_max: int) -> None:
    script = [*encode(word), EOS]
    seq, text = generate(script, n_max=n_max)
    assert text == word
    for quality in ("wrong", "half", None):
        assert generate(script, quality, n_max=n_max)[1] == word
    assert all("\ufffd" not in p.text for p in seq.pieces)


@pytest.mark.parametrize("quality", ["perfect", "wrong", None])
@pytest.mark.parametrize("n", range(1, 5))
def test_b10_cap_in_the_middle_of_a_character(n: int, quality: str | None) -> None:
    """What is whole is shown; half a character becomes one U+FFFD at the end, as in the text decoded at once."""
    script = encode("a👩b")
    seq, text = generate(script, quality, max_tokens=n)
    assert text == FakeVocab.decode(script[:n]) == ["a", "a\ufffd", "a\ufffd", "a\ufffd"][n - 1]
    assert seq.finish_reason == "length"


@pytest.mark.parametrize("quality", ["perfect", "wrong", None])
def test_b10_bytes_that_are_no_characters(quality: str | None) -> None:
    script = [*encode(b"a\xff\xfe\xc3(b\xe6\xad"), EOS]
    text = generate(script, quality)[1]
    assert text == b"a\xff\xfe\xc3(b\xe6\xad".decode("utf-8", "replace")


# ---- B11: as many tokens as asked for ------------------------------------------------------


@pytest.mark.parametrize("quality", ["perfect", "wrong", "half", "too-long", "empty", None])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_b11_exactly_max_tokens(k: int, quality: str | None) -> None:
    for n in range(1, 21):
        seq, text = generate(encode(TEXT), quality, n_max=k, max_tokens=n, ignore_eos=True)
        assert len(seq.output) == seq.stats.n_output == n
        assert text == TEXT[:n]
        assert seq.finish_reason == "length"
        if seq.stats.n_draft == 0:
            assert seq.stats.acceptance_rate is None
        # no token is drafted that could not become output
        assert seq.stats.n_draft <= seq.stats.n_pass * (n - 1)
        if quality == "perfect":
            assert seq.stats.acceptance_rate in (1.0, None)


def test_b11_max_tokens_0() -> None:
    seq, text = generate(encode(TEXT), max_tokens=0)
    assert (seq.output, text, seq.finish_reason, seq.stats.n_pass) == ([], "", "length", 0)


# ---- a full context ------------------------------------------------------------------------


@pytest.mark.parametrize("quality", ["perfect", "wrong", "half", None])
@pytest.mark.parametrize("n_ctx", [len(PROMPT), len(PROMPT) + 1, len(PROMPT) + 2, 17, 30])
@pytest.mark.parametrize("memory", KINDS)
def test_b26_context_becomes_full(n_ctx: int, quality: str | None, memory: str) -> None:
    """The last token needs no cell of its own: a context of n gives n - prompt + 1 tokens, drafted or not."""
    script = encode(TEXT)
    options = {"n_ctx_seq": n_ctx, "n_ubatch": 16} | KINDS[memory]
    seq, text = generate(script, quality, memory=options, max_tokens=None)
    assert len(seq.output) == n_ctx - len(PROMPT) + 1
    assert seq.output == script[: len(seq.output)]
    assert seq.finish_reason == "length"
    assert text == TEXT[: len(seq.output)]


@pytest.mark.parametrize("n_ctx", [20, 4096, 5000])
def test_engine_may_use_less_than_the_context(n_ctx: int) -> None:
    target = FakeEvaluator(Rule(), n_ctx_seq=64)
    engine = Engine(target, [FakeDrafter(target, "perfect")], n_ctx=n_ctx)
    seq = engine.submit(PROMPT, SamplingParams())
    run_all(engine)
    assert len(seq.tokens) == min(n_ctx, 64) + 1
