#!/usr/bin/env python3
"""Measure a change against an earlier revision on this machine: ``make bench-compare BASE=rev``.

Both are built in checkouts of their own and run in turns, with the benchmarks of the change, so what differs is the
library. The change is the working tree with what is not committed yet (files that git does not know are left out).
Checkouts lie in a folder of the cache and are kept, so the next comparison compiles only what differs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import compare
from peers_setup import ROOT, sync_script


class BenchError(Exception):
    """The comparison cannot be made; the message says why."""


def say(line: str) -> None:
    print(f"bench-compare: {line}", flush=True)


def git(*arguments: str) -> str:
    """Output of a git command in this repository."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def checkout(name: str, commit: str) -> Path:
    """A checkout of ``commit`` in the cache; what was built there before is kept."""
    folder = Path(sync_script().cache_dir() / "bench-compare" / name)
    if not (folder / ".git").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        git("worktree", "prune")
        git("worktree", "add", "--force", "--detach", str(folder), commit)
    for command in (["checkout", "--force", "--detach", commit], ["clean", "-qfd"]):
        done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"git {command[0]} in {folder}: {done.stderr.strip()}")
    return folder


def share(folder: Path) -> None:
    """Give a checkout this tree's native build, models and source, where it has none: the build decides what fits."""
    for path in (ROOT / "build").glob("native-*"):
        if path.is_dir() and not (folder / "build" / path.name).exists():
            shutil.copytree(path, folder / "build" / path.name)
    source = Path("vendor", "ggml", "llama.cpp")
    if (ROOT / source).is_dir() and not (folder / source).exists():
        shutil.copytree(ROOT / source, folder / source)
    if (ROOT / "models").is_dir() and not (folder / "models").exists():
        (folder / "models").symlink_to((ROOT / "models").resolve())


def build(folder: Path) -> None:
    """Native libraries and extensions of a checkout, in place."""
    say(f"building {folder.name}")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=folder, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise BenchError(f"the build of {folder.name} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def run(folder: Path, commit: str, out: Path, arguments: Sequence[str]) -> None:
    """The benchmarks once, in a checkout."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "benchmarks", "-q", "-p", "no:cacheprovider", "--benchmark-enable",
         "--benchmark-only", "--benchmark-max-time=0.3", "--benchmark-warmup=on", "--benchmark-warmup-iterations=10",
         f"--benchmark-json={out}", *arguments],
        # the checkout before whatever pyspec is installed
        cwd=folder, env=dict(os.environ, PYTHONPATH=str(folder), PYSPEC_BENCH_COMMIT=commit),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not out.is_file() or not out.stat().st_size:
        raise BenchError(f"the benchmarks of {folder.name} gave nothing:\n{(done.stdout + done.stderr)[-3000:]}")
    if done.returncode:
        say(f"some benchmarks of {folder.name} failed:\n{done.stdout[-1500:]}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options; what comes after ``--`` is ``pytest``."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog="Behind -- come arguments for pytest, such as -k argmax."
    )
    parser.add_argument("base", help="the revision to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in turns (default 3)")
    parser.add_argument("--threshold", type=float, default=1.1, help="largest ratio that passes (default 1.1)")
    # argparse would give the rest to an argument of its own only where no option stands before it
    at = list(argv).index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:at])
    options.pytest = list(argv[at + 1 :])
    if options.rounds < 1:
        parser.error("--rounds is at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        base = git("rev-parse", "--verify", f"{options.base}^{{commit}}")
        change = git("stash", "create") or git("rev-parse", "HEAD")
        names = {"base": git("describe", "--always", base), "change": git("describe", "--always", "--dirty")}
        folders = {"base": checkout("base", base), "change": checkout("change", change)}
        for folder in folders.values():
            share(folder)
            build(folder)
        shutil.rmtree(folders["base"] / "benchmarks")
        shutil.copytree(folders["change"] / "benchmarks", folders["base"] / "benchmarks")
        results = folders["base"].parent / "results"
        shutil.rmtree(results, ignore_errors=True)
        results.mkdir()
        pairs = []
        for r in range(options.rounds):
            say(f"round {r + 1} of {options.rounds}")
            out = {side: results / f"{side}-{r + 1}.json" for side in folders}
            for side in sorted(folders, reverse=bool(r % 2)):
                run(folders[side], names[side], out[side], options.pytest)
            pairs.append((out["base"], out["change"]))
    except (BenchError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return compare.report(pairs, options.threshold)


if __name__ == "__main__":
    sys.exit(main())
