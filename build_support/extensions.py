"""The extension modules, and the setuptools command that builds the native libraries before them."""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext

from build_support import binding, native
from build_support.config import ROOT, BuildConfig, BuildError

PACKAGE = ROOT / "pyspec"
BACKENDS = PACKAGE / "backends"
LIB_NAMES = ("pyspec-llama", "pyspec-ggml", "pyspec-ggml-base")
#: Cython modules.
KERNELS = ("_core", "_lookup", "_ngram", "_sample", "_suffix")
WINDOWS = sys.platform == "win32"
#: The oldest Python whose limited API has the buffer protocol, which typed memoryviews are made of.
_STABLE_SINCE = (3, 11)

_DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": False,
    "embedsignature": True,
}


def _compile_args(config: BuildConfig) -> list[str]:
    if WINDOWS:
        return ["/O2"]
    return ["-O2", "-g"] if config.debug else ["-O3", "-g0"]


def _link_args(config: BuildConfig, *, rpath: bool) -> list[str]:
    if WINDOWS:
        return []
    args: list[str] = [] if config.debug or sys.platform == "darwin" else ["-Wl,-s"]
    if rpath and sys.platform == "darwin":
        args.append("-Wl,-rpath,@loader_path/lib")
    elif rpath:
        # Old-style rpath: it comes before LD_LIBRARY_PATH.
        args += ["-Wl,-rpath,$ORIGIN/lib", "-Wl,--disable-new-dtags"]
    return args


def uses_stable_abi(config: BuildConfig) -> bool:
    """Return whether one build is to serve all later Pythons: wheels for others, where this Python can make them."""
    can = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
    return can and sys.version_info >= _STABLE_SINCE and config.portable and not config.debug


def _stable_abi(config: BuildConfig) -> dict[str, Any]:
    """Return the arguments of an extension for that."""
    if not uses_stable_abi(config):
        return {}
    version = f"0x{_STABLE_SINCE[0]:02X}{_STABLE_SINCE[1]:02X}0000"
    return {"py_limited_api": True, "define_macros": [("Py_LIMITED_API", version)]}


def command_options() -> dict[str, dict[str, str]]:
    """Return what ``setup()`` passes on to its commands: the tag of a wheel."""
    if not uses_stable_abi(BuildConfig.from_env()):
        return {}
    return {"bdist_wheel": {"py_limited_api": f"cp{_STABLE_SINCE[0]}{_STABLE_SINCE[1]}"}}


def _kernel_extension(config: BuildConfig, name: str) -> Extension:
    return Extension(
        f"pyspec.{name}",
        [f"pyspec/{name}.pyx"],
        depends=[path.relative_to(ROOT).as_posix() for path in (*PACKAGE.glob("*.pxd"), *PACKAGE.glob("*.h"))],
        include_dirs=["pyspec"],
        extra_compile_args=_compile_args(config),
        extra_link_args=_link_args(config, rpath=False),
        **_stable_abi(config),
    )


def _binding_extension(config: BuildConfig) -> Extension:
    return Extension(
        binding.MODULE,
        # Replaced by the generated file once the libraries (and so the headers) are there.
        ["build/binding/_llama.c"],
        depends=sorted(path.relative_to(ROOT).as_posix() for path in (*BACKENDS.glob("*.h"), *BACKENDS.glob("*.cpp"))),
        include_dirs=["pyspec/backends"],
        libraries=list(LIB_NAMES),
        language="c++",
        extra_compile_args=_compile_args(config) + ([] if WINDOWS else ["-fvisibility=hidden"]),
        extra_link_args=_link_args(config, rpath=True),
        **_stable_abi(config),
    )


def extension_list() -> list[Extension]:
    """Return the extension modules for ``setup()``."""
    try:
        config = BuildConfig.from_env()
    except BuildError as exc:
        raise SystemExit(f"error: {exc}") from None
    return [*(_kernel_extension(config, name) for name in KERNELS), _binding_extension(config)]


def write_if_changed(path: Path, text: str) -> None:
    """Write ``text``, leaving an equal file and its time stamp alone."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _copy_libraries(build: native.NativeBuild, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        if old.name not in build.libraries:
            old.unlink()
    for name in build.libraries:
        source, dest = build.install_dir / name, target / name
        if dest.exists() and _size_and_time(dest) == _size_and_time(source):
            continue
        # A new file, not new content: the old one may be mapped into a running process.
        partial = dest.with_name(f"{name}.part")
        shutil.copy2(source, partial)
        os.replace(partial, dest)


def place_native(build: native.NativeBuild, package_dir: Path) -> None:
    """Put the libraries and ``_build_info.py`` into a package folder, and remove libraries of earlier builds.

    Raises:
        BuildError: the folder cannot be written.
    """
    target = package_dir / "backends" / "lib"
    try:
        _copy_libraries(build, target)
    except OSError as exc:
        raise BuildError(
            f"the libraries cannot be put into {target}: {exc.strerror or exc}. Make the folder writable, or install "
            "into an environment of your own (python -m venv)"
        ) from None
    lines = ['"""What the native libraries beside this file were built from. Generated; do not edit."""', ""]
    lines += ["from __future__ import annotations", "", "from typing import Any", "", "BUILD_INFO: dict[str, Any] = {"]
    lines += [f"    {key!r}: {value!r}," for key, value in build.info.items()]
    write_if_changed(package_dir / "_build_info.py", "\n".join([*lines, "}", ""]))


def _is_newer(target: Path, inputs: list[str]) -> bool:
    if not target.exists():
        return False
    built = target.stat().st_mtime
    return all(os.stat(name).st_mtime <= built for name in inputs)


class BuildExt(build_ext):
    """Builds the native libraries, then the extension modules against them."""

    _native: native.NativeBuild
    _config: BuildConfig

    def run(self) -> None:
        try:
            self._config = BuildConfig.from_env()
            self._native = native.build(self._config)
            self._prepare_sources()
            place_native(self._native, PACKAGE if self.inplace else Path(self.build_lib) / "pyspec")
        except BuildError as exc:
            raise SystemExit(f"\nerror: {exc}\n") from None
        super().run()

    def _prepare_sources(self) -> None:
        """Generate the C sources and make every extension depend on what its flags and headers come from."""
        # Changed options change this file, and with it every extension is out of date.
        options = self._config.build_dir / "extension-options.json"
        info = {key: value for key, value in self._native.info.items() if key != "compiler"}
        write_if_changed(options, json.dumps([info, self._config.toolchain, sys.version], indent=1))
        for extension in self.extensions:
            extension.depends = [*extension.depends, str(options), __file__, str(PACKAGE / "_version.py")]
            if extension.name == binding.MODULE:
                generated = binding.generate(BACKENDS, self._config.build_dir / "binding" / "_llama.c")
                extension.sources = [os.path.relpath(generated, ROOT)]
                source = self._native.source_dir
                extension.include_dirs += [str(source / name) for name in ("include", "ggml/include", "src")]
                extension.library_dirs.append(str(self._native.install_dir))
                extension.depends.append(binding.__file__)
                extension.depends += [str(path) for path in source.glob("include/*.h")]
                extension.depends += [str(path) for path in source.glob("ggml/include/*.h")]
                extension.depends += [str(path) for path in source.glob("src/llama-ext.h")]
        kernels = [ext for ext in self.extensions if any(name.endswith(".pyx") for name in ext.sources)]
        if kernels:
            self._cythonize(kernels)

    def _cythonize(self, kernels: list[Extension]) -> None:
        try:
            from Cython.Build import cythonize
        except ImportError:
            raise BuildError("Cython was not found. Install it: python -m pip install cython") from None
        directives = dict(_DIRECTIVES)
        if self._config.debug:
            directives.update(boundscheck=True, initializedcheck=True)
        compiled = cythonize(
            kernels,
            build_dir=str(self._config.build_dir / ("cython-debug" if self._config.debug else "cython")),
            compiler_directives=directives,
            force=bool(self.force),
            quiet=True,
        )
        for extension in compiled:
            # cythonize returns copies, while other commands hold on to the first objects.
            original = next(ext for ext in kernels if ext.name == extension.name)
            original.sources = extension.sources

    def build_extensions(self) -> None:
        # An interpreter built by hand passes its own library folder on; an extension does not need it and a wheel
        # must not name a folder of the machine it was built on.
        for name in ("linker_so", "linker_so_cxx"):
            command = getattr(self.compiler, name, None)
            if isinstance(command, list):
                setattr(self.compiler, name, [arg for arg in command if not arg.startswith("-Wl,-rpath")])
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        inputs = [*ext.sources, *ext.depends]
        if not self.force:
            in_source = ROOT / self.get_ext_filename(self.get_ext_fullname(ext.name))
            if not target.exists() and _is_newer(in_source, inputs):
                # pip builds in a new folder each time; an in-place build of the same sources need not be repeated.
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(in_source, target)
            if _is_newer(target, inputs):
                return
        native.say(f"extension {ext.name}")
        if ext.name == binding.MODULE:
            ext.extra_objects = [*self._compile_shim(ext)]
        super().build_extension(ext)

    def _compile_shim(self, ext: Extension) -> list[str]:
        # By itself, because a C++ standard flag given to both languages is an error for one of them.
        sources = sorted(path.relative_to(ROOT).as_posix() for path in BACKENDS.glob("_shim*.cpp"))
        flags = ["-std=c++17", "-fvisibility=hidden", "-fvisibility-inlines-hidden"]
        if WINDOWS:
            flags = ["/std:c++17", "/EHsc"]
        return list(
            self.compiler.compile(
                sources,
                output_dir=self.build_temp,
                include_dirs=ext.include_dirs,
                macros=self._version_macros(),
                extra_postargs=[*_compile_args(self._config), *flags],
            )
        )

    def _version_macros(self) -> list[tuple[str, str | None]]:
        """Return what the handshake at load time compares with the libraries it finds."""
        info = self._native.info
        versions = {
            "PYSPEC_VERSION": self.distribution.get_version(),
            "PYSPEC_LLAMA_VERSION": info["llama_version"],
            "PYSPEC_GGML_VERSION": info["ggml_version"],
            # As native.py hands it to CMake: a checkout of the user's may change its commit between two builds.
            "PYSPEC_GGML_COMMIT": "external" if self._config.llama_src else info["llama_commit"],
        }
        return [(name, f'"{value}"') for name, value in versions.items()]
