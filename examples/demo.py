#!/usr/bin/env python3
"""What ``make demo`` shows: one target, plain and with several drafts; the same tokens, the speeds, the acceptance.

    python examples/demo.py [--threads N]

Honest about its size: the target is a small quantised model, for which a CPU gains little from checking several tokens
at once, and the first draft is as large as the target. What speculation can save shows with larger models.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from get_models import MODELS, get_smollm2

import pyspec

DATA = Path(__file__).resolve().parent / "data"
EAGLE3 = DATA / "smollm2-135m-eagle3.gguf"
SECONDS_FOR_TWO_TURNS = 12.0

PLAIN: dict[str, Any] = {"speculation": "off"}
NGRAM: dict[str, Any] = {"speculation": "ngram-simple", "size_n": 6, "size_m": 12}

QUESTION = "What is a rainbow, and how does it form? Answer in a few sentences."
TEXT = """\
The lighthouse keeper wrote in his log every evening. At six, he lit the lamp, at seven, he checked the oil, and at \
eight, he read the barometer and wrote down the weather. When ships passed, he wrote down their names and the hour. \
When no ships passed, he wrote down the colour of the sea."""
QUOTE = f"Repeat the following text word for word.\n\n{TEXT}"


@dataclass
class Method:
    """One way to run the target: a label, and what ``pyspec.LLM`` is given besides the model."""

    label: str
    options: dict[str, Any]
    results: list[pyspec.GenerationResult] = field(default_factory=list)

    @property
    def best(self) -> pyspec.GenerationResult:
        return max(self.results, key=lambda r: r.stats.tokens_per_s or 0.0)


def requantised(model: Path) -> Path:
    """A Q4_0 copy of the model beside it, made on first use."""
    copy = model.with_name(model.name.replace("Q4_1", "Q4_0"))
    if not copy.exists():
        print(f"making {copy.name}, a copy of the target in another precision, to use as a draft")
        partial = copy.with_name(f"{copy.name}.{os.getpid()}.part")
        pyspec.quantize(model, partial, "Q4_0")
        os.replace(partial, copy)
    return copy


def answer(llm: pyspec.LLM, prompt: str, max_tokens: int, show: bool) -> pyspec.GenerationResult:
    """Generate, streaming the text to stdout if ``show``."""
    result: pyspec.GenerationResult | None = None
    for piece in llm.chat([{"role": "user", "content": prompt}], stream=True, max_tokens=max_tokens):
        if show:
            print(piece.text, end="", flush=True)
        result = piece.result or result
    assert result is not None
    if show:
        print()
    return result


def compare(model: pyspec.Model, prompt: str, methods: list[Method], max_tokens: int, options: dict[str, Any]) -> bool:
    """Run all methods on one prompt, in turn, and print a table. True if all gave the same tokens.

    Twice, of which the faster run counts, unless the first round already took long.
    """
    print(f"\n== {prompt.splitlines()[0]}")
    llms = [pyspec.LLM(model, n_ctx=1024, **method.options, **options) for method in methods]
    try:
        began = time.monotonic()
        for turn in range(2):
            if time.monotonic() - began > SECONDS_FOR_TWO_TURNS:
                break
            for i, (llm, method) in enumerate(zip(llms, methods, strict=True)):
                show = turn == 0 and i < 2
                if show:
                    print(f"\n[{method.label}]")
                method.results.append(answer(llm, prompt, max_tokens, show))
    finally:
        for llm in llms:
            llm.close()
    print(f"\n{'':34}{'tokens/s':>10}{'against plain':>15}{'accepted':>10}{'tokens a pass':>15}  tokens")
    plain = methods[0].best
    same = True
    for method in methods:
        best = method.best
        stats = best.stats
        speed, base = stats.tokens_per_s or 0.0, plain.stats.tokens_per_s or 0.0
        accepted = f"{stats.acceptance_rate:.0%}" if stats.acceptance_rate is not None else "-"
        verdict = difference(plain.tokens, best.tokens)
        same = same and verdict == "the same"
        print(
            f"{method.label:34}{speed:>10.1f}{speed / base if base else 0.0:>14.2f}x{accepted:>10}"
            f"{stats.mean_accepted_length or 0.0:>15.2f}  {verdict if method is not methods[0] else len(plain.tokens)}"
        )
    return same


def difference(a: list[int], b: list[int]) -> str:
    """ "the same", or where two outputs part."""
    if a == b:
        return "the same"
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"other from token {at} on"


def main() -> int:
    parser = argparse.ArgumentParser(description="The same text with and without speculation.")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: all CPUs it may use)")
    options = {"n_threads": parser.parse_args().threads}

    path = get_smollm2(MODELS)
    draft = requantised(path)
    with pyspec.Model(path) as model:
        print(f"target: {path.name}, {model.size_bytes / 1e6:.0f} MB")
        methods = [
            Method("plain", PLAIN),
            Method(
                "draft-simple, Q4_0 copy", {"draft": draft, "speculation": "draft-simple", "n_max": 3, "p_min": 0.5}
            ),
        ]
        if EAGLE3.exists():
            methods.append(
                Method(
                    "draft-eagle3, 15 % of its size",
                    {"draft": EAGLE3, "speculation": "draft-eagle3", "n_max": 3, "p_min": 0.6},
                )
            )
        same = compare(model, QUESTION, methods, 120, options)
        methods = [Method("plain", PLAIN), Method("ngram-simple, no draft model", NGRAM)]
        same = compare(model, QUOTE, methods, 120, options) and same

    print("\nThe Q4_0 copy is about as large as the target: it is often right and saves little or nothing. It shows")
    print(
        "acceptance, not speed. What pays is a draft much smaller than its target, or none at all where text repeats."
    )
    if same:
        print("All methods gave the same tokens as plain decoding.")
    else:
        print(
            "Not all tokens are the same: kernels for one row and for several differ in the last digits, and two tokens"
        )
        print("were nearly tied. README.md, 'What \"same output\" means', has more.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
