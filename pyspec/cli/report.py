"""What a bug report needs: versions, build, backends, devices. Standard library only, works with a broken install."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

from .._version import __version__

__all__ = ["collect", "print_report"]

_PACKAGES = ("numpy", "cffi", "jinja2", "huggingface_hub", "typer", "rich")
#: Variables of other software that change what pyspec's libraries do.
_FOREIGN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "LD_PRELOAD")


def collect() -> dict[str, Any]:
    """The report as JSON-ready values. Where a part fails, ``errors`` has the reason and the rest is there."""
    out: dict[str, Any] = {
        "pyspec": __version__,
        "python": sys.version.replace("\n", " "),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "n_cpus": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("PYSPEC_", "GGML_")) or name in _FOREIGN_VARIABLES
        },
    }
    errors: list[str] = []
    # each part by itself: a broken install is what this report is for
    for collect_part in (_collect_build, _collect_native):
        try:
            collect_part(out)
        except Exception as e:
            errors.append(f"{type(e).__name__}: {e}")
    out["errors"] = errors
    return out


def _collect_build(out: dict[str, Any]) -> None:
    from .._build_info import BUILD_INFO

    out["built"] = BUILD_INFO


def _collect_native(out: dict[str, Any]) -> None:
    from .. import backends, config

    out["n_threads"] = config.default_n_threads()
    backends.load()
    out["loaded"] = backends.build_info()
    out["backends"] = backends.available()
    out["devices"] = [device_dict(d) for d in backends.devices()]


def device_dict(device: Any) -> dict[str, Any]:
    """A device's public fields."""
    names = ("name", "vendor", "backend", "kind", "description", "id", "memory_free_bytes", "memory_total_bytes")
    return {name: getattr(device, name) for name in names} | {"capabilities": list(device.capabilities)}


def print_report(as_json: bool = False) -> int:
    """Print the report; returns 1 if the native part could not be loaded."""
    report = collect()
    if as_json:
        print(json.dumps(report, indent=2, default=str))
    else:
        for key, value in report.items():
            _print_item(key, value, "")
    return 1 if report["errors"] else 0


def _print_item(key: str, value: Any, indent: str) -> None:
    if isinstance(value, dict):
        print(f"{indent}{key}:" + ("" if value else " none"))
        for k, v in value.items():
            _print_item(k, v, indent + "  ")
    elif isinstance(value, (list, tuple)) and any(isinstance(v, dict) for v in value):
        print(f"{indent}{key}:")
        for v in value:
            print(f"{indent}  - " + ", ".join(f"{k}={x}" for k, x in v.items()))
    elif isinstance(value, (list, tuple)):
        print(f"{indent}{key}: {', '.join(str(v) for v in value) or 'none'}")
    else:
        print(f"{indent}{key}: {value}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
