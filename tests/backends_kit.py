"""Small helpers for tests of ``pyspec.backends``; child processes import this too."""

from __future__ import annotations

import os
import platform
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pyspec.backends import ContextHandle, ModelHandle
from pyspec.config import ContextParams, ModelParams


def cpu_flags() -> set[str]:
    """What Linux calls this CPU's features; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    return set(next((x for x in text.splitlines() if x.startswith("flags")), "").split())


#: Flash attention is pyspec's own (``build_support/flash_rows.c``), not ggml's.
OWN_ATTENTION = platform.machine() == "x86_64" and {"avx2", "fma", "f16c"} <= cpu_flags()

#: One thread, small sizes, no flash attention (ggml's one-row and n-row results differ).
SIZES: dict[str, Any] = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 32, "n_threads": 1, "flash_attn": False}


def load(path: str, **options: Any) -> ModelHandle:
    return ModelHandle(path, ModelParams(**options))


def context(model: ModelHandle, other: ContextHandle | None = None, **options: Any) -> ContextHandle:
    return ContextHandle(model, ContextParams(**{**SIZES, **options}), other)


def rows(tokens: Any, pos0: int = 0, seq: int = 0, output: Any = 1) -> tuple[np.ndarray, ...]:
    """tokens, pos, seq, output of a batch of one sequence; ``tokens`` may be a number of rows."""
    ids = np.arange(9, 9 + tokens, dtype=np.int32) if isinstance(tokens, int) else np.array(tokens, np.int32)
    n = len(ids)
    flags = np.array(output, np.int8) if isinstance(output, (list, tuple)) else np.full(n, output, np.int8)
    return ids, np.arange(pos0, pos0 + n, dtype=np.int32), np.full(n, seq, np.int32), flags


def decode(
    ctx: ContextHandle,
    tokens: Any,
    pos0: int = 0,
    seq: int = 0,
    output: Any = 1,
    embd: Any = None,
    with_tokens: bool = True,
) -> None:
    """One pass over rows of one sequence."""
    ids, pos, seqs, flags = rows(tokens, pos0, seq, output)
    ctx.decode(ids if with_tokens else None, pos, seqs, flags, embd, len(ids))


def zeros(ctx: ContextHandle, n: int, encode: bool = False) -> np.ndarray:
    """Embedding rows of the width this context takes."""
    return np.zeros((n, ctx.n_embd_encode if encode else ctx.n_embd_decode), np.float32)


def greedy(ctx: ContextHandle, prompt: list[int], n: int, seq: int = 0) -> list[int]:
    """``n`` tokens after ``prompt``, one row a pass."""
    decode(ctx, prompt, 0, seq)
    out = [int(ctx.logits()[-1].argmax())]
    for i in range(n - 1):
        decode(ctx, [out[-1]], len(prompt) + i, seq)
        out.append(int(ctx.logits()[0].argmax()))
    return out


def caught(call: Any) -> str:
    """Class name of what ``call`` raises, with ``state`` if it has one; "none" if nothing."""
    try:
        call()
    except Exception as exc:
        state = getattr(exc, "state", None)
        return type(exc).__name__ + (f":{state}" if state else "")
    return "none"


def resident_growth(once: Callable[[], Any], rounds: int) -> float:
    """Resident memory at the end over that at the start of many rounds.

    Each the least of ten rounds, with free memory handed back first: now and then the allocator holds some megabytes of
    it, and what is looked for is memory that nobody can free.
    """
    import ctypes

    import psutil

    process = psutil.Process()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None

    def least() -> int:
        seen = []
        for _ in range(10):
            once()
            if trim is not None:
                trim(0)
            seen.append(process.memory_info().rss)
        return min(seen)

    for _ in range(10):
        once()
    start = least()
    for _ in range(rounds - 30):
        once()
    return least() / start


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


#: What a guarded case has at hand: ``M(name, **options)`` loads a tiny model, ``show(call)`` prints what it raises.
HEAD = """
import sys
import numpy as np
from backends_kit import load, context, decode, zeros, rows, greedy, caught
from pyspec.backends import _binding, ModelHandle, ContextHandle, ThreadPool
from pyspec.config import ContextParams
paths = dict(p.split("=", 1) for p in sys.argv[1:])
M = lambda name, **o: load(paths[name], **o)
def show(call): print(caught(call))
"""


def guard_runner(tiny: Any, run_child: Any) -> Callable[..., list[str]]:
    """Runner of cases that may end a process: code and names of tiny models in, printed lines out."""

    def run(code: str, *names: str, **options: Any) -> list[str]:
        args = [f"{name}={tiny(name)}" for name in names]
        return run_child(HEAD + textwrap.dedent(code), *args, **options).splitlines()

    return run
