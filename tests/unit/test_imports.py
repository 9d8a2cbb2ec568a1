"""Imports point one way: a module imports only from the layers below it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PYSPEC = Path(__file__).resolve().parents[2] / "pyspec"
ANYTHING = frozenset({"*"})
LEVEL0 = frozenset({"_options", "errors", "types", "config", "stats", "_version", "_build_info"})

#: What each module or subpackage of pyspec may import of pyspec, besides itself. A new one needs a line here.
MAY_IMPORT: dict[str, frozenset[str]] = {
    # level 0
    "_version": frozenset(),
    "_build_info": frozenset(),
    "errors": frozenset(),
    "types": frozenset({"errors"}),
    "_options": frozenset({"errors"}),
    "config": frozenset({"_options", "errors", "types"}),
    "stats": frozenset({"errors", "types"}),
    # level 1
    "_core": frozenset(),
    "_reference": frozenset(),
    "_lookup": frozenset(),
    "_ngram": frozenset(),
    "_ngram_reference": frozenset(),
    "_sample": frozenset(),
    "_sample_reference": frozenset({"_sample"}),
    "_suffix": frozenset(),
    "_suffix_reference": frozenset(),
    "backends": LEVEL0,
    # level 2
    "sampling": LEVEL0 | {"_core", "_reference", "_sample"},
    "runtime": LEVEL0 | {"_core", "_reference", "backends"},
    # level 3: drafters meet models only through runtime's Evaluator
    "drafters": LEVEL0 | {"_core", "_lookup", "_ngram", "_sample", "_suffix", "sampling", "runtime"},
    # level 4: control decides who drafts, the engine asks it
    "control": LEVEL0 | {"drafters", "runtime"},
    "engine": LEVEL0 | {"_core", "sampling", "runtime", "drafters", "control"},
    # level 5
    "llm": ANYTHING,
    "lora": ANYTHING,
    "results": ANYTHING,
    "assemble": ANYTHING,
    "fit": ANYTHING,
    "chat": ANYTHING,
    "hub": ANYTHING,
    "prompts": LEVEL0,
    "bench": ANYTHING,
    "measure": ANYTHING,
    "oracle": ANYTHING,
    "summary": LEVEL0,
    "verify": ANYTHING,
    "testing": ANYTHING,
    "cli": ANYTHING,
    "__init__": ANYTHING,
    "__main__": ANYTHING,
}

#: Third-party packages by part: what is not named here may import NumPy and the standard library only.
THIRD_PARTY: dict[str, frozenset[str]] = {
    "cli": frozenset({"typer", "rich", "click", "matplotlib"}),
    "chat": frozenset({"jinja2"}),
    "hub": frozenset({"huggingface_hub"}),
    "sampling": frozenset({"llguidance"}),
    "backends": frozenset({"cffi", "_cffi_backend"}),
}


def part_of(path: Path) -> str:
    """Name of the module or subpackage of pyspec that a file belongs to."""
    return path.relative_to(PYSPEC).parts[0].removesuffix(".py")


def imports_of(source: str, path: Path) -> list[tuple[int, str]]:
    """(line, absolute module name) of every import, inside functions and under TYPE_CHECKING too.

    ``from . import x`` gives ``package.x``; ``importlib.import_module("x")`` with a literal counts as an import.
    """
    found = []
    package = ".".join(path.relative_to(PYSPEC.parent).parts[:-1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            # `from pyspec import x` may name a module or an attribute: count the module where there is one
            found += [(node.lineno, f"{name}.{a.name}" if name == "pyspec" else name) for a in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                name = first.value
                found.append((node.lineno, name if not name.startswith(".") else package + name))
    return found


def violations(source: str, path: Path) -> list[str]:
    """Forbidden imports of one file, one line of text each."""
    part = part_of(path)
    allowed = MAY_IMPORT[part]
    out = []
    for line, name in imports_of(source, path):
        top, _, rest = name.partition(".")
        if top != "pyspec":
            continue
        wanted = rest.split(".")[0]
        if not wanted or wanted not in MAY_IMPORT:
            wanted = "__init__"  # a name that pyspec/__init__.py offers
        if wanted != part and wanted not in allowed and allowed is not ANYTHING:
            out.append(f"{path.relative_to(PYSPEC.parent)}:{line}: {part} must not import {name}")
    return out


FILES = sorted(PYSPEC.rglob("*.py"))


def test_every_part_has_a_layer() -> None:
    missing = {part_of(path) for path in FILES} - set(MAY_IMPORT)
    assert not missing, f"no layer for {sorted(missing)}: add them to MAY_IMPORT"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PYSPEC)))
def test_imports_point_down(path: Path) -> None:
    assert not violations(path.read_text(encoding="utf-8"), path)


def test_table_has_no_cycle() -> None:
    """The table itself points one way."""
    done: set[str] = set()
    rest = {part: allowed for part, allowed in MAY_IMPORT.items() if allowed is not ANYTHING}
    while rest:
        ready = [part for part, allowed in rest.items() if not (allowed - done) & set(rest)]
        assert ready, f"cycle among {sorted(rest)}"
        done.update(ready)
        for part in ready:
            del rest[part]


def test_cython_imports_nothing_of_pyspec() -> None:
    for path in [*PYSPEC.rglob("*.pyx"), *PYSPEC.rglob("*.pxd")]:
        text = path.read_text(encoding="utf-8")
        bad = re.findall(r"^\s*(?:from\s+(?:pyspec|\.)\S*\s+c?import|c?import\s+pyspec).*$", text, re.MULTILINE)
        bad = [line for line in bad if "_core" not in line]
        assert not bad, f"{path.name}: {bad}"
        assert "llama.h" not in text, f"{path.name}: only backends/ knows native headers"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PYSPEC)))
def test_third_party_imports(path: Path) -> None:
    """A hard dependency is NumPy (and cffi's runtime) alone; extras are met only where they belong, lazily."""
    import sys

    allowed = {"numpy", "pyspec", *THIRD_PARTY.get(part_of(path), ())} | set(sys.stdlib_module_names)
    found = imports_of(path.read_text(encoding="utf-8"), path)
    bad = [f"line {line}: {name}" for line, name in found if name.split(".")[0] not in allowed]
    assert not bad


@pytest.mark.parametrize(
    ("path", "source", "bad"),
    [
        ("drafters/x.py", "from ..backends import load", True),
        ("drafters/x.py", "def f():\n    from pyspec import backends", True),
        ("drafters/x.py", "import importlib\nimportlib.import_module('pyspec.engine')", True),
        ("drafters/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..llm import LLM", True),
        ("drafters/x.py", "from ..runtime.evaluator import Evaluator\nfrom .base import Drafter", False),
        ("drafters/x.py", "from pyspec import LLM", True),
        ("backends/handles.py", "from .. import _core", True),
        ("backends/handles.py", "from ..errors import ClosedError", False),
        ("runtime/context.py", "from ..sampling import verify", True),
        ("config.py", "from .stats import SpecStats", True),
        ("engine.py", "from .backends import load", True),
        ("engine.py", "from .drafters import registry", False),
        ("types.py", "from .config import x", True),
        ("cli/app.py", "from ..llm import LLM", False),
    ],
)
def test_the_check_finds_wrong_imports(path: str, source: str, bad: bool) -> None:
    assert bool(violations(source, PYSPEC / path)) == bad


def test_import_pyspec_loads_nothing_native(run_child) -> None:
    """No native library, no thread, no output, no environment change, no signal or logging handler."""
    run_child(
        """
        import logging, os, signal, sys, threading
        environment, handlers = dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        import pyspec
        import pyspec.backends
        assert "pyspec.backends._llama" not in sys.modules
        if os.path.exists("/proc/self/maps"):
            maps = open("/proc/self/maps").read()
            assert "libpyspec" not in maps and "_llama." not in maps
        assert threading.active_count() == 1
        assert dict(os.environ) == environment
        assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        assert not logging.getLogger().handlers
        assert [type(h) for h in logging.getLogger("pyspec").handlers] == [logging.NullHandler]
        logging.getLogger("pyspec.native").error("silent by default")
        assert "typer" not in sys.modules and "rich" not in sys.modules and "jinja2" not in sys.modules
        """
    )


def test_engine_and_drafters_run_without_the_native_extension(run_child) -> None:
    run_child(
        """
        import sys
        sys.modules["pyspec.backends._llama"] = None
        import pyspec.engine, pyspec.drafters.registry
        assert "draft-simple" in pyspec.drafters.registry.names()
        """
    )
