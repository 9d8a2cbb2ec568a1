"""Drafts that cannot be used are errors at construction, with the reason and the values on both sides."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pairs import SMALL

import pyspec
from pyspec import ConfigError, ModelLoadError, UnsupportedError, VocabMismatchError
from pyspec.backends import _context_checks
from pyspec.drafters.choose import choose, usable


def open_llm(tiny: Any, target: str, draft: str | None, **options: Any) -> pyspec.LLM:
    path = draft if draft is None or "/" in draft else tiny(draft)
    return pyspec.LLM(tiny(target), draft=path, **{"n_ctx": 256, "n_threads": 1} | options)


def patched(tiny: Any, tmp_path: Path, name: str, old: bytes, new: bytes) -> str:
    """A copy of a tiny model with one name in its header changed (same length)."""
    data = Path(tiny(name)).read_bytes()
    assert len(old) == len(new)
    assert data.count(old) == 1
    path = tmp_path / f"{name}-patched.gguf"
    path.write_bytes(data.replace(old, new))
    return str(path)


@pytest.mark.parametrize(
    ("target", "draft", "options", "error", "message"),
    [
        # the target's architecture does not hand out what the draft reads
        ("target-swa", "eagle3", {}, UnsupportedError, r"layer inputs.*gemma3"),
        ("target-recurrent", "dflash", {}, UnsupportedError, r"layer inputs.*mamba"),
        ("target-mtp-chain", "dspark", {}, UnsupportedError, r"layer inputs.*step35"),
        ("target-llama", "eagle3-hybrid", {}, UnsupportedError, r"final hidden rows \(layer 4\).*llama"),
        ("target-llama", "draft-mtp-only", {}, UnsupportedError, r"hidden rows of llama"),
        ("target-llama", "draft-gemma4-assistant", {}, UnsupportedError, r"works with no other"),
        ("target-llama", None, {"speculation": "draft-mtp"}, UnsupportedError, r"hidden rows of llama"),
        ("target-hybrid", None, {"speculation": "draft-mtp"}, UnsupportedError, r"no multi-token-prediction blocks"),
        ("target-gemma4", None, {"speculation": "draft-mtp"}, UnsupportedError, r"a separate draft file"),
        # the method and the file do not go together
        ("target-llama", "eagle3", {"speculation": "draft-simple"}, UnsupportedError, r"made for draft-eagle3"),
        ("target-llama", "dspark", {"speculation": "draft-dflash"}, UnsupportedError, r"made for draft-dspark"),
        ("target-llama", "draft-llama", {"speculation": "draft-mtp"}, UnsupportedError, r"made for draft-simple"),
        ("target-hybrid", "draft-mtp-only", {"speculation": "draft-simple"}, UnsupportedError, r"made for draft-mtp"),
        ("target-llama", "draft-llama", {"speculation": "ngram-simple"}, ConfigError, r"does not use one"),
        ("target-llama", None, {"speculation": "draft-eagle3"}, ConfigError, r"needs a draft model"),
        ("target-llama", None, {"speculation": "draft-dflash"}, ConfigError, r"needs a draft model"),
        ("target-llama", None, {"speculation": "draft-simple"}, ConfigError, r"needs a draft model"),
        # options that the draft cannot obey
        ("target-llama", "dspark-noconf", {"p_min": 0.5}, ConfigError, r"no confidence head.*p_min=0"),
        (
            "target-llama",
            "dflash",
            {"speculation": "draft-dflash", "draft_n_batch": 3, "draft_n_ubatch": 3},
            ConfigError,
            r"a block of 4 rows.*n_ubatch=3",
        ),
        # vocabularies
        ("target-llama", "draft-badvocab-type", {}, VocabMismatchError, r"types differ: target 2, draft 1"),
        ("target-llama", "draft-badvocab-addbos", {}, VocabMismatchError, r"add_bos differs: target True, draft False"),
        ("target-llama", "draft-badvocab-bos", {}, VocabMismatchError, r"bos token differs"),
        ("target-llama", "draft-badvocab-addeos", {}, VocabMismatchError, r"add_eos differs"),
        ("target-llama-addeos", "draft-badvocab-eos", {}, VocabMismatchError, r"eos token differs"),
        ("target-llama", "draft-badvocab-size", {}, VocabMismatchError, r"sizes differ by 129: target 512, draft 641"),
        ("target-llama", "draft-badvocab-text", {}, VocabMismatchError, r"token \d+ differs: target '.*', draft '.*'"),
    ],
)
def test_refused_with_the_reason(
    tiny: Any, target: str, draft: str | None, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as e:
        open_llm(tiny, target, draft, **options)
    assert re.search(message, str(e.value), re.DOTALL)
    assert isinstance(e.value, pyspec.PyspecError)


def test_layers_beyond_the_target(tiny: Any) -> None:
    """Made for a deeper target."""
    for name in ("eagle3", "dflash"):
        path = tiny(name, target_layers="1-2-9")
        with pytest.raises(
            ConfigError, match=r"reads layer 9; the target .* has 4 layers: it is made for another target"
        ):
            open_llm(tiny, "target-llama", path)
    # a final hidden row means nothing to dflash
    with pytest.raises(ConfigError, match="reads layer 4"):
        open_llm(tiny, "target-hybrid", tiny("dflash", target_layers="1-2-4"))


def test_files_that_lack_something(tiny: Any, tmp_path: Path) -> None:
    no_map = patched(tiny, tmp_path, "eagle3-d2t", b"\x03\0\0\0\0\0\0\0d2t", b"\x03\0\0\0\0\0\0\0d2x")
    with pytest.raises(ModelLoadError, match=r"eagle3-d2t-patched\.gguf"):
        open_llm(tiny, "target-llama", no_map)
    no_mask = patched(tiny, tmp_path, "dflash", b"tokenizer.ggml.mask_token_id", b"tokenizer.ggml.mask_xoken_id")
    with pytest.raises(UnsupportedError, match="names no mask token"):
        open_llm(tiny, "target-llama", no_mask)
    no_block = patched(tiny, tmp_path, "dspark", b"dflash.block_size", b"dflash.block_xize")
    with pytest.raises(UnsupportedError, match="does not say its block size"):
        open_llm(tiny, "target-llama", no_block)


def test_target_of_another_width(tiny: Any) -> None:
    """Hidden sizes are compared before anything runs."""
    from types import SimpleNamespace

    from pyspec.config import SpeculationParams
    from pyspec.drafters import get

    for name, file in [("draft-eagle3", "eagle3"), ("draft-dflash", "dflash"), ("draft-mtp", "draft-mtp-only")]:
        mtp = name == "draft-mtp"
        with pyspec.Model(tiny(file), pyspec.ModelParams(load_mtp=mtp)) as draft:
            target: Any = SimpleNamespace(
                architecture="qwen35", n_embd=4096, n_embd_out=4096, n_layer=4, n_layer_nextn=0, vocab=draft.vocab,
                path=Path("big.gguf"), is_recurrent=False, is_hybrid=True, params=pyspec.ModelParams(),
            )  # fmt: skip
            with pytest.raises(ConfigError, match=r"64.*4096|4096.*64|64 values, the target has 4096"):
                get(name).plan(target, draft, SpeculationParams(), 1)


def test_models_loaded_without_their_blocks(tiny: Any) -> None:
    """Models that the caller has loaded: the blocks cannot be added later."""
    with (
        pyspec.Model(tiny("target-mtp")) as model,
        pytest.raises(ConfigError, match="load it with load_mtp=True"),
    ):
        pyspec.LLM(model, speculation="draft-mtp", n_ctx=256, n_threads=1)
    with pyspec.Model(tiny("target-mtp"), pyspec.ModelParams(load_mtp=True)) as model:
        assert choose(model, None) == "draft-mtp"
        with pyspec.LLM(model, speculation="draft-mtp", n_ctx=256, n_threads=1) as llm:
            assert llm.generate("The quick", max_tokens=20, ignore_eos=True).stats.n_accepted > 5


@pytest.mark.parametrize(
    ("target", "without"),
    [
        ("target-llama", {"draft-mtp"}),
        ("target-swa", {"draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark"}),
        ("target-mtp", set()),
        ("target-hybrid", {"draft-mtp"}),
        ("target-mtp-chain", {"draft-eagle3", "draft-dflash", "draft-dspark"}),
        ("target-gemma4", set()),
        ("target-recurrent", {"draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark"}),
    ],
)
def test_what_a_target_can_be_used_with(tiny: Any, target: str, without: set[str]) -> None:
    with pyspec.Model(tiny(target)) as model:
        assert {name for name, reason in usable(model).items() if reason is not None} == without


def test_recurrent_target_with_drafts_beyond_its_snapshots(tiny: Any) -> None:
    """n_max above n_rs_seq: checkpoints or shorter drafts, the same text."""
    with open_llm(tiny, "target-hybrid", None, speculation="off") as llm:
        plain = llm.generate("The quick brown fox", max_tokens=80, ignore_eos=True).tokens
    for options in ({"n_max": 12, "n_rs_seq": 2}, {"n_max": 20}, {"n_max": 5, "n_batch": 4, "n_ubatch": 4}):
        with open_llm(tiny, "target-hybrid", "eagle3-hybrid", speculation="draft-eagle3", **options) as llm:
            result = llm.generate("The quick brown fox", max_tokens=80, ignore_eos=True)
            assert result.tokens == plain
            assert result.stats.n_accepted > 20
            assert all(d.n_failed == 0 for d in result.stats.drafters)


@pytest.mark.parametrize(
    ("target", "draft", "what"),
    [
        ("target-hybrid", "eagle3-hybrid", "output matrix"),
        ("target-llama", "dflash", "output matrix"),
        ("target-gemma4", "draft-gemma4-assistant", "cache"),
        ("target-llama", "eagle3-own", None),
    ],
)
def test_a_draft_that_uses_what_lies_on_another_device_is_refused(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, target: str, draft: str, what: str | None
) -> None:
    """An assertion of ggml fails there. A stand-in says where the models lie, so no GPU is needed."""
    gpu = SimpleNamespace(name="CUDA1")
    monkeypatch.setattr(_context_checks, "devices_in_use", lambda params: [gpu] if params.devices is None else [])
    options = {**SMALL, "draft_devices": []}
    if what is None:
        pyspec.LLM(tiny(target), tiny(draft), **options).close()
        return
    with pytest.raises(ConfigError, match=f"no {what} of its own and uses its target's, which lies on CUDA1"):
        pyspec.LLM(tiny(target), tiny(draft), **options)
    with pyspec.LLM(tiny(target), tiny(draft), **SMALL) as llm:
        llm.generate("abc", max_tokens=3)
