"""Fixtures and helpers for all tests.

``tiny("target-llama")``, ``tiny("draft-llama", agreement=0.5)``: path of a tiny model, made on first use.
``run_child(code)``: run Python in a process of its own; nothing it does may end it by a signal.
``smollm2``: the small real model, or a skip with the reason.

Environment: ``PYSPEC_TEST_CACHE`` folder of generated models; ``PYSPEC_TEST_REQUIRE=native,smollm2,device`` turns the
skips of these kinds into failures (for machines that must have them).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
# for ``fakes`` and ``tinymodels``, whatever the import mode
sys.path.insert(0, str(TESTS))

MARKERS = {
    "native": "needs the built native library",
    "slow": "takes more than a few seconds",
    "smollm2": "needs the small real model",
    "statistical": "checks a distribution; fails by chance less than once in a million runs",
    "device(kind)": "needs a device of that kind (cuda, vulkan, metal, ...)",
    "packaging": "builds or installs packages",
}


def pytest_configure(config: pytest.Config) -> None:
    # a background job is started with Ctrl-C ignored, and so would be the children that tests interrupt
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, text in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parts = item.path.relative_to(TESTS).parts if item.path.is_relative_to(TESTS) else ()
        if parts and parts[0] in ("native", "exactness", "device"):
            item.add_marker("native")


def need(kind: str, reason: str) -> NoReturn:
    """Skip with the reason; fail where ``PYSPEC_TEST_REQUIRE`` names this kind."""
    if kind in os.environ.get("PYSPEC_TEST_REQUIRE", "").split(","):
        pytest.fail(f"required here, but: {reason}", pytrace=False)
    pytest.skip(reason)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("native") and importlib.util.find_spec("pyspec.backends._llama") is None:
        need("native", "the native extension pyspec.backends._llama is not built (pip install -e .)")


# ---- tiny models ---------------------------------------------------------------------


class TinyModels:
    """Callable that gives the path of a tiny model. Files are written once and shared by all runs and processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str, *, seed: int = 1, **params: Any) -> str:
        """Path of the model ``name`` with some parameters of its builder changed."""
        from tinymodels import build

        tag = "".join(f"_{key}={value}" for key, value in sorted(params.items()))
        path = self.folder / f"seed{seed}" / f"{name}{tag}.gguf"
        if not path.exists():
            # the stem goes into the file, so the unfinished file needs a folder, not a name of its own
            temporary = self.folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}" / path.name
            temporary.parent.mkdir(parents=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            build(name, temporary, seed, **params)
            os.replace(temporary, path)
            temporary.parent.rmdir()
        return str(path)


def _generator_version() -> str:
    import hashlib

    digest = hashlib.sha256()
    for source in sorted((TESTS / "tinymodels").glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


@pytest.fixture(scope="session")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Paths of tiny models by name, see ``tinymodels``."""
    pytest.importorskip("gguf", reason="tiny models need the package gguf (pip install -e '.[test]')")
    base = os.environ.get("PYSPEC_TEST_CACHE")
    if base:
        folder = Path(base)
    elif request.config.pluginmanager.hasplugin("cacheprovider"):
        folder = Path(request.config.cache.mkdir("tinymodels"))
    else:
        folder = tmp_path_factory.mktemp("tinymodels")
    return TinyModels(folder / _generator_version())


# ---- the small real model --------------------------------------------------------------


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Path of SmolLM2-135M-Instruct Q4_1; skips with the reason when it cannot be had."""
    script = ROOT / "examples" / "get_models.py"
    run = subprocess.run(
        [sys.executable, str(script), "smollm2"], capture_output=True, text=True, timeout=600, check=False, cwd=ROOT
    )
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines or not Path(lines[-1]).is_file():
        reason = (run.stderr.strip() or run.stdout.strip() or f"exit code {run.returncode}").splitlines()[-1]
        need("smollm2", f"SmolLM2 cannot be had: {reason}")
    return lines[-1]


# ---- child processes -------------------------------------------------------------------

RunChild = Callable[..., str]


@pytest.fixture(scope="session")
def run_child() -> RunChild:
    """Run Python code in a process of its own and give back what it printed."""

    def run(
        code: str,
        *args: str,
        timeout: float = 60,
        exit_code: int = 0,
        stderr: str | None = "",
        env: dict[str, str] | None = None,
        cwd: str | Path | None = None,
        python: str = sys.executable,
    ) -> str:
        """Run ``code`` with ``sys.argv[1:] == args``.

        Fails unless the process ends with ``exit_code`` and prints exactly ``stderr`` there (None: anything).
        """
        full = os.environ | {"PYTHONFAULTHANDLER": "1", "GGML_NO_BACKTRACE": "1", "PYTHONIOENCODING": "utf-8"}
        full["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        child = subprocess.run(
            [python, "-c", textwrap.dedent(code), *args],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            check=False,
            env=full | (env or {}),
            cwd=cwd,
        )
        ended = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        report = f"child ended with {ended}\n--- stdout\n{child.stdout[-3000:]}\n--- stderr\n{child.stderr[-5000:]}"
        assert child.returncode == exit_code, report
        if stderr is not None:
            assert child.stderr == stderr, report
        return child.stdout

    return run


# ---- LLM objects -----------------------------------------------------------------------


@pytest.fixture
def make_llm() -> Iterator[Callable[..., Any]]:
    """Make LLMs with the settings of all tiny-model tests; they are closed after the test.

    Where no ``speculation`` is given it is the one method that the files are made for, as much as it proposes: what
    "auto" does depends on the clock.
    """
    from pairs import SMALL, method_for

    import pyspec

    with contextlib.ExitStack() as stack:

        def make(model: Any, draft: Any = None, **options: Any) -> Any:
            method = {} if "speculation" in options else method_for(model, draft)
            return stack.enter_context(pyspec.LLM(model, draft, **(SMALL | method | options)))

        yield make


# ---- nothing left behind ---------------------------------------------------------------


def live_threads() -> int:
    """Threads of this process, native ones too where the system tells."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def rss_bytes() -> int:
    """Resident memory of this process."""
    psutil = pytest.importorskip("psutil")
    return int(psutil.Process().memory_info().rss)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails when a test leaves open native handles or threads behind."""
    import gc

    gc.collect()
    threads = live_threads()
    yield
    gc.collect()  # warnings are errors: an unclosed handle shows up here as a ResourceWarning
    assert live_threads() <= threads, "threads were left running"
