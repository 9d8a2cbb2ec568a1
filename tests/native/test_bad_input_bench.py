"""Bad input of issue 4: windows and draft lengths, cache types, prompt files, outputs that cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pairs import PROMPTS, SMALL

import pyspec
from pyspec.errors import ConfigError

LONG = PROMPTS[5] * 3


def plain(make_llm: Any, model: str, prompt: Any, n: int) -> list[int]:
    tokens: list[int] = make_llm(model, speculation="off").generate(prompt, max_tokens=n, ignore_eos=True).tokens
    return tokens


@pytest.mark.parametrize(("k", "n_ubatch"), [(1, 1), (3, 1), (3, 3), (8, 4), (32, 32)])
def test_k_plus_one_above_n_ubatch(k: int, n_ubatch: int, tiny: Any, make_llm: Any) -> None:
    """A window cache would forget rows: refused. Plain attention splits the pass, and the text is plain."""
    options = {"n_max": k, "n_ubatch": n_ubatch, "n_batch": 64}
    with pytest.raises(
        ConfigError, match=rf"n_ubatch={n_ubatch} is too small for draft-simple with n_max={k}.* {k + 1}"
    ):
        make_llm(tiny("target-swa"), tiny("draft-swa"), **options)
    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"), **options)
    found = llm.generate(PROMPTS[0], max_tokens=60, ignore_eos=True)
    assert found.tokens == plain(make_llm, tiny("target-llama"), PROMPTS[0], 60)
    assert found.stats.n_draft > 0
    with pytest.raises(ConfigError, match="exact=True"):
        make_llm(tiny("target-llama"), tiny("draft-llama"), exact=True, **options)


def test_the_message_names_the_option_of_the_method(tiny: Any, make_llm: Any) -> None:
    for name, option in {
        "ngram-simple": "size_m", "ngram-map-k": "size_m", "ngram-map-k4v": "size_m", "ngram-mod": "mod_n_max",
        "suffix": "suffix_n_max", "prediction": "prediction_n_max", "ngram-cache": "n_max",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=rf"too small for {name} with {option}=\d+"):
            make_llm(tiny("target-swa"), speculation=name, n_ubatch=4)
        # the default has room for the defaults
        make_llm(tiny("target-swa"), speculation=name)


def test_the_message_names_the_draft(tiny: Any, make_llm: Any) -> None:
    with pytest.raises(ConfigError, match=r"^draft_n_ubatch=3 is too small .*draft-swa.* or use draft_swa_full=True"):
        make_llm(tiny("target-llama"), tiny("draft-swa"), draft_n_ubatch=3)
    make_llm(tiny("target-llama"), tiny("draft-swa"), draft_n_ubatch=3, draft_swa_full=True)
    make_llm(tiny("target-llama"), tiny("draft-swa"), draft_n_ubatch=4)


@pytest.mark.parametrize("k", [31, 32, 33, 100])
def test_a_window_smaller_than_k(k: int, tiny: Any, make_llm: Any) -> None:
    """Window 32: rows of one draft do not all see each other, and all can be taken back."""
    llm = make_llm(tiny("target-swa"), tiny("draft-swa-half"), n_max=k, n_ubatch=k + 1, n_batch=256)
    found = llm.generate(PROMPTS[0], max_tokens=150, ignore_eos=True)
    assert found.tokens == plain(make_llm, tiny("target-swa"), PROMPTS[0], 150)
    assert found.stats.drafted_per_pos[k - 2] > 0


@pytest.mark.parametrize("n_ubatch", [2, 4, 7])
def test_a_prompt_longer_than_the_window_in_tiny_chunks(n_ubatch: int, tiny: Any, make_llm: Any) -> None:
    model = tiny("target-swa")
    llm = make_llm(model, tiny("draft-swa-half"), n_max=n_ubatch - 1, n_ubatch=n_ubatch)
    assert len(llm.tokenize(LONG)) > 3 * 32
    found = llm.generate(LONG, max_tokens=80, ignore_eos=True)
    assert found.tokens == plain(make_llm, model, LONG, 80)
    assert 0 < found.stats.n_accepted < found.stats.n_draft


def test_unknown_type_names(tiny: Any) -> None:
    for name in ("q9", "F16", "", "q8_0 ", 8, None):
        for option in ("cache_type_k", "cache_type_v", "draft_cache_type_k", "draft_cache_type_v"):
            with pytest.raises(ConfigError, match=r"cache_type_. must be one of f32, "):
                pyspec.LLM(tiny("target-llama"), tiny("draft-llama"), **{**SMALL, option: name})


def test_quantised_v_without_flash_attention(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="cache_type_v='q8_0' needs flash attention; flash_attn is off"):
        pyspec.LLM(tiny("target-llama"), flash_attn=False, cache_type_v="q8_0", n_threads=1)


# ---- the command line ---------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    pytest.importorskip("typer")
    from pyspec import cli

    code = cli.main([*args, "-t", "1", "-n", "2"])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "verify"])
@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--prompts", "EMPTY"], 1, "holds no prompt"),
        (["-c", "16"], 1, "the context n_ctx = 16: raise it"),
        (["--json", "/dev/full/x.json"], 1, "cannot be written"),
        (["--json", "FOLDER"], 1, "cannot be written"),
        (["--kv", "q9"], 2, "cache_type_k must be one of"),
        (["--kv", "f16,f16"], 2, "twice"),
        (["--kv", "f16", "--cache-type-k", "f16"], 2, "not both"),
        (["--cache-type-v", "q8_0", "--flash-attn", "off"], 1, "needs flash attention"),
        (["--draft-cache-type-k", "q9"], 1, "cache_type_k must be one of"),
        (["--swa-full", "maybe"], 2, "swa_full must be"),
        (["--n-ubatch", "0"], 1, "n_ubatch must be between"),
        (["--n-ubatch", "3", "--k", "3"], 1, "n_ubatch=3 is too small for ngram-simple with size_m=3"),
    ],
    ids=str,
)
def test_bench_and_verify(
    command: str, args: list[str], code: int, message: str, tiny: Any, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "empty.txt").write_text(" \n---\n\n")
    args = [{"EMPTY": str(tmp_path / "empty.txt"), "FOLDER": str(tmp_path)}.get(a, a) for a in args]
    found, err = run(capsys, command, tiny("target-swa"), "--spec-type", "ngram-simple", "--raw", *args)
    assert (found, message in err) == (code, True), err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--draft-cache-type-v", "q9"], 1, "cache_type_v must be one of"),
        (["--cache-type-v", "q4_0", "--flash-attn", "off"], 1, "needs flash attention"),
        (["--flash-attn", "maybe"], 2, "--flash-attn must be"),
        (["--n-ubatch", "2"], 1, "n_ubatch=2 is too small for draft-simple with n_max=3"),
        (["-c", "4"], 1, "the context n_ctx = 4: raise n_ctx"),
    ],
    ids=str,
)
def test_generate(args: list[str], code: int, message: str, tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found, err = run(
        capsys,
        "generate",
        tiny("target-swa"),
        "--draft",
        tiny("draft-swa"),
        "--spec-type",
        "draft-simple",
        "-p",
        PROMPTS[0],
        *args,
    )
    assert (found, message in err) == (code, True), err


def test_generate_with_types_of_the_draft(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--draft-cache-type-k", "q8_0", "--draft-cache-type-v", "q8_0", "--cache-type-k", "q8_0", "--swa-full"]
    found, err = run(capsys, "generate", tiny("target-swa"), "--draft", tiny("draft-swa"), "-p", PROMPTS[0], *args)
    assert found == 0, err
