"""Another package's libllama and libggml in the same process: neither side may pick the other's up.

The foreign libraries here carry upstream's file names and sonames and every function name ours export; each function
ends the process. They are opened globally, which is the worst case for symbol lookup: before ours, and after.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.native,
    pytest.mark.packaging,
    pytest.mark.skipif(sys.platform != "linux", reason="sonames and RTLD_GLOBAL: Linux only"),
]

LIBRARIES = {
    "libpyspec-ggml-base.so": "libggml-base.so.0",
    "libpyspec-ggml.so": "libggml.so.0",
    "libpyspec-ggml-cpu.so": "libggml-cpu.so.0",
    "libpyspec-llama.so": "libllama.so.0",
}


@pytest.fixture(scope="session")
def lib_dir() -> Path:
    spec = importlib.util.find_spec("pyspec.backends")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "lib"


def readelf(*arguments: str | Path) -> str:
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf (binutils)")
    return subprocess.run(["readelf", "-W", *arguments], capture_output=True, text=True, check=True).stdout


def exported_functions(path: Path) -> set[str]:
    """C functions a library defines for others."""
    names = set()
    for line in readelf("--dyn-syms", path).splitlines():
        fields = line.split()
        if len(fields) == 8 and fields[3] == "FUNC" and fields[4] == "GLOBAL" and fields[6] != "UND":
            names.add(fields[7].split("@")[0])
    return names


@pytest.fixture(scope="session")
def foreign(lib_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Compile the foreign libraries."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("foreign")
    made = []
    for ours, soname in LIBRARIES.items():
        present = sorted(lib_dir.glob(ours.replace(".so", "*.so") if "cpu" in ours else ours))
        assert present, f"{ours} is not in {lib_dir}"
        names = {name for name in exported_functions(present[0]) if re.fullmatch(r"[A-Za-z_]\w*", name)}
        names -= {"_init", "_fini"}
        assert len(names) > 20 or ours == "libpyspec-ggml.so"
        body = "".join(f"void {name}(void) {{ end(); }}\n" for name in sorted(names))
        source = folder / f"{soname}.c"
        source.write_text(
            "#include <stdio.h>\n#include <stdlib.h>\n"
            f'static void end(void) {{ fputs("foreign {soname} was called\\n", stderr); abort(); }}\n{body}'
        )
        target = folder / soname
        flags = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{soname}"]
        subprocess.run([compiler, *flags, "-o", target, source], check=True)
        made.append(target)
    return made


def test_our_sonames_are_our_own(lib_dir: Path) -> None:
    for path in sorted(lib_dir.iterdir()):
        dynamic = readelf("-d", path)
        assert path.name.startswith("libpyspec-")
        for soname in re.findall(r"soname: \[(.*)\]", dynamic):
            assert soname == path.name
        for needed in re.findall(r"Shared library: \[(.*)\]", dynamic):
            assert not re.match(r"lib(ggml|llama)", needed), f"{path.name} needs {needed}"


def test_libraries_find_each_other_beside_themselves_only(lib_dir: Path) -> None:
    for path in sorted(lib_dir.iterdir()):
        assert re.findall(r"Library r(?:un)?path: \[(.*)\]", readelf("-d", path)) == ["$ORIGIN"]


def test_only_the_api_is_exported(lib_dir: Path) -> None:
    """Upstream's internal C++ names stay inside, the C++ staging functions that the shim calls do not."""
    names = exported_functions(lib_dir / "libpyspec-llama.so")
    assert "llama_decode" in names
    assert any("llama_set_embeddings_nextn" in name for name in names)
    assert not any("llama_kv_cache" in name for name in names)


CODE = """
import ctypes, os, sys
order, *foreign, model = sys.argv[1:]

def open_foreign():
    keep = [ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in foreign]
    assert ctypes.CDLL(None).llama_decode  # really visible to everybody
    return keep

def use_ours():
    with pyspec.LLM(model, speculation="off", n_threads=1, n_ctx=64) as llm:
        return llm.generate("a b c", max_tokens=8, ignore_eos=True).tokens

keep = open_foreign() if order == "first" else None
import pyspec
from pyspec import backends
backends.load()
assert any(device.kind == "cpu" for device in backends.devices())
if order == "after":
    before = use_ours()
    keep = open_foreign()
    assert use_ours() == before
else:
    use_ours()
mapped = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
ours = {os.path.basename(path) for path in mapped if "libpyspec-" in path}
assert {"libpyspec-ggml-base.so", "libpyspec-ggml.so", "libpyspec-llama.so"} <= ours, ours
assert set(foreign) <= mapped, mapped
print("done")
"""


@pytest.mark.parametrize("order", ["first", "after"])
def test_a_foreign_library_is_not_picked_up(
    order: str, foreign: list[Path], tiny: Callable[..., str], run_child: Callable[..., str]
) -> None:
    assert run_child(CODE, order, *map(str, foreign), tiny("target-llama"), timeout=120) == "done\n"


def test_ours_are_not_visible_to_others(tiny: Callable[..., str], run_child: Callable[..., str]) -> None:
    code = """
    import ctypes
    from pyspec import backends
    backends.load()
    everybody = ctypes.CDLL(None)
    for name in ("llama_decode", "ggml_init", "ggml_backend_load", "pyspec_init"):
        assert not hasattr(everybody, name), name
    """
    run_child(code)


def test_the_library_path_variable_does_not_choose_ours(
    lib_dir: Path, tmp_path: Path, run_child: Callable[..., str]
) -> None:
    """Nor does the working directory, which an empty entry of that variable means."""
    for name in ("libpyspec-llama.so", "libpyspec-ggml.so", "libpyspec-ggml-base.so"):
        (tmp_path / name).write_bytes(b"not a library")
    code = """
    from pyspec import backends
    backends.load()
    assert backends.devices()
    """
    run_child(code, env={"LD_LIBRARY_PATH": f":{tmp_path}"}, cwd=tmp_path)
