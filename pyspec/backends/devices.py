"""Devices of the loaded backends: name, vendor, kind, memory, capabilities, and whether they compute."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import default_n_threads
from ..errors import BackendNotFoundError
from . import _binding
from ._status import drain_log, raise_status

__all__ = ["Device", "DeviceTest", "check_device", "devices", "features", "find_device"]

# enum ggml_backend_dev_type
_KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel", 4: "meta"}

_PCI_VENDORS = {
    "0x10de": "NVIDIA", "0x1002": "AMD", "0x1022": "AMD", "0x8086": "Intel", "0x106b": "Apple", "0x13b5": "ARM",
    "0x5143": "Qualcomm", "0x1ed5": "Moore Threads",
}  # fmt: skip
# What drivers and CPUs call themselves. First match wins; software drivers name the CPU too.
_NAMES = (
    (r"llvmpipe|lavapipe|swiftshader", "Mesa (software)"),
    (r"nvidia|geforce|tesla|quadro", "NVIDIA"),
    (r"amd\b|radeon|ryzen|epyc|gfx\d", "AMD"),
    (r"intel|xeon", "Intel"),
    (r"apple", "Apple"),
    (r"adreno|qualcomm", "Qualcomm"),
    (r"mali|neoverse|cortex|\barm\b", "ARM"),
    (r"mtt\b|moore threads", "Moore Threads"),
)
_BACKEND_VENDORS = {"CUDA": "NVIDIA", "ROCm": "AMD", "MTL": "Apple", "MUSA": "Moore Threads", "CANN": "Huawei"}
_CAPABILITIES = ("async", "host_buffer", "buffer_from_host_ptr", "events", "mmap_support")


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: as options take it, e.g. "CUDA0". description: for people.
        kind: "cpu", "gpu", "igpu" (shares the host's memory) or "accel" (helps the CPU, e.g. BLAS).
        backend: "CPU", "CUDA", "Vulkan", "Metal" ...
        memory_free_bytes, memory_total_bytes: as of now; 0 if the backend does not say.
        index: position in ggml's registry.
        vendor: who made it, "NVIDIA", "AMD", "Intel", "Apple" ...; "" if nothing tells.
        id: PCI address or the like; "" if unknown.
        capabilities: of "async", "host_buffer" (pinned memory), "buffer_from_host_ptr", "events", "mmap_support".
    """

    name: str
    description: str
    kind: str
    backend: str
    memory_free_bytes: int
    memory_total_bytes: int
    index: int
    vendor: str = ""
    id: str = ""
    capabilities: tuple[str, ...] = ()

    @property
    def is_gpu(self) -> bool:
        """Whether a model's layers can be put on it."""
        return self.kind in ("gpu", "igpu")


@dataclass(frozen=True)
class DeviceTest:
    """What :func:`check_device` found.

    Attributes:
        ok: every product was right within what the precision allows.
        error: worst normalized mean squared error of a product.
        n_checked: products compared; 0: the device computes none of them (``ok`` is True then: it helps in other ways).
        bytes_per_s: weights read a second by a product with one row, which bounds plain decoding.
        flop_per_s: of a product with many rows.
        seconds: all of it.
    """

    ok: bool
    error: float
    n_checked: int
    bytes_per_s: float
    flop_per_s: float
    seconds: float


#: Kernels may round activations to 8 bits; upstream's own tests allow this much.
_ERROR_MAX = 5e-4


def vendor_of(backend: str, description: str, device_id: str = "", sysfs: str = "/sys/bus/pci/devices") -> str:
    """Return who made a device: by its PCI address, else by what it calls itself, else by its backend."""
    if re.fullmatch(r"[0-9a-f]+:[0-9a-f]+:[0-9a-f]+\.[0-9a-f]", device_id):
        try:
            code = (Path(sysfs) / device_id / "vendor").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            code = ""
        if code in _PCI_VENDORS:
            return _PCI_VENDORS[code]
    for pattern, vendor in _NAMES:
        if re.search(pattern, description, re.IGNORECASE):
            return vendor
    return _BACKEND_VENDORS.get(backend, "")


def devices() -> list[Device]:
    """Every device of the loaded backends, GPUs first, memory as of now. Loads the native libraries."""
    _binding.load()
    ffi, lib = _binding.ffi, _binding.lib
    found = []
    info = ffi.new("struct pyspec_device *")
    for i in range(lib.pyspec_device_count()):
        if lib.pyspec_device_info(i, info) == 0:
            name, description, backend, device_id = (
                ffi.string(text).decode("utf-8", "replace")
                for text in (info.name, info.description, info.backend, info.id)
            )
            found.append(
                Device(
                    name,
                    description,
                    _KINDS.get(info.type, "unknown"),
                    backend,
                    int(info.memory_free),
                    int(info.memory_total),
                    i,
                    vendor_of(backend, description, device_id),
                    device_id,
                    tuple(each for each in _CAPABILITIES if getattr(info, each)),
                )
            )
    drain_log()
    return found


def find_device(name: str, source: str = "device", known: list[Device] | None = None) -> Device:
    """The device of that name, case ignored.

    Raises:
        BackendNotFoundError: there is none; lists those there are.
    """
    known = devices() if known is None else known
    for device in known:
        if device.name.lower() == name.lower():
            return device
    raise BackendNotFoundError(f"{source}: no device {name!r}; there are: {', '.join(d.name for d in known)}")


def features() -> dict[str, dict[str, str]]:
    """What each loaded backend was built with and found, by backend: instruction sets, GPU architectures."""
    _binding.load()
    ffi, lib = _binding.ffi, _binding.lib
    found = {}
    buf = ffi.new("char[]", 65536)
    for i in range(lib.pyspec_backend_count()):
        rc = lib.pyspec_backend_features(i, buf, 65536)
        if rc:
            raise_status(rc, "ggml_backend_get_features", "asking a backend for its features")
        lines = ffi.string(buf).decode("utf-8", "replace").splitlines()
        name = ffi.string(lib.pyspec_backend_name(i)).decode("utf-8", "replace")
        found[name] = dict(line.split("=", 1) for line in lines)
    drain_log()
    return found


def check_device(name: str, seconds: float = 2.0) -> DeviceTest:
    """Compute products of matrices in several precisions on a device, compare each with double precision, time two.

    A broken driver can end the process or hang: :func:`pyspec.cli.doctor.self_test` does it in a process of its own.

    Args:
        name: as :func:`devices` lists it. seconds: about how long the timing takes.

    Raises:
        BackendNotFoundError: no device of that name. NativeError: it cannot be opened, or fails to compute.
    """
    device = find_device(name)
    ffi, lib = _binding.ffi, _binding.lib
    out: Any = ffi.new("struct pyspec_device_test *")
    rc = lib.pyspec_test_device(device.index, default_n_threads(), seconds, out)
    if rc:
        raise_status(rc, "ggml_backend_graph_compute", f"testing the device {device.name}")
    drain_log()
    return DeviceTest(
        ok=float(out.error) <= _ERROR_MAX,
        error=float(out.error),
        n_checked=int(out.n_checked),
        bytes_per_s=float(out.bytes_per_s),
        flop_per_s=float(out.flop_per_s),
        seconds=float(out.seconds),
    )
