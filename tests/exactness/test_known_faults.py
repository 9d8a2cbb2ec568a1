"""Known faults of other engines, B03 to B11: what is generated, and when it ends.

Ids are those of the project's list of public reports. What may end the process runs in a child process.
Faults of loading, pairing and in-process use are in ``test_known_faults_process.py``.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

import pytest
from pairs import PROMPTS, SMALL

import pyspec
from pyspec.errors import ConfigError

#: One pair for each way to draft: (target, draft or None, options).
WAYS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "draft-simple": ("target-llama", "draft-llama-half", {}),
    "draft-eagle3": ("target-llama", "eagle3-half", {}),
    "draft-dflash": ("target-llama", "dflash", {}),
    "draft-mtp": ("target-mtp", None, {}),
    "draft-mtp-chain": ("target-mtp-chain", None, {}),
    "draft-mtp-shared": ("target-gemma4", "draft-gemma4-assistant", {}),
    "ngram-simple": ("target-llama", None, {"speculation": "ngram-simple", "size_n": 1, "size_m": 5}),
    "recurrent": ("target-recurrent", "draft-recurrent-half", {}),
}


def make(way: str, tiny: Any, make_llm: Any, **options: Any) -> Any:
    target, draft, fixed = WAYS[way]
    return make_llm(tiny(target), tiny(draft) if draft else None, **(fixed | options))


def plain(way: str, tiny: Any, make_llm: Any, **options: Any) -> Any:
    return make_llm(tiny(WAYS[way][0]), speculation="off", **options)


# ---- B03: recurrent memory and drafts that are empty ----------------------------------------


@pytest.mark.parametrize("n_min", [0, 1])
@pytest.mark.parametrize("target", ["target-recurrent", "target-hybrid"])
def test_b03_ngram_on_recurrent_targets(target: str, n_min: int, tiny: Any, make_llm: Any) -> None:
    """No repeats at first: many rounds without a draft. Then a tail that repeats: drafts, partly accepted."""
    no_repeats = list(range(9, 9 + 60))
    repeats = no_repeats + [300, 301, 302, 303, 304] * 6
    off = make_llm(tiny(target), speculation="off")
    llm = make_llm(tiny(target), speculation="ngram-simple", size_n=2, size_m=6, n_min=n_min)
    for prompt in (no_repeats, repeats):
        wanted = off.generate(prompt, max_tokens=300, ignore_eos=True)
        found = llm.generate(prompt, max_tokens=300, ignore_eos=True)
        assert found.tokens == wanted.tokens
        drafts = sum(found.stats.drafted_per_pos[:1])
        assert 0 < drafts < found.stats.n_pass, "some rounds with a draft, some without"
        assert found.stats.n_accepted < found.stats.n_draft, "some drafts were rejected"


# ---- B04: several sequences ------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_b04_starts_and_stops_interleaved(way: str, tiny: Any, make_llm: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Four sequences begin and end at different times; then their slots serve prompts sharing half a prefix."""
    off = plain(way, tiny, make_llm)
    llm = make(way, tiny, make_llm, n_seq_max=4)
    prompts = [*PROMPTS[:4], PROMPTS[0][:25] + " other words", PROMPTS[5][:60], PROMPTS[1][:30]]
    lengths = [60, 15, 40, 25, 30, 30, 30]
    solo = [off.generate(p, max_tokens=n, ignore_eos=True).tokens for p, n in zip(prompts, lengths, strict=True)]
    found: list[list[int]] = [[] for _ in prompts]
    with caplog.at_level(logging.INFO, "pyspec.native"):
        running: list[tuple[int, Any]] = []
        waiting = list(range(len(prompts)))
        for turn in range(400):
            if waiting and (turn % 7 == 0 or not running) and len(running) < 4:
                i = waiting.pop(0)
                running.append((i, llm.stream(prompts[i], max_tokens=lengths[i], ignore_eos=True)))
            if not running:
                break
            i, stream = running[turn % len(running)]
            piece = next(stream, None)
            if piece is None:
                running.remove((i, stream))
            else:
                found[i] += piece.tokens
        # one is dropped half-way, its slot taken again
        stream = llm.stream(prompts[2], max_tokens=50, ignore_eos=True)
        for _ in range(3):
            next(stream)
        stream.close()
        again = llm.generate(prompts[4], max_tokens=30, ignore_eos=True).tokens
    assert found == solo
    assert again == solo[4]
    assert not [r.message for r in caplog.records if "position" in r.message or "inconsistent" in r.message]


# ---- B05: a draft context smaller than the target's -------------------------------------------


@pytest.mark.parametrize("way", ["draft-simple", "draft-eagle3", "draft-dflash", "draft-mtp", "draft-mtp-chain"])
def test_b05_text_longer_than_the_draft_context(way: str, tiny: Any, run_child: Any) -> None:
    """Drafting stops at the draft's end, nothing fails, and the counters say so."""
    target, draft, _ = WAYS[way]
    code = """
        import sys, pyspec
        from pairs import SMALL, PROMPTS, method_for
        target, draft = sys.argv[1], sys.argv[2] or None
        method = method_for(target, draft)
        with pyspec.LLM(target, speculation="off", **SMALL) as llm:
            wanted = llm.generate(PROMPTS[0], max_tokens=300, ignore_eos=True).tokens
            long = llm.generate(PROMPTS[5] * 2, max_tokens=20, ignore_eos=True).tokens
        counts = []
        for n_ctx in (64, 100, 0):
            with pyspec.LLM(target, draft, draft_n_ctx=n_ctx, **SMALL, **method) as llm:
                for _ in range(2):
                    r = llm.generate(PROMPTS[0], max_tokens=300, ignore_eos=True)
                    assert r.tokens == wanted, n_ctx
                    assert r.finish_reason == "length"
                assert llm.generate(PROMPTS[5] * 2, max_tokens=20, ignore_eos=True).tokens == long
                assert llm.stats.drafters[0].n_failed == 0
                counts.append(r.stats.n_draft)
        assert 0 < counts[0] < counts[1] < counts[2], counts
        for n_ctx in (1, 8):
            try:
                with pyspec.LLM(target, draft, draft_n_ctx=n_ctx, **SMALL, **method) as llm:
                    assert llm.generate(PROMPTS[0], max_tokens=40, ignore_eos=True).tokens == wanted[:40]
            except pyspec.PyspecError as e:
                assert "n_ctx" in str(e) or "n_batch" in str(e), e
        for n_ctx in (-1, 1.5, "64"):
            try:
                pyspec.LLM(target, draft, draft_n_ctx=n_ctx, **SMALL, **method)
            except pyspec.ConfigError as e:
                assert "n_ctx" in str(e)
            else:
                raise AssertionError(n_ctx)
    """
    run_child(code, tiny(target), tiny(draft) if draft else "")


# ---- B06: batch limits -------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_b06_draft_length_against_batch_size(way: str, tiny: Any, run_child: Any) -> None:
    """A prompt of some 40 tokens, drafts of 1 to 32 tokens: the work is split, whatever the limits are.

    A window cache forgets the rows of a split verification: it is refused in words.
    """
    target, draft, fixed = WAYS[way]
    code = """
        import json, sys, pyspec
        from pairs import SMALL, PROMPTS, method_for
        target, draft = sys.argv[1], sys.argv[2] or None
        options = SMALL | method_for(target, draft) | json.loads(sys.argv[3])
        with pyspec.Model(target) as model:
            window, n_heads = model.n_swa, model.n_layer_nextn
        prompt = (PROMPTS[5] * 2)[:150]
        with pyspec.LLM(target, speculation="off", **SMALL) as llm:
            assert len(llm.tokenize(prompt)) >= 40
            wanted = llm.generate(prompt, max_tokens=24, ignore_eos=True).tokens
        for n_batch, n_ubatch in ((4, 1), (4, 4), (8, 1), (8, 4), (512, 1), (512, 4)):
            for n_max in (1, 3, 8, 32):
                print(n_batch, n_ubatch, n_max, flush=True)
                if window and min(n_max, n_heads or n_max) + 1 > n_ubatch:
                    try:
                        pyspec.LLM(target, draft, n_max=n_max, n_batch=n_batch, n_ubatch=n_ubatch, **options)
                    except pyspec.ConfigError as e:
                        assert f"n_ubatch={n_ubatch} is too small" in str(e) and "n_max=" in str(e), e
                        continue
                    raise AssertionError((n_ubatch, n_max))
                with pyspec.LLM(target, draft, n_max=n_max, n_batch=n_batch, n_ubatch=n_ubatch, **options) as llm:
                    r = llm.generate(prompt, max_tokens=24, ignore_eos=True)
                    assert r.tokens == wanted
                    assert llm.stats.drafters[0].n_failed == 0
    """
    run_child(code, tiny(target), tiny(draft) if draft else "", json.dumps(fixed))


@pytest.mark.parametrize(
    ("options", "field"),
    [({"n_batch": 0}, "n_batch"), ({"n_ubatch": 0}, "n_ubatch"), ({"n_batch": 8, "n_ubatch": 16}, "n_ubatch")],
    ids=str,
)
def test_b06_impossible_batch_sizes(options: dict[str, int], field: str, tiny: Any) -> None:
    with pytest.raises(ValueError, match=field):
        pyspec.LLM(tiny("target-llama"), tiny("draft-llama"), **(SMALL | options))


# ---- B07: cancel ---------------------------------------------------------------------------------

LONG = {"n_ctx": 4096, "n_ubatch": 64, "n_batch": 64}


def long_prompt(llm: Any) -> list[int]:
    return (llm.tokenize(PROMPTS[5]) * 200)[:3900]


@pytest.mark.parametrize("way", ["draft-simple", "draft-eagle3", "draft-mtp", "recurrent", "ngram-simple"])
def test_b07_cancel_during_the_prompt(way: str, tiny: Any, make_llm: Any) -> None:
    """From another thread: ends within about one micro-batch; then the same object is as good as new."""
    llm = make(way, tiny, make_llm, **LONG)
    prompt = long_prompt(llm)
    start = time.monotonic()
    llm.generate(prompt[:800], max_tokens=1)
    per_token = (time.monotonic() - start) / 800
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(llm.generate(prompt, max_tokens=5)))
    thread.start()
    time.sleep(per_token * 600)
    start = time.monotonic()
    llm.cancel()
    thread.join(60)
    waited = time.monotonic() - start
    assert not thread.is_alive()
    assert result[0].finish_reason == "cancelled"
    assert result[0].tokens == []
    assert result[0].stats.n_prompt < len(prompt) - 1
    assert waited < per_token * len(prompt) / 2 + 0.5
    wanted = plain(way, tiny, make_llm, **LONG).generate(prompt[:50], max_tokens=30, ignore_eos=True)
    assert llm.generate(prompt[:50], max_tokens=30, ignore_eos=True).tokens == wanted.tokens


def test_b07_ctrl_c_during_the_prompt(tiny: Any, run_child: Any) -> None:
    code = """
        import os, signal, sys, threading, time
        import pyspec
        from pairs import SMALL, PROMPTS
        options = SMALL | {"n_ctx": 4096, "n_ubatch": 64}
        with pyspec.LLM(sys.argv[1], speculation="off", **options) as llm:
            prompt = (llm.tokenize(PROMPTS[5]) * 200)[:3900]
            wanted = llm.generate(prompt[:50], max_tokens=20).tokens
        with pyspec.LLM(sys.argv[1], sys.argv[2], **options) as llm:
            start = time.monotonic()
            llm.generate(prompt[:1000], max_tokens=1)
            per_token = (time.monotonic() - start) / 1000
            for use in ("generate", "stream"):
                threading.Timer(per_token * 600, os.kill, (os.getpid(), signal.SIGINT)).start()
                start = time.monotonic()
                try:
                    if use == "generate":
                        llm.generate(prompt, max_tokens=5)
                    else:
                        for _ in llm.stream(prompt, max_tokens=5):
                            pass
                except KeyboardInterrupt:
                    waited = time.monotonic() - start - per_token * 600
                else:
                    raise AssertionError("not interrupted")
                assert waited < per_token * 2000 + 0.5, waited
                assert llm.stats.n_output <= 60
                assert llm.generate(prompt[:50], max_tokens=20).tokens == wanted
    """
    run_child(code, tiny("target-llama", layers=24), tiny("draft-llama"))


def test_b07_cancel_ends_what_waits_too(tiny: Any, make_llm: Any) -> None:
    llm = make("draft-simple", tiny, make_llm, n_seq_max=1, **LONG)
    prompt = long_prompt(llm)
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.extend(llm.generate([prompt, prompt[:9], prompt], max_tokens=300)))
    thread.start()
    time.sleep(0.05)
    llm.cancel()
    thread.join(60)
    assert not thread.is_alive()
    assert [r.finish_reason for r in result] == ["cancelled"] * 3


@pytest.mark.parametrize("way", WAYS)
def test_b07_closing_the_generator(way: str, tiny: Any, make_llm: Any) -> None:
    """In the middle of a round, after every number of pieces: the object is as good as new."""
    off, llm = plain(way, tiny, make_llm), make(way, tiny, make_llm, n_max=5)
    for n in range(1, 6):
        stream = llm.stream(PROMPTS[5], max_tokens=50, ignore_eos=True)
        for _ in range(n):
            next(stream)
        stream.close()
        prompt = PROMPTS[5][: 20 * n]
        wanted = off.generate(prompt, max_tokens=20, ignore_eos=True).tokens
        assert llm.generate(prompt, max_tokens=20, ignore_eos=True).tokens == wanted


# ---- B08: the end inside a draft -------------------------------------------------------------------


@pytest.mark.parametrize("k", range(1, 9))
def test_b08_eos_inside_a_draft(k: int, tiny: Any, make_llm: Any) -> None:
    """Target as its own draft: everything is accepted, the end falls on every offset of a draft."""
    path = tiny("target-llama-eos")
    off, llm = make_llm(path, speculation="off"), make_llm(path, path, n_max=k)
    eos = llm.model.vocab.eos
    assert {eos, llm.model.vocab.eot} <= llm.model.vocab.eog_tokens
    ends = 0
    for prompt in PROMPTS:
        wanted = off.generate(prompt, max_tokens=100)
        found = llm.generate(prompt, max_tokens=100)
        assert (found.tokens, found.text, found.finish_reason) == (wanted.tokens, wanted.text, wanted.finish_reason)
        assert found.usage == wanted.usage
        pieces = list(llm.stream(prompt, max_tokens=100))
        assert [t for p in pieces for t in p.tokens] == wanted.tokens
        if found.finish_reason == "stop":
            ends += 1
            assert found.tokens.index(eos) == len(found.tokens) - 1
            assert "endoftext" not in found.text
    assert ends >= 3, "the model ends its text somewhere"
    more = llm.generate(PROMPTS[0], max_tokens=100, ignore_eos=True)
    assert more.tokens == off.generate(PROMPTS[0], max_tokens=100, ignore_eos=True).tokens
    assert len(more.tokens) == 100


# ---- B09: stop strings -------------------------------------------------------------------------------


def test_b09_stop_strings(tiny: Any, make_llm: Any) -> None:
    """Everything is accepted, k = 8: stop strings of 1 to 6 letters ending anywhere, the cap before, on and behind."""
    path = tiny("target-llama")
    off, llm = make_llm(path, speculation="off"), make_llm(path, path, n_max=8)
    whole = off.generate(PROMPTS[0], max_tokens=40, ignore_eos=True)
    n_stopped = 0
    for start in range(0, 36, 3):
        stop = whole.text[start : start + 1 + start % 6]
        n_tokens = len(off.generate(PROMPTS[0], max_tokens=40, ignore_eos=True, stop=stop).tokens)
        for cap in (max(1, n_tokens - 1), n_tokens, n_tokens + 1, 40):
            options = {"max_tokens": cap, "ignore_eos": True, "stop": stop}
            wanted, found = off.generate(PROMPTS[0], **options), llm.generate(PROMPTS[0], **options)
            assert (found.text, found.tokens) == (wanted.text, wanted.tokens)
            assert found.finish_reason == wanted.finish_reason
            assert found.usage == wanted.usage
            assert "".join(p.text for p in llm.stream(PROMPTS[0], **options)) == wanted.text
            if cap >= n_tokens:
                assert found.finish_reason == "stop"
                assert found.text == whole.text[: whole.text.find(stop)]
                n_stopped += 1
            else:
                assert found.finish_reason == "length"
    assert n_stopped >= 30


# ---- B10: bytes and characters -------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["target-llama", "target-llama-spm"])
def test_b10_streamed_text_is_the_text(model: str, tiny: Any, make_llm: Any) -> None:
    """Hot sampling gives single bytes, halves of characters among them."""
    llm = make_llm(tiny(model), tiny(model), n_max=5)
    for seed in range(12):
        options = {"temperature": 30.0, "max_tokens": 40, "seed": seed, "ignore_eos": True}
        whole = llm.generate(PROMPTS[0], **options)
        pieces = list(llm.stream(PROMPTS[0], **options))
        assert "".join(p.text for p in pieces) == whole.text
        assert [t for p in pieces for t in p.tokens] == whole.tokens
        raw = b"".join(llm.model.vocab.token_bytes(t) for t in whole.tokens)
        assert whole.text == raw.decode("utf-8", "replace")
        whole.text.encode("utf-8")


@pytest.mark.parametrize("model", ["target-llama", "target-llama-spm"])
def test_b10_tokenize_anything(model: str, tiny: Any, run_child: Any) -> None:
    code = """
        import sys, pyspec
        with pyspec.Model(sys.argv[1]) as model:
            word = "é歪👩\\u200d👩\\u200d👧"
            data = word.encode()
            for i in range(len(data) + 1):
                for part in (data[:i], data[i:]):
                    try:
                        ids = model.handle.tokenize(part, False, False)
                    except pyspec.PyspecError:
                        continue
                    assert all(0 <= t < model.n_vocab for t in ids)
            odd = ("", " ", "\\x00", "a\\x00b", "\\ud800", "\\ufffd", "\\n\\r\\t")
            for text in (*odd, word, "x" * 100_000, "<|im_end|>"):
                ids = model.vocab.encode(text, add_special=False, parse_special=False)
                back = model.vocab.decode(ids)
                assert back == text.encode("utf-8", "replace").decode("utf-8"), (text[:20], back[:20])
            for i in range(len(data) + 1):
                ids = model.vocab.encode(word, add_special=False)
                half = b"".join(map(model.vocab.token_bytes, ids[:i]))
                assert model.vocab.decode(ids[:i]) == half.decode("utf-8", "replace")
            for bad in (b"bytes", None, 5):
                try:
                    model.vocab.encode(bad)
                except pyspec.ConfigError:
                    continue
                raise AssertionError(bad)
    """
    run_child(code, tiny(model))


# ---- B11: counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["target-llama", "draft-llama-zero"])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_b11_as_many_tokens_as_asked_for(k: int, draft: str, tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), tiny(draft), speculation="draft-simple", n_max=k)
    longest = llm.generate(PROMPTS[0], max_tokens=20, ignore_eos=True).tokens
    for n in range(1, 21):
        result = llm.generate(PROMPTS[0], max_tokens=n, ignore_eos=True)
        stats = result.stats
        assert result.tokens == longest[:n]
        assert result.usage.completion_tokens == stats.n_output == len(result.drafted) == n
        assert result.usage.prompt_tokens == len(result.prompt_tokens) == len(llm.tokenize(PROMPTS[0]))
        assert result.finish_reason == "length"
        assert 0 <= stats.n_accepted <= stats.n_draft
        # the first token comes with the prompt, the last one needs no draft
        assert stats.acceptance_rate == (None if n <= 2 else 0.0 if "zero" in draft else 1.0)
        drafter = stats.drafters[0] if stats.drafters else None
        assert (drafter.n_gen_tokens if drafter else 0) == stats.n_draft
    empty = llm.generate(PROMPTS[0], max_tokens=0)
    assert (empty.tokens, empty.text, empty.finish_reason) == ([], "", "length")
    with pytest.raises(ConfigError, match="max_tokens"):
        llm.generate(PROMPTS[0], max_tokens=-1)
