"""README and docs: every example runs, every link leads somewhere, every variable and option is real.

How examples run, with nothing in them replaced:

- Each document runs in one child process, in an empty folder. The model files that documents name lie there as tiny
  models (``MODEL_FILES``); the Hugging Face cache holds ``HUB_FILES``, and the network is off.
- The ``python`` blocks of a document run in order and share their names, so a later one may use an earlier one's.
- Of ``sh`` blocks, the commands that start with ``pyspec`` or ``python -m pyspec`` run, each in a shell.
- ``<!-- not run: REASON -->`` on the line before a block keeps it from being run; Python must compile all the same.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

#: File name in documents -> tiny model.
MODEL_FILES = {
    "target.gguf": "target-llama",
    "draft.gguf": "draft-llama",
    "eagle3.gguf": "eagle3",
    "mtp-target.gguf": "target-mtp",
    "adapter.gguf": "lora-llama",
}
#: Repository and file in documents -> tiny model.
HUB_FILES = {
    ("user/model-GGUF", "model-Q8_0.gguf"): "target-llama",
    ("user/model-GGUF", "small-Q8_0.gguf"): "draft-llama",
}

NOT_RUN = re.compile(r"<!-- not run: (\S.*?) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text, the line it begins on, and why it is not to be run (or None)."""

    language: str
    text: str
    line: int
    not_run: str | None


def blocks_of(text: str) -> list[Block]:
    """All fenced blocks of a Markdown text."""
    found = []
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        fence = re.fullmatch(r"```(\w*)", lines[i])
        if not fence:
            assert not lines[i].lstrip().startswith("```"), f"line {i + 1}: indented or odd fence"
            i += 1
            continue
        end = next((j for j in range(i + 1, len(lines)) if lines[j] == "```"), None)
        assert end is not None, f"line {i + 1}: the block is not closed"
        mark = NOT_RUN.fullmatch(lines[i - 1].strip()) if i else None
        body = "\n".join(lines[i + 1 : end]) + "\n"
        found.append(Block(fence.group(1), body, i + 2, mark.group(1) if mark else None))
        i = end + 1
    return found


def commands_of(block: Block) -> list[tuple[int, str]]:
    """(line, command) of what can be run of a shell block; a backslash at the end continues a command."""
    found: list[tuple[int, str]] = []
    command, begin = "", 0
    for n, line in enumerate(block.text.splitlines(), block.line):
        begin = begin if command else n
        command += line
        if command.endswith("\\"):
            command = command[:-1]
            continue
        words = command.split("#")[0].split("|")[-1].split()
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        if words[:1] == ["pyspec"] or words[:3] == ["python", "-m", "pyspec"]:
            found.append((begin, command))
        command = ""
    return found


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ---- the blocks themselves ---------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_python_blocks_compile(path: Path) -> None:
    for block in blocks_of(path.read_text(encoding="utf-8")):
        assert block.language, f"line {block.line - 1}: a block without a language"
        if block.language == "python":
            ast.parse(block.text, f"{path.name}:{block.line}")


def test_readme_has_examples_that_run() -> None:
    blocks = [b for b in blocks_of((ROOT / "README.md").read_text(encoding="utf-8")) if b.not_run is None]
    assert len([b for b in blocks if b.language == "python"]) >= 4
    assert len([c for b in blocks if b.language == "sh" for c in commands_of(b)]) >= 4


@pytest.fixture(scope="session")
def workplace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes a folder with the documents' model files, a Hugging Face cache and a ``pyspec`` command."""
    if importlib.util.find_spec("pyspec.backends._llama") is None:
        pytest.skip("examples need the native extension, which is not built (pip install -e .)")
    tiny = request.getfixturevalue("tiny")

    def make() -> Path:
        folder = tmp_path_factory.mktemp("docs")
        for name, model in MODEL_FILES.items():
            shutil.copyfile(tiny(model), folder / name)
        for (repo, name), model in HUB_FILES.items():
            base = folder / "hub" / f"models--{repo.replace('/', '--')}"
            commit = "0" * 40
            (base / "refs").mkdir(parents=True, exist_ok=True)
            (base / "refs" / "main").write_text(commit)
            (base / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tiny(model), base / "snapshots" / commit / name)
        (folder / "bin").mkdir()
        # a link to the interpreter would not find its environment
        for command, arguments in (("pyspec", "-m pyspec "), ("python", "")):
            script = folder / "bin" / command
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
            script.chmod(0o755)
        return folder

    return make


def run(folder: Path, command: list[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONIOENCODING": "utf-8",
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "GGML_NO_BACKTRACE": "1",
    }
    # one CPU, hence one thread: beside other busy processes, two that wait for each other are slow
    pin = shutil.which("taskset")
    cpus = sorted(os.sched_getaffinity(0)) if pin else []
    prefix = [pin, "-c", str(cpus[os.getpid() % len(cpus)])] if pin else []
    return subprocess.run(
        [*prefix, *command],
        input=stdin,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


WITH_PYTHON = [p for p in DOCUMENTS if any(b.language == "python" for b in blocks_of(p.read_text(encoding="utf-8")))]
COMMANDS = [
    pytest.param(path, line, command, id=f"{ids(path)}:{line}")
    for path in DOCUMENTS
    for block in blocks_of(path.read_text(encoding="utf-8"))
    if block.language == "sh" and block.not_run is None
    for line, command in commands_of(block)
]


@pytest.mark.native
@pytest.mark.parametrize("path", WITH_PYTHON, ids=ids)
def test_python_examples_run(path: Path, workplace: Callable[[], Path]) -> None:
    text = path.read_text(encoding="utf-8")
    source = ""
    for block in blocks_of(text):
        if block.language == "python" and block.not_run is None:
            # the program has the document's own line numbers
            source += "\n" * (block.line - 1 - source.count("\n")) + block.text
    folder = workplace()
    program = folder / f"{path.stem}.py"
    program.write_text(source, encoding="utf-8")
    child = run(folder, [sys.executable, "-W", "error", str(program)])
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-4000:]


@pytest.mark.native
@pytest.mark.skipif(sys.platform == "win32", reason="shell examples are for POSIX shells")
@pytest.mark.parametrize(("path", "line", "command"), COMMANDS)
def test_shell_examples_run(path: Path, line: int, command: str, workplace: Callable[[], Path]) -> None:
    child = run(workplace(), ["sh", "-ec", command])
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-4000:]
    assert child.stdout or child.stderr, "it printed nothing"


@pytest.mark.native
@pytest.mark.parametrize(
    ("script", "models", "stdin", "expected"),
    [
        ("chat.py", "target.gguf draft.gguf", "Hello\nAgain\n", r"(?s)\A> .*\S.*\n> .*\S.*\n> \Z"),
        ("batch.py", "target.gguf", "one\ntwo\n\nthree\n", r'(\{"prompt": "(one|two|three)", "text": ".+\n){3}'),
        ("batch.py", "target.gguf eagle3.gguf", "one\ntwo\n", r'(\{.*"accepted": [01]\.\d+\}\n){2}'),
    ],
)
def test_example_programs_run(
    script: str, models: str, stdin: str, expected: str, workplace: Callable[[], Path]
) -> None:
    child = run(workplace(), [sys.executable, str(ROOT / "examples" / script), *models.split()], stdin)
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-4000:]
    assert re.search(expected, child.stdout), child.stdout


# ---- true to the code ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name) if name else path
        assert file.exists(), f"{target}: no such file"
        if anchor:
            heads = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in heads}
            assert anchor in anchors, f"{target}: no such heading"


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_named_files_exist(path: Path) -> None:
    """A path of the repository in backticks, such as ``pyspec/engine.py``, is a file or folder that is there."""
    text = path.read_text(encoding="utf-8")
    made = {"vendor/ggml/llama.cpp", "pyspec/backends/lib", "pyspec/_build_info.py"}  # by the build
    for name in re.findall(
        r"`((?:pyspec|tests|docs|benchmarks|examples|build_support|vendor|licenses)/[\w./*-]*)`", text
    ):
        if name.rstrip("/") in made:
            continue
        found = list(ROOT.glob(name.rstrip("/")))
        assert found, f"{name} is not there"


SOURCES = [
    p
    for top in ("pyspec", "build_support", "tests", "vendor/ggml", "examples", "benchmarks", ".ci")
    for p in (ROOT / top).glob("*" if top == "vendor/ggml" else "**/*")
    if p.is_file() and (p.suffix in (".py", ".sh") or p.parent.name == ".ci") and p != Path(__file__)
]
#: Passed from sync.py to a child of its own.
INTERNAL = {"PYSPEC_SYNC_NAME", "PYSPEC_SYNC_VERSION"}


def test_environment_page_is_complete() -> None:
    """docs/environment.md lists exactly the variables of ours that the code reads."""
    listed = set(re.findall(r"^\| `(PYSPEC_\w+)`", (ROOT / "docs" / "environment.md").read_text("utf-8"), re.MULTILINE))
    reads = re.compile(r"(?:environ|env|getenv)\w*(?:\.get|\.pop)?[\[(]+\w*?,?\s*[\"'](PYSPEC_\w+)")
    read = set()
    for path in [*SOURCES, ROOT / "setup.py"]:
        text = path.read_text(encoding="utf-8", errors="replace")
        read |= set(reads.findall(text))
        if path.parent.name == ".ci" or path.suffix == ".sh":
            read |= set(re.findall(r"\$\{?(PYSPEC_\w+)", text))
    read |= set(re.findall(r"\$[({](PYSPEC_\w+)", (ROOT / "Makefile").read_text(encoding="utf-8")))
    read |= set(re.findall(r'_flag\(env, "(PYSPEC_\w+)"', (ROOT / "build_support" / "config.py").read_text("utf-8")))
    assert read - INTERNAL == listed


def test_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("demo", "test"):
        assert f"make {command}" in text
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), f"the Makefile has no {command}"


def test_speculation_types_in_readme_are_the_registered_ones() -> None:
    from pyspec.drafters.registry import BUILTIN

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("## Which method") :].split("\n## ")[0]
    named = set(re.findall(r"`((?:draft|ngram)-[\w-]+|suffix|prediction|grammar)`", table))
    assert named == set(BUILTIN)


def test_public_names_in_docs_exist() -> None:
    """``pyspec.X`` in text and code is a public name or a module."""
    import pyspec

    modules = {p.stem for p in (ROOT / "pyspec").glob("*.py")} | {
        p.name for p in (ROOT / "pyspec").iterdir() if p.is_dir()
    }
    others = {"native"}  # a logger
    for path in DOCUMENTS:
        for name in re.findall(r"\bpyspec\.([A-Za-z_]\w*)", path.read_text(encoding="utf-8")):
            assert name in {*pyspec.__all__, *modules, *others}, f"{path.name}: pyspec.{name}"


# ---- the checks themselves ---------------------------------------------------------------------------


def test_blocks_are_found() -> None:
    text = "a\n<!-- not run: no network -->\n```python\nx = 1\n```\n"
    text += "```sh\nFOO=1 pyspec a \\\n  b\nmake\necho x | pyspec c # d\n```\n"
    first, second = blocks_of(text)
    assert first == Block("python", "x = 1\n", 4, "no network")
    assert (second.language, second.not_run) == ("sh", None)
    assert commands_of(second) == [(7, "FOO=1 pyspec a   b"), (10, "echo x | pyspec c # d")]
    with pytest.raises(AssertionError, match="not closed"):
        blocks_of("```python\nx")
