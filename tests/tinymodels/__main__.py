"""Command line: write models into a folder."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path

from . import MODELS, build, parse


def main() -> None:
    ap = argparse.ArgumentParser(
        prog="python -m tests.tinymodels", description="Write tiny GGUF models for speculative-decoding tests."
    )
    ap.add_argument("outdir", nargs="?", type=Path)
    ap.add_argument("names", nargs="*", help="models, each NAME or NAME:key=value,...")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--list", action="store_true", help="list the models and their parameters")
    args = ap.parse_args()
    if args.list or args.outdir is None:
        for name in sorted(MODELS):
            fn, fixed = MODELS[name]
            shown = [
                f"{p.name}={fixed.get(p.name, p.default)!r}"
                for p in inspect.signature(fn).parameters.values()
                if p.default is not p.empty
            ]
            print(f"{name:28} {' '.join(shown)}")
        sys.exit(0 if args.list else 2)
    args.outdir.mkdir(parents=True, exist_ok=True)
    for spec in args.names or sorted(MODELS):
        name, parameters, stem = parse(spec)
        path = build(name, args.outdir / f"{stem}.gguf", args.seed, **parameters)
        print(f"{path}  {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
