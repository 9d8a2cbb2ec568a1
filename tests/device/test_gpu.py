"""Models on a GPU. Skipped where there is none; ``make test-vulkan`` runs this on Mesa's software device.

The exactness suite runs there too, with target, draft or both on the device (``pairs.py``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from conftest import need

import pyspec
from pyspec import assemble, backends, fit
from pyspec.errors import BackendNotFoundError, DoesNotFitError

pytestmark = [pytest.mark.native, pytest.mark.device]

PROMPTS = ["The quick brown fox", "abc def ghi jkl", "x"]
SMALL: dict[str, Any] = {"n_ctx": 256, "n_threads": 1}


@pytest.fixture(scope="module")
def gpu() -> backends.Device:
    """The first GPU."""
    found = [d for d in pyspec.devices() if d.is_gpu]
    if not found:
        lacking = "; ".join(f"{name}: {why}" for name, why in backends.unavailable().items())
        need("device", f"no GPU: pyspec.devices() lists CPUs only{f' ({lacking})' if lacking else ''}")
    return found[0]


def plain(path: str, devices: tuple[str, ...]) -> list[list[int]]:
    with pyspec.LLM(path, speculation="off", devices=devices, **SMALL) as llm:
        return [llm.generate(p, max_tokens=60, ignore_eos=True).tokens for p in PROMPTS]


def decided(path: str, devices: tuple[str, ...]) -> list[list[int]]:
    """The beginnings of the plain texts up to where two tokens are within rounding, and each may come.

    Which one comes depends on the device, and on the rows of a pass: how many sequences generate, and what is drafted.
    (``target-swa`` after 11 tokens of the third prompt: 0.0002 apart.)
    """
    texts = []
    with pyspec.LLM(path, speculation="off", devices=devices, **SMALL) as llm:
        for prompt in PROMPTS:
            result = llm.generate(prompt, max_tokens=60, ignore_eos=True, logprobs=True, top_logprobs=2)
            assert result.logprobs is not None
            tops = [entry.top for entry in result.logprobs]
            n = next((i for i, (a, b) in enumerate(tops) if a.logprob - b.logprob < 0.02), len(tops))
            texts.append(result.tokens[:n])
    assert sum(map(len, texts)) >= 60
    return texts


@pytest.mark.parametrize(
    ("target", "draft"),
    [("target-llama", "draft-llama-half"), ("target-llama", "eagle3-half"), ("target-swa", "draft-swa-half")],
)
@pytest.mark.parametrize("where", ["both", "target", "draft"])
def test_same_tokens(tiny: Any, gpu: backends.Device, target: str, draft: str, where: str) -> None:
    on_gpu = (gpu.name,)
    devices = on_gpu if where != "draft" else ()
    expected = decided(tiny(target), devices)
    options: dict[str, Any] = {"devices": devices, "draft_devices": on_gpu if where != "target" else ()}
    with pyspec.LLM(tiny(target), tiny(draft), **options, **SMALL) as llm:
        found = [r.tokens for r in llm.generate(PROMPTS, max_tokens=60, ignore_eos=True)]
        assert llm.stats.n_accepted > 0
    assert [len(tokens) for tokens in found] == [60] * len(PROMPTS)
    assert [tokens[: len(text)] for tokens, text in zip(found, expected, strict=True)] == expected


@pytest.mark.parametrize("target", ["target-llama", "target-swa", "target-recurrent", "target-hybrid"])
def test_the_gpu_writes_what_the_cpu_writes(tiny: Any, gpu: backends.Device, target: str) -> None:
    expected = decided(tiny(target), ())
    found = plain(tiny(target), (gpu.name.lower(),))
    assert [tokens[: len(text)] for tokens, text in zip(found, expected, strict=True)] == expected


@pytest.mark.parametrize("n_gpu_layers", [0, 1])
def test_a_part_of_the_layers(tiny: Any, gpu: backends.Device, n_gpu_layers: int) -> None:
    path = tiny("target-llama")
    with pyspec.LLM(path, speculation="off", devices=[gpu.name], n_gpu_layers=n_gpu_layers, **SMALL) as llm:
        found = [llm.generate(p, max_tokens=60, ignore_eos=True).tokens for p in PROMPTS]
        assert llm.model.on_gpu == bool(n_gpu_layers)
    assert found == plain(path, ())


def test_what_a_device_says(gpu: backends.Device) -> None:
    assert gpu.backend.lower() in {"cuda", "vulkan", "mtl", "rocm", "sycl"}
    assert gpu.vendor
    assert gpu.description
    assert 0 < gpu.memory_free_bytes <= gpu.memory_total_bytes
    assert backends.available()[-1] == "cpu"


def test_bad_names_and_splits(tiny: Any, gpu: backends.Device) -> None:
    path = tiny("target-llama")
    with pytest.raises(BackendNotFoundError, match=rf"no device 'Nope0'; there are: {gpu.name}, .*CPU"):
        pyspec.LLM(path, devices=[gpu.name, "Nope0"], **SMALL)
    with pytest.raises(BackendNotFoundError, match="no device 'Nope1'"):
        pyspec.LLM(path, tiny("draft-llama"), draft_devices=["Nope1"], **SMALL)
    with pytest.raises(pyspec.ConfigError, match="main_gpu=9"):
        pyspec.LLM(path, devices=[gpu.name], split_mode="none", main_gpu=9, **SMALL)
    with pytest.raises(pyspec.ConfigError, match="tensor_split has 2 shares"):
        pyspec.LLM(path, devices=[gpu.name], tensor_split=[1, 1], **SMALL)
    with pyspec.LLM(path, devices=[gpu.name], tensor_split=[1.0], speculation="off", **SMALL) as llm:
        assert len(llm.generate("abc", max_tokens=4).tokens) > 0


# ---- memory ------------------------------------------------------------------------------------------


def test_the_estimate_is_what_is_taken(tiny: Any, gpu: backends.Device) -> None:
    model = pyspec.ModelParams(devices=(gpu.name,), use_mmap=False)
    context = pyspec.ContextParams(n_ctx=1024, n_threads=1)
    path = tiny("target-llama")
    uses = backends.estimate_memory(path, model, context)
    assert uses is not None
    on_gpu = next(use for use in uses if use.device == gpu.name)
    assert on_gpu.weights_bytes > 0
    assert on_gpu.context_bytes > 0
    with pyspec.Model(path, model) as loaded, pyspec.Context(loaded, context) as made:
        taken = made.memory_bytes()
    for name, what in (("weights_bytes", "model"), ("context_bytes", "context"), ("compute_bytes", "compute")):
        estimated = sum(getattr(use, name) for use in uses)
        assert estimated == pytest.approx(taken[what], rel=0.05), name


def test_what_does_not_fit_is_refused_with_what_would(
    tiny: Any, gpu: backends.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device with little memory, and then with the remedies that the message names."""
    real = backends.devices

    def shrunk() -> list[backends.Device]:
        return [replace(d, memory_free_bytes=fit.MARGIN_BYTES + 4 * 2**20) if d.is_gpu else d for d in real()]

    monkeypatch.setattr(assemble.backends, "devices", shrunk)
    path = tiny("target-llama")
    options: dict[str, Any] = {"devices": [gpu.name], "speculation": "off", "n_threads": 1}
    with pytest.raises(DoesNotFitError) as caught:
        pyspec.LLM(path, n_ctx=16384, **options)
    text = str(caught.value)
    assert text.startswith("the target")
    assert f"{gpu.name}: " in text
    assert caught.value.needed_bytes[gpu.name] > caught.value.free_bytes[gpu.name] - fit.MARGIN_BYTES
    assert "What would fit: " in text
    with pyspec.LLM(path, n_ctx=16384, **(options | {"devices": []})) as llm:
        assert len(llm.generate("abc", max_tokens=4).tokens) > 0
    with pytest.raises(DoesNotFitError, match=r"the draft .* does not fit beside its target"):
        pyspec.LLM(path, tiny("draft-llama"), n_ctx=16384, devices=[], draft_devices=[gpu.name], n_threads=1)


# ---- commands ------------------------------------------------------------------------------------------


def test_doctor_computes_on_the_device(gpu: backends.Device) -> None:
    command = [sys.executable, "-m", "pyspec", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    found = json.loads(done.stdout)
    device = next(d for d in found["devices"] if d["name"] == gpu.name)
    assert device["self_test"]["ok"], device
    assert device["self_test"]["n_checked"] >= 2
    assert found["problems"] == []
    assert done.returncode == 0
    module = next(m for m in found["modules"] if m["loaded"] and m["backend"] != "cpu")
    assert isinstance(found["drivers"].get(module["backend"], {}), dict), "a driver that works has a version"


def test_without_its_driver_all_else_works(gpu: backends.Device, run_child: Callable[..., str], tiny: Any) -> None:
    """The backend's devices are hidden, as where the driver finds none: import and CPU use go on."""
    hide = {"CUDA_VISIBLE_DEVICES": "", "GGML_VK_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    if gpu.backend not in ("CUDA", "Vulkan", "ROCm"):
        pytest.skip(f"no variable hides the devices of {gpu.backend}")
    code = """
    import sys, pyspec
    assert [d.kind for d in pyspec.devices()] == ["cpu"], pyspec.devices()
    with pyspec.LLM(sys.argv[1], speculation="off", n_threads=1, n_ctx=64) as llm:
        print(len(llm.generate("abc", max_tokens=4, ignore_eos=True).tokens))
    """
    extra = {"VK_ICD_FILENAMES": "/nonexistent", "VK_DRIVER_FILES": "/nonexistent"} if gpu.backend == "Vulkan" else {}
    assert run_child(code, tiny("target-llama"), env=hide | extra, timeout=120).strip() == "4"
