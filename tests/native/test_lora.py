"""LoRA adapters: what is refused, who owns them, how they are changed."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import rss_bytes
from pairs import PROMPTS, SMALL

import pyspec
from pyspec.errors import ClosedError, ConfigError, ModelLoadError, UnsupportedError

REFUSED = {
    "type": (ConfigError, "is no LoRA adapter"),
    "kind": (ConfigError, "is no LoRA adapter"),
    "lone": (ConfigError, "lacks blk"),
    "name": (ConfigError, "blk.99.attn_q.weight"),
    "integer": (ConfigError, "no weights"),
    "alora": (UnsupportedError, "activated LoRA"),
    "rank": (ConfigError, "does not fit"),
    "embd": (ConfigError, "token_embd.weight has shape"),
    "empty": (ConfigError, "holds no tensors"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_files_that_are_refused(fault: str, tiny: Any) -> None:
    error, text = REFUSED[fault]
    path = tiny("lora-llama", fault=fault)
    with pytest.raises(error, match=text) as info:
        pyspec.LLM(tiny("target-llama"), lora=path, **SMALL)
    assert Path(path).name in str(info.value)


def test_adapter_of_another_model(tiny: Any) -> None:
    for lora, text in (
        (tiny("lora-swa"), "is for gemma3 models"),
        (tiny("lora-llama", width=16), "does not fit"),
        (tiny("lora-llama", layers=9), "does not have"),
        (tiny("target-llama"), "is no LoRA adapter"),
    ):
        with pytest.raises(ConfigError, match=text):
            pyspec.LLM(tiny("target-llama"), lora=lora, **SMALL)


def test_output_matrix_that_is_the_embedding_too(tiny: Any, tmp_path: Path) -> None:
    """A target without output.weight uses its embeddings as head: an adapter for them would end the process."""
    gguf = pytest.importorskip("gguf")
    import numpy as np

    from pyspec import lora
    from pyspec.drafters.gguf import GgufHeader

    w = gguf.GGUFWriter(str(tmp_path / "embd.gguf"), "llama")
    w.add_type("adapter")
    w.add_string("adapter.type", "lora")
    w.add_tensor("token_embd.weight.lora_a", np.zeros((512, 4), np.float32))
    w.add_tensor("token_embd.weight.lora_b", np.zeros((64, 4), np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with pyspec.LLM(tiny("target-llama"), lora=tmp_path / "embd.gguf", speculation="off", **SMALL) as llm:
        assert llm.generate("a", max_tokens=5).tokens, "of a target that has both it is applied"
        tied = GgufHeader({"general.architecture": "llama"}, {"token_embd.weight": (64, 512)})
        with pytest.raises(UnsupportedError, match="output matrix"):
            lora.check(tmp_path / "embd.gguf", llm.model, tied)


@pytest.mark.parametrize("size", [0, 10, 100, 1000, 0.5, -1])
def test_truncated_file(size: float, tiny: Any, tmp_path: Path) -> None:
    data = Path(tiny("lora-llama")).read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(size * len(data)) if isinstance(size, float) else size])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
        pyspec.LLM(tiny("target-llama"), lora=cut, **SMALL)


def test_missing_file_and_folder(tiny: Any, tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelLoadError, match=path.name):
            pyspec.LLM(tiny("target-llama"), lora=path, **SMALL)


@pytest.mark.parametrize(
    "lora",
    [5, [5], ("x", float("nan")), [("x", float("inf"))], [("x", True)], [("x", "1")], [("x", 1, 2)], "", [("x", 1e9)]],
)
def test_wrong_arguments(lora: Any, tiny: Any) -> None:
    with pytest.raises(ConfigError, match="lora"):
        pyspec.LLM(tiny("target-llama"), lora=lora, **SMALL)


def test_a_refused_change_changes_nothing(tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"), lora=tiny("lora-llama"))
    wanted = llm.generate(PROMPTS[0], max_tokens=20).tokens
    for bad in (tiny("lora-swa"), "none.gguf", [tiny("lora-llama"), tiny("lora-llama", fault="rank")]):
        with pytest.raises((ConfigError, ModelLoadError)):
            llm.set_lora(bad)
        assert llm.generate(PROMPTS[0], max_tokens=20).tokens == wanted
    assert [(p.name, scale) for p, scale in llm.lora] == [("lora-llama.gguf", 1.0)]


def test_scales_add_up(tiny: Any, make_llm: Any) -> None:
    """The same file at half the scale twice is the file once; at scale 0 it is not there."""
    path = tiny("lora-llama")
    found = [
        make_llm(tiny("target-llama"), speculation="off", lora=lora).generate(PROMPTS[0], max_tokens=30).tokens
        for lora in (path, [(path, 0.5), (path, 0.5)], (path, 0.0), None)
    ]
    assert found[0] == found[1]
    assert found[2] == found[3] != found[0]


def test_a_running_generation_is_finished_first(tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"), lora=tiny("lora-llama"))
    wanted = llm.generate(PROMPTS[0], max_tokens=40, ignore_eos=True).tokens
    stream = llm.stream(PROMPTS[0], max_tokens=40, ignore_eos=True)
    found = list(next(stream).tokens)
    llm.set_lora(None)
    found += [t for piece in stream for t in piece.tokens]
    assert found == wanted


def test_two_objects_on_one_model(tiny: Any) -> None:
    """One with the adapter, one without, at the same time in two threads; the adapter comes and goes."""
    path, wanted, errors = tiny("lora-llama"), {}, []
    with pyspec.Model(tiny("target-llama")) as model:
        for lora in (None, path):
            with pyspec.LLM(model, speculation="off", lora=lora, **SMALL) as llm:
                wanted[lora] = llm.generate(PROMPTS[0], max_tokens=30).tokens

        def work(adapters: list[str | None]) -> None:
            try:
                with pyspec.LLM(model, speculation="off", **SMALL) as llm:
                    for lora in adapters:
                        llm.set_lora(lora)
                        assert llm.generate(PROMPTS[0], max_tokens=30).tokens == wanted[lora]
            except BaseException as e:
                errors.append(e)

        threads = [threading.Thread(target=work, args=(a,)) for a in ([path, None] * 10, [None] * 20, [path] * 20)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        assert not any(t.is_alive() for t in threads)
    assert not errors


@pytest.mark.usefixtures("no_leaks")
def test_adapters_are_freed(tiny: Any) -> None:
    """Memory stays level over loading, changing and failing; a closed object refuses."""
    big = tiny("lora-llama", rank=64)
    wrong = tiny("lora-llama", fault="rank")
    with pyspec.Model(tiny("target-llama")) as model:
        used = []
        for i in range(60):
            with pyspec.LLM(model, speculation="off", lora=[big, big], **SMALL) as llm:
                llm.generate("a", max_tokens=2)
                llm.set_lora(big)
                with pytest.raises(ConfigError):
                    llm.set_lora([big, wrong])
            if i in (20, 59):
                gc.collect()
                used.append(rss_bytes())
        assert used[1] - used[0] < 8 << 20, "one adapter has 1.4 MB"
        with pytest.raises(ClosedError):
            llm.set_lora(None)


def test_handle_closed_before_its_context(tiny: Any) -> None:
    """Closing an adapter takes it off; closing the model frees all of it in order."""
    from pyspec import backends

    model = pyspec.Model(tiny("target-llama"))
    context = pyspec.Context(model, pyspec.ContextParams(n_ctx=64, n_threads=1))
    one, two = (backends.LoraHandle(model.handle, tiny("lora-llama")) for _ in range(2))
    context.handle.set_loras([(one, 1.0), (two, 0.5)])
    with pytest.raises(ConfigError, match="twice"):
        context.handle.set_loras([(one, 1.0), (one, 0.5)])
    one.close()
    one.close()
    assert [lora for lora, _ in context.handle.loras] == [two]
    with pytest.raises(ClosedError):
        context.handle.set_loras([(one, 1.0)])
    with (
        pyspec.Model(tiny("target-llama")) as other,
        pyspec.Context(other, pyspec.ContextParams(n_ctx=64, n_threads=1)) as theirs,
        pytest.raises(ConfigError, match="another model object"),
    ):
        theirs.handle.set_loras([(two, 1.0)])
    model.close()
    assert two.closed
    assert context.closed


def test_command_line(tiny: Any, run_child: Any) -> None:
    code = """
        import sys
        from pyspec.cli import main
        sys.exit(main(sys.argv[1:]))
    """
    base = ["generate", tiny("target-llama"), "-p", PROMPTS[0], "-n", "20", "-t", "1", "-c", "256", "--json"]
    lora = tiny("lora-llama")

    def tokens(*more: str) -> Any:
        return json.loads(run_child(code, *base, *more, stderr=None))["tokens"]

    bare, full = tokens(), tokens("--lora", lora)
    assert full != bare
    assert tokens("--lora", f"{lora}:0") == bare
    assert tokens("--lora", f"{lora}:0.5", "--lora", f"{lora}:0.5") == full
    run_child(code, *base, "--lora", lora + ".none", exit_code=1, stderr=None)
