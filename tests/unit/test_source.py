"""Rules for the source text that no linter knows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYSPEC = ROOT / "pyspec"
FILES = sorted(PYSPEC.rglob("*.py"))
SUFFIXES = (".py", ".pyx", ".pxd", ".pyi", ".h", ".cpp", ".c", ".md", ".toml", ".cfg", ".sh", ".in", ".yml", ".yaml")


def tracked_texts() -> list[Path]:
    """Source and documentation files of the project, without build results and the vendored tree."""
    out = []
    for top in ("pyspec", "tests", "benchmarks", "build_support", "docs", "examples"):
        out += [p for p in (ROOT / top).rglob("*") if p.suffix in SUFFIXES and p.is_file()]
    out += [p for p in ROOT.iterdir() if p.is_file() and (p.suffix in SUFFIXES or p.name == "Makefile")]
    out += [p for p in (ROOT / "vendor" / "ggml").glob("*") if p.is_file() and p.suffix in SUFFIXES]
    skip = {"build", "__pycache__", "lib", "dist"}
    # written by the build, beside the sources
    made = {"_core.c", "_core.cpp", "_llama.c", "_llama.cpp", "_build_info.py"}
    return sorted(p for p in out if not skip & set(p.relative_to(ROOT).parts) and p.name not in made)


TEXTS = tracked_texts()


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", TEXTS, ids=ids)
def test_files_stay_short(path: Path) -> None:
    n = path.read_text(encoding="utf-8").count("\n")
    assert n < (600 if path.suffix == ".py" else 1200), f"{n} lines: split it"


@pytest.mark.parametrize("path", TEXTS, ids=ids)
def test_no_path_of_a_machine(path: Path) -> None:
    """Absolute paths of somebody's machine do not belong into the project."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"(?<![\w.:/-])/(?:work|root|home|Users|tmp)/[\w.-]+", text)
    assert not found


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_no_print_in_the_library(path: Path) -> None:
    if path.relative_to(PYSPEC).parts[0] in ("cli", "__main__.py"):
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    bad = [n.lineno for n in calls if ast.unparse(n.func) in ("print", "sys.stdout.write", "sys.stderr.write")]
    assert not bad, f"lines {bad}: log instead"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_native_calls_only_in_backends(path: Path) -> None:
    if path.relative_to(PYSPEC).parts[0] == "backends":
        return
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"\b(?:lib|_lib)\.(?:llama|ggml|pyspec)_\w+|\bffi\.\w+|_backends\._llama", text)
    assert not found, "only pyspec/backends/ calls native functions"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_a_good_guest(path: Path) -> None:
    """The library sets no signal handler and no environment variable, and never ends the process."""
    if path.relative_to(PYSPEC).parts[0] in ("cli", "__main__.py"):
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bad = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("signal.signal", "os.putenv", "os._exit", "os.abort", "sys.exit", "exit", "quit"):
                bad.append(f"line {node.lineno}: {name}")
            if name in ("os.environ.setdefault", "os.environ.update", "logging.basicConfig"):
                bad.append(f"line {node.lineno}: {name}")
        elif isinstance(node, (ast.Assign, ast.Delete)):
            targets = [ast.unparse(t) for t in node.targets]
            bad += [f"line {node.lineno}: {t}" for t in targets if t.startswith("os.environ[")]
    assert not bad


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_files_open_with_what_they_are_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if text.strip() and path.name != "_version.py":
        assert ast.get_docstring(ast.parse(text)), "no module docstring"


def test_nothing_unfinished() -> None:
    marks = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b|raise NotImplementedError")
    bad = [f"{ids(p)}: {m.group(0)}" for p in FILES for m in marks.finditer(p.read_text(encoding="utf-8"))]
    assert not bad
