"""What a measurement belongs to, and what a pass of a model costs by itself."""

from __future__ import annotations

import hashlib
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from time import perf_counter_ns
from typing import Any

from . import backends
from ._version import __version__
from .errors import ConfigError
from .prompts import Prompt
from .runtime import ALL, Batch, Context, Model

__all__ = ["batch_cost", "describe_machine", "describe_model", "file_sha256", "make_key"]

Progress = Callable[[float], None]


def file_sha256(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def describe_model(model: Model) -> dict[str, Any]:
    """What tells one model file from another. The name of the file only: its folder is the user's own affair."""
    return {
        "file": model.path.name,
        "sha256": file_sha256(model.path),
        "size_bytes": model.size_bytes,
        "architecture": model.architecture,
        "quantisation": model.file_type,
        "name": model.metadata.get("general.name"),
        "n_params": model.n_params,
    }


def describe_machine() -> dict[str, Any]:
    """Processor, devices, system, and how busy it is now."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "n_cpus": os.cpu_count(),
        "load_average": load[0] if load else None,
        "devices": [{"name": d.name, "kind": d.kind, "description": d.description} for d in backends.devices()],
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    """What the processor calls itself."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def make_key(
    model: Model, drafts: Sequence[Model], prompts: Iterable[tuple[Prompt, Sequence[int]]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything a figure depends on: two reports whose keys differ are not to be compared without a look at why.

    Args:
        prompts: with their token ids. options: what else was chosen, JSON-ready.
    """
    return {
        "pyspec": __version__,
        "build": {k: v for k, v in backends.build_info().items() if k != "library_dir"},
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "model": describe_model(model),
        "drafts": [describe_model(d) for d in drafts],
        "prompts": [
            {"name": p.name, "sha256": hashlib.sha256(p.text.encode()).hexdigest(), "n_tokens": len(t)}
            for p, t in prompts
        ],
        "options": dict(options),
    }


def batch_cost(
    context: Context, rows: Sequence[int], *, n_past: int = 256, repeat: int = 10, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Time of a pass against its number of rows: how many tokens a pass must give before drafting pays.

    Sizes take turns, and every pass is rolled back, so all start from the same ``n_past`` positions.

    Args:
        context: with room for ``n_past`` positions and the largest pass, and that many outputs. Emptied here.
        rows: sizes to measure. repeat: passes of each size.

    Returns:
        For each size: "rows", "median_us", "p25_us", "p75_us", and "relative", the median over that of the first size.

    Raises:
        ConfigError: a size does not fit the context.
    """
    largest = max(rows)
    limit = min(context.n_batch, context.n_outputs_max, context.memory.n_rows_max, context.memory.n_draft_max + 1)
    if min(rows) < 1 or largest > limit or n_past + largest > context.n_ctx_seq:
        limit = min(limit, context.n_ctx_seq - n_past)
        raise ConfigError(f"passes of {min(rows)} to {largest} rows: this context allows 1 to {limit}")
    batch = Batch(context.n_batch)
    token = max(context.model.vocab.bos, 0)
    n_chunk = min(context.n_ubatch, context.n_batch)

    def fill(begin: int, end: int) -> None:
        for at in range(begin, end, n_chunk):
            batch.clear()
            batch.extend([token] * min(n_chunk, end - at), at, 0)
            context.decode(batch)

    times: dict[int, list[float]] = {n: [] for n in rows}
    context.memory.clear(0)
    fill(0, n_past)
    for r in range(repeat + 1):
        for i, n in enumerate(rows):
            context.memory.checkpoint(0, n_past)
            batch.clear()
            batch.extend([token] * n, n_past, 0, ALL)
            t0 = perf_counter_ns()
            context.decode(batch)
            context.logits()
            us = (perf_counter_ns() - t0) / 1000
            if r:  # the first round reserves graphs
                times[n].append(us)
            # an emptied cache counts as kept up to 0; a pass without rejection needs no rollback but keeps its rows
            fill(context.memory.rollback(0, n_past, n_past + n), n_past)
            if progress is not None:
                progress((r * len(rows) + i + 1) / ((repeat + 1) * len(rows)))
    context.memory.clear(0)
    first = statistics.median(times[rows[0]])
    out = []
    for n in rows:
        quartiles = statistics.quantiles(times[n], n=4, method="inclusive") if repeat > 1 else times[n] * 3
        out.append(
            {
                "rows": n,
                "median_us": quartiles[1],
                "p25_us": quartiles[0],
                "p75_us": quartiles[2],
                "relative": quartiles[1] / first,
            }
        )
    return out
