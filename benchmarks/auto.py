#!/usr/bin/env python3
"""``speculation="auto"`` against plain decoding and fixed settings, on the suite of ``pyspec bench``.

    python benchmarks/auto.py TARGET.gguf DRAFT.gguf --out auto.jsonl [--threads 2] [--repeats 2]
    python benchmarks/auto.py --show auto.jsonl

Each repeat has new contexts, controllers and memories of look-ups, so nobody remembers an answer of the repeat before;
within a repeat the settings answer a prompt one after the other, in turns which of them is first. The last prompt is
the creative one at temperature 1 with a seed, where drafts are worth the least. A line a generation is written as it
ends.

With one thread (``--threads 1``) all clocks, the controller's too, are the thread's CPU time, so that other processes
on the machine disturb less. Times are without the prompt.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

import pyspec
from pyspec.bench import encode_prompt
from pyspec.prompts import suite

#: label: (methods, whether they need the draft file, options)
SETTINGS: dict[str, tuple[str | list[str], bool, dict[str, Any]]] = {
    "plain": ("off", False, {}),
    "auto": ("auto", True, {}),
    "suffix": ("suffix", False, {}),
    "ngram-simple": ("ngram-simple", False, {}),
    "ngram-mod": ("ngram-mod", False, {}),
    **{f"draft k={k}": ("draft-eagle3", True, {"n_max": k}) for k in (1, 2, 3, 5)},
    "draft k=3 p_min=0.6": ("draft-eagle3", True, {"n_max": 3, "p_min": 0.6}),
    "draft k=8 p_min=0.6": ("draft-eagle3", True, {"n_max": 8, "p_min": 0.6}),
    "suffix + draft k=8 p_min=0.6": (["suffix", "draft-eagle3"], True, {"n_max": 8, "p_min": 0.6}),
}
CREATIVE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5, "ignore_eos": True}


def measure(args: argparse.Namespace, names: list[str]) -> None:
    clock = thread_time_ns if args.threads == 1 else perf_counter_ns
    with ExitStack() as stack:
        model = stack.enter_context(pyspec.Model(args.target))
        draft = stack.enter_context(pyspec.Model(args.draft))
        prompts: list[tuple[str, list[int], dict[str, Any]]] = [
            (p.name, encode_prompt(model, p.text), {}) for p in suite()
        ]
        prompts += [(f"{name}, T=1", tokens, CREATIVE) for name, tokens, _ in prompts if name == "creative"]
        if args.prompts:
            prompts = [p for p in prompts if p[0] in args.prompts.split(",")]
        out = stack.enter_context(args.out.open("a", encoding="utf-8"))
        for repeat in range(args.first, args.first + args.repeats):
            with ExitStack() as contexts:
                llms = {}
                for name in names:
                    methods, needs, options = SETTINGS[name]
                    llm = pyspec.LLM(
                        model, draft if needs else None, speculation=methods, n_ctx=2048, n_seq_max=1,
                        n_threads=args.threads, **options,
                    )  # fmt: skip
                    llms[name] = contexts.enter_context(llm)
                    engine = llm._running().engine
                    engine._clock = clock
                    if engine.control is not None:
                        engine.control._clock = clock
                    llm.generate([1, 1], max_tokens=8, ignore_eos=True)
                for i, (prompt, tokens, sampling) in enumerate(prompts):
                    turn = (repeat * len(prompts) + i) % len(names)
                    for name in names[turn:] + names[:turn]:
                        line = {"repeat": repeat, "prompt": prompt, "setting": name, "threads": args.threads}
                        line |= run(llms[name], tokens, args.tokens, sampling, clock)
                        out.write(json.dumps(line) + "\n")
                        out.flush()


def run(llm: pyspec.LLM, tokens: list[int], n: int, sampling: dict[str, Any], clock: Any) -> dict[str, Any]:
    start = clock()
    result = llm.generate(tokens, max_tokens=n, **sampling)
    us = (clock() - start) / 1000 - result.stats.times.prefill_us
    times, n_out = result.stats.times, max(1, result.stats.n_later)
    line: dict[str, Any] = {
        "n": n_out, "us_per_token": us / n_out, "n_pass": result.stats.n_pass, "n_draft": result.stats.n_draft,
        "n_accepted": result.stats.n_accepted, "finish_reason": result.finish_reason,
        "phases_us": {name: getattr(times, name) for name in times.__slots__},
    }  # fmt: skip
    control = llm.stats.control
    if control is not None:
        line["control"] = {
            "chosen": dict(control.chosen), "n_steps": control.n_steps, "n_nothing": control.n_nothing,
            "n_not_worth": control.n_not_worth, "n_tried": control.n_tried, "n_measuring": control.n_measuring,
            "pass_us": control.pass_us, "drafters": control.drafters,
        }  # fmt: skip
    return line


def show(path: Path) -> str:
    """Speed by prompt and setting, relative to plain decoding: median over repeats, and what the bars ask for."""
    runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = list(dict.fromkeys(r["prompt"] for r in runs))
    settings = [s for s in SETTINGS if s != "plain" and any(r["setting"] == s for r in runs)]
    us = {(r["repeat"], r["prompt"], r["setting"]): r["us_per_token"] for r in runs}
    repeats = sorted({r["repeat"] for r in runs})
    table: dict[tuple[str, str], list[float]] = {}
    for prompt in prompts:
        for setting in settings:
            table[prompt, setting] = [
                us[r, prompt, "plain"] / us[r, prompt, setting]
                for r in repeats
                if (r, prompt, "plain") in us and (r, prompt, setting) in us
            ]
    lines = ["| prompt | " + " | ".join(settings) + " | auto / best fixed |", "|---" * (len(settings) + 2) + "|"]
    middle = {key: statistics.median(values) for key, values in table.items() if values}
    for prompt in prompts:
        cells = [_cell(table[prompt, s]) for s in settings]
        fixed = [1.0, *(middle[prompt, s] for s in settings if s != "auto" and (prompt, s) in middle)]
        share = f"{middle[prompt, 'auto'] / max(fixed):.3f}" if (prompt, "auto") in middle else ""
        lines.append(f"| {prompt} | " + " | ".join(cells) + f" | {share} |")
    means = []
    for setting in settings:
        logs = [math.log(middle[p, setting]) for p in prompts if (p, setting) in middle]
        means.append(f"{math.exp(statistics.fmean(logs)):.3f}" if logs else "")
    return "\n".join([*lines, "| geometric mean | " + " | ".join(means) + " | |"])


def _cell(values: list[float]) -> str:
    if len(values) < 2:
        return "".join(f"{v:.3f}" for v in values)
    return f"{statistics.median(values):.3f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path)
    parser.add_argument("draft", nargs="?", type=Path, help="an EAGLE-3 head")
    parser.add_argument("--out", type=Path, default=Path("auto.jsonl"), help="lines are added to this file")
    parser.add_argument("--show", type=Path, help="make a table of such a file, and end")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first repeat, to go on with a file")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="separated by commas")
    parser.add_argument("--prompts", default="", help="separated by commas (default: all)")
    args = parser.parse_args()
    if args.show is None:
        names = args.settings.split(",")
        unknown = [name for name in names if name not in SETTINGS]
        if args.target is None or args.draft is None or unknown:
            parser.error(f"no setting {unknown[0]!r}" if unknown else "a target and a draft are needed")
        measure(args, names)
    print(show(args.show or args.out))


if __name__ == "__main__":
    main()
