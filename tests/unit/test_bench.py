"""Prompts, settings, figures and the picture of ``pyspec bench``, without a model."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from fakes import N_SPECIAL, FakeEvaluator, Rule
from looptest import MEMORY

from pyspec.bench import PLAIN, Run, limit_options, make_settings, summarise
from pyspec.config import SpeculationParams
from pyspec.errors import ConfigError
from pyspec.measure import batch_cost, file_sha256
from pyspec.prompts import SUITE, read_prompts, suite

# ---- prompts ---------------------------------------------------------------------------


def test_suite() -> None:
    prompts = suite()
    assert [p.name for p in prompts] == list(SUITE)
    assert all(50 < len(p.text) < 2500 for p in prompts)
    assert [p.name for p in prompts if p.prediction] == ["code-edit"]
    code = prompts[0]
    assert code.prediction is not None
    assert code.prediction.strip() in code.text, "the answer will mostly repeat the prompt's module"
    assert read_prompts("suite") == prompts


def test_part_of_the_suite() -> None:
    assert [p.name for p in read_prompts("suite:chat,code-edit")] == ["code-edit", "chat"]
    with pytest.raises(ConfigError, match="no prompt 'chats'; it has code-edit,"):
        read_prompts("suite:chats")


def test_prompts_of_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("one\ntwo\n\n---\n\n---\n three \n---\n", encoding="utf-8")
    assert [(p.name, p.text) for p in read_prompts(path)] == [("1", "one\ntwo"), ("2", " three ")]


def test_prompts_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("a\r\n---\ncafé\n".encode())))
    assert [p.text for p in read_prompts("-")] == ["a", "café"]


def test_prompts_of_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(["a", {"text": "b", "name": "x", "prediction": "c"}]), encoding="utf-8")
    assert [(p.name, p.text, p.prediction) for p in read_prompts(path)] == [("1", "a", None), ("x", "b", "c")]


def test_prompts_of_a_file_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('"a\u2028b"\n\n{"text": "b", "name": "x"}\r\n', encoding="utf-8")
    assert [(p.name, p.text) for p in read_prompts(path)] == [("1", "a\u2028b"), ("x", "b")]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", "\n", "holds no prompt"),
        ("p.jsonl", '"a"\n{"text"', "is not JSON"),
        ("p.txt", "", "holds no prompt"),
        ("p.txt", "\n---\n \n", "holds no prompt"),
        ("p.json", "[]", "holds no prompt"),
        ("p.json", "", "is not JSON"),
        ("p.json", '{"text": "a"}', "array, not a dict"),
        ("p.json", '["a", ""]', "prompt 2"),
        ("p.json", '[{"prompt": "a"}]', "prompt 1"),
        ("p.json", '[{"text": "a", "nam": "x"}]', "unknown key 'nam'"),
        ("p.json", '[{"text": "a", "name": 3}]', "'name' of prompt 1"),
        ("p.json", '[{"text": "a", "name": "2"}, "b"]', "two prompts are named '2'"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_prompts(path)


def test_unreadable_prompt_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "absent.txt")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_prompts(tmp_path / "latin")


# ---- settings --------------------------------------------------------------------------


def test_settings_are_all_combinations() -> None:
    settings = make_settings(["draft-simple", "suffix", "suffix+draft-simple"], [2, 4], ["a.gguf", "b.gguf"])
    assert [(s.label, s.draft) for s in settings] == [
        (PLAIN, None),
        ("draft-simple a.gguf k=2", 0),
        ("draft-simple a.gguf k=4", 0),
        ("draft-simple b.gguf k=2", 1),
        ("draft-simple b.gguf k=4", 1),
        ("suffix k=2", None),
        ("suffix k=4", None),
        ("suffix+draft-simple a.gguf k=2", 0),
        ("suffix+draft-simple a.gguf k=4", 0),
        ("suffix+draft-simple b.gguf k=2", 1),
        ("suffix+draft-simple b.gguf k=4", 1),
    ]
    assert settings[0].speculation == ("off",)
    assert settings[-1].speculation == ("suffix", "draft-simple")
    assert settings[-1].options == {"n_max": 4, "suffix_n_max": 4}
    assert make_settings(["auto"])[1].options == {}


def test_exact_settings_have_a_plain_one_of_each_shape() -> None:
    settings = make_settings(["suffix"], [2, 4], exact=True)
    exact = [s for s in settings if s.options.get("exact")]
    assert [s.label for s in exact] == ["plain k=2 exact", "plain k=4 exact", "suffix k=2 exact", "suffix k=4 exact"]
    assert [s.options["n_max"] for s in exact] == [2, 4, 2, 4]
    assert settings[: -len(exact)] == make_settings(["suffix"], [2, 4])


def test_k_limits_every_method() -> None:
    """The options exist, are valid at any k, and no method of the registry drafts more than k by its own option."""
    from pyspec.drafters import registry

    for k in (1, 2, 100, 1000):
        for name in registry.names():
            params = SpeculationParams(**limit_options([name], k))
            if name == "ngram-cache":  # its length is fixed in llama.cpp
                continue
            if not name.startswith("draft-"):
                plan = registry.get(name).plan(None, None, params, 1)  # type: ignore[arg-type]
                assert plan.n_max == k


@pytest.mark.parametrize(
    ("types", "message"),
    [(["off"], "always measured"), (["sufix"], "did you mean 'suffix'"), (["suffix", "suffix"], "given twice")],
)
def test_bad_settings(types: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_settings(types)


def test_drafts_are_not_dropped_in_silence() -> None:
    with pytest.raises(ConfigError, match="suffix, ngram-mod does not use one"):
        make_settings(["suffix", "ngram-mod"], drafts=["d"])


# ---- figures ---------------------------------------------------------------------------


def run(setting: str, prompt: str, seconds: float, repeat: int = 0, **changes: Any) -> Run:
    """10 output tokens in 5 passes; drafts of 3, of which the first is always accepted."""
    values: dict[str, Any] = {
        "n_prompt": 21,
        "n_prefill": 20,
        "n_output": 10,
        "n_first": 0,
        "n_pass": 5,
        "n_draft": 15,
        "n_accepted": 6,
        "drafted_per_pos": [5, 5, 5],
        "accepted_per_pos": [5, 1],
        "finish_reason": "length",
        "wall_us": int(seconds * 1e6) + 500_000 + 40_000,
        "prefill_us": 500_000,
        "draft_us": int(seconds * 2e5),
        "decode_us": int(seconds * 5e5),
        "process_us": int(seconds * 1e5),
        "verify_us": 0,
        "rollback_us": 0,
        "logprob_us": 40_000,
        "logprob": -10 * math.log(2),
    }
    return Run(setting=setting, prompt=prompt, repeat=repeat, **(values | changes))


def test_summary() -> None:
    base = [run(PLAIN, "a", 1.0), run(PLAIN, "b", 2.0)]
    runs = [run("x", "a", 0.5), run("x", "b", 2.0, first_difference=3)]
    found = summarise(runs, base)
    assert (found["PN"], found["generated"], found["DN"], found["DA"], found["n_pass"]) == (42, 20, 30, 12, 10)
    assert found["PP"] == pytest.approx(40.0)
    assert found["TG"] == pytest.approx(20 / 2.5), "neither the prompt nor taking log-probabilities counts"
    assert found["LOGPROB"] == pytest.approx(-20 * math.log(2))
    assert found["PERPLEXITY"] == pytest.approx(2.0)
    assert found["acceptance_rate"] == pytest.approx(0.4)
    assert found["acceptance_per_pos"] == pytest.approx([1.0, 0.2, 0.0])
    assert found["mean_accepted_length"] == pytest.approx(2.0)
    assert found["time_share"] == pytest.approx(
        {"draft": 0.2, "decode": 0.5, "process": 0.1, "verify": 0.0, "rollback": 0.0, "other": 0.2}
    )
    assert (found["same_as_plain"], found["n_runs"]) == (1, 2)
    assert found["drafters"] == {}
    speedup = found["speedup"]
    assert speedup["by_prompt"] == pytest.approx({"a": 2.0, "b": 1.0})
    assert (speedup["total"], speedup["median"]) == pytest.approx((3.0 / 2.5, 1.5))
    assert (speedup["min"], speedup["p25"], speedup["p75"], speedup["max"]) == pytest.approx((1.0, 1.25, 1.75, 2.0))


def test_what_came_with_the_prompt_is_not_counted_as_generated_since() -> None:
    """In the times it is not, so it must not be in what is divided by them."""
    runs = [run("x", "a", 0.5, n_first=1), run("x", "b", 2.0, n_first=1)]
    found = summarise(runs, [run(PLAIN, "a", 1.0, n_first=1), run(PLAIN, "b", 2.0)])
    assert (found["generated"], found["n_pass"]) == (20, 10)
    assert found["TG"] == pytest.approx(18 / 2.5)
    assert found["mean_accepted_length"] == pytest.approx(1.8)
    assert found["speedup"]["by_prompt"] == pytest.approx({"a": 2.0, "b": 0.9})
    assert found["speedup"]["total"] == pytest.approx(18 / 2.5 * 3.0 / 19)
    assert found["PERPLEXITY"] == pytest.approx(2.0), "of all tokens"


def test_answers_of_one_token_have_no_speed_to_compare() -> None:
    """They came with the prompt, on both sides or on one."""
    nothing = {"n_output": 1, "n_first": 1, "n_pass": 0}
    base = [run(PLAIN, "a", 0.0, **nothing), run(PLAIN, "b", 1.0)]
    found = summarise([run("x", "a", 0.0, **nothing), run("x", "b", 0.5)], base)
    assert found["speedup"]["by_prompt"] == pytest.approx({"a": 1.0, "b": 2.0})
    assert summarise(base[:1], base[:1])["speedup"]["total"] == 1.0
    assert summarise(base[:1], base[:1])["TG"] == 0.0
    assert summarise([run("x", "a", 1.0)], base[:1])["speedup"]["median"] == 1.0


def test_counts_by_drafter() -> None:
    runs = [
        run("x", "a", 1.0, drafters={"ngram-mod": [1, 8, 8], "draft-eagle3": [4, 12, 5]}),
        run("x", "b", 1.0, drafters={"ngram-mod": [0, 0, 0], "draft-eagle3": [5, 15, 6]}),
    ]
    found = summarise(runs, [run(PLAIN, p, 1.0) for p in "ab"])["drafters"]
    assert found == {
        "ngram-mod": {"drafts": 1, "DN": 8, "DA": 8},
        "draft-eagle3": {"drafts": 9, "DN": 27, "DA": 11},
    }


def test_plain_decoding_shows_its_own_spread() -> None:
    base = [run(PLAIN, "a", seconds, r) for r, seconds in enumerate([1.0, 2.0, 4.0])]
    assert summarise(base, base)["speedup"]["by_prompt"] == pytest.approx({"a": 1.0})
    assert summarise(base, base)["speedup"]["max"] == pytest.approx(2.0)
    assert summarise(base, base)["speedup"]["min"] == pytest.approx(0.5)


def test_summary_without_drafts_or_output() -> None:
    empty = run(
        "x", "a", 0.0, n_output=0, n_pass=0, n_draft=0, n_accepted=0, drafted_per_pos=[], accepted_per_pos=[],
        logprob=0.0, prefill_us=0, n_prefill=0, wall_us=0,
    )  # fmt: skip
    found = summarise([empty], [run(PLAIN, "a", 1.0)])
    for name in ("PP", "PERPLEXITY", "acceptance_rate", "mean_accepted_length"):
        assert found[name] is None
    assert found["acceptance_per_pos"] == []


# ---- the cost of passes ----------------------------------------------------------------


@pytest.mark.parametrize("memory", [m for m in MEMORY if m != "bounded-small"])
def test_every_pass_starts_from_the_same_positions(memory: str) -> None:
    target: Any = FakeEvaluator(Rule(), **{"n_ubatch": 16, **MEMORY[memory]})
    target.model = type("M", (), {"vocab": type("V", (), {"bos": N_SPECIAL})})
    rows = [1, 2] if memory == "window-tight" else [1, 2, 4]
    found = batch_cost(target, rows, n_past=20, repeat=3)
    assert not target.violations
    assert [x["rows"] for x in found] == rows
    assert found[0]["relative"] == 1.0
    assert all(0 < x["p25_us"] <= x["median_us"] <= x["p75_us"] for x in found)
    measured = [p[0] for p in target.passes if p[0][2]]
    assert len(measured) == 4 * len(rows), "one round that does not count, and three"
    assert {begin for begin, _, _ in measured} == {20}


@pytest.mark.parametrize("rows", [[0, 1], [1, 65], [1, 40]])
def test_passes_that_do_not_fit(rows: list[int]) -> None:
    target: Any = FakeEvaluator(Rule(), n_ctx_seq=50)
    target.model = type("M", (), {"vocab": type("V", (), {"bos": N_SPECIAL})})
    with pytest.raises(ConfigError, match="this context allows 1 to 30"):
        batch_cost(target, rows, n_past=20)


def test_file_hash(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert file_sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


# ---- the picture -----------------------------------------------------------------------


def report(n_settings: int, **more: Any) -> dict[str, Any]:
    base = [run(PLAIN, p, 1.0) for p in "ab"]
    labels = [PLAIN, *(f"method-{i} k=4" for i in range(1, n_settings))]
    settings = [
        {"label": label, **summarise([run(label, p, 0.5 + i) for i, p in enumerate("ab")], base)} for label in labels
    ]
    key = {
        "model": {"file": "m.gguf"},
        "machine": {"cpu": "a processor", "machine": "x"},
        "options": {"n_threads": 2, "repeat": 1},
        "prompts": [1, 2],
    }
    return {"key": key, "settings": settings, **more}


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from pyspec.cli.plot import draw

    sweep = [
        {"n_ctx_used": n, "label": label, **summarise([run(label, "a", 1.0)], [run(PLAIN, "a", 1.0)])}
        for n in (100, 200)
        for label in (PLAIN, "method-1 k=4")
    ]
    cost = [{"rows": n, "median_us": 1e3 * n, "p25_us": 9e2 * n, "p75_us": 2e3 * n, "relative": n} for n in (1, 4)]
    for i, found in enumerate([report(2), report(12), report(2, ctx_sweep=sweep, batch_cost=cost)]):
        path = tmp_path / f"{i}.png"
        draw(found, str(path))
        assert path.read_bytes()[:4] == b"\x89PNG"
        assert path.stat().st_size > 10_000
