"""``pyspec lookup`` on a tiny model's tokens: files as llama.cpp writes them, and errors in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from pyspec import LLM, ModelParams, cli
from pyspec._lookup import LookupCache
from pyspec.drafters.ngram_cache import read_cache, write_cache
from pyspec.runtime import Model

TEXT = "the model predicts the next token, the model predicts the last token. " * 6

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*args: Any) -> tuple[int, str, str]:
        code = cli.main([str(a) for a in ("lookup", *args)])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT + "\n", encoding="utf-8")
    return path


def test_create_merge_stats(call: Call, tiny: Any, text: Path, tmp_path: Path) -> None:
    model = tiny("target-llama")
    static, both = tmp_path / "static.bin", tmp_path / "both.bin"
    code, out, err = call("create", model, static, "-f", text)
    assert (code, out) == (0, "")
    assert "n-grams of" in err
    with Model(model, ModelParams(vocab_only=True)) as loaded:
        tokens = loaded.vocab.encode(TEXT)
        n_vocab = loaded.vocab.n_tokens
    expected: dict[tuple[int, ...], dict[int, int]] = {}
    for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False):
        counts = expected.setdefault((a, b), {})
        counts[c] = counts.get(c, 0) + 1
    assert dict(read_cache(static, n_vocab).items()) == expected

    assert call("merge", static, static, both)[0] == 0
    assert dict(read_cache(both).items()) == {k: {t: 2 * n for t, n in v.items()} for k, v in expected.items()}

    code, out, _ = call("stats", static, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["n_grams"] == len(expected)
    assert found["n_grams_by_length"] == {"2": len(expected)}
    assert found["n_counted"] == len(tokens) - 2
    assert "n_accepted" not in found
    code, out, _ = call("stats", static)
    assert code == 0
    assert "n_grams_by_length" in out
    assert f"{len(expected)} of 2" in out


def test_stats_drafts_through_a_text(call: Call, tiny: Any, text: Path, tmp_path: Path) -> None:
    model, static = tiny("target-llama"), tmp_path / "static.bin"
    call("create", model, static, "-f", text)
    rates = []
    for args in ((static,), (static, "--n-draft", 1), (static, "--dynamic", static), (static, "-c", 16)):
        code, out, _ = call("stats", *args, "--model", model, "-f", text, "--json")
        found = json.loads(out)
        assert code == 0
        assert found["n_tokens"] == len(TEXT) or found["n_tokens"] > 50
        assert 0 < found["n_accepted"] <= found["n_drafted"]
        assert found["tokens_per_pass"] > 1
        rates.append(found["tokens_per_pass"])
    assert rates[1] < rates[0]
    empty = tmp_path / "empty.bin"
    write_cache(empty, LookupCache())
    nothing = tmp_path / "nothing.txt"
    nothing.write_text("", encoding="utf-8")
    code, out, _ = call("stats", empty, "--model", model, "-f", nothing)
    assert code == 0
    assert "acceptance_rate" in out


def test_generate_with_the_files(call: Call, tiny: Any, text: Path, tmp_path: Path, make_llm: Any) -> None:
    """The text is the target's own, and the dynamic file is there after the close."""
    model, static, dynamic = tiny("target-llama"), tmp_path / "static.bin", tmp_path / "dynamic.bin"
    call("create", model, static, "-f", text)
    options = {"n_threads": 1, "n_ctx": 512, "flash_attn": False}
    with LLM(model, speculation="off", **options) as llm:
        plain = llm.generate(TEXT[:70], max_tokens=60, ignore_eos=True).tokens
    for _ in range(2):
        with LLM(
            model, speculation="ngram-cache", lookup_cache_static=static, lookup_cache_dynamic=dynamic, **options
        ) as llm:
            assert llm.generate(TEXT[:70], max_tokens=60, ignore_eos=True).tokens == plain
            assert llm.stats.n_draft > 0
    assert len(read_cache(dynamic)) > 10


def test_errors(call: Call, tiny: Any, text: Path, tmp_path: Path) -> None:
    model, static = tiny("target-llama"), tmp_path / "static.bin"
    code, _, err = call("create", model, static)
    assert code == 2
    assert "no text" in err
    assert call("create", model, static, "-f", text)[0] == 0
    code, _, err = call("create", model, static, "-f", text)
    assert code == 1
    assert "--force" in err
    assert call("create", model, static, "-f", text, "--force")[0] == 0
    code, _, err = call("create", tmp_path / "no.gguf", tmp_path / "x", "-f", text)
    assert code == 1
    assert "no.gguf" in err
    code, _, err = call("create", model, tmp_path / "x", "-f", tmp_path / "no.txt")
    assert code == 1
    assert "no.txt" in err
    assert not (tmp_path / "x").exists()

    damaged = tmp_path / "damaged.bin"
    damaged.write_bytes(static.read_bytes()[:-2])
    for args in (("stats", damaged), ("merge", static, damaged, tmp_path / "x"), ("stats", tmp_path / "none")):
        code, out, err = call(*args)
        assert (code, out) == (1, "")
        assert err.count("\n") == 1
        assert "lookup cache" in err
    assert not (tmp_path / "x").exists()
    assert call("merge", static)[0] == 2
    assert call("stats", static, "--model", model)[0] == 2
    assert call("stats", static, "--dynamic", static)[0] == 2

    other = tmp_path / "other.bin"
    cache = LookupCache.from_bytes(b"".join(n.to_bytes(4, "little") for n in (1, 2, 2**32 - 1, 2**32 - 1, 1, 10**6, 1)))
    write_cache(other, cache)
    code, _, err = call("stats", other, "--model", model, "-f", text)
    assert code == 1
    assert "another model" in err
