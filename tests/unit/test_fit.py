"""What fits: the sizes come from a stand-in that counts layers and rows, the arithmetic and the words are ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyspec import fit
from pyspec.backends import Device, MemoryUse
from pyspec.config import ContextParams, ModelParams
from pyspec.errors import DoesNotFitError, ModelLoadError

MIB = 2**20
N_LAYER = 10


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A file with a header of ten layers, and nothing else in it."""
    gguf = pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("models")

    def make(name: str) -> str:
        path = folder / f"{name}.gguf"
        if not path.exists():
            writer = gguf.GGUFWriter(path, "llama")
            writer.add_block_count(N_LAYER)
            writer.add_embedding_length(4096)
            writer.add_head_count(32)
            writer.add_context_length(4096)
            writer.add_tensor("token_embd.weight", np.zeros((32, 4096), np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        return str(path)

    return make


def gpu(name: str = "CUDA0", free: int = 1000, total: int = 8000, kind: str = "gpu") -> Device:
    return Device(name, "a card", kind, "CUDA", free * MIB, total * MIB, 0)


CPU = Device("CPU", "a CPU", "cpu", "CPU", 64_000 * MIB, 64_000 * MIB, 1)


class Sizes:
    """MiB: a layer weighs as the file's name says, 1024 rows of its cache take 10 (f16) or 5, work buffers 20."""

    def __init__(self, weights: dict[str, int]) -> None:
        self.weights = weights
        self.calls = 0

    def __call__(self, path: str, model: ModelParams, context: ContextParams) -> list[MemoryUse] | None:
        self.calls += 1
        layer = self.weights[Path(path).stem]
        if layer < 0:
            return None
        cached = 10 if context.cache_type_k == "f16" else 5
        n_gpu = min(N_LAYER + 1, model.n_gpu_layers if model.n_gpu_layers >= 0 else N_LAYER + 1)
        names = [d.name for d in fit.backends.devices_in_use(model, KNOWN)]
        n_gpu = n_gpu if names else 0
        uses = []
        for name in names:
            on_this = n_gpu // len(names)
            cache = on_this * cached * context.n_ctx * MIB // 1024
            uses.append(MemoryUse(name, on_this * layer * MIB, 0, cache, 20 * MIB))
        rest = N_LAYER + 1 - n_gpu
        uses.append(MemoryUse("CPU", rest * layer * MIB, 0, rest * cached * context.n_ctx * MIB // 1024, 5 * MIB))
        return uses


KNOWN = [gpu(), CPU]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit.backends, "available_bytes", lambda: 8000 * MIB)
    monkeypatch.setattr(fit, "_clearly_fits", lambda *_: False)


def part(path: str, what: str = "target", n_ctx: int = 4096, **model: Any) -> fit.Part:
    return fit.Part(what, path, ModelParams(**model), ContextParams(n_ctx=n_ctx))


def refused(*parts: fit.Part, sizes: Sizes, known: list[Device] | None = None) -> DoesNotFitError:
    with pytest.raises(DoesNotFitError) as caught:
        fit.check(parts, known or KNOWN, sizes)
    assert isinstance(caught.value, ModelLoadError)
    return caught.value


def test_what_fits_passes(file: Callable[[str], str]) -> None:
    fit.check([part(file("small"), n_ctx=1024)], KNOWN, Sizes({"small": 10}))


def test_a_target_that_is_too_large_names_sizes_and_what_would_fit(file: Callable[[str], str]) -> None:
    """11 layers of 60 MiB and 40 of cache each, and 20: 1120 of 1000 less the margin."""
    sizes = Sizes({"big": 60})
    error = refused(part(file("big")), sizes=sizes)
    text = str(error)
    assert text.splitlines()[0] == "the target 'big.gguf' does not fit:"
    assert "CUDA0: 1,120 MiB needed, 1,000 are free (target: weights 660, cache 440, work 20)" in text
    assert error.needed_bytes == {"CUDA0": 1120 * MIB, "CPU": 5 * MIB}
    assert error.free_bytes == {"CUDA0": 1000 * MIB, "CPU": 8000 * MIB}
    for remedy in ("cache_type_k='q8_0', cache_type_v='q8_0'", "n_ctx=2048 (now 4096)", "n_gpu_layers=9 (of 11)"):
        assert remedy in text
    # each of them is true
    whole = part(file("big"))
    for model, context in (
        ({}, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}),
        ({}, {"n_ctx": 2048}),
        ({"n_gpu_layers": 9}, {}),
    ):
        trial = replace(whole, model=whole.model.override(**model), context=whole.context.override(**context))
        fit.check([trial], KNOWN, sizes)
    # and the number of layers is the most there can be
    more = replace(whole, model=whole.model.override(n_gpu_layers=10))
    refused(more, sizes=sizes)


def test_a_draft_that_does_not_fit_beside_its_target(file: Callable[[str], str]) -> None:
    sizes = Sizes({"target": 30, "draft": 20})
    target, draft = part(file("target"), n_ctx=2048), part(file("draft"), "draft", n_ctx=2048)
    fit.check([target], KNOWN, sizes)
    text = str(refused(target, draft, sizes=sizes))
    assert text.splitlines()[0] == "the draft 'draft.gguf' does not fit beside its target:"
    assert "(target: weights 330, cache 220, work 20; draft: weights 220, cache 220, work 20)" in text
    assert "draft_n_gpu_layers=" in text
    assert "draft_devices=[], which is the CPU" in text
    assert "a smaller draft, or none" in text
    n = int(re.search(r"draft_n_gpu_layers=(\d+)", text).group(1))
    fit.check([target, replace(draft, model=ModelParams(n_gpu_layers=n))], KNOWN, sizes)
    refused(target, replace(draft, model=ModelParams(n_gpu_layers=n + 1)), sizes=sizes)
    fit.check([target, replace(draft, model=ModelParams(devices=()))], KNOWN, sizes)


def test_nothing_on_the_gpu_is_a_remedy_too(file: Callable[[str], str]) -> None:
    text = str(refused(part(file("huge"), n_ctx=256), sizes=Sizes({"huge": 950})))
    assert "devices=[], which is the CPU" in text
    assert "n_gpu_layers" not in text


def test_when_nothing_helps_a_smaller_model_is_named(
    file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit.backends, "available_bytes", lambda: 100 * MIB)
    error = refused(part(file("huge"), n_ctx=256, use_mmap=False), sizes=Sizes({"huge": 950}))
    assert "What would fit: a smaller quantization of the model, or a smaller model" in str(error)


def test_host_memory_counts_without_pages_of_the_file(
    file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped model may be larger than the memory; caches, and weights that are read or locked, may not."""
    monkeypatch.setattr(fit.backends, "available_bytes", lambda: 400 * MIB)
    sizes = Sizes({"model": 60})
    on_cpu = {"devices": (), "n_ctx": 1024}
    fit.check([part(file("model"), **on_cpu)], [CPU], sizes)
    for options in ({"use_mmap": False}, {"use_mlock": True}):
        text = str(refused(part(file("model"), **on_cpu, **options), sizes=sizes, known=[CPU]))
        assert "CPU: 775 MiB needed, 400 this process may have (target: weights 660, cache 110, work 5)" in text
    text = str(refused(part(file("model"), devices=(), n_ctx=8192), sizes=sizes, known=[CPU]))
    assert "n_ctx=2048 (now 8192)" in text
    assert "n_gpu_layers" not in text


def test_a_device_without_memory(file: Callable[[str], str]) -> None:
    full = gpu(free=10)
    sizes = Sizes({"model": 1})
    text = str(refused(part(file("model"), n_ctx=256), sizes=sizes, known=[full, CPU]))
    assert "cannot be put on CUDA0 (a card): 10 of 8,000 MiB are free there" in text
    assert "devices=[...]" in text
    assert sizes.calls == 0, "nothing is read for a device that is full"
    draft = part(file("model"), "draft", n_ctx=256)
    text = str(refused(part(file("model"), devices=(), n_ctx=256), draft, sizes=sizes, known=[full, CPU]))
    assert text.startswith("the draft 'model.gguf' cannot be put on CUDA0")
    assert "draft_devices=[...]" in text


def test_a_device_that_does_not_say_is_not_checked(file: Callable[[str], str]) -> None:
    fit.check([part(file("big"))], [gpu(free=0, total=0), CPU], Sizes({"big": 900}))


def test_a_target_that_libllama_cannot_estimate_is_not_refused(file: Callable[[str], str]) -> None:
    fit.check([part(file("odd"))], KNOWN, Sizes({"odd": -1}))


def test_a_draft_that_libllama_cannot_estimate_counts_with_its_file(file: Callable[[str], str]) -> None:
    sizes = Sizes({"target": 10, "head": -1})
    parts = [part(file("target"), n_ctx=1024), part(file("head"), "draft", n_ctx=1024)]
    found = fit.estimate(parts, KNOWN, sizes)
    assert found is not None
    assert found.uses["draft"] == [MemoryUse("CUDA0", Path(file("head")).stat().st_size, 0, 0, 0)]


def test_own_draft_heads_count_without_their_weights(file: Callable[[str], str]) -> None:
    """They are part of the target's file, whose weights are there once."""
    target = part(file("target"), n_ctx=1024)
    parts = fit.parts_of(target, None, ModelParams(), {}, own_heads=True)
    assert [(p.what, p.loaded) for p in parts] == [("target", False), ("draft", True)]
    assert [p.context.ctx_type for p in parts] == ["default", "mtp"]
    found = fit.estimate(parts, KNOWN, Sizes({"target": 10}))
    assert found is not None
    assert sum(use.weights_bytes for use in found.uses["draft"]) == 0
    assert sum(use.context_bytes for use in found.uses["draft"]) > 0


def test_options_of_the_draft(file: Callable[[str], str]) -> None:
    target = replace(part(file("target")), context=ContextParams(n_ctx=2000, n_seq_max=2, cache_type_k="q8_0"))
    own = {"n_ctx": 500, "cache_type_v": "q8_0"}
    draft = fit.parts_of(target, file("draft"), ModelParams(n_gpu_layers=3), own, own_heads=False)[1]
    assert draft.model.n_gpu_layers == 3
    assert (draft.context.n_ctx, draft.context.cache_type_k, draft.context.cache_type_v) == (1000, "f16", "q8_0")


def test_small_models_are_not_even_counted(file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting costs a fraction of a second a model; a rough bound is enough where there is room."""
    monkeypatch.undo()
    monkeypatch.setattr(fit.backends, "available_bytes", lambda: 64_000 * MIB)
    sizes = Sizes({"small": 1})
    roomy = [gpu(free=32_000, total=32_000), CPU]
    fit.check([part(file("small"), n_ctx=256)], roomy, sizes)
    assert sizes.calls == 0
    fit.check([part(file("small"), n_ctx=256)], [gpu(free=900, total=32_000), CPU], sizes)
    assert sizes.calls == 1
