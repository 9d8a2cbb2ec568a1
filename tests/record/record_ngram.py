#!/usr/bin/env python3
"""Record what llama.cpp's n-gram methods draft, for tests/unit/test_ngram_parity.py.

    python tests/record/record_ngram.py [--tree DIR] [--out tests/data/ngram/drafts.json]

``--tree`` is llama.cpp's full source tree; without it vendor/ggml/sync.py fetches the pinned one. ``ngram_driver.cpp``
is compiled with the tree's ``common/speculative.cpp`` and ``common/ngram-*.cpp`` (a C++17 compiler for Linux is needed:
c++, or the one in CXX), so what is recorded comes from llama.cpp's own code. Histories are made here from fixed seeds.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).resolve().parent / "ngram_driver.cpp"
SOURCES = ("ngram-map.cpp", "ngram-mod.cpp", "ngram-cache.cpp", "speculative.cpp")
INCLUDES = ("common", "include", "ggml/include", "src", "vendor")

Options = dict[str, int]
DEFAULTS: Options = {
    "size_n": 12, "size_m": 48, "min_hits": 1, "n_match": 24, "mod_n_max": 64, "mod_n_min": 48,
}  # fmt: skip

#: Of drafts at every position so many are kept: the data has to stay small.
EVERY = 3

TEXT = """def area(shape):
    if shape.kind == "circle":
        return 3.14 * shape.radius * shape.radius
    if shape.kind == "square":
        return shape.side * shape.side
    raise ValueError(shape.kind)
"""


def histories() -> dict[str, tuple[list[int], int]]:
    """Name -> (tokens, tokens of them that are the prompt)."""
    out: dict[str, tuple[list[int], int]] = {}
    rng = random.Random(5)
    # a program, and the same with changed names
    edited = TEXT.replace("shape", "figure").replace("3.14", "math.pi")
    out["code"] = (list((TEXT + edited + TEXT.replace("area", "perimeter")).encode()), len(TEXT))
    # phrases that come again, in another order and cut short
    phrases = [[rng.randrange(2000, 49152) for _ in range(rng.randint(8, 40))] for _ in range(8)]
    copied: list[int] = []
    while len(copied) < 700:
        phrase = rng.choice(phrases)
        copied += phrase[: rng.randint(len(phrase) // 2, len(phrase))]
        if rng.random() < 0.3:
            copied.append(rng.randrange(49152))
    out["phrases"] = (copied, 300)
    out["phrases-short-prompt"] = (copied[:500], 9)
    out["loop"] = ([*range(100, 117)] * 24, 150)
    out["one-token"] = ([7] * 260, 100)
    out["two-letters"] = ([rng.randrange(2) for _ in range(400)], 120)
    out["four-letters"] = ([rng.randrange(4) for _ in range(500)], 200)
    out["all-different"] = (list(range(300)), 150)
    # one n-gram with continuations of different frequency
    mixed: list[int] = []
    for i in range(40):
        mixed += [1, 2, 3, 4, *([10, 11, 12, 13] if i % 5 else [20 + i % 3, 21, 22, 23]), 50 + i % 7]
    out["mixed"] = (mixed, 180)
    return out


def cases() -> list[dict[str, Any]]:
    """What is recorded: mode, type, options, names of histories."""
    every = list(histories())
    out: list[dict[str, Any]] = []

    def add(mode: str, type_: str, names: list[str], **options: int) -> None:
        out.append({"mode": mode, "type": type_, "options": options, "histories": names})

    for type_ in ("ngram-simple", "ngram-map-k", "ngram-map-k4v"):
        for name in every:
            add("spec", type_, [name])
            add("spec", type_, [name], size_n=3, size_m=8)
        for name in ("phrases", "two-letters", "mixed", "one-token"):
            add("spec", type_, [name], size_n=1, size_m=1)
            add("spec", type_, [name], size_n=2, size_m=3)
        for name in ("mixed", "four-letters", "phrases"):
            add("spec", type_, [name], size_n=4, size_m=6, n_max=3)
        add("spec", type_, ["phrases", "mixed", "loop"], size_n=3, size_m=5)
    for type_ in ("ngram-map-k", "ngram-map-k4v"):
        for min_hits in (2, 5):
            for name in ("mixed", "loop", "phrases", "two-letters"):
                add("spec", type_, [name], size_n=3, size_m=4, min_hits=min_hits)
    for name in every:
        add("spec", "ngram-mod", [name])
        add("spec", "ngram-mod", [name], n_match=4, mod_n_max=8, mod_n_min=2)
        add("spec", "ngram-mod", [name], n_match=2, mod_n_max=6, mod_n_min=0)
    add("spec", "ngram-mod", ["phrases", "phrases-short-prompt"], n_match=4, mod_n_max=12, mod_n_min=1)
    add("spec", "ngram-mod", ["two-letters", "four-letters", "mixed"], n_match=3, mod_n_max=8, mod_n_min=1)
    for name in every:
        add("lookup", "ngram-cache", [name])
    for name in ("phrases", "two-letters", "mixed"):
        add("once", "ngram-cache", [name])
        for levels in ("static", "dynamic", "both"):
            add("lookup", "ngram-cache", [name])
            out[-1]["levels"] = levels
    return out


def compile_driver(tree: Path, folder: Path) -> Path:
    """Compile one file after the other; what they name of other files stays unresolved, and is never called."""
    compiler = os.environ.get("CXX", "c++")
    includes = [f"-I{tree / name}" for name in INCLUDES]
    objects = []
    for source in (DRIVER, *(tree / "common" / name for name in SOURCES)):
        print(f"compiling {source.name}", file=sys.stderr, flush=True)
        objects.append(str(folder / f"{source.name}.o"))
        subprocess.run(
            [compiler, "-std=c++17", "-O1", "-w", *includes, "-c", str(source), "-o", objects[-1]], check=True
        )
    program = folder / "driver"
    link = [compiler, "-no-pie", "-o", str(program), *objects, "-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run(link, check=True)
    return program


def run(
    program: Path, case: dict[str, Any], sequences: list[tuple[list[int], int]], static: str = "-", dynamic: str = "-"
) -> list[tuple[int, int, list[int]]]:
    """(sequence, position, draft) in the order of drafting."""
    o = DEFAULTS | case["options"]
    words = [case["mode"], case["type"], *(o[name] for name in DEFAULTS), o.get("n_max", -1)]
    words += [static, dynamic, len(sequences)]
    for tokens, n_prompt in sequences:
        words += [len(tokens), n_prompt, *tokens]
    result = subprocess.run(
        [str(program)], input=" ".join(map(str, words)), capture_output=True, text=True, timeout=60, check=True
    )
    rows = [list(map(int, line.split())) for line in result.stdout.splitlines()]
    assert all(len(row) == 3 + row[2] for row in rows)
    return [(row[0], row[1], row[3:]) for row in rows]


def record(program: Path, folder: Path) -> dict[str, Any]:
    texts = histories()
    rng = random.Random(11)
    # files of another text with the same phrases, so that all levels have a say
    corpus = [t for name in ("phrases", "mixed", "two-letters") for t in texts[name][0]]
    corpus += [rng.choice(corpus) for _ in range(400)]
    static, dynamic = folder / "static.bin", folder / "dynamic.bin"
    run(program, {"mode": "create", "type": "-", "options": {}}, [(corpus, 0)], str(static), "-")
    run(program, {"mode": "context", "type": "-", "options": {}}, [(corpus[300:800], 0)], "-", str(dynamic))
    found = []
    for case in cases():
        levels = case.get("levels", "")
        rows = run(
            program,
            case,
            [texts[name] for name in case["histories"]],
            str(static) if levels in ("static", "both") else "-",
            str(dynamic) if levels in ("dynamic", "both") else "-",
        )
        # empty drafts are left out: the positions drafted at follow from the others
        found.append({**case, "n_calls": len(rows), "drafts": [row for row in rows if row[2]]})
        if case["mode"] != "spec":
            found[-1]["every"] = EVERY
            found[-1]["drafts"] = [row for row in rows if row[1] % EVERY == 0 and row[2]]
    return {
        "histories": {name: {"tokens": t, "n_prompt": n} for name, (t, n) in texts.items()},
        "files": {p.name: base64.b64encode(p.read_bytes()).decode() for p in (static, dynamic)},
        "cases": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, help="llama.cpp's full source tree")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "data" / "ngram" / "drafts.json")
    args = parser.parse_args()
    pin = dict(re.findall(r'^(\w+) = "([^"]+)"', (ROOT / "vendor/ggml/PIN.toml").read_text("utf-8"), re.MULTILINE))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree = args.tree
        if tree is None:
            tree = folder / "tree"
            subprocess.run([sys.executable, str(ROOT / "vendor/ggml/sync.py"), "--with-tools", str(tree)], check=True)
        data = {"package": pin["package"], "version": pin["version"], "llama_commit": pin["llama_commit"]}
        data |= record(compile_driver(tree.resolve(), folder), folder)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in data.items() if k != "cases"]
    rows = ",\n".join(json.dumps(c, separators=(",", ":")) for c in data["cases"])
    args.out.write_text("{\n" + ",\n".join(lines) + ',\n"cases": [\n' + rows + "\n]}\n", encoding="utf-8")
    print(f"{args.out}: {len(data['cases'])} cases, {args.out.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
