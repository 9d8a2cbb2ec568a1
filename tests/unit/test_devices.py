"""Devices by name, vendors, splits: what is decided before libllama is asked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pyspec.backends import _dependencies, _select
from pyspec.backends.devices import Device, find_device, vendor_of
from pyspec.config import ModelParams
from pyspec.errors import BackendNotFoundError, ConfigError

GIB = 2**30


def device(name: str, kind: str = "gpu", *, backend: str = "CUDA", id: str = "", total: int = 8 * GIB) -> Device:
    return Device(name, f"{name} of the test", kind, backend, total // 2, total, 0, id=id)


KNOWN = [
    device("CUDA0", id="0000:01:00.0"),
    device("CUDA1", id="0000:02:00.0"),
    device("Vulkan0", backend="Vulkan", id="0000:01:00.0"),
    device("BLAS", "accel", backend="BLAS", total=0),
    device("CPU", "cpu", backend="CPU"),
]


@pytest.mark.parametrize(
    ("backend", "description", "vendor"),
    [
        ("CUDA", "NVIDIA H200", "NVIDIA"),
        ("CUDA", "H200", "NVIDIA"),
        ("Vulkan", "AMD Radeon RX 7900 XTX (RADV NAVI31)", "AMD"),
        ("Vulkan", "Intel(R) Arc(tm) A770 Graphics (DG2)", "Intel"),
        ("Vulkan", "llvmpipe (LLVM 15.0.6, 256 bits)", "Mesa (software)"),
        ("ROCm", "gfx1100", "AMD"),
        ("ROCm", "Something", "AMD"),
        ("MTL", "Apple M3", "Apple"),
        ("CPU", "Intel(R) Xeon(R) Platinum 8488C", "Intel"),
        ("CPU", "AMD EPYC 9R14", "AMD"),
        ("CPU", "CPU", ""),
    ],
)
def test_vendor(backend: str, description: str, vendor: str) -> None:
    assert vendor_of(backend, description) == vendor


def test_vendor_by_pci_address(tmp_path: Path) -> None:
    folder = tmp_path / "0000:c1:00.0"
    folder.mkdir()
    (folder / "vendor").write_text("0x1002\n")
    assert vendor_of("Vulkan", "Unnamed", "0000:c1:00.0", str(tmp_path)) == "AMD"
    assert vendor_of("Vulkan", "Unnamed", "0000:c2:00.0", str(tmp_path)) == ""
    assert vendor_of("Vulkan", "Unnamed", "../0000:c1:00.0", str(tmp_path)) == "", "no path of the driver's is opened"


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(BackendNotFoundError, match=r"devices: no device 'CUDA7'; there are: CUDA0, CUDA1, .*, CPU"):
        _select.select_devices(("cuda1", "CUDA7"), KNOWN)
    with pytest.raises(BackendNotFoundError, match=r"draft: no device 'gpu'"):
        find_device("gpu", "draft", KNOWN)


def test_names_are_found_whatever_their_case_and_once() -> None:
    chosen = _select.select_devices(("cuda1", "CUDA1", "cpu", "Vulkan0"), KNOWN)
    assert [d.name for d in chosen or []] == ["CUDA1", "Vulkan0"]
    assert _select.select_devices((), KNOWN) == []
    assert _select.select_devices(None, KNOWN) is None


def test_a_device_without_memory_for_models_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"devices: BLAS .* has no memory for a model.*CUDA0, CUDA1, Vulkan0, and the"
    ):
        _select.select_devices(("BLAS",), KNOWN)


def test_the_variable_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPEC_DEVICES", "CUDA0, nope")
    with pytest.raises(BackendNotFoundError, match="PYSPEC_DEVICES: no device 'nope'"):
        _select.select_devices(None, KNOWN)
    monkeypatch.setenv("PYSPEC_DEVICES", "none")
    assert _select.select_devices(None, KNOWN) == []


def names(params: ModelParams, known: list[Device] = KNOWN) -> list[str]:
    return [d.name for d in _select.devices_in_use(params, known)]


def test_devices_in_use() -> None:
    """As libllama chooses: every GPU once, though two backends see it; integrated ones only where there is no other."""
    assert names(ModelParams()) == ["CUDA0", "CUDA1"]
    assert names(ModelParams(n_gpu_layers=0)) == []
    assert names(ModelParams(devices=())) == []
    assert names(ModelParams(devices=("Vulkan0",))) == ["Vulkan0"]
    assert names(ModelParams(split_mode="none", main_gpu=1)) == ["CUDA1"]
    integrated = [device("MTL0", "igpu", backend="MTL"), device("Vulkan0", "igpu", backend="Vulkan"), KNOWN[-1]]
    assert names(ModelParams(), integrated) == ["MTL0"]
    assert names(ModelParams(), [KNOWN[-1]]) == []


def test_a_split_has_to_fit_the_devices() -> None:
    gpus = KNOWN[:2]
    with pytest.raises(ConfigError, match=r"tensor_split has 3 shares, but the devices in use are 2 \(CUDA0, CUDA1\)"):
        _select.check_split(ModelParams(tensor_split=(1, 1, 1)), gpus)
    with pytest.raises(ConfigError, match=r"main_gpu=2 is not one of the devices in use, counted from 0: 2 \(CUDA0"):
        _select.check_split(ModelParams(split_mode="none", main_gpu=2), None, KNOWN)
    with pytest.raises(ConfigError, match=r"main_gpu=1 .* none"):
        _select.check_split(ModelParams(split_mode="none", main_gpu=1), [])
    _select.check_split(ModelParams(tensor_split=(3, 1)), gpus)
    _select.check_split(ModelParams(split_mode="none", main_gpu=1), gpus)
    _select.check_split(ModelParams(tensor_split=(1, 1)), [])  # ignored: nothing is offloaded


@pytest.mark.parametrize("shares", ["1,1", 3, (), (0.0, 0.0), (-1.0, 2.0), (math.nan,), (math.inf, 1.0), ("1",)])
def test_shares_that_mean_nothing(shares: Any) -> None:
    with pytest.raises(ConfigError, match="tensor_split"):
        ModelParams(tensor_split=shares)


# ---- libraries of vendors ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        (
            "libcuda.so.1: cannot open shared object file: No such file or directory",
            "the NVIDIA driver is not installed",
        ),
        ("libcublas.so.13: cannot open shared object file: No such file", r"pip install 'pyspec-llm\[cuda\]'"),
        ("libcublasLt.so.13: cannot open shared object file: No such file", r"cuBLAS is not installed"),
        ("libcudart.so.12: cannot open shared object file: No such file", r"CUDA runtime is not installed"),
        ("libvulkan.so.1: cannot open shared object file: No such file", "apt install libvulkan1"),
        ("libamdhip64.so.6: cannot open shared object file: No such file", "ROCm's runtime is not installed"),
    ],
)
def test_a_missing_driver_is_a_sentence(reason: str, says: str) -> None:
    text = _dependencies.explain(reason)
    assert says.replace("\\", "") in text
    assert reason.split(":")[0] in text
    assert len(text.splitlines()) == 1


def test_other_reasons_stay_as_they_are() -> None:
    for reason in ("file too short", "libodd.so.1: cannot open shared object file: No such file", ""):
        assert _dependencies.explain(reason) == reason


class FakeLinker:
    """Stands in for the shim: a library opens once all it needs was opened by name."""

    def __init__(self, needs: dict[str, list[str]]) -> None:
        self.needs = needs
        self.opened: list[str] = []
        self.error = ""

    def pyspec_library_open(self, path: bytes) -> int:
        name = Path(path.decode()).name
        for need in self.needs.get(name, []):
            if need not in self.opened:
                self.error = f"{need}: cannot open shared object file: No such file or directory"
                return -1
        self.opened.append(name)
        return 0

    def pyspec_last_error(self) -> str:
        return self.error


class FakeFfi:
    @staticmethod
    def string(text: str) -> bytes:
        return text.encode()


@pytest.fixture
def vendor_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_dependencies, "folders", lambda: [tmp_path / "nothing", tmp_path])
    for name in ("libcublas.so.13", "libcublasLt.so.13", "libcudart.so.13", "libcuda.so.1", "libodd.so.1"):
        (tmp_path / name).write_bytes(b"")
    return tmp_path


def test_what_a_module_needs_is_opened_first(vendor_folder: Path) -> None:
    module = "libpyspec-ggml-cuda.so"
    linker = FakeLinker({module: ["libcudart.so.13", "libcublas.so.13"], "libcublas.so.13": ["libcublasLt.so.13"]})
    _dependencies.provide(FakeFfi(), linker, Path("lib") / module)
    assert linker.opened == ["libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13", module]


@pytest.mark.parametrize("need", ["libcuda.so.1", "libodd.so.1", "libcublas.so.12"])
def test_a_driver_or_a_stranger_is_never_taken_from_a_folder(vendor_folder: Path, need: str) -> None:
    """The driver must be the running kernel's; and a version that is not there is not replaced by another."""
    linker = FakeLinker({"libpyspec-ggml-cuda.so": [need]})
    _dependencies.provide(FakeFfi(), linker, Path("libpyspec-ggml-cuda.so"))
    assert linker.opened == []
    assert need in linker.error


def test_folders_of_packages_and_toolkits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By full path only: the working directory is never searched."""
    for name in ("site/nvidia/cu13/lib", "site/nvidia/cublas/lib", "home/lib64", "nvidia/cu12/lib"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found = _dependencies.folders({"CUDA_HOME": str(tmp_path / "home"), "CUDA_PATH": "home"})
    assert tmp_path / "site" / "nvidia" / "cu13" / "lib" in found
    assert tmp_path / "site" / "nvidia" / "cublas" / "lib" in found
    assert tmp_path / "home" / "lib64" in found
    assert all(folder.is_absolute() for folder in found)
    assert tmp_path / "nvidia" / "cu12" / "lib" not in found
