"""Devices of the loaded backends: name, kind, memory."""

from __future__ import annotations

from dataclasses import dataclass

from . import _binding
from ._status import drain_log

__all__ = ["Device", "devices"]

# enum ggml_backend_dev_type
_KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel", 4: "meta"}


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: as options take it, e.g. "CUDA0". description: for people.
        kind: "cpu", "gpu", "igpu" (shares the host's memory) or "accel" (helps the CPU, e.g. BLAS).
        backend: "CPU", "CUDA", "Vulkan", "Metal" ...
        memory_free_bytes, memory_total_bytes: 0 if the backend does not say.
        index: position in ggml's registry.
    """

    name: str
    description: str
    kind: str
    backend: str
    memory_free_bytes: int
    memory_total_bytes: int
    index: int


def devices() -> list[Device]:
    """Every device of the loaded backends, GPUs first, memory as of now. Loads the native libraries."""
    _binding.load()
    ffi, lib = _binding.ffi, _binding.lib
    found = []
    info = ffi.new("struct pyspec_device *")
    for i in range(lib.pyspec_device_count()):
        if lib.pyspec_device_info(i, info) == 0:
            name, description, backend = (
                ffi.string(text).decode("utf-8", "replace") for text in (info.name, info.description, info.backend)
            )
            kind = _KINDS.get(info.type, "unknown")
            found.append(Device(name, description, kind, backend, int(info.memory_free), int(info.memory_total), i))
    drain_log()
    return found
