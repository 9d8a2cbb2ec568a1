"""Level 0: every check of config.py with its message, CPU quota, and the counters of stats.py."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from pyspec import config
from pyspec.config import (
    CACHE_TYPES,
    ContextParams,
    ModelParams,
    SamplingParams,
    SpeculationParams,
    default_n_threads,
)
from pyspec.errors import ConfigError, PyspecError
from pyspec.stats import DrafterStats, PhaseTimes, SpecStats
from pyspec.types import DraftRequest, Requirements, RollbackKind

NAN, INF = math.nan, math.inf

#: (class, wrong options, what the message must hold besides the option's name)
WRONG: list[tuple[type, dict[str, Any], list[str]]] = [
    (ModelParams, {"n_gpu_layers": "all"}, ["integer", "'all'"]),
    (ModelParams, {"n_gpu_layers": True}, ["integer"]),
    (ModelParams, {"n_gpu_layers": 2**31}, ["2147483648"]),
    (ModelParams, {"main_gpu": -1}, [">= 0", "-1"]),
    (ModelParams, {"main_gpu": 1.0}, ["integer"]),
    (ModelParams, {"split_mode": "rows"}, ["'layer'", "'rows'"]),
    (ModelParams, {"devices": "cpu"}, ["sequence", "'cpu'"]),
    (ModelParams, {"devices": (1,)}, ["sequence"]),
    (ContextParams, {"n_ctx": -1}, ["between 0", "-1"]),
    (ContextParams, {"n_ctx": 2**31}, ["2147483647"]),
    (ContextParams, {"n_ctx": 512.0}, ["integer"]),
    (ContextParams, {"n_ctx": None}, ["integer", "None"]),
    (ContextParams, {"n_batch": 0}, ["between 1", "got 0"]),
    (ContextParams, {"n_batch": -8}, ["-8"]),
    (ContextParams, {"n_ubatch": 0}, ["between 1", "got 0"]),
    (ContextParams, {"n_ubatch": 64, "n_batch": 32}, ["n_batch", "64", "32"]),
    (ContextParams, {"n_seq_max": 0}, ["between 1 and 256", "got 0"]),
    (ContextParams, {"n_seq_max": 257}, ["between 1 and 256", "257"]),
    (ContextParams, {"n_batch": 4, "n_ubatch": 4, "n_seq_max": 5}, ["n_batch", "4", "5"]),
    (ContextParams, {"n_rs_seq": -1}, [">= 0"]),
    (ContextParams, {"n_ubatch": 4, "n_rs_seq": 3}, ["n_rs_seq + 2", "5"]),
    (ContextParams, {"n_outputs_max": -1}, [">= 0"]),
    (ContextParams, {"n_threads": 0}, ["between 1 and 512", "got 0"]),
    (ContextParams, {"n_threads": -1}, ["-1"]),
    (ContextParams, {"n_threads": 513}, ["513"]),
    (ContextParams, {"n_threads": 2.0}, ["integer"]),
    (ContextParams, {"n_threads_batch": 0}, ["between 1 and 512"]),
    (ContextParams, {"ctx_type": "draft"}, ["'mtp'", "'draft'"]),
    (ContextParams, {"flash_attn": "maybe"}, ["'auto'", "'maybe'"]),
    (ContextParams, {"flash_attn": 1.5}, ["1.5"]),
    (ContextParams, {"flash_attn": None}, ["None"]),
    (ContextParams, {"cache_type_k": "q4"}, ["q4_0", "'q4'"]),
    (ContextParams, {"cache_type_k": 8}, ["q8_0", "8"]),
    (ContextParams, {"cache_type_v": "fp8"}, ["q8_0", "'fp8'"]),
    (ContextParams, {"cache_type_v": "q8_0", "flash_attn": False}, ["flash_attn", "q8_0"]),
    (ContextParams, {"cache_type_v": "q8_0", "flash_attn": "off"}, ["flash_attn", "q8_0"]),
    (SamplingParams, {"max_tokens": -1}, [">= 0", "-1"]),
    (SamplingParams, {"max_tokens": 1.5}, ["integer", "1.5"]),
    (SamplingParams, {"max_tokens": True}, ["integer"]),
    (SamplingParams, {"temperature": -0.1}, ["[0", "-0.1"]),
    (SamplingParams, {"temperature": NAN}, ["number", "nan"]),
    (SamplingParams, {"temperature": INF}, ["finite"]),
    (SamplingParams, {"temperature": "hot"}, ["number", "'hot'"]),
    (SamplingParams, {"temperature": None}, ["number", "None"]),
    (SamplingParams, {"top_k": -1}, [">= 0"]),
    (SamplingParams, {"top_k": 2.0}, ["integer"]),
    (SamplingParams, {"top_p": 0.0}, ["(0", "1]"]),
    (SamplingParams, {"top_p": 1.1}, ["1.1"]),
    (SamplingParams, {"top_p": NAN}, ["number"]),
    (SamplingParams, {"min_p": -0.1}, ["[0, 1]"]),
    (SamplingParams, {"min_p": 2}, ["[0, 1]"]),
    (SamplingParams, {"seed": -1}, ["between 0", "-1"]),
    (SamplingParams, {"seed": 2**64}, ["18446744073709551615"]),
    (SamplingParams, {"seed": 0.5}, ["integer"]),
    (SamplingParams, {"stop": ""}, ["non-empty"]),
    (SamplingParams, {"stop": ("a", "")}, ["non-empty"]),
    (SamplingParams, {"stop": ("a", b"b")}, ["strings"]),
    (SpeculationParams, {"n_max": 0}, ["between 1 and 1024", "got 0"]),
    (SpeculationParams, {"n_max": 1025}, ["1025"]),
    (SpeculationParams, {"n_max": -3}, ["-3"]),
    (SpeculationParams, {"n_max": 3.0}, ["integer"]),
    (SpeculationParams, {"n_min": -1}, [">= 0"]),
    (SpeculationParams, {"n_min": 4, "n_max": 3}, ["n_max", "4", "3"]),
    (SpeculationParams, {"p_min": -0.5}, ["[0, 1]"]),
    (SpeculationParams, {"p_min": 1.5}, ["[0, 1]"]),
    (SpeculationParams, {"p_min": NAN}, ["number"]),
    (SpeculationParams, {"size_n": 0}, ["between 1"]),
    (SpeculationParams, {"size_n": 2000}, ["2000"]),
    (SpeculationParams, {"size_m": 0}, ["between 1"]),
    (SpeculationParams, {"min_hits": 0}, [">= 1"]),
    (SpeculationParams, {"n_match": 0}, ["between 1"]),
    (SpeculationParams, {"mod_n_max": 0}, ["between 1"]),
    (SpeculationParams, {"mod_n_min": -1}, ["between 0"]),
    (SpeculationParams, {"mod_n_min": 9, "mod_n_max": 8}, ["mod_n_max", "9", "8"]),
    (SpeculationParams, {"suffix_n_max": 0}, ["between 1"]),
    (SpeculationParams, {"suffix_min_match": 0}, ["between 1"]),
    (SpeculationParams, {"suffix_factor": -1}, ["[0"]),
    (SpeculationParams, {"suffix_offset": NAN}, ["number"]),
    (SpeculationParams, {"suffix_p_min": 0.0}, ["(0, 1]"]),
    (SpeculationParams, {"suffix_corpus_max": -1}, ["between 0"]),
    (SpeculationParams, {"suffix_corpus_max": 1}, ["at least 2"]),
    (SpeculationParams, {"suffix_corpus": ""}, ["file name"]),
]


@pytest.mark.parametrize(
    ("cls", "options", "holds"), WRONG, ids=lambda v: str(v) if isinstance(v, dict) else getattr(v, "__name__", "")
)
def test_wrong_option_is_named(cls: type, options: dict[str, Any], holds: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        cls(**options)
    message = str(caught.value)
    assert next(iter(options)) in message
    for text in holds:
        assert text in message
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, PyspecError)


#: Values at the edge that are allowed.
RIGHT: list[tuple[type, dict[str, Any]]] = [
    (ModelParams, {"n_gpu_layers": 0, "devices": (), "tensor_split": (1, 2)}),
    (ModelParams, {"n_gpu_layers": -(2**31)}),
    (ContextParams, {"n_ctx": 0, "n_batch": 1, "n_ubatch": 1}),
    (ContextParams, {"n_ubatch": 5, "n_rs_seq": 3}),
    (ContextParams, {"n_batch": 256, "n_ubatch": 1, "n_seq_max": 256}),
    (ContextParams, {"n_threads": 1, "n_threads_batch": 512}),
    (ContextParams, {"cache_type_v": "q8_0", "flash_attn": "auto"}),
    (ContextParams, {"cache_type_v": "bf16", "flash_attn": False}),
    (ContextParams, {"cache_type_k": "q8_0", "flash_attn": False}),
    (SamplingParams, {"max_tokens": 0, "temperature": 0, "top_p": 1, "min_p": 1, "seed": 2**64 - 1}),
    (SpeculationParams, {"n_max": 1, "n_min": 1, "p_min": 1.0, "size_n": 1, "size_m": 1, "min_hits": 1}),
    (SpeculationParams, {"n_max": 1024, "n_min": 0, "p_min": 0}),
]


@pytest.mark.parametrize(("cls", "options"), RIGHT, ids=str)
def test_edge_values_are_allowed(cls: type, options: dict[str, Any]) -> None:
    made = cls(**options)
    for name, value in options.items():
        assert getattr(made, name) == value


def test_upstream_defaults() -> None:
    context, speculation = ContextParams(), SpeculationParams()
    assert (context.n_batch, context.n_ubatch, context.n_seq_max) == (2048, 512, 1)
    assert (context.cache_type_k, context.cache_type_v, context.flash_attn) == ("f16", "f16", "auto")
    assert (speculation.n_max, speculation.n_min, speculation.p_min) == (3, 0, 0.0)
    assert (speculation.size_n, speculation.size_m, speculation.min_hits) == (12, 48, 1)
    assert SamplingParams().temperature == 0.0


@pytest.mark.parametrize(
    ("value", "code"), [("auto", -1), (False, 0), ("off", 0), (True, 1), ("on", 1)], ids=lambda v: repr(v)
)
def test_flash_attn_code(value: Any, code: int) -> None:
    assert ContextParams(flash_attn=value).flash_attn_code == code


def test_cache_type_numbers() -> None:
    """The numbers of ggml.h's enum ggml_type."""
    assert CACHE_TYPES["f32"] == 0
    assert CACHE_TYPES["q4_0"] == 2
    assert CACHE_TYPES["q8_0"] == 8
    assert CACHE_TYPES["iq4_nl"] == 20
    assert CACHE_TYPES["bf16"] == 30
    for name in CACHE_TYPES:
        assert ContextParams(cache_type_k=name, cache_type_v=name).cache_type_k == name


def test_sequences_are_normalised() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert ModelParams(devices=["cpu"]).devices == ("cpu",)
    assert ModelParams(tensor_split=[1, 3]).tensor_split == (1.0, 3.0)


@pytest.mark.parametrize("cls", [ModelParams, ContextParams, SamplingParams, SpeculationParams])
def test_override(cls: type) -> None:
    made = cls()
    assert made.override() == made
    with pytest.raises(ConfigError, match="unknown option 'n_ctxx'") as caught:
        made.override(n_ctxx=1)
    for field in dataclasses.fields(cls):
        assert field.name in str(caught.value)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(cls)[0].name, 1)
    assert not hasattr(made, "__dict__")


def test_override_checks_and_keeps_the_rest() -> None:
    made = ContextParams(n_ctx=64, n_batch=16, n_ubatch=8)
    changed = made.override(n_ubatch=16)
    assert (changed.n_ctx, changed.n_batch, changed.n_ubatch, made.n_ubatch) == (64, 16, 16, 8)
    with pytest.raises(ConfigError, match="n_ubatch"):
        made.override(n_ubatch=17)


# ---- CPUs this process may use ---------------------------------------------------------


def cpus(root: Path, own: str = "0::/\n", **files: str) -> int | None:
    """What a made-up cgroup tree says; ``__`` in a name is a folder, ``_dot_`` a dot."""
    for name, text in files.items():
        path = root / "cgroup" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "self").write_text(own)
    return config._cgroup_cpus(str(root / "cgroup"), str(root / "self"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("max 100000\n", None),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("100000 100000\n", 1),
        ("10000 100000\n", 1),
        ("6400000 100000\n", 64),
        ("nonsense\n", None),
        ("", None),
        ("100000 0\n", None),
        ("-1 100000\n", None),
    ],
)
def test_cgroup_v2_quota(tmp_path: Path, text: str, wanted: int | None) -> None:
    assert cpus(tmp_path, cpu_dot_max=text) == wanted


@pytest.mark.parametrize(
    ("quota", "period", "wanted"),
    [("-1", "100000", None), ("250000", "100000", 3), ("50000", "100000", 1), ("0", "100000", None), ("x", "1", None)],
)
def test_cgroup_v1_quota(tmp_path: Path, quota: str, period: str, wanted: int | None) -> None:
    files = {"cpu__cpu_dot_cfs_quota_us": f"{quota}\n", "cpu__cpu_dot_cfs_period_us": f"{period}\n"}
    assert cpus(tmp_path, "4:cpu,cpuacct:/\n", **files) == wanted


def test_quota_of_a_parent_group_counts(tmp_path: Path) -> None:
    """Without a cgroup namespace the quota is somewhere on the way down to this process's group."""
    own = "0::/system.slice/job.service/inner\n"
    assert cpus(tmp_path, own, system_dot_slice__job_dot_service__cpu_dot_max="300000 100000\n") == 3
    assert cpus(tmp_path, own, system_dot_slice__cpu_dot_max="200000 100000\n") == 2
    assert cpus(tmp_path, own, system_dot_slice__cpu_dot_max="max 100000\n") == 3
    # another job's quota does not
    assert cpus(tmp_path, "0::/other\n", other__cpu_dot_max="max 100000\n") is None


def test_quota_of_a_parent_group_counts_v1(tmp_path: Path) -> None:
    own = "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/ignored\n"
    files = {"cpu__docker__x__cpu_dot_cfs_quota_us": "150000", "cpu__docker__x__cpu_dot_cfs_period_us": "100000"}
    assert cpus(tmp_path, own, **files) == 2


@pytest.mark.parametrize("own", ["", "nonsense\n", "0::/gone\n", "0::/../../x\n"])
def test_no_cgroup(tmp_path: Path, own: str) -> None:
    assert cpus(tmp_path, own) is None


@pytest.mark.parametrize(("affinity", "quota", "wanted"), [(8, None, 8), (8, 2, 2), (2, 8, 2), (1, 1, 1)])
def test_default_n_threads(monkeypatch: pytest.MonkeyPatch, affinity: int, quota: int | None, wanted: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
    monkeypatch.setattr(config, "_cgroup_cpus", lambda: quota)
    assert default_n_threads() == wanted


@pytest.mark.parametrize(("count", "wanted"), [(6, 6), (None, 1)])
def test_default_n_threads_without_affinity(monkeypatch: pytest.MonkeyPatch, count: int | None, wanted: int) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    monkeypatch.setattr(config, "_cgroup_cpus", lambda: None)
    assert default_n_threads() == wanted


def test_default_n_threads_here() -> None:
    assert 1 <= default_n_threads() <= (os.cpu_count() or 1)


# ---- counters --------------------------------------------------------------------------


def test_nothing_drafted_has_no_rate() -> None:
    """B11: no ZeroDivisionError, no invented number."""
    stats = SpecStats()
    assert stats.acceptance_rate is None
    assert stats.mean_accepted_length is None
    assert stats.tokens_per_s is None
    assert stats.prompt_tokens_per_s is None
    assert DrafterStats("x").acceptance_rate is None
    stats.count(0, 0)
    assert stats.acceptance_rate is None
    assert stats.n_pass == 1
    assert stats.mean_accepted_length == 0.0


def test_counts() -> None:
    """Four drafts: worked out by hand."""
    stats, drafter = SpecStats(), DrafterStats("draft-simple")
    for n_draft, n_accepted in [(3, 3), (3, 0), (2, 1), (4, 2)]:
        stats.count(n_draft, n_accepted)
        drafter.count(n_draft, n_accepted)
    assert (stats.n_pass, stats.n_draft, stats.n_accepted) == (4, 12, 6)
    assert stats.drafted_per_pos == drafter.n_gen_tokens_per_pos == [4, 4, 3, 1]
    assert stats.accepted_per_pos == drafter.n_acc_tokens_per_pos == [3, 2, 1]
    assert (drafter.n_gen_drafts, drafter.n_acc_drafts) == (4, 3)
    assert (drafter.n_gen_tokens, drafter.n_acc_tokens) == (12, 6)
    assert stats.acceptance_rate == drafter.acceptance_rate == 0.5
    stats.n_output = 10
    assert stats.mean_accepted_length == 2.5


def test_speeds() -> None:
    stats = SpecStats(n_prompt=100, n_output=50)
    stats.times = PhaseTimes(prefill_us=200_000, draft_us=1, decode_us=2, process_us=3, verify_us=4, rollback_us=99_990)
    assert stats.times.step_us == 100_000
    assert stats.tokens_per_s == pytest.approx(500)
    assert stats.prompt_tokens_per_s == pytest.approx(500)


def test_to_dict_is_json() -> None:
    stats = SpecStats(n_output=4, drafters=[DrafterStats("ngram-simple")])
    stats.count(3, 2)
    plain = json.loads(json.dumps(stats.to_dict()))
    assert plain["acceptance_rate"] == pytest.approx(2 / 3)
    assert plain["mean_accepted_length"] == 4.0
    assert plain["tokens_per_s"] is None
    assert plain["times"]["decode_us"] == 0
    assert plain["drafters"][0]["name"] == "ngram-simple"
    assert plain["accepted_per_pos"] == [1, 1]


# ---- types -----------------------------------------------------------------------------


def test_requests_do_not_share_lists() -> None:
    first, second = (DraftRequest(seq=0, n_past=0, id_last=1, tokens=[1], n_max=3) for _ in range(2))
    first.draft.append(5)
    first.extra["x"] = 1
    assert second.draft == []
    assert second.extra == {}


def test_requirements_and_kinds() -> None:
    assert Requirements() == Requirements((), False, False, 0)
    assert {k.value for k in RollbackKind} == {"none", "partial", "bounded", "full"}
