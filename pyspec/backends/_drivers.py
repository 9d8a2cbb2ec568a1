"""Versions of the drivers below the backends. Asks the drivers themselves, so a broken one may end the process: callers
do it in a process of its own.
"""

from __future__ import annotations

import platform
import re
import struct
import sys
from pathlib import Path
from typing import Any

from . import _dependencies

__all__ = ["cuda_driver", "drivers", "vulkan_drivers"]

# vulkan_core.h; structs are read at their offsets, which never change
_VULKAN = """
typedef struct VkInstance_T *VkInstance;
typedef struct VkPhysicalDevice_T *VkPhysicalDevice;
typedef struct { uint32_t sType; const void *pNext; const char *pApplicationName; uint32_t applicationVersion;
                 const char *pEngineName; uint32_t engineVersion; uint32_t apiVersion; } VkApplicationInfo;
typedef struct { uint32_t sType; const void *pNext; uint32_t flags; const VkApplicationInfo *pApplicationInfo;
                 uint32_t enabledLayerCount; const char *const *ppEnabledLayerNames; uint32_t enabledExtensionCount;
                 const char *const *ppEnabledExtensionNames; } VkInstanceCreateInfo;
typedef struct { uint32_t sType; void *pNext; uint32_t driverID; char driverName[256]; char driverInfo[256];
                 uint8_t conformance[4]; } VkPhysicalDeviceDriverProperties;
typedef struct { uint32_t sType; void *pNext; uint8_t properties[4096]; } VkPhysicalDeviceProperties2;
int32_t vkEnumerateInstanceVersion(uint32_t *version);
int32_t vkCreateInstance(const VkInstanceCreateInfo *info, const void *allocator, VkInstance *out);
int32_t vkEnumeratePhysicalDevices(VkInstance instance, uint32_t *n, VkPhysicalDevice *out);
void vkGetPhysicalDeviceProperties2(VkPhysicalDevice device, VkPhysicalDeviceProperties2 *out);
void vkDestroyInstance(VkInstance instance, const void *allocator);
"""
_APPLICATION_INFO, _INSTANCE_CREATE_INFO, _PROPERTIES_2, _DRIVER_PROPERTIES = 0, 1, 1000059001, 1000196000
_TYPES = ("other", "igpu", "gpu", "virtual gpu", "cpu")


def _open(names: tuple[str, ...], declarations: str) -> tuple[Any, Any]:
    """Return ffi and the first library that opens.

    Raises:
        OSError: none does.
    """
    import cffi

    ffi = cffi.FFI()
    ffi.cdef(declarations)
    error: OSError | None = None
    for name in names:
        try:
            return ffi, ffi.dlopen(name)
        except OSError as e:
            error = e
    raise error or OSError("no name")


def _version(number: int) -> str:
    return f"{number >> 22 & 0x7F}.{number >> 12 & 0x3FF}.{number & 0xFFF}"


def vulkan_drivers() -> dict[str, Any]:
    """The Vulkan loader's version and every device that its drivers offer, software ones too.

    Raises:
        OSError: there is no loader, or it makes no instance (no driver).
    """
    names = {"win32": ("vulkan-1.dll",), "darwin": ("libvulkan.1.dylib", "libMoltenVK.dylib")}
    ffi, lib = _open(names.get(sys.platform, ("libvulkan.so.1",)), _VULKAN)
    version = ffi.new("uint32_t *")
    lib.vkEnumerateInstanceVersion(version)
    application = ffi.new("VkApplicationInfo *", {"sType": _APPLICATION_INFO, "apiVersion": 1 << 22 | 1 << 12})
    info = ffi.new("VkInstanceCreateInfo *", {"sType": _INSTANCE_CREATE_INFO, "pApplicationInfo": application})
    instance = ffi.new("VkInstance *")
    if code := lib.vkCreateInstance(info, ffi.NULL, instance):
        raise OSError(f"the Vulkan loader {_version(version[0])} finds no usable driver (vkCreateInstance: {code})")
    found = []
    try:
        n = ffi.new("uint32_t *")
        lib.vkEnumeratePhysicalDevices(instance[0], n, ffi.NULL)
        handles = ffi.new("VkPhysicalDevice[]", max(1, n[0]))
        lib.vkEnumeratePhysicalDevices(instance[0], n, handles)
        for i in range(n[0]):
            driver = ffi.new("VkPhysicalDeviceDriverProperties *", {"sType": _DRIVER_PROPERTIES})
            properties = ffi.new("VkPhysicalDeviceProperties2 *", {"sType": _PROPERTIES_2, "pNext": driver})
            lib.vkGetPhysicalDeviceProperties2(handles[i], properties)
            raw = bytes(ffi.buffer(properties.properties, 276))
            api, _, _, _, kind = struct.unpack_from("<5I", raw)
            found.append(
                {
                    "name": raw[20:].split(b"\0", 1)[0].decode("utf-8", "replace"),
                    "type": _TYPES[kind] if kind < len(_TYPES) else "other",
                    "api": _version(api),
                    "driver": ffi.string(driver.driverName).decode("utf-8", "replace"),
                    "driver_version": ffi.string(driver.driverInfo).decode("utf-8", "replace"),
                }
            )
    finally:
        lib.vkDestroyInstance(instance[0], ffi.NULL)
    return {"loader": _version(version[0]), "devices": found}


def cuda_driver(proc_file: str = "/proc/driver/nvidia/version") -> dict[str, str]:
    """The NVIDIA driver's version and the newest CUDA version it runs.

    Raises:
        OSError: there is no driver.
    """
    ffi, lib = _open(
        ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1",), "int cuDriverGetVersion(int *version);"
    )
    version = ffi.new("int *")
    lib.cuDriverGetVersion(version)
    out = {"cuda": f"{version[0] // 1000}.{version[0] % 1000 // 10}"}
    try:
        text = Path(proc_file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    if match := re.search(r"Kernel Module\D*([\d.]+)", text):
        out["driver"] = match.group(1)
    return out


def drivers() -> dict[str, Any]:
    """Versions by interface: "cuda", "vulkan", "metal"; where there is none a text that says why."""
    out: dict[str, Any] = {}
    for name, ask in (("cuda", cuda_driver), ("vulkan", vulkan_drivers)):
        try:
            out[name] = ask()
        except OSError as e:
            out[name] = _dependencies.explain(str(e))
    if sys.platform == "darwin":
        out["metal"] = {"macos": platform.mac_ver()[0]}
    return out
