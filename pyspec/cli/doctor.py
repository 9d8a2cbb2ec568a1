"""``pyspec doctor``: what was built, what loaded, what did not and why, and whether each device computes.

Standard library only, so that it works where the rest does not. Whatever may hang or end the process (drivers, kernels)
runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

from .._version import __version__

__all__ = ["collect", "print_doctor", "self_test"]

_PROBE_TIMEOUT = 120.0
_KNOWN = ("cpu", "cuda", "metal", "vulkan", "hip", "sycl")

# ggml's name of a CPU feature -> Linux's names of it in /proc/cpuinfo
_CPU_FLAGS = {
    "SSE3": "pni", "SSSE3": "ssse3", "AVX": "avx", "AVX_VNNI": "avx_vnni", "AVX2": "avx2", "F16C": "f16c", "FMA": "fma",
    "BMI2": "bmi2", "AVX512": "avx512f", "AVX512_VBMI": "avx512vbmi", "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16", "AMX_INT8": "amx_int8",
    "NEON": "asimd", "DOTPROD": "asimddp", "MATMUL_INT8": "i8mm", "FP16_VA": "asimdhp", "SVE": "sve", "SME": "sme",
}  # fmt: skip
# Left out on purpose; build_support/CMakeLists.txt says why.
_UNUSED_ON_PURPOSE = ("AMX_INT8",)


def collect(test: bool = True, seconds: float = 2.0) -> dict[str, Any]:
    """The findings as JSON-ready values; ``problems`` has what should be seen to, and ``ok`` is True if that is empty.

    Args:
        test: compute on each device. seconds: about how long the timing of one takes.
    """
    out: dict[str, Any] = {
        "pyspec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "build": None,
        "modules": [],
        "not_built": [],
        "drivers": {},
        "cpu": {},
        "limits": limits(),
        "devices": [],
        "problems": [],
    }
    problems: list[str] = out["problems"]
    try:
        from .._build_info import BUILD_INFO
    except ImportError as e:
        problems.append(f"pyspec was not built: {e}")
    else:
        keys = ("llama_commit", "ggml_version", "backends", "portable", "build_type", "compiler", "source")
        out["build"] = {key: BUILD_INFO.get(key) for key in keys}
        out["not_built"] = [name for name in _KNOWN if name not in BUILD_INFO.get("backends", ())]
    out["drivers"] = _probe("drivers")
    if error := out["drivers"].pop("error", None):
        problems.append(f"asking the drivers for their versions: {error}")
    try:
        _collect_native(out)
    except Exception as e:
        problems.append(f"the native libraries do not load: {type(e).__name__}: {e}")
    else:
        for device in out["devices"]:
            device["self_test"] = self_test(device["name"], seconds) if test else None
            if (found := device["self_test"]) and not found["ok"]:
                problems.append(f"{device['name']} does not compute: {found['error']}")
    out["ok"] = not problems
    return out


def _collect_native(out: dict[str, Any]) -> None:
    from .. import backends
    from .report import device_dict

    info = backends.build_info()
    found = backends.devices()
    out["devices"] = [device_dict(d) for d in found]
    features = backends.features()
    for name, module in info["modules"].items():
        entry = {"file": name, "backend": module["backend"], "loaded": module["loaded"], "reason": module["reason"]}
        wanted = _REGISTERED.get(module["backend"], module["backend"])
        registered = next((n for n in features if n.lower() == wanted), "")
        if module["loaded"] and not any(d.backend == registered for d in found):
            entry["reason"] = _no_device(module["backend"], out["drivers"])
        entry["features"] = features.get(registered, {}) if module["loaded"] else {}
        out["modules"].append(entry)
        if not module["loaded"] and "suits this machine better" not in module["reason"] and module["score"] != 0:
            out["problems"].append(f"{name} is built but does not load: {module['reason']}")
        elif module["loaded"] and entry["reason"] and module["backend"] != "cpu":
            out["problems"].append(f"{module['backend']}: {entry['reason']}")
    out["cpu"] = cpu(features.get("CPU", {}))
    out["problems"] += out["cpu"].pop("problems")


# Module name -> ggml's name of the backend, where they differ.
_REGISTERED = {"hip": "rocm", "metal": "mtl"}


def _no_device(backend: str, drivers: dict[str, Any]) -> str:
    """Why a loaded backend has no device, as far as its driver tells."""
    driver = drivers.get(backend)
    if isinstance(driver, str):
        return f"no device: {driver}"
    if backend == "vulkan" and isinstance(driver, dict):
        names = ", ".join(d["name"] for d in driver.get("devices", ()))
        hint = "; software devices are left out unless GGML_VK_VISIBLE_DEVICES names them" if names else ""
        return f"no device: the drivers offer {names or 'none'}{hint}"
    return "no device: the driver offers none"


def cpu(features: dict[str, str], cpuinfo: str = "/proc/cpuinfo") -> dict[str, Any]:
    """Instruction sets that the build uses against those that this CPU has.

    Args:
        features: ggml's, of the CPU module in use. cpuinfo: Linux's file.

    Returns:
        "model", "used", "unused" (the CPU has them, the build does not use them), "lacking" (the other way round),
        "problems".
    """
    used = [name for name, value in features.items() if value == "1" and name in _CPU_FLAGS]
    model, flags = platform.processor() or platform.machine(), None
    try:
        with open(cpuinfo, encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    model = value.strip()
                elif key.strip() in ("flags", "Features"):
                    flags = set(value.split())
                    break
    except OSError:
        pass
    out: dict[str, Any] = {"model": model, "used": used, "unused": None, "lacking": None, "problems": []}
    if flags is not None:
        out["unused"] = [
            n for n, f in _CPU_FLAGS.items() if f in flags and n not in used and n not in _UNUSED_ON_PURPOSE
        ]
        out["lacking"] = [n for n in used if _CPU_FLAGS[n] not in flags]
    if out["lacking"]:
        out["problems"].append(
            f"the CPU module uses {', '.join(out['lacking'])}, which this CPU does not announce: it was built on "
            "another machine. Build it here, or with PYSPEC_PORTABLE=1"
        )
    return out


def limits() -> dict[str, Any]:
    """CPUs and memory that this process may use."""
    from ..config import default_n_threads

    out: dict[str, Any] = {
        "n_cpus": os.cpu_count(),
        "n_cpus_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "n_threads": default_n_threads(),
        "memory_available_bytes": None,
        "locked_memory_bytes": None,
    }
    try:
        from ..backends import available_bytes

        out["memory_available_bytes"] = available_bytes()
    except ImportError:  # no NumPy, for one
        pass
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        out["locked_memory_bytes"] = None if soft == resource.RLIM_INFINITY else soft
    except ImportError:  # Windows
        pass
    return out


def self_test(device: str, seconds: float = 2.0) -> dict[str, Any]:
    """Compute on a device, in a process of its own.

    Returns:
        "ok", "error" (None, or a sentence), and what :class:`pyspec.backends.DeviceTest` has.
    """
    found = _probe("device", device, str(seconds))
    error = found.pop("error", None)
    out: dict[str, Any] = {"ok": error is None and bool(found.get("ok")), "error": error}
    if error is None and not out["ok"]:
        size = "that is not finite" if found["nmse"] is None else f"of {found['nmse']:.1e}"
        out["error"] = f"wrong results: a normalized mean squared error {size}"
    return out | {key: found.get(key) for key in ("nmse", "n_checked", "bytes_per_s", "flop_per_s", "seconds")}


def _probe(*arguments: str) -> dict[str, Any]:
    """Run ``pyspec.cli._probe`` and return what it printed; ``error`` if it failed, hung or was killed."""
    command = [sys.executable, "-m", "pyspec.cli._probe", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PROBE_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_PROBE_TIMEOUT:.0f} s: the driver hangs"}
    except OSError as e:
        return {"error": f"cannot start {sys.executable}: {e}"}
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode < 0:
        return {"error": f"the process was ended by signal {-done.returncode} ({last})"}
    return {"error": last}


# ---- text ----


def print_doctor(as_json: bool = False, test: bool = True) -> int:
    """Print the findings; returns 1 if there are problems."""
    found = collect(test)
    print(json.dumps(found, indent=2) if as_json else text(found), end="" if not as_json else "\n")
    return 0 if found["ok"] else 1


def text(found: dict[str, Any]) -> str:
    """The findings for people, one fact a line."""
    lines = [f"pyspec {found['pyspec']}, Python {found['python']}, {found['platform']}"]
    if build := found["build"]:
        kind = "portable" if build["portable"] else "for the CPU it was built on"
        lines.append(
            f"build     llama.cpp {build['llama_commit']}, ggml {build['ggml_version']}, {build['compiler']}, {kind}"
        )
    for i, module in enumerate(found["modules"]):
        state = "loaded" if module["loaded"] else "not loaded"
        reason = f": {module['reason']}" if module["reason"] else ""
        lines.append(f"{'modules' if not i else '':8}  {module['file']}  {state}{reason}")
    if found["not_built"]:
        lines.append(f"{'':8}  not built: {', '.join(found['not_built'])}")
    for i, (name, driver) in enumerate(found["drivers"].items()):
        lines.append(f"{'drivers' if not i else '':8}  {name}: {_driver_text(driver)}")
    if facts := found["cpu"]:
        lines.append(f"cpu       {facts['model']}")
        lines.append(f"          the build uses {', '.join(facts['used']) or 'no extensions'}")
        if facts["unused"]:
            lines.append(f"          not used though the CPU has it: {', '.join(facts['unused'])}")
    limit = found["limits"]
    locked = _size(limit["locked_memory_bytes"]) if limit["locked_memory_bytes"] is not None else "no limit"
    lines.append(
        f"limits    {limit['n_threads']} threads ({limit['n_cpus_allowed']} of {limit['n_cpus']} CPUs allowed), "
        f"{_size(limit['memory_available_bytes'])} memory, locked memory: {locked}"
    )
    for i, device in enumerate(found["devices"]):
        vendor = f"{device['vendor']}, " if device["vendor"] else ""
        memory = f"{_size(device['memory_free_bytes'])} of {_size(device['memory_total_bytes'])} free"
        title = f"{device['name']}: {device['description']} ({vendor}{device['kind']})"
        lines.append(f"{'devices' if not i else '':8}  {title}, {memory}")
        if device["self_test"]:
            lines.append(f"{'':8}    {_test_text(device['self_test'])}")
    lines += [f"PROBLEM   {problem}" for problem in found["problems"]] or ["no problems found"]
    return "\n".join(lines) + "\n"


def _driver_text(driver: Any) -> str:
    if isinstance(driver, str):
        return f"none: {driver}"
    if "loader" in driver:
        devices = "; ".join(f"{d['name']}, {d['driver']} {d['driver_version']}" for d in driver["devices"])
        return f"loader {driver['loader']}; {devices or 'no device'}"
    return ", ".join(f"{key} {value}" for key, value in driver.items())


def _test_text(test: dict[str, Any]) -> str:
    if not test["ok"]:
        return f"self-test FAILED: {test['error']}"
    if not test["n_checked"]:
        return "self-test: this device multiplies no matrices"
    speed = f", {test['bytes_per_s'] / 1e9:.1f} GB/s of weights" if test["bytes_per_s"] else ""
    speed += f", {test['flop_per_s'] / 1e9:,.1f} GFLOP/s" if test["flop_per_s"] else ""
    return f"self-test passed: {test['n_checked']} products{speed}, {test['seconds']:.1f} s"


def _size(n_bytes: int | None) -> str:
    return "unknown" if n_bytes is None else f"{n_bytes / 2**30:.1f} GiB"
