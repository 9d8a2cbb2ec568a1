"""Build options, what makes a rebuild, and what a missing tool says."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

config = pytest.importorskip("build_support.config")
from build_support import binding, cuda, extensions, native, preflight  # noqa: E402

BuildConfig, BuildError = config.BuildConfig, config.BuildError


# --- options ---


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ("cpu",)),
        ("cuda vulkan", ("cpu", "cuda", "vulkan")),
        ("CUDA,cpu, cuda", ("cpu", "cuda")),
        ("metal;hip sycl", ("cpu", "metal", "hip", "sycl")),
    ],
)
def test_backends(text: str, names: tuple[str, ...]) -> None:
    assert config.parse_backends(text) == names


def test_an_unknown_backend_is_named_with_the_known_ones() -> None:
    with pytest.raises(BuildError, match=r"unknown backend cudda\. Known: cpu, cuda, metal, vulkan, hip, sycl"):
        BuildConfig.from_env({"PYSPEC_BACKENDS": "cudda vulkan"})


@pytest.mark.parametrize(
    "environ",
    [
        {"PYSPEC_BUILD_JOBS": "many"},
        {"PYSPEC_BUILD_JOBS": "0"},
        {"PYSPEC_PORTABLE": "perhaps"},
        {"CMAKE_ARGS": "-DX='open"},
        {"PYSPEC_LLAMA_SRC": os.sep},
    ],
)
def test_a_senseless_option_names_itself(environ: dict[str, str]) -> None:
    with pytest.raises(BuildError, match=next(iter(environ))):
        BuildConfig.from_env(environ)


def test_options_for_cmake() -> None:
    options = BuildConfig.from_env({"PYSPEC_BACKENDS": "cuda", "CMAKE_ARGS": "-DGGML_CUDA_FA=OFF -DA='b c'"})
    flags = options.cmake_options()
    assert "-DGGML_CUDA=ON" in flags
    assert "-DGGML_OPENMP=OFF" in flags
    assert flags[-2:] == ["-DGGML_CUDA_FA=OFF", "-DA=b c"]  # the user's come last, so they win
    assert "-DGGML_CPU_ALL_VARIANTS=ON" in BuildConfig(portable=True).cmake_options()
    assert "-DPYSPEC_NATIVE=ON" in BuildConfig().cmake_options()


def test_a_backend_turned_on_for_cmake_is_known_as_one() -> None:
    """So that its toolkit is asked for before the compile, and the build record names it."""
    options = BuildConfig.from_env(
        {"PYSPEC_BACKENDS": "", "CMAKE_ARGS": "-DGGML_CUDA=on -DGGML_VULKAN:BOOL=1 -DGGML_HIP=OFF"}
    )
    assert options.backends == ("cpu", "cuda", "vulkan")


# --- when to rebuild ---


CHANGES: list[dict[str, Any]] = [
    {"backends": ("cpu", "vulkan")},
    {"cmake_args": ("-DGGML_LTO=ON",)},
    {"portable": True},
    {"debug": True},
    {"toolchain": ("clang", "clang++", "", "", "", "")},
    {"llama_src": Path("elsewhere")},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_changed_option_is_another_build(sync: ModuleType, change: dict[str, Any]) -> None:
    pin = sync.read_pin()
    assert native.stamp_key(BuildConfig(), pin) != native.stamp_key(replace(BuildConfig(), **change), pin)
    assert BuildConfig().options_key() != replace(BuildConfig(), **change).options_key()


def test_another_backend_shares_what_is_compiled() -> None:
    """The backends are modules of their own: with one more of them all else stays as it was compiled."""
    plain, vulkan = BuildConfig(), BuildConfig(backends=("cpu", "vulkan"))
    assert plain.folder_key() == vulkan.folder_key() == BuildConfig(cuda_archs="90").folder_key()
    assert plain.folder_key() != BuildConfig(cmake_args=("-DGGML_VULKAN=ON",)).folder_key()
    assert plain.folder_key() != BuildConfig(portable=True).folder_key()


def test_cuda_architectures_are_another_build_of_the_cuda_backend_only() -> None:
    keys = {BuildConfig(backends=("cpu", "cuda"), cuda_archs=archs).options_key() for archs in ("", "86", "90")}
    assert len(keys) == 3
    assert BuildConfig().options_key() == BuildConfig(cuda_archs="90").options_key()
    environ = {"PYSPEC_BACKENDS": "cuda", "CUDAARCHS": "86;89"}
    assert "-DCMAKE_CUDA_ARCHITECTURES=86;89" in BuildConfig.from_env(environ).cmake_options()


def test_another_compiler_or_flag_is_another_build() -> None:
    keys = {BuildConfig.from_env({name: "x"}).options_key() for name in ("CC", "CXX", "CFLAGS", "LDFLAGS")}
    assert len(keys) == 4
    assert BuildConfig.from_env({}).options_key() not in keys


def test_jobs_and_folders_are_no_other_build(sync: ModuleType, tmp_path: Path) -> None:
    pin = sync.read_pin()
    other = BuildConfig(jobs=7, build_dir=tmp_path)
    assert native.stamp_key(BuildConfig(), pin) == native.stamp_key(other, pin)


def test_another_pin_is_another_build(sync: ModuleType) -> None:
    pin = sync.read_pin()
    assert native.stamp_key(BuildConfig(), pin) != native.stamp_key(BuildConfig(), replace(pin, tree_sha256="0" * 64))


def test_changed_build_files_are_another_build(
    sync: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = native.stamp_key(BuildConfig(), sync.read_pin())
    (tmp_path / "build_support").mkdir()
    for name in native._BUILD_FILES:
        (tmp_path / "build_support" / name).write_bytes(b"changed")
    monkeypatch.setattr(native, "ROOT", tmp_path)
    assert native.stamp_key(BuildConfig(), sync.read_pin()) != before


class FakeSteps:
    """Stands in for CMake: counts the builds and leaves one library behind."""

    def __init__(self) -> None:
        self.builds = 0

    def __call__(self, config: Any, pin: Any, source: Path, folder: Path, install_dir: Path, module: str) -> None:
        self.builds += 1
        install_dir.mkdir(parents=True, exist_ok=True)
        (install_dir / "libpyspec-ggml-cpu.so").write_bytes(b"library")


@pytest.fixture
def steps(sync: ModuleType, monkeypatch: pytest.MonkeyPatch) -> FakeSteps:
    fake = FakeSteps()
    if not sync.TREE_DIR.is_dir():
        pytest.skip("vendor/ggml/llama.cpp is not there: built with PYSPEC_LLAMA_SRC")
    monkeypatch.setattr(native, "_configure_and_compile", fake)
    monkeypatch.setattr(preflight, "check", lambda *_: None)
    return fake


def test_the_second_build_does_nothing(steps: FakeSteps, tmp_path: Path) -> None:
    options = BuildConfig(build_dir=tmp_path)
    first, second = native.build(options), native.build(options)
    assert (first.rebuilt, second.rebuilt, steps.builds) == (True, False, 1)
    assert second.libraries == first.libraries == ("libpyspec-ggml-cpu.so",)
    assert second.info == first.info
    assert second.info["modules"] == ["cpu"]


def test_two_sets_of_backends_side_by_side(steps: FakeSteps, tmp_path: Path) -> None:
    plain = BuildConfig(build_dir=tmp_path)
    first, more = native.build(plain), native.build(replace(plain, backends=("cpu", "vulkan")))
    assert first.install_dir != more.install_dir
    assert first.install_dir.parent == more.install_dir.parent
    assert (steps.builds, native.build(plain).rebuilt) == (2, False)


def test_a_changed_option_builds_again_and_the_first_build_stays(steps: FakeSteps, tmp_path: Path) -> None:
    plain = BuildConfig(build_dir=tmp_path)
    native.build(plain)
    assert native.build(replace(plain, debug=True)).rebuilt
    assert not native.build(plain).rebuilt
    assert steps.builds == 2


@pytest.mark.parametrize("damage", ["missing", "cut", "stamp"])
def test_a_damaged_build_is_done_again(steps: FakeSteps, tmp_path: Path, damage: str) -> None:
    options = BuildConfig(build_dir=tmp_path)
    build = native.build(options)
    library = build.install_dir / build.libraries[0]
    if damage == "missing":
        library.unlink()
    elif damage == "cut":
        library.write_bytes(b"lib")
    else:
        native.stamp_file(build.install_dir).write_text('{"key": ')
    assert native.build(options).rebuilt


def test_a_failed_build_leaves_no_stamp(steps: FakeSteps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise BuildError("boom")

    options = BuildConfig(build_dir=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(native, "_configure_and_compile", fail)
        with pytest.raises(BuildError, match="boom"):
            native.build(options)
    assert native.build(options).rebuilt


def test_a_checkout_of_the_users_is_asked_each_time(steps: FakeSteps, sync: ModuleType, tmp_path: Path) -> None:
    """Its files may change at any time; Ninja knows which."""
    options = BuildConfig(build_dir=tmp_path, llama_src=sync.TREE_DIR)
    assert native.build(options).rebuilt
    assert native.build(options).rebuilt
    assert native.build(options).info["source"] == "external"


def test_a_failed_step_shows_the_error_and_names_the_log(tmp_path: Path) -> None:
    script = "print('[1/2] fine'); print('x.cpp:3: error: no such thing'); raise SystemExit(1)"
    with pytest.raises(BuildError, match="no such thing") as caught:
        native._run([sys.executable, "-c", script], "compiling", tmp_path / "step.log")
    assert str(tmp_path / "step.log") in str(caught.value)
    assert "fine" not in str(caught.value)
    assert "[1/2] fine" in (tmp_path / "step.log").read_text()


# --- where the libraries go ---


def test_a_folder_that_cannot_be_written_is_named(
    steps: FakeSteps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = native.build(BuildConfig(build_dir=tmp_path / "build"))
    package = tmp_path / "package"
    (package / "backends").mkdir(parents=True)
    (package / "backends" / "lib").write_text("in the way")
    with pytest.raises(BuildError, match=r"cannot be put into .*lib: File exists. Make the folder writable"):
        extensions.place_native(build, package)

    (package / "backends" / "lib").unlink()

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(extensions.shutil, "copy2", refuse)
        with pytest.raises(BuildError, match=r"cannot be put into .*lib: Permission denied"):
            extensions.place_native(build, package)
    assert not (package / "_build_info.py").exists(), "nothing claims a build that is not there"
    extensions.place_native(build, package)
    assert (package / "_build_info.py").exists()


# --- what must be installed ---


def programs(folder: Path, *names: str) -> dict[str, str]:
    for name in names:
        path = folder / name
        path.write_text("#!/bin/sh\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"PATH": str(folder)}


@pytest.mark.skipif(sys.platform == "win32", reason="compilers are found by setuptools there")
def test_a_missing_compiler_names_the_package_to_install(root: Path) -> None:
    """The whole command, as `make` runs it, on a machine with nothing."""
    env = {"PATH": "", "PYTHONPATH": str(root)}
    run = subprocess.run(
        [sys.executable, "-m", "build_support"], cwd=root, env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "error: no C compiler found" in run.stderr
    assert "apt install g++" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="compilers are found by setuptools there")
def test_compilers(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no C\+\+ compiler found"):
        preflight.check(BuildConfig(), programs(tmp_path, "cc"))
    with pytest.raises(BuildError, match="CXX='nonsense': there is no such program"):
        preflight.check(BuildConfig(), programs(tmp_path, "cc") | {"CXX": "nonsense"})
    preflight.check(BuildConfig(), programs(tmp_path, "cc", "c++"))


def test_python_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(BuildError, match="apt install python3-dev"):
        preflight.check(BuildConfig(), programs(tmp_path, "cc", "c++"))


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("cuda", "nvcc was not found"),
        ("vulkan", "glslc was not found. Debian: apt install glslc"),
        ("metal", "macOS only"),
        ("hip", "hipcc was not found"),
        ("sycl", "icpx was not found"),
    ],
)
def test_a_missing_sdk_is_named(tmp_path: Path, backend: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.sys, "platform", "linux")
    monkeypatch.setattr(preflight, "_SDK_FOLDERS", {})
    monkeypatch.setattr(preflight, "_SYSTEM_PREFIXES", ())
    monkeypatch.setattr(cuda, "_USUAL_ROOT", tmp_path)
    with pytest.raises(BuildError, match=message):
        preflight.check(BuildConfig(backends=("cpu", backend)), programs(tmp_path, "cc", "c++"))


class FakeToolkit:
    """A CUDA toolkit in a folder, with or without cuBLAS and the driver's stub, and a package of cuBLAS."""

    def __init__(self, folder: Path, release: str = "13.0") -> None:
        self.root = folder / "toolkit"
        self.bin = folder / "bin"
        self.package = folder / "site-packages" / "nvidia"
        (self.root / "bin").mkdir(parents=True)
        self.bin.mkdir()
        nvcc = self.root / "bin" / "nvcc"
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        nvcc.chmod(0o755)
        self.environ = programs(self.bin, "cc", "c++") | {"CUDACXX": str(nvcc)}

    def add(self, *names: str, under: Path | None = None) -> None:
        for name in names:
            path = (under or self.root) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"// {name}\n")

    def add_package(self) -> None:
        names = ("include/cublas_v2.h", "include/cublas_api.h", "include/cuda_fp16.h")
        self.add(*names, "lib/libcublas.so.13", "lib/libcublasLt.so.13", under=self.package / "cu13")


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeToolkit:
    fake = FakeToolkit(tmp_path)

    spec = SimpleNamespace(submodule_search_locations=[str(fake.package)])
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(cuda, "_has_gpu", lambda: False)
    return fake


CUDA = BuildConfig(backends=("cpu", "cuda"), cuda_archs="90")


@pytest.mark.skipif(sys.platform == "win32", reason="the fake compiler is a shell script")
class TestCuda:
    def test_a_complete_toolkit_needs_nothing(self, toolkit: FakeToolkit, tmp_path: Path) -> None:
        toolkit.add("include/cublas_v2.h", "lib64/libcublas.so", "lib64/stubs/libcuda.so")
        preflight.check(CUDA, toolkit.environ)
        nvcc = toolkit.environ["CUDACXX"]
        assert cuda.options(CUDA, tmp_path / "build", toolkit.environ) == [f"-DCMAKE_CUDA_COMPILER={nvcc}"]
        assert cuda.missing_requirements(CUDA, toolkit.environ) == []

    def test_missing_cublas_names_the_packages(self, toolkit: FakeToolkit) -> None:
        with pytest.raises(BuildError, match=r"no cuBLAS.*apt install libcublas-dev-13-0.*'nvidia-cublas>=13,<14'"):
            preflight.check(CUDA, toolkit.environ)
        assert cuda.missing_requirements(CUDA, toolkit.environ) == ["nvidia-cublas>=13,<14"]
        preflight.check(CUDA, toolkit.environ, packages=False)  # the Makefile installs them
        assert cuda.missing_requirements(BuildConfig(), toolkit.environ) == []

    def test_cublas_of_the_package_is_used_from_a_path_that_stays(self, toolkit: FakeToolkit, tmp_path: Path) -> None:
        """And only its own headers: those of the CUDA runtime must stay the toolkit's."""
        toolkit.add_package()
        preflight.check(CUDA, toolkit.environ)
        build = tmp_path / "build"
        options = cuda.options(CUDA, build, toolkit.environ)
        stage = build / "cuda-13"
        assert f"-DPYSPEC_CUDA_INCLUDE={stage / 'include'}" in options
        assert f"-DCUDA_cublas_LIBRARY={stage / 'lib' / 'libcublas.so.13'}" in options
        assert f"-DCUDA_cublasLt_LIBRARY={stage / 'lib' / 'libcublasLt.so.13'}" in options
        assert sorted(p.name for p in (stage / "include").iterdir()) == ["cublas_api.h", "cublas_v2.h"]
        before = (stage / "include" / "cublas_v2.h").stat().st_mtime_ns
        assert cuda.options(CUDA, build, toolkit.environ) == options
        assert (stage / "include" / "cublas_v2.h").stat().st_mtime_ns == before

    def test_without_the_drivers_stub_its_pool_is_left_out(self, toolkit: FakeToolkit, tmp_path: Path) -> None:
        toolkit.add("include/cublas_v2.h", "lib64/libcublas.so")
        driver = any(Path("/usr/lib").glob("*-linux-gnu/libcuda.so")) or Path("/usr/lib64/libcuda.so").exists()
        assert ("-DGGML_CUDA_NO_VMM=ON" in cuda.options(CUDA, tmp_path, toolkit.environ)) != driver

    def test_without_a_gpu_the_architecture_must_be_named(self, toolkit: FakeToolkit) -> None:
        toolkit.add("include/cublas_v2.h", "lib64/libcublas.so")
        with pytest.raises(BuildError, match=r"no NVIDIA GPU here.*CUDAARCHS=90.*H100"):
            preflight.check(replace(CUDA, cuda_archs=""), toolkit.environ)
        for told in ({"cmake_args": ("-DCMAKE_CUDA_ARCHITECTURES=86",)}, {"portable": True}):
            preflight.check(replace(CUDA, cuda_archs="", **told), toolkit.environ)

    def test_an_old_toolkit_is_refused(self, tmp_path: Path) -> None:
        old = FakeToolkit(tmp_path, "10.2")
        with pytest.raises(BuildError, match=r"is of CUDA 10\.2, 11\.7 or newer is needed"):
            preflight.check(CUDA, old.environ)

    def test_a_compiler_that_is_none(self, toolkit: FakeToolkit) -> None:
        with pytest.raises(BuildError, match="CUDACXX is somewhere/nvcc, but there is no such program"):
            preflight.check(CUDA, toolkit.environ | {"CUDACXX": "somewhere/nvcc"})
        with pytest.raises(BuildError, match="does not answer like nvcc"):
            preflight.check(CUDA, toolkit.environ | {"CUDACXX": str(toolkit.bin / "cc")})


VULKAN = BuildConfig(backends=("cpu", "vulkan"))
CORE_H = """\
#define VK_HEADER_VERSION 239
#define VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION(0, 1, 3, VK_HEADER_VERSION)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="compilers are found by setuptools there")
def test_vulkan_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thing that is missing is named, old headers with their version; with all of them the check passes."""
    monkeypatch.setattr(preflight, "_SYSTEM_PREFIXES", ())
    monkeypatch.setattr(preflight.sysconfig, "get_config_var", lambda _: "nowhere")
    sdk = tmp_path / "sdk"
    headers = sdk / "include" / "vulkan"
    headers.mkdir(parents=True)
    environ = programs(tmp_path, "cc", "c++") | {"VULKAN_SDK": str(sdk)}

    def refused(pattern: str) -> None:
        with pytest.raises(BuildError, match=pattern):
            preflight.check(VULKAN, environ)

    refused("glslc was not found")
    programs(tmp_path, "glslc")
    refused(r"vulkan_core\.h was not found.*apt install libvulkan-dev spirv-headers")
    (headers / "vulkan_core.h").write_text(CORE_H)
    (headers / "vulkan_structs.hpp").write_text("struct Layer {};")
    refused(r"are of Vulkan 1\.3\.239 and have no vk::LayerSettingEXT; 1\.3\.275 or newer")
    (headers / "vulkan_structs.hpp").write_text("  struct LayerSettingEXT\n")
    refused(r"spirv\.hpp was not found. Debian: apt install spirv-headers")
    (sdk / "include" / "spirv" / "unified1").mkdir(parents=True)
    (sdk / "include" / "spirv" / "unified1" / "spirv.hpp").write_text("")
    refused("loader libvulkan was not found")
    (sdk / "lib").mkdir()
    (sdk / "lib" / "libvulkan.so").write_text("")
    preflight.check(VULKAN, environ)


# --- the binding's declarations ---


HEADER = """\
#ifndef H
#define H 1
#include <stdint.h>
#define LONG one \\
    two
#ifdef __cplusplus
#include <map>
extern "C" {
#  if 1
using x = int;
#  endif
#endif
typedef int pyspec_id; // kept
#define GONE 3
int pyspec_call(pyspec_id id);
#ifdef __cplusplus
} // extern "C"
#endif
#endif
"""


def test_headers_for_cffi() -> None:
    text = binding.strip_preprocessor(HEADER)
    assert text == "typedef int pyspec_id; // kept\nint pyspec_call(pyspec_id id);\n"


def test_every_shim_function_is_declared_to_cffi(root: Path) -> None:
    """What the shim offers and cffi does not see would be missing without a word."""
    cffi = pytest.importorskip("cffi")
    backends = root / "pyspec" / "backends"
    ffi = cffi.FFI()
    for name in ("_cdef.h", *binding.SHIM_HEADERS):
        ffi.cdef(binding.strip_preprocessor((backends / name).read_text(encoding="utf-8")))
    declared = {name.split()[1] for name in ffi._parser._declarations if name.startswith("function ")}
    text = "".join(path.read_text(encoding="utf-8") for path in backends.glob("_shim*.cpp"))
    stripped = "".join(
        binding.strip_preprocessor((backends / name).read_text(encoding="utf-8")) for name in binding.SHIM_HEADERS
    )
    assert declared
    for function in declared:
        if function.startswith("pyspec_"):
            assert f"{function}(" in text, f"{function} is declared and not defined"
            assert f"{function}(" in stripped


def test_an_unreadable_declaration_names_the_header(tmp_path: Path) -> None:
    pytest.importorskip("cffi")
    (tmp_path / "_cdef.h").write_text("int f(;\n")
    for name in binding.SHIM_HEADERS:
        (tmp_path / name).write_text("")
    with pytest.raises(BuildError, match=r"_cdef\.h cannot be parsed"):
        binding.generate(tmp_path, tmp_path / "out.c")


def test_generated_source_is_left_alone_when_nothing_changed(tmp_path: Path) -> None:
    pytest.importorskip("cffi")
    (tmp_path / "_cdef.h").write_text("int f(int);\n")
    for name in binding.SHIM_HEADERS:
        (tmp_path / name).write_text("")
    (tmp_path / "_shim.h").write_text("int g(int);\n")
    out = binding.generate(tmp_path, tmp_path / "out.c")
    os.utime(out, (1, 1))
    binding.generate(tmp_path, out)
    assert out.stat().st_mtime == 1
    (tmp_path / "_shim.h").write_text("int h(int);\n")
    binding.generate(tmp_path, out)
    assert out.stat().st_mtime != 1


def test_build_info_says_what_was_built(root: Path) -> None:
    """The record beside the libraries of this installation is the record of the stamp that made them."""
    info = pytest.importorskip("pyspec._build_info", reason="not built").BUILD_INFO
    assert {"llama_commit", "ggml_version", "backends", "modules", "compiler", "cmake_options"} <= set(info)
    assert json.loads(json.dumps(info)) == info  # plain data: it goes into bug reports
    assert str(root) not in json.dumps(info)
