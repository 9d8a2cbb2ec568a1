"""Which devices a model is offloaded to: the argument, else ``PYSPEC_DEVICES``, else ggml's own order (all GPUs)."""

from __future__ import annotations

import os

from ..errors import BackendNotFoundError
from .devices import Device, devices

__all__ = ["select_devices"]


def select_devices(names: tuple[str, ...] | None) -> list[Device] | None:
    """Resolve device names.

    Args:
        names: names as :func:`pyspec.backends.devices` lists them, case ignored; empty: CPU only; None: the
            environment variable ``PYSPEC_DEVICES`` (comma-separated; "none" or "cpu": CPU only) if it is set.

    Returns:
        Devices to offload to, without CPU devices (which always take part); None: let ggml choose.

    Raises:
        BackendNotFoundError: no device of that name; lists those there are.
    """
    source = "devices"
    if names is None:
        text = os.environ.get("PYSPEC_DEVICES", "").strip()
        if not text:
            return None
        source = "PYSPEC_DEVICES"
        names = () if text.lower() == "none" else tuple(part.strip() for part in text.split(",") if part.strip())
    known = devices()
    by_name = {device.name.lower(): device for device in known}
    chosen: list[Device] = []
    for name in names:
        device = by_name.get(name.lower())
        if device is None:
            raise BackendNotFoundError(f"{source}: no device {name!r}; there are: {', '.join(d.name for d in known)}")
        if device.kind in ("gpu", "igpu") and device not in chosen:
            chosen.append(device)
    return chosen
