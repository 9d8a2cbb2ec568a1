"""Options of the methods without a draft model on the command line, chains, and predictions; on a fake LLM."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from fake_cli import FakeLLM, run

from pyspec.config import SpeculationParams

LOOKUP = {
    "size_n": 3,
    "size_m": 11,
    "min_hits": 2,
    "n_match": 8,
    "mod_n_max": 16,
    "mod_n_min": 0,
    "lookup_cache_static": "static.bin",
    "lookup_cache_dynamic": "dynamic.bin",
    "suffix_n_max": 9,
    "suffix_min_match": 2,
    "suffix_factor": 1.5,
    "suffix_offset": 2.0,
    "suffix_p_min": 0.25,
    "suffix_rate": 0.0,
    "suffix_corpus_max": 5000,
    "suffix_corpus": "corpus.bin",
    "prediction_n_max": 8,
}


def test_options_of_methods_without_a_model(fake: type[FakeLLM]) -> None:
    args = [text for name, value in LOOKUP.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert run("generate", "m.gguf", "-q", "-p", "x", "--spec-type", "suffix", *args) == 0
    given = fake.made[0].options
    assert {name: given[name] for name in LOOKUP} == LOOKUP
    assert SpeculationParams(**LOOKUP)


def test_every_option_of_these_methods_has_a_flag() -> None:
    prefixes = ("size_", "min_hits", "n_match", "mod_", "lookup_", "suffix_", "prediction_")
    assert {name for name in SpeculationParams.names() if name.startswith(prefixes)} == set(LOOKUP)


@pytest.mark.parametrize("command", ["generate", "bench", "verify"])
def test_help_lists_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    shown = capsys.readouterr().out
    for name in LOOKUP:
        assert f"--{name.replace('_', '-')} " in shown
    assert "--lookup " not in shown


def test_bench_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    given: dict[str, Any] = {}

    def bench(*args: Any, options: dict[str, Any], **_: Any) -> None:
        given.update(options)
        raise Stop

    monkeypatch.setenv("PYSPEC_TRACEBACK", "1")
    monkeypatch.setattr("pyspec.bench.Bench", bench)
    with pytest.raises(Stop):
        run(
            "bench",
            "m.gguf",
            "--spec-type",
            "suffix",
            "--suffix-corpus",
            "c",
            "--size-n",
            "3",
            "--synth-rates",
            "0.9,0.5",
        )
    assert (given["suffix_corpus"], given["size_n"], given["synth_rates"]) == ("c", 3, (0.9, 0.5))
    assert "size_m" not in given


def test_prediction(fake: type[FakeLLM], tmp_path: Path) -> None:
    file = tmp_path / "old.py"
    file.write_text("a = 1\n", encoding="utf-8")
    for args in (["-p", "x"], ["-p", "x", "--chat"]):
        assert run("generate", "m.gguf", "-q", "--prediction", str(file), *args) == 0
        assert fake.made[-1].prediction == "a = 1"


def test_a_chain_is_shown_by_drafter(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "m.gguf", "--spec-type", "ngram-mod,draft-eagle3", "-p", "x") == 0
    shown = capsys.readouterr().err
    assert re.search(r"ngram-mod +0 tokens +accepted, of 0 in 0 drafts", shown)
    assert re.search(r"draft-eagle3 +3 tokens +accepted, of 4 in 2 drafts", shown)
