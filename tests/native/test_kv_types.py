"""Types of the K and V cache: each pair works or is refused in words; memory as libllama allocates it."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from pairs import PROMPTS, SMALL

import pyspec
from pyspec import backends
from pyspec.backends import _attention
from pyspec.backends._attention import Support, judge
from pyspec.config import CACHE_TYPES, ContextParams
from pyspec.errors import ConfigError, UnsupportedError

QUANTISED = [t for t in CACHE_TYPES if t not in ("f32", "f16", "bf16")]
TARGETS = ["target-llama", "target-swa", "target-hybrid", "target-gemma4", "target-mtp-chain"]


@pytest.mark.parametrize("flash_attn", ["auto", False], ids=["flash", "no-flash"])
@pytest.mark.parametrize("type_k", CACHE_TYPES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_pair_of_types(target: str, type_k: str, flash_attn: Any, tiny: Any, make_llm: Any) -> None:
    """Speculation gives the text of plain decoding with the same cache, or construction is refused."""
    with pyspec.Model(tiny(target)) as model:
        for type_v in CACHE_TYPES:
            options = {"cache_type_k": type_k, "cache_type_v": type_v, "flash_attn": flash_attn, "n_ctx": 128}
            if flash_attn is False and type_v in QUANTISED:
                with pytest.raises(ConfigError, match=f"cache_type_v='{type_v}' needs flash attention"):
                    make_llm(model, speculation="off", **options)
                continue
            tokens = []
            for speculation in ({"speculation": "off"}, {"speculation": "ngram-simple", "size_n": 1, "size_m": 3}):
                with pyspec.LLM(model, **(SMALL | options), **speculation) as llm:
                    described = llm.describe()["context"]
                    assert (described["cache_type_k"], described["cache_type_v"]) == (type_k, type_v)
                    tokens.append(llm.generate([5, 6, 7] * 4, max_tokens=12, ignore_eos=True).tokens)
            assert tokens[0] == tokens[1], (type_k, type_v)


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("target-llama", "draft-llama-half"),
        ("target-swa", "draft-swa-half"),
        ("target-llama", "eagle3-half"),
        ("target-llama", "dflash"),
        ("target-llama", "dspark"),
        ("target-mtp", None),
        ("target-mtp-chain-half", None),
    ],
)
@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("q4_0", "f16"), ("bf16", "iq4_nl"), ("q5_1", "q5_0")], ids=str)
def test_the_draft_apart(target: str, draft: str | None, types: tuple[str, str], tiny: Any, make_llm: Any) -> None:
    """The draft's cache has its own types, the target's keeps its own, and the text stays plain."""
    options = {"flash_attn": "auto", "cache_type_k": "q8_0"}
    method = {} if draft else {"speculation": "draft-mtp"}
    pair = tiny(target), tiny(draft) if draft else None
    wanted = make_llm(pair[0], speculation="off", **options).generate(PROMPTS[0], max_tokens=40, ignore_eos=True).tokens
    sizes = {}
    for kind in (("f16", "f16"), types):
        own = {"draft_cache_type_k": kind[0], "draft_cache_type_v": kind[1]}
        llm = make_llm(*pair, **options, **own, **method)
        found = llm.describe()
        assert (found["context"]["cache_type_k"], found["context"]["cache_type_v"]) == ("q8_0", "f16")
        (drafts,) = found["draft_contexts"]
        assert (drafts["cache_type_k"], drafts["cache_type_v"]) == kind
        result = llm.generate(PROMPTS[0], max_tokens=40, ignore_eos=True)
        assert result.tokens == wanted
        assert result.stats.n_accepted > 0
        assert llm.stats.drafters[0].n_failed == 0
        sizes[kind] = llm._assembly.drafts[0].memory_bytes()["context"]
    assert sizes[types] < sizes["f16", "f16"]


def test_names(tiny: Any) -> None:
    for option in ("cache_type_k", "cache_type_v", "draft_cache_type_k", "draft_cache_type_v"):
        with pytest.raises(ConfigError, match=r"cache_type_. must be one of f32, f16, .*; got 'q9'"):
            pyspec.LLM(tiny("target-llama"), tiny("draft-llama"), **{option: "q9"}, n_threads=1)


def test_quantised_v_of_the_draft_needs_flash_attention(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="cache_type_v='q8_0' needs flash attention"):
        pyspec.LLM(tiny("target-llama"), tiny("draft-llama"), **SMALL, draft_cache_type_v="q8_0")


@pytest.mark.parametrize("option", ["cache_type_k", "cache_type_v"])
def test_heads_that_are_no_whole_blocks(option: str, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """libllama ends the process for some of these."""
    monkeypatch.setattr(_attention, "_head_sizes", lambda model: {(48, 48)})
    with pytest.raises(UnsupportedError, match=rf"{option}='q8_0' stores blocks of 32 values, .* have 48"):
        pyspec.LLM(tiny("target-llama"), **{option: "q8_0"}, n_threads=1)


@pytest.mark.parametrize("type_v", CACHE_TYPES)
@pytest.mark.parametrize("type_k", CACHE_TYPES)
def test_the_cpu_has_all(type_k: str, type_v: str, tiny: Any) -> None:
    backends.load()
    with pyspec.Model(tiny("target-llama")) as model:
        params = ContextParams(cache_type_k=type_k, cache_type_v=type_v)
        found = _attention.support(model.handle, -1, params, 32, 32)
    assert found == Support(found.device, False, True, True, type_v not in QUANTISED)
    assert found.device == next(d.name for d in backends.devices() if d.kind == "cpu")


CPU = Support("CPU", False, True, True, True)


@pytest.mark.parametrize(
    ("gpu", "options", "warned"),
    [
        # flash attention forced by a quantised V, or asked for
        (
            Support("CUDA0", True, True, False, True),
            {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
            "flash attention",
        ),
        (Support("CUDA0", True, True, False, True), {"cache_type_k": "q8_0", "flash_attn": True}, "flash attention"),
        (Support("CUDA0", True, True, False, True), {"flash_attn": True}, "flash attention"),
        # auto: libllama goes without it, on the device
        (Support("CUDA0", True, True, False, True), {"cache_type_k": "q8_0"}, None),
        (Support("CUDA0", True, True, False, False), {"cache_type_k": "iq4_nl"}, " attention"),
        (Support("CUDA0", True, True, True, False), {"cache_type_k": "iq4_nl", "flash_attn": False}, " attention"),
        (Support("CUDA0", True, True, True, True), {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, None),
    ],
)
def test_a_warning_where_attention_leaves_the_gpu(gpu: Support, options: dict[str, Any], warned: str | None) -> None:
    warnings = judge([gpu, CPU], ContextParams(**options))
    assert len(warnings) == (warned is not None)
    for warning in warnings:
        assert f"device CUDA0 has no{'' if warned[0] == ' ' else ' '}{warned}" in warning
        assert f"cache_type_k={options.get('cache_type_k', 'f16')!r}" in warning
        assert "runs on the CPU" in warning


def test_refused_where_nothing_can() -> None:
    params = ContextParams(cache_type_k="iq4_nl", cache_type_v="iq4_nl")
    with pytest.raises(UnsupportedError, match=r"'iq4_nl'.*device Metal cannot write a cache"):
        judge([Support("Metal", True, False, True, True), CPU], params)
    with pytest.raises(UnsupportedError, match="neither device CUDA0 nor the CPU has flash attention"):
        judge([Support("CUDA0", True, True, False, False), Support("CPU", False, True, False, False)], params)


def test_the_warning_is_logged_at_construction(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A double in place of the question to the device: the CPU of this test plays a GPU without the kernel."""
    monkeypatch.setattr(_attention, "support", lambda *a: Support("CUDA0", True, True, False, True))
    monkeypatch.setattr(_attention, "judge", lambda devices, params: judge([*devices, CPU], params), raising=True)
    with caplog.at_level(logging.WARNING, "pyspec"):
        pyspec.LLM(tiny("target-llama"), speculation="off", n_threads=1, n_ctx=64).close()
        assert not caplog.records
        pyspec.LLM(tiny("target-llama"), speculation="off", n_threads=1, n_ctx=64, cache_type_v="q8_0").close()
    assert "device CUDA0 has no flash attention" in caplog.text


# ---- sizes ------------------------------------------------------------------------------------

CACHES = [
    ("target-llama", {}),
    ("target-swa", {}),
    ("target-swa", {"swa_full": True}),
    ("target-swa", {"n_ubatch": 4}),
    ("target-swa", {"n_seq_max": 3}),
    ("target-swa", {"n_seq_max": 3, "kv_unified": True}),
    ("target-gemma4", {"cache_type_k": "q8_0", "cache_type_v": "q4_0"}),
    ("target-mtp-chain", {"swa_full": True, "cache_type_k": "q5_1"}),
    ("target-hybrid", {"n_rs_seq": 3}),
    ("target-recurrent", {}),
]


@pytest.mark.parametrize(("target", "options"), CACHES, ids=str)
def test_sizes_without_allocation(target: str, options: dict[str, Any], tiny: Any) -> None:
    params = ContextParams(n_ctx=3072, n_threads=1, **options)
    with pyspec.Model(tiny(target)) as model:
        sizes = model.context_memory(params)
        with pyspec.Context(model, params) as context:
            assert sizes["context"] == context.memory_bytes()["context"] > 0


def inspect(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    pytest.importorskip("typer")
    from pyspec import cli

    code = cli.main(["inspect", *args])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("target", "draft", "args", "options"),
    [
        ("target-swa", None, [], {}),
        ("target-swa", "draft-swa", ["--draft-cache-type-k", "q8_0"], {"draft_cache_type_k": "q8_0"}),
        ("target-swa", None, ["--n-seq", "3", "--n-ubatch", "8"], {"n_seq_max": 3, "n_ubatch": 8}),
        ("target-gemma4", None, ["--cache-type-k", "q8_0"], {"cache_type_k": "q8_0"}),
        ("target-hybrid", "draft-llama", [], {}),
    ],
)  # fmt: skip
def test_inspect_says_what_an_llm_takes(
    target: str, draft: str | None, args: list[str], options: dict[str, Any], tiny: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    n_ctx, k = 2048, 5
    files = [tiny(target), *(["--draft", tiny(draft)] if draft else [])]
    code, out, _ = inspect(capsys, *files, "--ctx", str(n_ctx), "--k", str(k), "--json", *args)
    assert code == 0
    found = json.loads(out)
    cache = found["cache"]
    assert (cache["n_ctx"], cache["k"]) == (n_ctx, k)
    for name, swa_full in (("small_window_bytes", False), ("full_window_bytes", True)):
        more: dict[str, Any] = {"n_max": k, "n_seq_max": 1, "swa_full": swa_full} | options
        if draft is None:
            more |= {"speculation": "ngram-simple", "size_m": k}
        with pyspec.LLM(files[0], tiny(draft) if draft else None, n_ctx=n_ctx, n_threads=1, **more) as llm:
            assert cache[name] == llm._assembly.target.memory_bytes()["context"]
            if draft:
                (context,) = llm._assembly.drafts
                assert found["draft_cache"][name] == context.memory_bytes()["context"]
    if found["n_swa"]:
        assert cache["small_window_bytes"] < cache["full_window_bytes"]
        assert (cache["margin"], cache["fits"]) == (6, True)
        text = inspect(capsys, *files, "--ctx", str(n_ctx), "--k", str(k), *args)[1]
        assert f"{cache['small_window_bytes']:,} bytes" in text
        assert f"{cache['full_window_bytes']:,} bytes" in text
        assert "drafts of 5 need micro-batches of 6 rows" in text
    else:
        assert cache["margin"] is None


def test_inspect_margin_too_small(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for k, verdict in (("7", "n_ubatch = 8 is enough"), ("8", "n_ubatch = 8 is too small")):
        _, out, _ = inspect(capsys, tiny("target-swa"), "--ctx", "512", "--k", k, "--n-ubatch", "8")
        assert verdict in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ctx", "0"], "--ctx must be 1 or more"),
        (["--ctx", "64", "--k", "0"], "--k must be 1 or more"),
        (["--ctx", "64", "--cache-type-k", "q9"], "cache_type_k must be one of"),
        (["--ctx", "64", "--n-seq", "0"], "n_seq_max"),
    ],
)
def test_inspect_bad_sizes(args: list[str], message: str, tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = inspect(capsys, tiny("target-swa"), *args)
    assert (code, message in err) == (1, True), err


def test_a_model_without_attention_has_no_fault_with_these_options(tiny: Any) -> None:
    for t in CACHE_TYPES:
        pyspec.LLM(tiny("target-recurrent"), speculation="off", n_threads=1, n_ctx=64, cache_type_v=t).close()
