"""``pyspec bench`` and ``pyspec verify`` on tiny models, and that ``verify`` finds a planted fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import pyspec
from pyspec import cli
from pyspec.bench import Bench, make_settings
from pyspec.config import SamplingParams, SpeculationParams
from pyspec.drafters import Drafter, Plan, registry
from pyspec.prompts import Prompt
from pyspec.runtime import Batch
from pyspec.types import DraftRequest
from pyspec.verify import Verify, make_modes, measure_noise

#: Kernels whose result does not depend on the number of rows.
OPTIONS: dict[str, Any] = {"n_threads": 1, "flash_attn": False}
PROMPTS = [Prompt("fox", "The quick brown fox jumps over"), Prompt("sea", "When the morning comes, the river")]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"name": p.name, "text": p.text} for p in PROMPTS]), encoding="utf-8")
    return str(path)


class Forger(Drafter):
    """A double that corrupts rollback: some positions of the target's cache hold rows of other tokens afterwards."""

    name = "forger"
    begins_at: ClassVar[int] = 20

    def __init__(self, target: Any, draft: Any, params: SpeculationParams, n_seq: int) -> None:
        super().__init__(target, draft, params, n_seq)
        self._target = target

    @classmethod
    def plan(cls, target: Any, draft: Any, params: SpeculationParams, n_seq: int) -> Plan:
        return Plan(n_max=params.n_max)

    def draft(self, requests: list[DraftRequest]) -> None:
        for r in requests:
            n = 8
            if r.n_past > self.begins_at + n:
                self._target.handle.seq_rm(r.seq, r.n_past - n, -1)
                batch = Batch(n)
                batch.extend([r.tokens[0]] * n, r.n_past - n, r.seq)
                self._target.decode(batch)
            r.draft.extend([r.id_last] * min(2, r.n_max))


@pytest.fixture
def forger() -> Iterator[str]:
    registry.register(Forger)
    yield Forger.name
    registry._registered.pop(Forger.name)


# ---- bench -----------------------------------------------------------------------------


def test_bench_figures_are_those_of_the_generations(tiny: Any) -> None:
    settings = make_settings(["draft-simple", "suffix"], [2, 4], ["d"])
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    target, draft = tiny("target-llama"), tiny("draft-llama")
    with Bench(target, [draft], settings, PROMPTS, sampling, raw=True, options=OPTIONS) as bench:
        report = bench.run(2)
    json.dumps(report)
    assert [s["label"] for s in report["settings"]] == [s.label for s in settings]
    assert len(report["runs"]) == 2 * 2 * 5
    for k in (2, 4):
        found = next(s for s in report["settings"] if s["label"] == f"draft-simple k={k}")
        with pyspec.LLM(target, draft, speculation="draft-simple", n_max=k, n_ctx=256, **OPTIONS) as llm:
            stats = [llm.generate(p.text, sampling).stats for p in PROMPTS]
        assert found["generated"] == 2 * 2 * 24
        assert (found["DN"], found["DA"]) == (2 * sum(s.n_draft for s in stats), 2 * sum(s.n_accepted for s in stats))
        assert found["acceptance_rate"] > 0.8
        assert found["n_draft_max"] == k == len(found["acceptance_per_pos"])
        assert found["same_as_plain"] == found["n_runs"] == 4
        assert sum(found["time_share"].values()) == pytest.approx(1.0)
        assert found["kv_bytes"]["target"] > found["kv_bytes"]["draft"] > 0
    # every token's probability is the target's own, whoever proposed it
    logprobs = [s["LOGPROB"] for s in report["settings"]]
    assert logprobs == pytest.approx([logprobs[0]] * 5, abs=1e-3)
    assert logprobs[0] < -1


def test_bench_prediction_is_used_where_there_is_one(tiny: Any) -> None:
    text = "The quick brown fox jumps over"
    with pyspec.LLM(tiny("target-llama"), speculation="off", **OPTIONS) as llm:
        answer = llm.generate(text, max_tokens=24, ignore_eos=True).text
    prompts = [Prompt("with", text, answer), Prompt("without", text)]
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    settings = make_settings(["prediction"])
    with Bench(tiny("target-llama"), (), settings, prompts, sampling, raw=True, options=OPTIONS) as bench:
        runs = {(r["setting"], r["prompt"]): r for r in bench.run()["runs"]}
    assert runs["prediction", "with"]["n_accepted"] > 12
    assert runs["prediction", "without"]["n_draft"] == 0


def test_bench_repeats_do_not_learn_from_each_other(tiny: Any) -> None:
    sampling = SamplingParams(max_tokens=32, ignore_eos=True)
    settings = make_settings(["suffix"])
    with Bench(tiny("target-llama"), (), settings, PROMPTS, sampling, raw=True, options=OPTIONS) as bench:
        runs = [r for r in bench.run(2)["runs"] if r["setting"] == "suffix"]
    by_repeat = [[(r["n_draft"], r["n_accepted"]) for r in runs if r["repeat"] == i] for i in range(2)]
    assert by_repeat[0] == by_repeat[1]


def test_bench_command(tiny: Any, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    args = ["bench", tiny("target-llama"), "--draft", tiny("draft-llama"), "--spec-type", "draft-simple", "--k", "3"]
    args += ["--prompts", prompts, "-n", "16", "-t", "1", "--flash-attn", "off", "--json", str(out), "--exact"]
    assert cli.main([*args, "--ctx-sweep", "32,64", "--batch-cost", "1,4"]) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    for text in ("draft-simple k=3 exact", "PN", "PERPLEXITY", "rollback", "By tokens in the context", "One pass"):
        assert text in printed
    assert not any(line.endswith(" ") for line in printed.splitlines())
    report = json.loads(out.read_text(encoding="utf-8"))
    key = report["key"]
    assert key["pyspec"] == pyspec.__version__
    assert key["build"]["build"]["llama_commit"]
    assert len(key["model"]["sha256"]) == len(key["drafts"][0]["sha256"]) == 64
    assert key["model"]["quantisation"]
    assert [p["name"] for p in key["prompts"]] == ["fox", "sea"]
    assert (key["options"]["n_threads"], key["options"]["max_tokens"]) == (1, 16)
    assert [x["label"] for x in key["options"]["settings"]] == [x["label"] for x in report["settings"]]
    assert str(tmp_path) not in json.dumps(report), "a report can be published: no folder of this machine"
    assert [x["n_ctx_used"] for x in report["ctx_sweep"]] == [32] * 4 + [64] * 4
    assert [x["rows"] for x in report["batch_cost"]] == [1, 4]
    exact = {s["label"]: s for s in report["settings"]}
    assert exact["plain k=3 exact"]["LOGPROB"] == exact["draft-simple k=3 exact"]["LOGPROB"], "bit by bit"


def test_bench_compares_caches(tiny: Any, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command for both windows and two types of cache, each beside its own plain decoding."""
    out = tmp_path / "out.json"
    args = ["bench", tiny("target-swa"), "--draft", tiny("draft-swa-half"), "--spec-type", "draft-simple", "--k", "3"]
    args += ["--prompts", prompts, "-n", "60", "-c", "1024", "-t", "1", "--raw", "--ignore-eos", "--json", str(out)]
    args += ["--draft-cache-type-k", "q8_0", "--ctx-sweep", "64", "--swa-full", "both", "--kv", "f16,q8_0"]
    assert cli.main(args) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out.read_text(encoding="utf-8"))
    modes = ["f16", "q8_0", "swa_full f16", "swa_full q8_0"]
    labels = [f"{name}, {mode}" for mode in modes for name in ("plain", "draft-simple k=3")]
    assert [s["label"] for s in report["settings"]] == labels
    assert all(label in printed for label in labels)
    assert [x["label"] for x in report["ctx_sweep"]] == labels
    found = {s["label"]: s for s in report["settings"]}
    for mode in modes:
        plain, drafted = found[f"plain, {mode}"], found[f"draft-simple k=3, {mode}"]
        assert plain["base"] == drafted["base"] == f"plain, {mode}"
        assert drafted["same_as_plain"] == drafted["n_runs"] == 2
        assert plain["speedup"]["total"] == 1.0
        assert drafted["context"]["cache_type_k"] == mode.split()[-1]
        assert drafted["draft_contexts"][0]["cache_type_k"] == "q8_0"
        small = found[f"plain, {mode.split()[-1]}"]["kv_bytes"]["target"]
        assert (plain["kv_bytes"]["target"] > small) == ("swa_full" in mode)
    # what is drafted and accepted is the same with either window
    for kind in ("f16", "q8_0"):
        pair = [found[f"draft-simple k=3, {mode}"] for mode in (kind, f"swa_full {kind}")]
        assert pair[0]["acceptance_rate"] == pytest.approx(pair[1]["acceptance_rate"], rel=0.02)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--swa-full", "both"], 1, "no sliding window"),
        (["--prompts", "absent.txt"], 1, "cannot be read"),
        (["--prompts", "EMPTY"], 1, "holds no prompt"),
        (["--json", "absent/out.json"], 1, "cannot be written"),
        (["--plot", "absent/out.png"], 1, "cannot be written"),
        (["-c", "16"], 1, "n_ctx = 16"),
        (["--spec-type", "sufix"], 1, "did you mean 'suffix'"),
        (["--k", "0"], 2, "--k"),
        (["--k", "2,2"], 2, "--k"),
        (["--repeat", "0"], 2, "--repeat"),
        (["--batch-cost", "1,9999999"], 1, "this context allows"),
        (["--cache-type-k", "q9"], 1, "cache_type_k"),
    ],
)
def test_bench_bad_input(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, message: str
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    args = [str(tmp_path / "empty.txt") if a == "EMPTY" else a for a in args]
    found = cli.main(["bench", tiny("target-llama"), "-n", "2", "-t", "1", *args])
    err = capsys.readouterr().err
    assert (found, message in err) == (code, True), err


# ---- verify ----------------------------------------------------------------------------


def verify(tiny: Any, target: str, draft: str | None, types: list[str], **options: Any) -> list[Any]:
    drafts = [tiny(draft)] if draft else []
    settings = make_settings(types, options.pop("ks", [3]), ["d"] * len(drafts))
    with Verify(
        tiny(target), drafts, settings, PROMPTS, options.pop("modes", []), n_tokens=40, raw=True,
        options=OPTIONS | options.pop("more", {}), **options,
    ) as v:  # fmt: skip
        return v.run()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("target", "draft", "types"),
    [
        ("target-llama", "draft-llama-half", ["draft-simple", "suffix"]),
        ("target-llama", "eagle3", ["draft-eagle3"]),
        ("target-mtp-dense", None, ["draft-mtp"]),
    ],
)
def test_right_code_is_identical(tiny: Any, target: str, draft: str | None, types: list[str], exact: bool) -> None:
    outcomes = verify(tiny, target, draft, types, exact=exact)
    assert [(o.verdict, o.n_tokens) for o in outcomes] == [("identical", 40)] * (2 * len(types))
    assert all(o.acceptance[1] is not None for o in outcomes if "draft" in o.right)


def test_modes_are_compared(tiny: Any) -> None:
    outcomes = verify(
        tiny, "target-swa", "draft-swa", ["draft-simple"], modes=make_modes("both", "both"), more={"flash_attn": True}
    )
    pairs = [(o.left, o.right) for o in outcomes if o.prompt == "fox"]
    assert pairs == [
        ("plain, f16", "draft-simple k=3, f16"),
        ("plain, q8_0", "draft-simple k=3, q8_0"),
        ("plain, f16", "plain, q8_0"),
        ("plain, swa_full f16", "draft-simple k=3, swa_full f16"),
        ("plain, f16", "plain, swa_full f16"),
        ("plain, swa_full q8_0", "draft-simple k=3, swa_full q8_0"),
        ("plain, f16", "plain, swa_full q8_0"),
    ]
    for o in outcomes:
        other_type = o.left.endswith("f16") and o.right.endswith("q8_0")
        assert o.verdict in ("identical", "differs" if other_type else "tie")


@pytest.mark.parametrize("target", ["target-llama", "target-swa", "target-gemma4"])
def test_a_planted_fault_is_found(tiny: Any, forger: str, target: str) -> None:
    outcomes = verify(tiny, target, None, [forger])
    faults = [o for o in outcomes if o.verdict == "FAULT"]
    assert faults, [o.verdict for o in outcomes]
    d = faults[0].difference
    assert d.left_token != d.right_token
    assert d.left_logits[0] > d.left_logits[1], "each side took what it found best"
    assert d.right_logits[1] > d.right_logits[0]
    assert (d.left_rows, d.repeatable) == (1, True)
    assert d.gap > 10 * d.noise
    assert d.noise < 0.01, "these models' kernels hardly depend on the number of rows"


def test_verify_command_finds_the_fault(
    tiny: Any, forger: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    args = ["verify", tiny("target-llama"), "--prompts", prompts, "-n", "40", "-t", "1", "--raw", "--flash-attn", "off"]
    assert cli.main([*args, "--spec-type", f"suffix,{forger}", "--k", "3", "--json", str(out)]) == 1
    printed, err = capsys.readouterr()
    assert err == ""
    assert "FAULT: prompt" in printed
    assert "logit, 1-row pass" in printed
    assert "moved against each other by" in printed
    outcomes = json.loads(out.read_text(encoding="utf-8"))["outcomes"]
    assert {o["verdict"] for o in outcomes if o["right"].startswith("suffix")} == {"identical"}
    assert "FAULT" in {o["verdict"] for o in outcomes if o["right"].startswith("forger")}
    assert cli.main([*args, "--spec-type", "suffix"]) == 0
    assert "2 identical" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--swa-full", "maybe"], 2, "swa_full"),
        (["--kv", "q9"], 2, "cache_type_k"),
        (["--swa-full", "both"], 1, "no sliding window"),
        (["-n", "0"], 2, "-n"),
        (["-c", "8"], 1, "n_ctx = 8"),
        (["--prompts", "absent"], 1, "cannot be read"),
    ],
)
def test_verify_bad_input(
    tiny: Any, capsys: pytest.CaptureFixture[str], args: list[str], code: int, message: str
) -> None:
    found = cli.main(["verify", tiny("target-llama"), "-t", "1", *args])
    err = capsys.readouterr().err
    assert (found, message in err) == (code, True), err


def test_noise_of_the_same_shape_is_nothing(tiny: Any) -> None:
    with pyspec.Model(tiny("target-llama")) as model:
        text = model.vocab.encode("The quick brown fox jumps over the lazy dog while the river")
        params = pyspec.ContextParams(n_ctx=128, n_threads=1, flash_attn=False)
        assert measure_noise(model, (params, 1), (params, 1), text, 8) == 0.0
        assert measure_noise(model, (params, 4), (params, 4), text, 9) == 0.0
        q4 = params.override(cache_type_k="q4_0")
        assert measure_noise(model, (params, 1), (q4, 1), text, 8) > 1e-3


def test_bench_oracle(tiny: Any, prompts: str, tmp_path: Path) -> None:
    """Nothing beats hindsight: the share of a setting is below one, but for the noise of times on a busy machine."""
    out = tmp_path / "out.json"
    args = [str(tiny("target-llama")), "--draft", str(tiny("eagle3")), "--spec-type", "auto,suffix", "--oracle"]
    assert cli.main(["bench", *args, "--prompts", prompts, "-n", "32", "-t", "1", "--json", str(out)]) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    rows = {x["label"]: x for x in report["oracle"]}
    assert set(rows) == {"auto", "suffix"}
    assert rows["auto"]["drafters"] == ["suffix", "draft-eagle3"]
    for row in rows.values():
        assert 0 < row["share"] < 3
        assert set(row["by_prompt"]) == {p.name for p in PROMPTS}
        assert row["oracle_tg"] > 0
