"""Which choices change the bits of the logits, and which do not: the table of docs/exactness.md.

    python benchmarks/numerics.py MODEL [MODEL ...] [-n 40] [--threads 1,2] [--json OUT]

For each model, greedy generations of one prompt are compared bit by bit, row by row, with those of a reference: in
exact mode without drafts and with drafts; alone and beside other sequences; with other caches, attention, chunks of the
prompt and numbers of threads. "max" is the largest difference of a logit up to the first token that is
not the same.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import pyspec
from pyspec.drafters import Drafter
from pyspec.types import DraftRequest

PROMPT = (
    "A list of the numbers from one to twenty: one, two, three, four, five, six. The list goes on: seven, eight, nine,"
)
OTHERS = ["The quick brown fox jumps over the lazy dog", "def add(a, b): return", "Once upon a time there was"]
K = 3


class Random(Drafter):
    """Proposes random tokens: nearly all are rejected."""

    name: ClassVar[str] = "random"

    def draft(self, requests: list[DraftRequest]) -> None:
        rng = random.Random(7)
        for r in requests:
            rng.seed(r.n_past)
            r.draft[:] = [rng.randrange(self.target.n_vocab) for _ in range(min(r.n_max, rng.randint(0, K)))]


Found = tuple[list[int], list[np.ndarray]]


def generate(model: pyspec.Model, n: int, n_seq: int = 1, **options: Any) -> Found:
    """Tokens of the first of ``n_seq`` sequences, and the row of logits that decided each."""
    base: dict[str, Any] = {"n_ctx": 256, "n_seq_max": n_seq, "n_max": K}
    if options.get("kv_unified"):
        base["n_ctx"] *= options.get("n_seq_max", n_seq)
    with pyspec.LLM(model, **(base | options)) as llm:
        engine = llm._running().engine
        sampling = pyspec.SamplingParams(max_tokens=n, ignore_eos=True)
        seqs = [engine.submit(llm.tokenize(text), sampling) for text in [PROMPT, *OTHERS][:n_seq]]
        rows: list[np.ndarray] = []

        def watch(seq: Any, logits: np.ndarray, row: int, n_draft: int, emitted: list[int]) -> None:
            if seq is seqs[0]:
                rows.extend(logits[row : row + len(emitted)].copy())

        engine.observer = watch
        while not seqs[0].done:
            engine.step()
        tokens = list(seqs[0].output)
        for seq in seqs:
            engine.release(seq)
    return tokens, rows[: len(tokens)]


def compare(a: Found, b: Found) -> dict[str, Any]:
    """Bits, the largest difference of a logit while the texts are the same, and where they part."""
    first = next((i for i, (x, y) in enumerate(zip(a[0], b[0], strict=True)) if x != y), None)
    n = len(a[0]) if first is None else first + 1
    largest = max(float(np.abs(x - y).max()) for x, y in zip(a[1][:n], b[1][:n], strict=True))
    same = first is None and all(np.array_equal(x, y) for x, y in zip(a[1], b[1], strict=True))
    return {"identical": same, "max": largest, "first_difference": first}


#: Caches and kinds of attention that exact mode is tried in.
EXACT: dict[str, dict[str, Any]] = {
    "default": {},
    "flash attention off": {"flash_attn": False},
    "flash attention on": {"flash_attn": True},
    "KV q8_0": {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    "full window": {"swa_full": True},
    "prompt in chunks of 8": {"n_ubatch": 8},
    "1 thread": {"n_threads": 1},
}
DRAFTS: dict[str, dict[str, Any]] = {
    "random": {"speculation": Random},
    "suffix": {"speculation": "suffix", "suffix_n_max": K},
}


def measure(path: str, n: int, threads: list[int]) -> dict[str, Any]:
    """All comparisons of one model."""
    out: dict[str, Any] = {}

    def note(what: str, a: Found, b: Found) -> None:
        out[what] = compare(a, b)
        print(f"  {what}: {out[what]}", flush=True)

    with pyspec.Model(path) as model:
        off: dict[str, Any] = {"speculation": "off", "n_threads": max(threads)}
        exact = off | {"exact": True}
        names = [name for name in EXACT if model.n_swa or "window" not in name]
        try:
            references = {name: generate(model, n, **(exact | EXACT[name])) for name in names}
        except pyspec.UnsupportedError as e:
            print(f"  exact mode refused: {e}")
            out["exact mode"] = str(e)
            references = {}
        for name, reference in references.items():
            for kind, options in DRAFTS.items():
                note(
                    f"exact, {name}: drafts {kind} | none",
                    reference,
                    generate(model, n, **(exact | EXACT[name] | options)),
                )
        for n_seq in (2, 4) if references else ():
            for unified in (False, True):
                kind = "unified" if unified else "split"
                many = generate(model, n, n_seq, **exact, kv_unified=unified)
                drafted = generate(model, n, n_seq, **(exact | DRAFTS["suffix"]), kv_unified=unified)
                alone = generate(model, n, 1, **exact, n_seq_max=n_seq, kv_unified=unified)
                note(f"exact, {n_seq} sequences, {kind}: beside others | alone", alone, many)
                note(f"exact, {n_seq} sequences, {kind}: drafts suffix | none", many, drafted)
        plain = generate(model, n, **off)
        note("not exact: drafts random | plain", plain, generate(model, n, **(off | DRAFTS["random"])))
        for n_seq in (2, 4):
            for unified in (False, True):
                kind = "unified" if unified else "split"
                many = generate(model, n, n_seq, **off, kv_unified=unified)
                note(f"not exact: plain beside {n_seq - 1} others, {kind} | alone", plain, many)
        for name in names[1:-1]:
            note(f"plain, {name} | default", plain, generate(model, n, **(off | EXACT[name])))
        for count in threads:
            note(
                f"plain, {count} thread(s) | {max(threads)}", plain, generate(model, n, **(off | {"n_threads": count}))
            )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("-n", type=int, default=40)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--json")
    args = parser.parse_args()
    found = {}
    for path in args.models:
        print(Path(path).name)
        found[Path(path).name] = measure(path, args.n, [int(t) for t in args.threads.split(",")])
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
