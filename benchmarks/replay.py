#!/usr/bin/env python3
"""Try settings of look-up methods on recorded outputs, without a model: a second for what a run takes minutes.

    python benchmarks/replay.py record MODEL OUT.json [--prompts suite] [-n 128] [--raw]
    python benchmarks/replay.py replay OUT.json ngram-simple:size_n=3,size_m=11 suffix suffix:suffix_p_min=0.7
    python benchmarks/replay.py replay OUT.json auto suffix
    python benchmarks/replay.py replay OUT.json --sweep

``record`` writes what a model says to the prompts, and what its passes cost by their rows. ``replay`` lets drafters
propose while the recorded text goes by, and adds up the cost of the passes that would have been made: the speed that
greedy decoding would have with this text, if drafting were free. Where rows of a pass are computed otherwise than one
alone (K-quants), a real run may write another text; so this is for comparing settings, and real runs have the last
word. ``--sweep`` tries some hundred settings of llama.cpp's five methods, and ``suffix``. ``auto`` is what
``speculation="auto"`` makes of ``suffix``; the recorded costs are its clock.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pyspec.config import SpeculationParams
from pyspec.control import AutoController
from pyspec.drafters import registry
from pyspec.drafters.chain import DrafterChain
from pyspec.testing import FakeEvaluator, Rule
from pyspec.types import DraftRequest

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 16, 17, 20, 24, 25, 32, 33, 40, 49, 65)


# A target that is never asked; large enough for any model's tokens, and made once because its table takes seconds.
@functools.cache
def target() -> FakeEvaluator:
    return FakeEvaluator(Rule(n_vocab=1 << 19), n_batch=8)


def record(args: argparse.Namespace) -> None:
    from pyspec.bench import Bench, make_settings
    from pyspec.config import SamplingParams
    from pyspec.prompts import read_prompts

    sampling = SamplingParams(max_tokens=args.max_tokens)
    with Bench(args.model, [], make_settings(["suffix"]), read_prompts(args.prompts), sampling, raw=args.raw) as bench:
        cost = [(c["rows"], c["median_us"]) for c in bench.batch_cost(ROWS)]
        runs = []
        with bench.llm(bench.settings[0]) as llm:
            for prompt, tokens in bench.prompts:
                result = llm.generate(tokens, sampling)
                runs.append({"name": prompt.name, "prompt": tokens, "output": result.tokens})
                print(f"{prompt.name}: {len(tokens)} tokens, {len(result.tokens)} written", file=sys.stderr)
    Path(args.out).write_text(json.dumps({"cost_us": cost, "runs": runs}), encoding="utf-8")


def replay(data: dict[str, Any], method: str, options: dict[str, Any], n: int) -> dict[str, float]:
    """Speed against one pass for each token, by prompt, and over all of them."""
    rows, us = zip(*data["cost_us"], strict=True)
    sizes = np.arange(1026)
    cost = np.interp(sizes, rows, us) / us[0] * np.maximum(1.0, sizes / rows[-1])
    params = SpeculationParams(**options)
    drafter = registry.get("suffix" if method == "auto" else method)(target(), None, params, 1)
    chain = DrafterChain([drafter], target().n_vocab)
    control = AutoController() if method == "auto" else None
    speeds, spent = {}, {}
    for run in data["runs"]:
        text, tokens = run["prompt"] + run["output"][:n], list(run["prompt"])
        chain.begin(0, tokens)
        if control is not None:
            control.begin(0)
            control.prefilled(len(run["prompt"]), int(1000 * us[0] * cost[min(len(run["prompt"]), len(cost) - 1)]))
        spent[run["name"]] = 0.0
        while len(tokens) < len(text):
            room = len(text) - len(tokens) - 1
            request = DraftRequest(0, len(tokens) - 1, tokens[-1], tokens, room)
            requests = [request] if room else []
            if control is not None:
                control.draft(chain, requests, 1)
            else:
                chain.draft(requests)
            pairs = zip(request.draft, text[len(tokens) :], strict=False)
            n_accepted = sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], pairs))
            n_rows = 1 + len(request.draft)
            spent[run["name"]] += float(cost[n_rows])
            emitted = text[len(tokens) : len(tokens) + n_accepted + 1]
            tokens += emitted
            chain.accept(0, n_accepted, drafter if request.draft else None, len(request.draft))
            if control is not None:
                control.accept(0, len(request.draft), n_accepted, emitted)
                control.passed(n_rows, int(1000 * us[0] * cost[n_rows]))
        chain.end(0)
        speeds[run["name"]] = (len(text) - len(run["prompt"])) / spent[run["name"]]
    n_all = sum(min(n, len(run["output"])) for run in data["runs"])
    return {"all": n_all / sum(spent.values()), **speeds}


def sweep() -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for method in ("ngram-simple", "ngram-map-k", "ngram-map-k4v"):
        for n, m, hits in itertools.product((1, 2, 3, 4, 5, 6, 8, 12), (3, 5, 7, 11, 15, 23, 31, 48), (1, 2)):
            if hits == 1 or method != "ngram-map-k":
                found.append((method, {"size_n": n, "size_m": m, "min_hits": hits}))
    for n, m in itertools.product((2, 3, 4, 6, 8, 12, 16, 24), (3, 5, 8, 12, 16, 31, 48, 64)):
        found += [("ngram-mod", {"n_match": n, "mod_n_max": m, "mod_n_min": low}) for low in sorted({0, m // 2, m})]
    return [*found, ("ngram-cache", {}), ("suffix", {})]


def setting(text: str) -> tuple[str, dict[str, Any]]:
    method, _, rest = text.partition(":")
    pairs = (item.split("=") for item in rest.split(",") if item)
    return method, {name: float(value) if "." in value else int(value) for name, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record")
    one.add_argument("model")
    one.add_argument("out")
    one.add_argument("--prompts", default="suite")
    one.add_argument("--raw", action="store_true")
    two = commands.add_parser("replay")
    two.add_argument("data", type=Path)
    two.add_argument("settings", nargs="*", type=setting)
    two.add_argument("--sweep", action="store_true")
    two.add_argument("--top", type=int, default=5, help="how many settings of a method to show after a sweep")
    for command in (one, two):
        command.add_argument("-n", "--max-tokens", type=int, default=128)
    args = parser.parse_args()
    if args.command == "record":
        record(args)
        return
    data = json.loads(args.data.read_text(encoding="utf-8"))
    tried = [(m, o, replay(data, m, o, args.max_tokens)) for m, o in (sweep() if args.sweep else args.settings)]
    tried.sort(key=lambda x: -x[2]["all"])
    shown: dict[str, int] = {}
    for method, options, speeds in tried:
        shown[method] = shown.get(method, 0) + 1
        if not args.sweep or shown[method] <= args.top:
            figures = " ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())
            print(f"{method} {' '.join(f'{k}={v}' for k, v in options.items())}: {figures}")


if __name__ == "__main__":
    main()
