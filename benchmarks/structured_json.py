"""What a JSON schema costs, and what its forced tokens bring: tokens/s of an extraction task, with and without.

    python benchmarks/structured_json.py MODEL.gguf [--rounds 5] [--json OUT]

Settings take turns within each round, prompt by prompt, so that a machine that slows down slows all of them. The figure
of a round is the tokens of all prompts over the time of all steps after the prompt (drafting, passes, verification with
its masks, rollback). Ratios are to the first setting, round by round; the table has their median, least and largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pyspec

TEXTS = [
    "Maria Lindqvist, 34, has worked as a marine biologist for the Nordic Ocean Institute in Gothenburg since 2019. "
    "She can be reached at maria.lindqvist@nordic-ocean.example.",
    "Our new colleague is Tomasz Zielinski. He is 51 years old, lives in Krakow and joins Baltic Rail as a signalling "
    "engineer. His address is t.zielinski@balticrail.example.",
    "The winner of this year's baking contest, Amelie Durand (27), is a pastry chef at the Hotel du Parc in Lyon; "
    "write to her at amelie@hotelduparc.example.",
    "Dr. Samuel Okafor of Lagos, aged 45, is head of cardiology at Island General Hospital. Contact: "
    "s.okafor@islandgeneral.example.",
]
FIELDS = {
    "full_name": {"type": "string", "maxLength": 40},
    "age_in_years": {"type": "integer", "minimum": 0, "maximum": 130},
    "city_of_residence": {"type": "string", "maxLength": 30},
    "occupation": {"type": "string", "maxLength": 40},
    "current_employer": {"type": "string", "maxLength": 40},
    "email_address": {"type": "string", "maxLength": 60},
}
SCHEMA = {
    "type": "object",
    "properties": {"person": {"type": "object", "properties": FIELDS, "required": list(FIELDS)}},
    "required": ["person"],
}
SCHEMA["additionalProperties"] = SCHEMA["properties"]["person"]["additionalProperties"] = False  # type: ignore[index]

#: (name, drafters, options of the request); the first is what the others are compared with.
SETTINGS: list[tuple[str, str, dict[str, Any]]] = [
    ("free text", "off", {}),
    ("schema, nothing drafted", "off", {"json_schema": SCHEMA}),
    ("schema, forced tokens drafted", "grammar", {"json_schema": SCHEMA}),
    ("the same without white space", "grammar", {"json_schema": SCHEMA, "json_whitespace": False}),
]


def prompt(text: str) -> list[dict[str, str]]:
    fields = ", ".join(FIELDS)
    task = f"Extract the person as JSON: an object 'person' with {fields}. Answer with the JSON only.\n\n{text}"
    return [{"role": "user", "content": task}]


def measure(
    model: pyspec.Model, rounds: int, max_tokens: int, n_threads: int | None, texts: list[str]
) -> list[dict[str, Any]]:
    llms = [
        pyspec.LLM(model, speculation=speculation, n_ctx=1024, n_threads=n_threads) for _, speculation, _ in SETTINGS
    ]
    out: list[dict[str, Any]] = [{"name": name, "rates": [], "tokens": 0, "valid": 0} for name, _, _ in SETTINGS]
    try:
        for i in range(rounds + 1):
            counts = [[0, 0] for _ in SETTINGS]
            for text in texts:
                for j, (llm, (_, _, options)) in enumerate(zip(llms, SETTINGS, strict=True)):
                    # the task without a schema goes on as long as the ones with it are allowed to
                    result = llm.chat(prompt(text), max_tokens=max_tokens, ignore_eos=not options, **options)
                    counts[j][0] += result.stats.n_later
                    counts[j][1] += result.stats.times.step_us
                    if i == 0 and options:
                        if result.finish_reason == "stop":
                            json.loads(result.text)
                            out[j]["valid"] += 1
                        out[j]["text"] = result.text
                        out[j]["stats"] = [(d.name, d.n_gen_tokens, d.n_acc_tokens) for d in result.stats.drafters]
            if i:  # the first round warms up
                for row, (n, us) in zip(out, counts, strict=True):
                    row["rates"].append(1e6 * n / us)
                    row["tokens"] = n
    finally:
        for llm in llms:
            llm.close()
    return out


def report(path: str, rows: list[dict[str, Any]]) -> None:
    print(f"{Path(path).name}, {len(rows[0]['rates'])} rounds")
    for row in rows:
        ratios = [a / b for a, b in zip(row["rates"], rows[0]["rates"], strict=True)]
        row["ratio"] = [statistics.median(ratios), min(ratios), max(ratios)]
        median, low, high = row["ratio"]
        print(
            f"  {row['name']:32} {statistics.median(row['rates']):7.1f} tokens/s   "
            f"{median:5.2f} ({low:.2f} to {high:.2f})   {row['tokens']} tokens",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=len(TEXTS), help="how many of them")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", metavar="OUT")
    args = parser.parse_args()
    found = {}
    for path in args.model:
        with pyspec.Model(path) as model:
            found[path] = rows = measure(model, args.rounds, args.max_tokens, args.threads, TEXTS[: args.prompts])
        report(path, rows)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
