"""What LOGPROB (``pyspec bench``) and the watch of ``pyspec verify`` add to generation.

    python benchmarks/measure_observers.py MODEL [-n 128] [--repeat 9]

Runs take turns: nobody looks, LOGPROB, verify's watch. Prints tokens/s and, for each, the median and the quartiles of
the ratio to the run of the same turn that nobody looked at.
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter

import pyspec
from pyspec.sampling import Logprobs
from pyspec.verify import _Watch

PROMPT = "A list of the numbers from one to twenty: one, two, three,"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    with pyspec.LLM(args.model, speculation="suffix", suffix_n_max=3, n_ctx=512, n_seq_max=1) as llm:
        engine = llm._running().engine
        tokens = llm.generate(PROMPT, max_tokens=args.n, ignore_eos=True).tokens
        ways = {"nobody": lambda: None, "LOGPROB": Logprobs, "verify": lambda: _Watch(tokens)}
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(args.repeat):
            names = list(ways)
            for name in names[turn % 3 :] + names[: turn % 3]:
                engine.observer = ways[name]()
                start = perf_counter()
                llm.generate(PROMPT, max_tokens=args.n, ignore_eos=True)
                speeds[name].append(args.n / (perf_counter() - start))
                engine.observer = None
    for name, found in speeds.items():
        ratios = [a / b for a, b in zip(found, speeds["nobody"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name:8} {statistics.median(found):7.1f} tokens/s, ratio {middle:.4f} ({low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
