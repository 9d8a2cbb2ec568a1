"""``pyspec doctor``: what it says about broken drivers, missing parts and another machine's build."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyspec import __main__ as entry
from pyspec.cli import _probe, doctor

FEATURES = {"SSE3": "1", "AVX2": "1", "AVX512": "0", "REPACK": "1"}


def cpuinfo(path: Path, flags: str) -> str:
    path.write_text(f"processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    return str(path)


def test_cpu_features_against_the_build(tmp_path: Path) -> None:
    found = doctor.cpu(FEATURES, cpuinfo(tmp_path / "cpuinfo", "fpu pni avx2 avx512f amx_int8"))
    assert found["model"] == "Some CPU @ 3 GHz"
    assert found["used"] == ["SSE3", "AVX2"]
    assert found["unused"] == ["AVX512"]  # AMX is left out on purpose
    assert found["lacking"] == []
    assert found["problems"] == []


def test_a_build_of_another_machine(tmp_path: Path) -> None:
    found = doctor.cpu(FEATURES, cpuinfo(tmp_path / "cpuinfo", "fpu pni"))
    assert found["lacking"] == ["AVX2"]
    assert len(found["problems"]) == 1
    assert "uses AVX2, which this CPU does not announce" in found["problems"][0]
    assert "PYSPEC_PORTABLE=1" in found["problems"][0]


def test_without_cpuinfo_nothing_is_claimed(tmp_path: Path) -> None:
    found = doctor.cpu(FEATURES, str(tmp_path / "none"))
    assert (found["unused"], found["lacking"], found["problems"]) == (None, None, [])


def test_limits() -> None:
    found = doctor.limits()
    assert 1 <= found["n_threads"] <= found["n_cpus_allowed"]
    assert found["memory_available_bytes"] is None or found["memory_available_bytes"] > 0


@pytest.mark.parametrize(
    ("backend", "driver", "says"),
    [
        (
            "cuda",
            "the NVIDIA driver is not installed (libcuda.so.1 was not found)",
            "no device: the NVIDIA driver is not",
        ),
        (
            "vulkan",
            {"loader": "1.3", "devices": [{"name": "llvmpipe"}]},
            "no device: the drivers offer llvmpipe; software devices are left out unless GGML_VK_VISIBLE_DEVICES",
        ),
        ("vulkan", {"loader": "1.3", "devices": []}, "no device: the drivers offer none"),
        ("hip", None, "no device: the driver offers none"),
    ],
)
def test_a_backend_without_device_says_why(backend: str, driver: Any, says: str) -> None:
    text = doctor._no_device(backend, {backend: driver})
    assert text.startswith(says)
    assert "\n" not in text


# ---- the probe: whatever hangs or dies, dies there -------------------------------------------------


def probe_with(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run this code instead of the probe."""

    def run(command: list[str], **options: Any) -> Any:
        return subprocess.run([sys.executable, "-c", code], **options)

    fake = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(doctor, "subprocess", fake)


def test_a_driver_that_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    probe_with(monkeypatch, "import os, signal, sys; print('driver bug', file=sys.stderr); os.kill(os.getpid(), 11)")
    found = doctor.self_test("CUDA0")
    assert found["ok"] is False
    assert found["error"] == "the process was ended by signal 11 (driver bug)"


def test_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROBE_TIMEOUT", 0.5)
    probe_with(monkeypatch, "import time; time.sleep(60)")
    assert doctor.self_test("CUDA0")["error"] == "no answer within 0 s: the driver hangs"


def test_a_device_that_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    probe_with(monkeypatch, """print('noise of a driver'); print('{"ok": false, "nmse": 0.25, "n_checked": 10}')""")
    found = doctor.self_test("CUDA0")
    assert found["error"] == "wrong results: a normalized mean squared error of 2.5e-01"
    probe_with(monkeypatch, """print('{"ok": false, "nmse": null, "n_checked": 10}')""")
    assert doctor.self_test("CUDA0")["error"].endswith("error that is not finite")


def test_the_probe_says_in_one_line_what_it_lacks(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from pyspec import backends
    from pyspec.errors import BackendNotFoundError

    def fail(name: str, seconds: float) -> None:
        raise BackendNotFoundError(f"no device {name!r}\nthere are: CPU")

    monkeypatch.setattr(backends, "check_device", fail)
    assert _probe.main(["device", "X9", "1"]) == 1
    assert capsys.readouterr().err == "no device 'X9' there are: CPU\n"


# ---- the report -------------------------------------------------------------------------------------


@pytest.fixture
def fake_backends(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    device = SimpleNamespace(
        name="CPU", vendor="", backend="CPU", kind="cpu", description="A CPU", id="",
        memory_free_bytes=2**30, memory_total_bytes=2**31, capabilities=(),
    )  # fmt: skip
    modules = {
        "libpyspec-ggml-cpu.so": {"backend": "cpu", "score": 1, "loaded": True, "reason": ""},
        "libpyspec-ggml-cuda.so": {
            "backend": "cuda",
            "score": None,
            "loaded": False,
            "reason": "no cuBLAS",
        },
        "libpyspec-ggml-vulkan.so": {"backend": "vulkan", "score": 1, "loaded": True, "reason": ""},
    }
    fake = SimpleNamespace(
        build_info=lambda: {"modules": modules},
        devices=lambda: [device],
        features=lambda: {"CPU": {}, "Vulkan": {}},
        available_bytes=lambda: 2**30,
    )
    monkeypatch.setitem(sys.modules, "pyspec.backends", fake)
    monkeypatch.setattr(sys.modules["pyspec"], "backends", fake, raising=False)
    info = {"llama_commit": "abc", "ggml_version": "1.2", "backends": ["cpu", "cuda", "vulkan"], "portable": False}
    monkeypatch.setitem(sys.modules, "pyspec._build_info", SimpleNamespace(BUILD_INFO={**info, "compiler": "GNU 12"}))

    def probe(*arguments: str) -> dict[str, Any]:
        if arguments[0] == "drivers":
            return {"cuda": "the NVIDIA driver is not installed", "vulkan": {"loader": "1.3.239", "devices": []}}
        test = {"ok": True, "nmse": 1e-6, "n_checked": 10, "bytes_per_s": 8e9, "flop_per_s": 1.5e11, "seconds": 1.9}
        return test

    monkeypatch.setattr(doctor, "_probe", probe)
    return fake


def test_the_report_names_what_should_be_seen_to(
    fake_backends: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^modules   libpyspec-ggml-cpu.so  loaded$", out, re.MULTILINE)
    assert re.search(r"^ +libpyspec-ggml-cuda.so  not loaded: no cuBLAS$", out, re.MULTILINE)
    assert re.search(r"^ +libpyspec-ggml-vulkan.so  loaded: no device: the drivers offer none$", out, re.MULTILINE)
    assert re.search(r"^ +not built: metal, hip, sycl$", out, re.MULTILINE)
    assert re.search(r"^drivers   cuda: none: the NVIDIA driver is not installed$", out, re.MULTILINE)
    assert re.search(r"^devices   CPU: A CPU \(cpu\), 1.0 GiB of 2.0 GiB free$", out, re.MULTILINE)
    assert "self-test passed: 10 products, 8.0 GB/s of weights, 150.0 GFLOP/s, 1.9 s" in out
    problems = re.findall(r"^PROBLEM   (.*)$", out, re.MULTILINE)
    assert problems == [
        "libpyspec-ggml-cuda.so is built but does not load: no cuBLAS",
        "vulkan: no device: the drivers offer none",
    ]


def test_json(fake_backends: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["doctor", "--json", "--no-test"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert len(found["problems"]) == 2
    assert found["devices"][0]["self_test"] is None
    assert [m["loaded"] for m in found["modules"]] == [True, False, True]


def test_it_works_with_a_broken_install_and_without_the_extra(run_child: Any) -> None:
    out = run_child(
        """
        import sys
        for name in ("typer", "rich", "pyspec.backends"):
            sys.modules[name] = None
        from pyspec import __main__ as entry
        assert entry.run(["doctor", "--no-test"]) == 1
        """
    )
    assert re.search(r"^pyspec \d", out)
    assert "limits" in out
    assert "PROBLEM   the native libraries do not load: " in out


def test_the_readme_shows_the_lines_there_are(
    fake_backends: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another machine has other values; the labels, and their order, are these."""
    entry.run(["doctor", "--no-test"])
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    shown = readme.split("What `pyspec doctor` says")[1].split("```text\n")[1].split("```")[0]

    def labels(text: str) -> list[str]:
        return [line.split()[0] for line in text.splitlines() if not line.startswith((" ", "PROBLEM", "no problems"))]

    assert labels(shown) == labels(capsys.readouterr().out)
