#!/usr/bin/env python3
"""Compare pytest-benchmark results: ``python benchmarks/compare.py BASE.json CHANGE.json``.

Compared are the medians of benchmarks that are in both files and belong to the same key: pin, backend, device, CPU,
model and its hash, quantisation, threads, drafter, k, Python and NumPy. The commit may differ: it is what is compared.
Another key is refused, since its ratio would say nothing. With several pairs of files (runs in turns, see
``bench_compare.py``) the ratio of a benchmark is the median over the pairs, so that a machine that slows down between
two pairs does not count.

Exit code: 0, nothing became slower than the threshold; 1, something did; 2, the files cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The part of a key that may differ: it is what is compared.
COMMIT = "commit"


class CompareError(Exception):
    """The files cannot be compared; the message says why."""


@dataclass(frozen=True)
class Measured:
    """One benchmark of one file: what it belongs to, and its median in seconds."""

    key: dict[str, Any]
    median_s: float


@dataclass(frozen=True)
class Row:
    """One benchmark in both: seconds of the last pair; ratio change / base, median and extremes over the pairs."""

    name: str
    base_s: float
    change_s: float
    ratio: float
    low: float
    high: float


def read(path: Path) -> dict[str, Measured]:
    """Benchmarks of a pytest-benchmark file by name.

    Raises:
        CompareError: the file is missing or is none, or a benchmark has no key or no usable median.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise CompareError(f"{path}: {e.strerror or e}") from None
    except ValueError as e:
        raise CompareError(f"{path} is not JSON: {e}") from None
    if not isinstance(data, dict) or not isinstance(data.get("benchmarks"), list):
        raise CompareError(f"{path} is not a file of pytest-benchmark (--benchmark-json)")
    out: dict[str, Measured] = {}
    for item in data["benchmarks"]:
        name = item.get("fullname", "?")
        key = (item.get("extra_info") or {}).get("key")
        median = (item.get("stats") or {}).get("median")
        if not isinstance(key, dict):
            raise CompareError(f"{path}: {name} has no key; it was made by other benchmarks than pyspec's")
        if not isinstance(median, (int, float)) or not median > 0 or not math.isfinite(median):
            raise CompareError(f"{path}: {name} has no usable median: {median!r}")
        out[name] = Measured(key, float(median))
    if not out:
        raise CompareError(f"{path} holds no benchmark")
    return out


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Fields of two keys that differ, as text; the commit aside."""
    names = sorted((set(a) | set(b)) - {COMMIT})
    return [f"{n}: {a.get(n)!r} and {b.get(n)!r}" for n in names if a.get(n) != b.get(n)]


def compare(pairs: Sequence[tuple[dict[str, Measured], dict[str, Measured]]]) -> list[Row]:
    """Rows for the benchmarks that all files have.

    Raises:
        CompareError: keys differ, or no benchmark is in all files.
    """
    files = [f for pair in pairs for f in pair]
    names = [name for name in files[0] if all(name in f for f in files)]
    if not names:
        raise CompareError("the files have no benchmark in common")
    rows = []
    for name in names:
        first = files[0][name]
        for f in files[1:]:
            other = differences(first.key, f[name].key)
            if other:
                raise CompareError(f"{name} was measured under different keys: {'; '.join(other)}")
        ratios = [change[name].median_s / base[name].median_s for base, change in pairs]
        base, change = pairs[-1]
        ratio = statistics.median(ratios)
        rows.append(Row(name, base[name].median_s, change[name].median_s, ratio, min(ratios), max(ratios)))
    return rows


def only_in_some(pairs: Sequence[tuple[dict[str, Measured], dict[str, Measured]]]) -> list[str]:
    """Names that are not in all files, and so are not compared."""
    files = [f for pair in pairs for f in pair]
    return sorted({name for f in files for name in f if not all(name in g for g in files)})


def table(rows: Sequence[Row], threshold: float) -> str:
    """The rows as text, the slowest change first."""
    width = max(len(r.name) for r in rows)
    lines = [f"{'benchmark':{width}}  {'base':>10}  {'change':>10}  {'ratio':>6}  spread"]
    for r in sorted(rows, key=lambda r: -r.ratio):
        mark = "  SLOWER" if r.ratio > threshold else "  faster" if r.ratio < 1 / threshold else ""
        spread = f"{r.low:.3f} to {r.high:.3f}"
        lines.append(f"{r.name:{width}}  {_time(r.base_s)}  {_time(r.change_s)}  {r.ratio:6.3f}  {spread}{mark}")
    mean = math.exp(math.fsum(math.log(r.ratio) for r in rows) / len(rows))
    lines.append(f"geometric mean of {len(rows)} ratios change / base: {mean:.3f} (below 1: the change is faster)")
    return "\n".join(lines)


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:8.2f} {unit}".rjust(10)
    return f"{seconds * 1e9:7.1f} ns".rjust(10)


def report(pairs: Sequence[tuple[Path, Path]], threshold: float) -> int:
    """Read, compare, print; gives the exit code."""
    try:
        files = [(read(base), read(change)) for base, change in pairs]
        rows = compare(files)
    except CompareError as e:
        print(f"refused: {e}", file=sys.stderr)
        return 2
    commits = [{m.key.get(COMMIT, "unknown") for f in side for m in f.values()} for side in zip(*files, strict=True)]
    print(f"base {', '.join(sorted(commits[0]))}; change {', '.join(sorted(commits[1]))}; {len(files)} pair(s) of runs")
    print(table(rows, threshold))
    for name in only_in_some(files):
        print(f"not in all files: {name}")
    return int(any(r.ratio > threshold for r in rows))


def _threshold(text: str) -> float:
    value = float(text)
    if not value >= 1 or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"a ratio of at least 1, got {text}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="BASE CHANGE", help="one or several pairs of files")
    parser.add_argument("--threshold", type=_threshold, default=1.1, help="largest ratio that passes (default 1.1)")
    options = parser.parse_args(argv)
    files = options.files
    if len(files) % 2:
        parser.error(f"files come in pairs, base and change; got {len(files)}")
    return report(list(zip(files[::2], files[1::2], strict=True)), options.threshold)


if __name__ == "__main__":
    sys.exit(main())
