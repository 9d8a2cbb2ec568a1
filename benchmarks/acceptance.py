"""Mean accepted length of sample-and-match, rejection sampling and block verification on the same prompts.

    python benchmarks/acceptance.py TARGET.gguf DRAFT.gguf [--temp 1.0] [--tokens 128] [--n-max 4] [--repeat 3]

Each prompt of pyspec's suite is generated with several seeds in each way, in turns; seeds are the same for all ways.
Printed: tokens a pass (accepted + 1) over all, its spread over the seeds, and how much of what was drafted is accepted.
With ``--json FILE`` also as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import pyspec
from pyspec.drafters.choose import kind_of_file
from pyspec.prompts import suite

WAYS = ("match", "rejection", "block")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--temp", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--n-max", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, list[tuple[int, int, int, int]]] = {way: [] for way in WAYS}
    method = kind_of_file(args.draft)
    with pyspec.LLM(
        args.target, args.draft, speculation=method, n_ctx=2048, n_max=args.n_max, n_threads=args.threads, n_seq_max=1
    ) as llm:
        prompts = [p.text for p in suite()]
        for seed in range(args.repeat):
            for way in WAYS:
                counts = [0, 0, 0, 0]
                for i, prompt in enumerate(prompts):
                    result = llm.generate(
                        prompt,
                        max_tokens=args.tokens,
                        temperature=args.temp,
                        top_k=args.top_k,
                        seed=1000 * seed + i,
                        ignore_eos=True,
                        verification=way,
                    )
                    s = result.stats
                    for j, value in enumerate((s.n_later, s.n_pass, s.n_draft, s.n_accepted)):
                        counts[j] += value
                found[way].append((counts[0], counts[1], counts[2], counts[3]))
        print(f"{Path(args.target).name}, {'+'.join(llm.speculation)}, temperature {args.temp:g}, n_max {args.n_max}, "
              f"{len(prompts)} prompts of {args.tokens} tokens, {args.repeat} seeds")  # fmt: skip
    summary = {}
    for way, runs in found.items():
        lengths = [n_output / n_pass for n_output, n_pass, _, _ in runs]
        total = [sum(x) for x in zip(*runs, strict=True)]
        spread = statistics.stdev(lengths) if len(lengths) > 1 else 0.0
        summary[way] = {"length": total[0] / total[1], "spread": spread, "acceptance": total[3] / max(1, total[2])}
        print(
            f"{way:10} tokens a pass {total[0] / total[1]:.3f} (sd over seeds {spread:.3f}), "
            f"accepted {total[3] / max(1, total[2]):.3f} of {total[2]} drafted"
        )
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
