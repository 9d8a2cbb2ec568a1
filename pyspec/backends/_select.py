"""Which devices a model is offloaded to: the argument, else ``PYSPEC_DEVICES``, else ggml's own order (all GPUs)."""

from __future__ import annotations

import os

from ..config import ModelParams
from ..errors import ConfigError
from .devices import Device, devices, find_device

__all__ = ["check_split", "devices_in_use", "select_devices"]


def select_devices(names: tuple[str, ...] | None, known: list[Device] | None = None) -> list[Device] | None:
    """Resolve device names.

    Args:
        names: names as :func:`pyspec.backends.devices` lists them, case ignored; empty: CPU only; None: the
            environment variable ``PYSPEC_DEVICES`` (comma-separated; "none" or "cpu": CPU only) if it is set.
        known: the devices there are, if they were asked for already.

    Returns:
        Devices to offload to, without CPU devices (which always take part); None: let ggml choose.

    Raises:
        BackendNotFoundError: no device of that name; lists those there are.
        ConfigError: a device that holds no models.
    """
    source = "devices"
    if names is None:
        text = os.environ.get("PYSPEC_DEVICES", "").strip()
        if not text:
            return None
        source = "PYSPEC_DEVICES"
        names = () if text.lower() == "none" else tuple(part.strip() for part in text.split(",") if part.strip())
    known = devices() if known is None else known
    chosen: list[Device] = []
    for name in names:
        device = find_device(name, source, known)
        if device.kind not in ("cpu", "gpu", "igpu"):
            usable = ", ".join(d.name for d in known if d.is_gpu) or "none"
            raise ConfigError(
                f"{source}: {device.name} ({device.description}) has no memory for a model; it helps the CPU without "
                f"being named. Devices that hold models here: {usable}, and the CPU"
            )
        if device.is_gpu and device not in chosen:
            chosen.append(device)
    return chosen


def devices_in_use(params: ModelParams, known: list[Device] | None = None) -> list[Device]:
    """The GPUs that a model with these options is put on; empty: CPU only. As libllama chooses where nothing is said.

    Raises:
        BackendNotFoundError, ConfigError: as :func:`select_devices`.
    """
    known = devices() if known is None else known
    chosen = select_devices(params.devices, known)
    if chosen is None:
        chosen = _all_gpus(known)
    if params.n_gpu_layers == 0:
        return []
    if params.split_mode == "none" and chosen:
        return [chosen[params.main_gpu]] if params.main_gpu < len(chosen) else chosen[:1]
    return chosen


def _all_gpus(known: list[Device]) -> list[Device]:
    """Each GPU once, though several backends see it; without any the integrated ones of one backend."""
    chosen: list[Device] = []
    for device in known:
        if device.kind == "gpu" and not (device.id and device.id in {d.id for d in chosen}):
            chosen.append(device)
    integrated = [d for d in known if d.kind == "igpu"]
    return chosen or [d for d in integrated if d.backend == integrated[0].backend]


def check_split(params: ModelParams, chosen: list[Device] | None, known: list[Device] | None = None) -> None:
    """Refuse a split that does not fit the devices: libllama reads past its arrays, or ignores the rest.

    Raises:
        ConfigError: names the option, what was given, and the devices.
    """
    if params.tensor_split is None and not params.main_gpu:
        return
    if chosen is None:
        chosen = devices_in_use(ModelParams(), known)
    names = f"{len(chosen)} ({', '.join(d.name for d in chosen)})" if chosen else "none"
    if params.split_mode == "none" and params.main_gpu >= max(1, len(chosen)):
        raise ConfigError(f"main_gpu={params.main_gpu} is not one of the devices in use, counted from 0: {names}")
    if params.tensor_split is not None and chosen and len(params.tensor_split) > len(chosen):
        raise ConfigError(
            f"tensor_split has {len(params.tensor_split)} shares, but the devices in use are {names}: "
            "give one share a device, or name the devices"
        )
