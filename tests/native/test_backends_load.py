"""Opening the native libraries: lazily, once, only pyspec's own; readable errors for a broken installation."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

PACKAGE = Path(next(iter(importlib.util.find_spec("pyspec").submodule_search_locations or [])))


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory):
    """Factory of copies of the installed package that a test may damage; gives the folder to put on the path."""

    def make() -> Path:
        root = tmp_path_factory.mktemp("installation")
        shutil.copytree(PACKAGE, root / "pyspec", ignore=shutil.ignore_patterns("__pycache__"))
        return root

    return make


REPORT = """
import sys
sys.path.insert(0, sys.argv[1])
from pyspec import backends
assert backends.__file__.startswith(sys.argv[1]), backends.__file__
try:
    backends.load()
except Exception as exc:
    print(type(exc).__name__, isinstance(exc, OSError), isinstance(exc, ImportError))
    print(exc)
else:
    print("loaded", backends.available(), backends.unavailable())
"""


def lib(root: Path, name: str) -> Path:
    return next((root / "pyspec" / "backends" / "lib").glob(f"libpyspec-{name}.*"))


def test_import_opens_nothing(run_child):
    out = run_child(
        """
        import sys, threading
        before = threading.active_count()
        import pyspec.backends as b
        maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
        print(b.is_loaded(), "pyspec.backends._llama" in sys.modules, "libpyspec" in maps)
        print(threading.active_count() - before)
        """
    )
    assert out.split() == ["False", "False", "False", "0"]


def test_load_is_idempotent_from_many_threads(run_child):
    out = run_child(
        """
        import threading
        from pyspec import backends
        errors = []
        def go():
            try:
                backends.load()
            except BaseException as exc:
                errors.append(exc)
        threads = [threading.Thread(target=go) for _ in range(8)]
        [t.start() for t in threads]; [t.join() for t in threads]
        backends.load()
        paths = [m.path for m in backends._binding.modules]
        print(errors, backends.is_loaded(), len(paths) == len(set(paths)) == len(backends.build_info()["modules"]))
        """
    )
    assert out.strip() == "[] True True"


def test_build_info_and_devices():
    from pyspec import backends

    info = backends.build_info()
    assert "cpu" in backends.available()
    assert info["llama_version"] == info["build"]["llama_version"]
    assert info["ggml_version"]
    assert Path(info["library_dir"]) == PACKAGE.resolve() / "backends" / "lib"
    json.dumps(info)  # a bug report prints it
    cpus = [d for d in backends.devices() if d.kind == "cpu"]
    assert len(cpus) == 1
    assert cpus[0].backend == "CPU"
    assert 0 < cpus[0].memory_free_bytes <= cpus[0].memory_total_bytes
    assert backends.devices()[-1].kind == "cpu", "fast devices come first"


@pytest.mark.parametrize("name", ["llama", "ggml", "ggml-base"])
def test_missing_library_is_named(broken, run_child, name):
    root = broken()
    path = lib(root, name)
    path.rename(path.with_name("renamed" + path.suffix))
    first, *rest = run_child(REPORT, str(root)).splitlines()
    assert first == "BackendLoadError True False"
    text = "\n".join(rest)
    assert f"libpyspec-{name}" in text.splitlines()[0]
    assert "Install pyspec again" in text
    assert "renamed" in text, "the folder is listed"


def test_missing_cpu_module(broken, run_child):
    root = broken()
    for path in (root / "pyspec" / "backends" / "lib").glob("libpyspec-ggml-cpu*"):
        path.unlink()
    first, *rest = run_child(REPORT, str(root)).splitlines()
    assert first == "BackendLoadError True False"
    assert "no CPU backend" in rest[0]


def test_missing_binding_lists_the_folder(broken, run_child):
    root = broken()
    for path in (root / "pyspec" / "backends").glob("_llama*.so"):
        path.unlink()
    first, *rest = run_child(REPORT, str(root)).splitlines()
    assert first == "ImportError False True"
    text = "\n".join(rest)
    assert "was not built" in text
    assert "_shim.h" in text or "handles.py" in text


def test_binding_of_another_python(broken, run_child):
    root = broken()
    for path in (root / "pyspec" / "backends").glob("_llama*.so"):
        path.rename(path.with_name("_llama.cpython-399-x86_64-linux-gnu.so"))
    first, *rest = run_child(REPORT, str(root)).splitlines()
    assert first == "ImportError False True"
    assert "another Python (_llama.cpython-399" in rest[0]


def test_damaged_library(broken, run_child):
    root = broken()
    lib(root, "llama").write_text("no library at all")
    assert run_child(REPORT, str(root)).splitlines()[0] == "BackendLoadError True False"


def test_other_package_version_is_refused(broken, run_child):
    root = broken()
    (root / "pyspec" / "_version.py").write_text('__version__ = "9.9.9"\n')
    first, *rest = run_child(REPORT, str(root)).splitlines()
    assert first.startswith("AbiMismatchError")
    assert "9.9.9" in rest[0]


def test_module_that_does_not_open_is_skipped_with_the_reason(broken, run_child):
    root = broken()
    suffix = lib(root, "ggml-cpu").suffix if lib(root, "ggml-cpu").suffix in (".so", ".dll") else ".so"
    folder = root / "pyspec" / "backends" / "lib"
    (folder / f"libpyspec-ggml-cuda{suffix}").write_bytes(b"no library at all")
    shutil.copy(lib(root, "ggml-base"), folder / f"libpyspec-ggml-odd{suffix}")  # a library, but no backend module
    out = run_child(
        """
        import sys, logging
        sys.path.insert(0, sys.argv[1])
        seen = []
        handler = logging.Handler(); handler.emit = lambda r: seen.append((r.levelno, r.getMessage()))
        logger = logging.getLogger("pyspec.native"); logger.addHandler(handler); logger.setLevel(logging.DEBUG)
        from pyspec import backends
        print(backends.available())
        for name, reason in sorted(backends.unavailable().items()):
            logged = any(name in text and level == logging.DEBUG for level, text in seen)
            print(name.split(".")[0], bool(reason), logged)
        """,
        str(root),
    )
    assert out.splitlines() == ["['cpu']", "libpyspec-ggml-cuda True True", "libpyspec-ggml-odd True True"]


def test_best_cpu_variant_wins(broken, run_child):
    """Several CPU modules, as wheels carry them: one that suits the machine is taken, the others say why not."""
    root = broken()
    cpu = lib(root, "ggml-cpu")
    shutil.copy(cpu, cpu.with_name("libpyspec-ggml-cpu-other" + cpu.suffix))
    out = run_child(REPORT, str(root))
    assert out.startswith("loaded ['cpu'] {'libpyspec-ggml-cpu")
    assert "suits this machine better" in out


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_libraries_of_the_working_directory_are_not_touched(broken, run_child, tmp_path):
    """Neither modules in the working directory nor ggml's environment variable are opened."""
    root = broken()
    for name in ("libpyspec-ggml-cuda.so", "libggml-cuda.so", "libggml-cpu.so"):
        shutil.copy(lib(root, "ggml-cpu"), tmp_path / name)
    run_child(
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        from pyspec import backends
        backends.load()
        maps = open("/proc/self/maps").read()
        assert sys.argv[2] not in maps, maps
        """,
        str(root),
        str(tmp_path),
        cwd=tmp_path,
        env={"GGML_BACKEND_PATH": str(tmp_path / "libggml-cuda.so")},
    )


def test_loading_writes_nothing_into_the_package(broken, run_child):
    """So a folder that cannot be written, as in a system installation, is no obstacle."""
    root = broken()
    folders = sorted(path for path in (root / "pyspec").rglob("*") if path.is_dir())
    for folder in folders:
        folder.chmod(0o555)
    before = sorted(root.rglob("*"))
    try:
        out = run_child(REPORT, str(root), env={"PYTHONDONTWRITEBYTECODE": "1"})
        assert out.startswith("loaded ['cpu'")
        assert sorted(root.rglob("*")) == before
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_unknown_device_lists_those_there_are(tiny):
    from backends_kit import load

    from pyspec.errors import BackendNotFoundError

    with pytest.raises(BackendNotFoundError, match=r"no device 'CUDA7'; there are: .*CPU"):
        load(tiny("target-llama"), devices=("CUDA7",))


def test_devices_from_the_environment(tiny, run_child):
    out = run_child(
        """
        import sys
        from backends_kit import load, caught
        print(caught(lambda: load(sys.argv[1])))
        print(caught(lambda: load(sys.argv[1], devices=()).close()))
        """,
        tiny("target-llama"),
        env={"PYSPEC_DEVICES": "nothing-of-that-name"},
    )
    assert out.split() == ["BackendNotFoundError", "none"]
    for value in ("none", "cpu", ""):
        run_child(
            "import sys; from backends_kit import load; load(sys.argv[1]).close()",
            tiny("target-llama"),
            env={"PYSPEC_DEVICES": value},
        )


@pytest.mark.skipif(not hasattr(os, "RTLD_DEEPBIND"), reason="no RTLD_DEEPBIND here")
def test_deepbind_can_be_turned_off(run_child):
    out = run_child(
        "from pyspec import backends; print(backends.build_info()['deepbind'])", env={"PYSPEC_NO_DEEPBIND": "1"}
    )
    assert out.strip() == "False"
    assert run_child("from pyspec import backends; print(backends.build_info()['deepbind'])").strip() == "True"


def test_flags_of_the_dynamic_linker_are_put_back(run_child):
    if not hasattr(sys, "getdlopenflags"):
        pytest.skip("no dlopen flags here")
    run_child(
        """
        import sys
        before = sys.getdlopenflags()
        from pyspec import backends
        backends.load()
        assert sys.getdlopenflags() == before
        """
    )
