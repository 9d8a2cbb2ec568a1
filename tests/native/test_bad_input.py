"""Whatever is passed in: a typed error or the defined result; the process lives, the object stays usable or is closed.

Bad files are in ``tests/exactness/test_known_faults_process.py`` (B17, B18), prompt edges there too (B26).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairs import PROMPTS, SMALL, method_of

import pyspec
from pyspec.errors import (
    BackendNotFoundError,
    ConfigError,
    InvalidBatchError,
    ModelLoadError,
    UnsupportedError,
    VocabMismatchError,
)

# ---- paths -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["modèle-東京-👩.gguf", "with space ' and \".gguf", "a" * 200 + ".gguf", "n\\o%s{0}.gguf"]
)
def test_odd_file_names(name: str, tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(Path(tiny("draft-llama")).read_bytes())
    with pyspec.LLM(path, path, **SMALL) as llm:
        assert len(llm.generate(PROMPTS[0], max_tokens=4, ignore_eos=True).tokens) == 4
        assert llm.describe()["target"]["path"] == str(path)


@pytest.mark.parametrize(
    "path",
    ["x" * 5000, "/" + "d/" * 3000 + "m.gguf", "", "\x00.gguf", "missing.gguf", "~/missing.gguf", "http://h/m.gguf"],
)
def test_paths_that_lead_nowhere(path: str, tiny: Any) -> None:
    for make in (lambda: pyspec.Model(path), lambda: pyspec.LLM(path, **SMALL)):
        with pytest.raises((ModelLoadError, ConfigError)):
            make()
    with pytest.raises((ModelLoadError, ConfigError)) as caught:
        pyspec.LLM(tiny("draft-llama"), path or "missing.gguf", **SMALL)
    assert isinstance(caught.value, (OSError, ValueError))


def test_path_of_bytes_that_are_no_text(tiny: Any, tmp_path: Path) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("file names are bytes on Linux only")
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff.gguf"))
    path.write_bytes(Path(tiny("draft-llama")).read_bytes())
    with contextlib.suppress(ConfigError, ModelLoadError), pyspec.LLM(path, **SMALL) as llm:
        assert llm.generate(PROMPTS[0], max_tokens=2).tokens


def test_things_that_are_no_paths(tiny: Any, run_child: Any) -> None:
    """A number is not taken for a file descriptor."""
    code = """
        import os, sys, pyspec
        from pairs import SMALL
        from pyspec.drafters.gguf import read_header
        keep = os.open(sys.argv[1], os.O_RDONLY)
        for path in (None, keep, 1.5, b"m.gguf", ["m.gguf"], object(), {}):
            for make in (
                lambda: pyspec.Model(path),
                lambda: pyspec.LLM(path, **SMALL),
                lambda: path is None or pyspec.LLM(sys.argv[1], path, **SMALL),
            ):
                try:
                    made = make()
                except (pyspec.ConfigError, pyspec.ModelLoadError):
                    continue
                assert made is True, path
            os.fstat(keep)
    """
    run_child(code, tiny("draft-llama"))


# ---- drafts that do not match -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "draft", "word"),
    [
        ("target-llama", "draft-badvocab-type", "type"),
        ("target-llama", "draft-badvocab-bos", "bos"),
        ("target-llama", "draft-badvocab-addbos", "add_bos"),
        ("target-llama", "draft-badvocab-addeos", "add_eos"),
        ("target-llama-addeos", "draft-badvocab-eos", "eos"),
        ("target-llama", "draft-badvocab-size", "129"),
        ("target-llama", "draft-badvocab-text", "<|other|>"),
    ],
)
def test_vocabulary_that_does_not_fit(target: str, draft: str, word: str, tiny: Any) -> None:
    """Each for its own reason, with the first difference; nothing silently runs without a draft."""
    with pyspec.Model(tiny(target)) as model:
        for what in (tiny(target), model):
            with pytest.raises(VocabMismatchError) as caught:
                pyspec.LLM(what, tiny(draft), **SMALL)
            assert word in str(caught.value)
            assert isinstance(caught.value, ValueError)
        with pyspec.LLM(model, speculation="off", **SMALL) as llm:
            assert llm.generate(PROMPTS[0], max_tokens=2).tokens


def test_vocabulary_that_fits_after_all(tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama-addeos"), tiny("draft-badvocab-addeos"), speculation="draft-simple")
    assert llm.generate(PROMPTS[0], max_tokens=20, ignore_eos=True).stats.n_accepted > 10


def test_draft_that_proposes_unknown_tokens(tiny: Any, make_llm: Any) -> None:
    """A compatible draft with more tokens than the target: ids the target lacks never reach it."""
    off = make_llm(tiny("target-llama"), speculation="off")
    for n_seq in (1, 3):
        llm = make_llm(tiny("target-llama"), tiny("draft-okvocab-stray"), speculation="draft-simple", n_seq_max=n_seq)
        found = llm.generate(PROMPTS, max_tokens=60, ignore_eos=True)
        wanted = off.generate(PROMPTS, max_tokens=60, ignore_eos=True)
        assert [r.tokens for r in found] == [r.tokens for r in wanted]
        assert llm.stats.drafters[0].n_failed == 0
        assert llm.stats.n_accepted > 0


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("target-swa", "draft-gemma4-assistant"),
        ("target-llama", "draft-gemma4-assistant"),
        ("target-llama", "draft-mtp-only"),
        ("target-recurrent", "eagle3-own"),
    ],
)
def test_draft_for_another_target(target: str, draft: str, tiny: Any) -> None:
    with pytest.raises((UnsupportedError, ConfigError)) as caught:
        pyspec.LLM(tiny(target), tiny(draft), **SMALL)
    assert len(str(caught.value)) > 20


@pytest.mark.parametrize("kind", ["eagle3-own", "dflash-own", "dspark-own"])
def test_draft_for_another_hidden_size(kind: str, tiny: Any, tmp_path: Path) -> None:
    """The head's file says 64 where the target has 64; changed to 96 the sizes are named."""
    data = bytearray(Path(tiny(kind)).read_bytes())
    key = b"eagle3.target_hidden_size" if kind.startswith("eagle3") else b"dflash.embedding_length"
    at = data.index(key) + len(key) + 4
    assert data[at : at + 4] == (64).to_bytes(4, "little")
    data[at : at + 4] = (96).to_bytes(4, "little")
    path = tmp_path / "other-width.gguf"
    path.write_bytes(data)
    with pytest.raises((UnsupportedError, ConfigError, ModelLoadError)):
        pyspec.LLM(tiny("target-llama"), path, **SMALL)


def test_any_model_of_the_same_vocabulary_can_draft(tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), tiny("draft-swa"), speculation="draft-simple")
    result = llm.generate(PROMPTS[0], max_tokens=20, ignore_eos=True)
    assert result.stats.n_draft > 0


@pytest.mark.parametrize("layers", ["1-2-5", "1-2-9", "0-1-100"])
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_extract_layer_beyond_the_target(kind: str, layers: str, tiny: Any) -> None:
    with pytest.raises((UnsupportedError, ConfigError)) as caught:
        pyspec.LLM(tiny("target-llama"), tiny(kind, target_layers=layers), **SMALL)
    assert layers.split("-")[-1] in str(caught.value)


def test_extract_layer_of_a_shallower_target(tiny: Any) -> None:
    with pytest.raises((UnsupportedError, ConfigError)) as caught:
        pyspec.LLM(tiny("target-llama", layers=2), tiny("eagle3"), **SMALL)
    assert "3" in str(caught.value)


def test_reduced_draft_vocabulary_without_its_table(tiny: Any, tmp_path: Path) -> None:
    """The tensor d2t is named otherwise, so the draft's ids mean nothing."""
    data = Path(tiny("eagle3-d2t")).read_bytes()
    path = tmp_path / "no-d2t.gguf"
    path.write_bytes(data.replace(b"\x03\0\0\0\0\0\0\0d2t", b"\x03\0\0\0\0\0\0\0d2x"))
    assert path.read_bytes() != data
    with pytest.raises(pyspec.PyspecError) as caught:
        pyspec.LLM(tiny("target-llama"), path, **SMALL)
    assert isinstance(caught.value, (ModelLoadError, ConfigError, UnsupportedError))


@pytest.mark.parametrize("draft", ["dflash", "dspark"])
def test_n_max_above_the_block_size(draft: str, tiny: Any, make_llm: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A block of 8: the draft is clamped, with a warning."""
    off = make_llm(tiny("target-llama"), speculation="off")
    with caplog.at_level(logging.WARNING, "pyspec"):
        llm = make_llm(tiny("target-llama"), tiny(draft), speculation=f"draft-{draft}", n_max=20)
    assert "20" in caplog.text
    result = llm.generate(PROMPTS[0], max_tokens=60, ignore_eos=True)
    assert result.tokens == off.generate(PROMPTS[0], max_tokens=60, ignore_eos=True).tokens
    assert 1 < len(result.stats.drafted_per_pos) <= 8


def test_n_max_above_the_number_of_heads(tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-mtp-chain"), speculation="draft-mtp", n_max=9)
    result = llm.generate(PROMPTS[0], max_tokens=60, ignore_eos=True)
    assert len(result.stats.drafted_per_pos) == 3


@pytest.mark.parametrize("n_max", [4, 15, 16, 17, 40])
@pytest.mark.parametrize(("target", "draft"), [("target-hybrid", "target-hybrid"), ("target-mtp", None)])
def test_recurrent_target_with_long_drafts(
    target: str, draft: str | None, n_max: int, tiny: Any, make_llm: Any
) -> None:
    """More than the snapshots can take back: shorter drafts or checkpoints, never a wrong state."""
    off = make_llm(tiny(target), speculation="off")
    for options in ({}, {"n_rs_seq": 2}, {"n_ubatch": 8, "n_batch": 64}):
        llm = make_llm(
            tiny(target), tiny(draft) if draft else None, speculation=method_of(tiny, draft), n_max=n_max, **options
        )
        for prompt in PROMPTS[:2]:
            wanted = off.generate(prompt, max_tokens=50, ignore_eos=True).tokens
            assert llm.generate(prompt, max_tokens=50, ignore_eos=True).tokens == wanted


@pytest.mark.parametrize(
    ("target", "draft"),
    [("target-llama", "draft-llama"), ("target-llama", "eagle3"), ("target-llama", "dflash"), ("target-mtp", None)],
)
@pytest.mark.parametrize("at", [1, 4])
def test_draft_whose_decode_fails(
    target: str, draft: str | None, at: int, tiny: Any, make_llm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Drafting stops, the output stays right, the failure is counted and logged; the next request drafts again."""
    off = make_llm(tiny(target), speculation="off")
    llm = make_llm(tiny(target), tiny(draft) if draft else None, speculation=method_of(tiny, draft))
    context = llm._assembly.drafts[0]
    decode, n_calls = context.decode, [0]

    def fail(batch: Any) -> None:
        n_calls[0] += 1
        if n_calls[0] == at:
            raise InvalidBatchError("made to fail", func="llama_decode", code=-1, state="unchanged")
        decode(batch)

    context.decode = fail
    wanted = off.generate(PROMPTS[0], max_tokens=60, ignore_eos=True).tokens
    with caplog.at_level(logging.WARNING, "pyspec"):
        result = llm.generate(PROMPTS[0], max_tokens=60, ignore_eos=True)
    assert result.tokens == wanted
    assert llm.stats.drafters[0].n_failed == 1
    assert "made to fail" in caplog.text
    again = llm.generate(PROMPTS[0], max_tokens=60, ignore_eos=True)
    assert again.tokens == wanted
    assert again.stats.acceptance_rate > 0.4


def test_draft_given_with_speculation_off(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="off"):
        pyspec.LLM(tiny("target-llama"), tiny("draft-llama"), speculation="off", **SMALL)


def test_draft_given_to_a_method_that_needs_none(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="ngram-simple"):
        pyspec.LLM(tiny("target-llama"), tiny("draft-llama"), speculation="ngram-simple", **SMALL)


def test_draft_of_another_kind_than_the_method(tiny: Any) -> None:
    for method, draft in [("draft-eagle3", "draft-llama"), ("draft-simple", "eagle3"), ("draft-dflash", "eagle3")]:
        with pytest.raises((ConfigError, UnsupportedError), match=method):
            pyspec.LLM(tiny("target-llama"), tiny(draft), speculation=method, **SMALL)


@pytest.mark.parametrize("target", ["eagle3-own", "dflash-own", "draft-mtp-only", "draft-gemma4-assistant"])
def test_draft_file_as_target(target: str, tiny: Any, run_child: Any) -> None:
    """Files that libllama cannot run on their own, some of which end the process there."""
    code = """
        import sys, pyspec
        from pairs import SMALL
        for options in ({"speculation": "off"}, {}):
            try:
                with pyspec.LLM(sys.argv[1], **(SMALL | options)) as llm:
                    llm.generate("x", max_tokens=3)
            except pyspec.PyspecError as e:
                assert len(str(e)) > 20
            else:
                raise AssertionError("ran")
    """
    run_child(code, tiny(target))


# ---- options --------------------------------------------------------------------------------------

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"n_ctxx": 5}, "n_ctxx"),
    ({"draft_nothing": 5}, "draft_nothing"),
    ({"n_ctx": -1}, "n_ctx"),
    ({"n_ctx": "512"}, "n_ctx"),
    ({"n_seq_max": 0}, "n_seq_max"),
    ({"n_seq_max": 257}, "n_seq_max"),
    ({"n_batch": 0}, "n_batch"),
    ({"n_ubatch": 0}, "n_ubatch"),
    ({"n_batch": 16, "n_ubatch": 32}, "n_ubatch"),
    ({"cache_type_k": "q3"}, "cache_type_k"),
    ({"cache_type_v": "q8_0", "flash_attn": False}, "flash_attn"),
    ({"draft_cache_type_k": "q3"}, "cache_type_k"),
    ({"n_max": 0}, "n_max"),
    ({"n_max": 2000}, "n_max"),
    ({"n_min": 5}, "n_min"),
    ({"p_min": 2.0}, "p_min"),
    ({"size_n": 0}, "size_n"),
    ({"devices": ("no-such-device",)}, "no-such-device"),
    ({"devices": "cpu"}, "devices"),
    ({"split_mode": "diagonal"}, "split_mode"),
    ({"n_gpu_layers": "all"}, "n_gpu_layers"),
    ({"speculation": "draft-magic"}, "draft-magic"),
    ({"speculation": ["draft-simple", "draft-simple"]}, "draft-simple"),
    ({"speculation": ["auto", "ngram-simple"]}, "auto"),
    ({"speculation": 5}, "speculation"),
    ({"speculation": [5]}, "speculation"),
]


@pytest.mark.parametrize(("options", "word"), BAD_OPTIONS, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_bad_options(options: dict[str, Any], word: str, tiny: Any) -> None:
    with pytest.raises((ConfigError, BackendNotFoundError)) as caught:
        pyspec.LLM(tiny("target-llama"), tiny("draft-llama"), **(SMALL | options))
    assert word in str(caught.value)
    assert isinstance(caught.value, ConfigError) or "no-such-device" in word


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"top_p": 0}, "top_p"),
    ({"min_p": 2}, "min_p"),
    ({"seed": -1}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"no_such": 1}, "no_such"),
    ({"params": {"max_tokens": 5}}, "params"),
]


@pytest.mark.parametrize(("options", "word"), BAD_PARAMS, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_bad_sampling_params(options: dict[str, Any], word: str, tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("draft-llama"), speculation="off")
    for use in (llm.generate, llm.stream):
        with pytest.raises(ConfigError) as caught:
            use(PROMPTS[0], **options)
        assert word in str(caught.value)
    assert llm.generate(PROMPTS[0], max_tokens=2).tokens


BAD_PROMPTS: list[tuple[Any, str]] = [
    (None, "prompt"),
    (5, "prompt"),
    (b"bytes", "prompt"),
    ({"a": 1}, "prompt"),
    ([1.5, 2.5], "prompt"),
    ([True, False], "prompt"),
    ([None], "prompt"),
    (["a", 5], "prompt"),
    ([[["a"]]], "prompt"),
    (np.zeros(2, np.float32), "prompt"),
    ([512], "512"),
    ([-1], "-1"),
    ([2**40], str(2**40)),
    ([1, 2, 99999], "99999"),
    ([[1, 2], [3, 512]], "512"),
]


@pytest.mark.parametrize(("prompt", "word"), BAD_PROMPTS, ids=lambda v: repr(v)[:20])
def test_bad_prompts(prompt: Any, word: str, tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("draft-llama"), speculation="off")
    with pytest.raises(ConfigError) as caught:
        llm.generate(prompt, max_tokens=5)
    assert word in str(caught.value)
    assert llm._assembly.engine.idle
    assert llm.generate(PROMPTS[0], max_tokens=2).tokens


@pytest.mark.parametrize("ids", [[512], [-1], [2**40], [1.5], ["a"], [None], 5, None], ids=repr)
def test_detokenize_what_is_no_token(ids: Any, tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("draft-llama"), speculation="off")
    with pytest.raises(ConfigError):
        llm.detokenize(ids)


def test_k_larger_than_what_is_left(tiny: Any, make_llm: Any) -> None:
    """Near the end of the context and of the budget drafts get shorter."""
    off = make_llm(tiny("target-llama"), speculation="off", n_ctx=48)
    llm = make_llm(tiny("target-llama"), tiny("target-llama"), speculation="draft-simple", n_ctx=48, n_max=40)
    for n in (1, 2, 3, None):
        wanted = off.generate(PROMPTS[0], max_tokens=n, ignore_eos=True)
        found = llm.generate(PROMPTS[0], max_tokens=n, ignore_eos=True)
        assert (found.tokens, found.finish_reason) == (wanted.tokens, "length")
    assert found.usage.total_tokens == 49


@pytest.mark.parametrize("n_ctx", [1, 2, 3, 8])
def test_tiny_contexts(n_ctx: int, tiny: Any, make_llm: Any) -> None:
    """n_ctx smaller than prompt + 1: the error names both numbers; what fits runs."""
    llm = make_llm(tiny("target-llama"), tiny("draft-llama"), n_ctx=n_ctx)
    letters = llm.tokenize("a" * 20, add_special=False)
    with pytest.raises(ConfigError, match=rf"{n_ctx + 1}.*{n_ctx}"):
        llm.generate(letters[: n_ctx + 1])
    for n in range(1, n_ctx + 1):
        assert len(llm.generate(letters[:n], ignore_eos=True).tokens) == n_ctx - n + 1


# ---- loading ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [pyspec.Model, pyspec.LLM], ids=["Model", "LLM"])
def test_progress(of: Callable[..., Any], tiny: Any) -> None:
    """Ascending fractions; False stops the load, an exception goes through."""
    path = tiny("target-llama")
    seen: list[float] = []
    of(path, progress=seen.append).close()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    with pytest.raises(ModelLoadError):
        of(path, progress=lambda fraction: False)

    class OwnError(Exception):
        pass

    def fail(fraction: float) -> None:
        raise OwnError

    with pytest.raises(OwnError):
        of(path, progress=fail)


# ---- after fork -----------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_use_in_a_forked_child(tiny: Any, run_child: Any) -> None:
    """The child gets typed errors and exits cleanly; the parent goes on. A child may load its own."""
    code = """
        import os, sys, pyspec
        from pairs import SMALL, PROMPTS
        llm = pyspec.LLM(sys.argv[1], sys.argv[2], **SMALL)
        wanted = llm.generate(PROMPTS[0], max_tokens=10).tokens
        # long enough not to be over after one step, whatever is drafted
        stream = llm.stream(PROMPTS[0], max_tokens=80, ignore_eos=True)
        next(stream)
        pid = os.fork()
        if pid == 0:
            uses = (
                lambda: llm.generate(PROMPTS[0], max_tokens=10),
                lambda: llm.tokenize("a text that no cache holds"),
                lambda: next(stream),
            )
            for use in uses:
                try:
                    use()
                except pyspec.ClosedError as e:
                    assert "fork" in str(e), e
                else:
                    print("no error", flush=True)
            llm.close()
            with pyspec.LLM(sys.argv[1], sys.argv[2], **SMALL) as own:
                assert own.generate(PROMPTS[0], max_tokens=10).tokens == wanted
            sys.exit(0)
        _, status = os.waitpid(pid, 0)
        assert status == 0, status
        assert llm.generate(PROMPTS[0], max_tokens=10).tokens == wanted
        for _ in stream:
            pass
        llm.close()
    """
    assert run_child(code, tiny("target-llama"), tiny("draft-llama")) == ""
