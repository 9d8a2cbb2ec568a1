"""Tokens a second on a quiet machine, beside busy foreign processes, and after they are gone.

    python benchmarks/load.py MODEL.gguf [--busy 2] [--seconds 6] [--threads N] [--fixed] [--json OUT]

Starts the busy processes itself, each in a session of its own, and ends them. ``--fixed`` keeps the number of threads,
for comparison. Says how much of the quiet speed is left under load (the bar is 0.45), and how long after the load's end
the speed was back at 0.9.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import pyspec

#: Tokens a second are taken over stretches of this length.
WINDOW_S = 0.25
BUSY = "while True: pass"


class Meter:
    """Generates without end, and counts."""

    def __init__(self, llm: pyspec.LLM) -> None:
        self.llm = llm
        self.pieces: Any = iter(())
        self.n = 0

    def run(self, seconds: float) -> list[tuple[float, float]]:
        """(seconds since the call, tokens a second) of each stretch."""
        out = []
        start = last = time.perf_counter()
        n = 0
        while (now := time.perf_counter()) - start < seconds:
            piece = next(self.pieces, None)
            if piece is None:
                self.pieces = self.llm.stream("Once upon a time", ignore_eos=True, max_tokens=400)
                continue
            n += len(piece.tokens)
            if now - last >= WINDOW_S:
                out.append((now - start, n / (now - last)))
                last, n = now, 0
        return out


def speed(stretches: list[tuple[float, float]]) -> float:
    return statistics.median(v for _, v in stretches)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with pyspec.LLM(
        args.model, speculation="off", n_ctx=1024, n_threads=args.threads, adapt_threads=not args.fixed
    ) as llm:
        meter = Meter(llm)
        meter.run(2)
        quiet = speed(meter.run(args.seconds))
        load = [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(args.busy)]
        try:
            first = meter.run(1)
            loaded = speed(meter.run(args.seconds))
        finally:
            for process in load:
                process.kill()
            for process in load:
                process.wait()
        after = meter.run(args.seconds)
        back = next((t for t, v in after if v >= 0.9 * quiet), None)
        meter.pieces.close()
        threads = llm._running().engine.threads
        return {
            "model": llm.model.path.name,
            "n_threads": llm.describe()["n_threads"],
            "adapt_threads": not args.fixed,
            "busy": args.busy,
            "quiet": quiet,
            "first_second": speed(first),
            "loaded": loaded,
            "share": loaded / quiet,
            "back_after_s": back,
            "after": speed(after[len(after) // 2 :]),
            "n_changes": threads.n_changes if threads is not None else 0,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--busy", type=int, default=2, help="foreign processes")
    parser.add_argument("--seconds", type=float, default=6, help="length of each part")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--fixed", action="store_true", help="keep the number of threads")
    parser.add_argument("--json", default=None, help="append the result to this file, a JSON object a line")
    args = parser.parse_args()
    result = measure(args)
    r = result
    back = "never" if r["back_after_s"] is None else f"{r['back_after_s']:.2f} s"
    print(f"{r['model']}, {r['n_threads']} threads{' fixed' if args.fixed else ''}: quiet {r['quiet']:.1f} tokens/s")
    print(f"  beside {args.busy} busy processes {r['loaded']:.1f} ({r['share']:.0%})")
    print(f"  in the first second {r['first_second']:.1f}")
    print(f"  afterwards {r['after']:.1f}, back after {back}")
    if args.json:
        with open(args.json, "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
