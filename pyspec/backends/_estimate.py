"""What a model and a context on it would take on each device, computed by libllama without taking it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..config import ContextParams, ModelParams
from . import _binding
from ._context_base import native_context_params
from ._gguf import check_file
from ._model import native_model_params
from ._status import drain_log
from .devices import devices

__all__ = ["HOST", "MemoryUse", "estimate_memory"]

#: The name that host memory goes by.
HOST = "CPU"
_MAX_DEVICES = 64
_REPACKED = -2  # struct pyspec_device_memory


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory on one device, in bytes.

    Attributes:
        device: its name; :data:`HOST`: host memory.
        weights_bytes: the model; on the host it may be mapped from the file.
        repacked_bytes: part of the model that is stored anew for the CPU's kernels.
        context_bytes: the caches. compute_bytes: work buffers.
    """

    device: str
    weights_bytes: int
    repacked_bytes: int
    context_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.repacked_bytes + self.context_bytes + self.compute_bytes


def estimate_memory(path: str, model_params: ModelParams, context_params: ContextParams) -> list[MemoryUse] | None:
    """Ask libllama what loading and one context would take; nothing is allocated, only metadata is read.

    Args:
        path: a GGUF file. model_params, context_params: as they will be used.

    Returns:
        One entry a device that would be used, host memory last; None: libllama cannot say, as for drafts that need
        their target's context.

    Raises:
        ModelLoadError: no GGUF file. BackendNotFoundError, ConfigError: devices or their split do not fit.
    """
    path = check_file(path)
    _binding.load()
    ffi, lib = _binding.ffi, _binding.lib
    rows: Any = ffi.new("struct pyspec_device_memory[]", _MAX_DEVICES)
    n: Any = ffi.new("int32_t *")
    native_model = native_model_params(model_params)
    native_context = native_context_params(context_params, False)
    rc = lib.pyspec_estimate_memory(os.fsencode(path), native_model.params, native_context, rows, _MAX_DEVICES, n)
    drain_log()
    if rc:
        return None
    names = {device.index: device.name for device in devices()}
    found: dict[str, list[int]] = {}
    for row in (rows[i] for i in range(n[0])):
        sizes = found.setdefault(names.get(row.device, HOST), [0, 0, 0, 0])
        sizes[1 if row.device == _REPACKED else 0] += int(row.model)
        sizes[2] += int(row.context)
        sizes[3] += int(row.compute)
    uses = [MemoryUse(name, *sizes) for name, sizes in found.items()]
    return sorted(uses, key=lambda use: use.device == HOST)
