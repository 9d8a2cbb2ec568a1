"""Weights in huge pages: where they lie, when a file is mapped instead, and that neither changes a bit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tinymodels import build

import pyspec
from pyspec.backends import _memory

MIB = 1 << 20

#: Loads a model, and prints the MiB of the process that lie in huge pages before and after.
SHOW = """
import sys
import pyspec
import pyspec.backends

def huge():
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("AnonHugePages:")) // 1024

pyspec.backends.load()
before = huge()
use_mmap = {"None": None, "True": True, "False": False}[sys.argv[2]]
with pyspec.Model(sys.argv[1], pyspec.ModelParams(use_mmap=use_mmap, devices=())):
    print(before, huge())
"""


def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "enabled"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(_memory, "_THP", str(path))
    monkeypatch.setattr(_memory, "devices_in_use", lambda params: [])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="huge pages are asked for on Linux only")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("always [madvise] never", True),
        ("[always] madvise never", True),
        ("always madvise [never]", False),
        (None, False),
    ],
)
def test_the_systems_setting_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, expected: bool
) -> None:
    settings(monkeypatch, tmp_path, text)
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(MIB))
    assert _memory.has_huge_pages() is expected
    assert _memory.is_mapped(str(model), pyspec.ModelParams()) is not expected
    for given in (True, False):
        assert _memory.is_mapped(str(model), pyspec.ModelParams(use_mmap=given)) is given


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="huge pages are asked for on Linux only")
def test_what_does_not_fit_is_mapped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings(monkeypatch, tmp_path, "always [madvise] never")
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part in parts:
        part.write_bytes(bytes(MIB))
    path = str(parts[0])
    monkeypatch.setattr(_memory, "available_bytes", lambda: 6 * MIB + 4096)
    assert not _memory.is_mapped(path, pyspec.ModelParams())
    monkeypatch.setattr(_memory, "available_bytes", lambda: 6 * MIB - 4096)
    assert _memory.is_mapped(path, pyspec.ModelParams())
    monkeypatch.setattr(_memory, "available_bytes", lambda: None)
    assert _memory.is_mapped(path, pyspec.ModelParams())
    monkeypatch.setattr(_memory, "available_bytes", lambda: 600 * MIB)
    assert _memory.is_mapped(path, pyspec.ModelParams(vocab_only=True))
    parts[1].unlink()
    assert _memory.is_mapped(path, pyspec.ModelParams())
    monkeypatch.setattr(_memory, "devices_in_use", lambda params: ["a GPU"])
    parts[1].write_bytes(b"")
    assert _memory.is_mapped(path, pyspec.ModelParams())


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with many tokens, most of which it never says."""
    path = build("draft-llama", tmp_path_factory.mktemp("huge") / "big.gguf", size=65_536)
    assert path.stat().st_size > 24 * MIB
    return path


@pytest.mark.skipif(not _memory.has_huge_pages(), reason="this system gives no huge pages")
@pytest.mark.parametrize("use_mmap", [None, True, False])
def test_where_the_weights_lie(big: Path, use_mmap: bool | None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOW, str(big), str(use_mmap)], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.fullmatch(r"(\d+) (\d+)\n", done.stdout)
    assert found is not None, done.stdout
    grown = int(found[2]) - int(found[1])
    size = big.stat().st_size / MIB
    if use_mmap:
        assert grown < size / 2
    else:
        # the rest is metadata, and what the system had no huge page for
        assert grown > size * 0.6


def test_same_logits_mapped_or_not(big: Path) -> None:
    rows = []
    for use_mmap in (True, False):
        with (
            pyspec.Model(big, pyspec.ModelParams(use_mmap=use_mmap, devices=())) as model,
            pyspec.Context(model, pyspec.ContextParams(n_ctx=64, n_threads=1)) as context,
        ):
            batch = pyspec.Batch(8)
            batch.extend(list(range(5, 13)), 0, 0, 1)
            context.decode(batch)
            rows.append(context.logits().copy())
    assert np.array_equal(*rows)
