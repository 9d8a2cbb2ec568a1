"""The Metal build as far as it goes without a Mac: options, CMake's configuration, the embedded kernels.

What is compiled and run only on macOS is not tested here; docs/gpu.md says so.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

config = pytest.importorskip("build_support.config")
from build_support import native, preflight  # noqa: E402

TOOLCHAIN = Path(__file__).with_name("macos-toolchain.cmake")


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> config.BuildConfig:
    """What a Mac's environment without any variable gives."""
    for module in (config, preflight):
        fake = SimpleNamespace(platform="darwin", version_info=sys.version_info)
        monkeypatch.setattr(module, "sys", fake)
    return config.BuildConfig.from_env({})


def test_metal_is_the_default_on_macos_and_can_be_left_out(mac: config.BuildConfig) -> None:
    assert mac.backends == ("cpu", "metal")
    assert {"-DGGML_METAL=ON", "-DGGML_METAL_EMBED_LIBRARY=ON"} <= set(mac.cmake_options())
    assert "-DGGML_METAL=OFF" in config.BuildConfig.from_env({"PYSPEC_BACKENDS": ""}).cmake_options()


def test_without_the_command_line_tools_the_build_says_so(
    mac: config.BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cc", "c++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(config.BuildError, match=r"macOS SDK was not found.*xcode-select --install"):
        preflight.check(mac)
    (tmp_path / "xcrun").write_text("#!/bin/sh\necho /sdk\n")
    (tmp_path / "xcrun").chmod(0o755)
    preflight.check(mac)


@pytest.mark.skipif(sys.platform != "linux", reason="stands in for a Mac; a Mac builds the real thing")
@pytest.mark.slow
def test_the_project_configures_for_macos(mac: config.BuildConfig, sync: ModuleType, tmp_path: Path) -> None:
    if not sync.TREE_DIR.is_dir():
        pytest.skip("vendor/ggml/llama.cpp is not there: built with PYSPEC_LLAMA_SRC")
    command = native.configure_command(mac, sync.read_pin(), sync.TREE_DIR, tmp_path)
    # BLAS is Accelerate there, which CMake looks for by linking
    command += [f"-DCMAKE_TOOLCHAIN_FILE={TOOLCHAIN}", "-DGGML_BLAS=OFF"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    rules = (tmp_path / "build.ninja").read_text(encoding="utf-8")
    built = set(re.findall(r"^build \S*?(libpyspec-[\w-]+\.(?:so|dylib)): CXX_", rules, re.MULTILINE))
    core = {"libpyspec-ggml-base.dylib", "libpyspec-ggml.dylib", "libpyspec-llama.dylib"}
    assert built == core | {"libpyspec-ggml-cpu.so", "libpyspec-ggml-metal.so"}
    links = re.findall(r"LINK_LIBRARIES = (.*)", rules)
    assert len(links) == len(built)
    for line in links:
        assert "-Wl,-rpath,@loader_path" in line  # the libraries find each other beside themselves
    metal = next(line for line in links if "METALKIT_FRAMEWORK" in line or "Metal" in line)
    for framework in ("FOUNDATION_LIBRARY", "METAL_FRAMEWORK", "METALKIT_FRAMEWORK"):
        assert framework in metal, metal

    # the kernels' source goes into the module: its generation needs nothing of Apple's
    sources = re.findall(r"^build (\S*/ggml-metal-embed-[\w-]+\.s) ", rules, re.MULTILINE)
    kernels = list((sync.TREE_DIR / "ggml" / "src" / "ggml-metal" / "kernels").glob("*.metal"))
    assert len(sources) >= 30
    names = {Path(source).stem.removeprefix("ggml-metal-embed-") for source in sources}
    assert names <= {kernel.stem for kernel in kernels}
    ask = [native.find_tool("ninja"), "-C", str(tmp_path), "-t", "commands", "-s", sources[0]]
    step = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()[-1]
    subprocess.run(step, shell=True, cwd=tmp_path, timeout=60, check=True)
    assembly = (tmp_path / sources[0]).read_text(encoding="utf-8")
    assert ".section __DATA,__ggml_metallib" in assembly
    embedded = re.search(r'\.incbin "(.*)"', assembly)
    assert embedded is not None
    text = Path(embedded.group(1)).read_text(encoding="utf-8")
    assert "kernel void" in text
    assert '#include "common.h"' not in text  # in the module there is no folder to include from
