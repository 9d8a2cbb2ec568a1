#!/usr/bin/env python3
"""pyspec beside its peers on the same work, in one run: ``make bench-peers``.

Peers: ``llama-bench``, ``llama-speculative-simple`` and ``llama-server``, built from pyspec's pinned llama.cpp source
with pyspec's compiler flags; llama-cpp-python on the same libraries; xllamacpp's prebuilt wheel (its own llama.cpp, its
own flags). See ``peers_setup.py``; the first run builds them.

Rules:

1. Same work: same model files, token ids of the prompts, drafter with the same options and draft file, threads, context
   length, number of generated tokens. Greedy on all sides; the end of the text is ignored, and only prompts are used
   whose answer does not end before that many tokens, so that ignoring it changes nothing.
2. A peer gets what makes it fastest: the CPU library with OpenMP or with ggml's own threads, and flash attention or
   none, whichever is faster in trial runs of that very case (a program that attaches no thread pool starts threads for
   every pass without OpenMP; ggml's flash attention is slow for a few rows); the Python peers have their own defaults;
   the shortest sampler chain there is for greedy sampling; drafts sampled on the CPU on both sides, which was measured
   to be faster for both. Its own clock is believed. Memory is as each program comes: pyspec's weights lie in huge pages
   where the system gives them to whoever asks (docs/performance.md), the peers map the file; ``--mapped`` lets pyspec
   map it, too, so that both read the same memory.
3. What is timed: generating, from the end of the prompt to the last token. With several sequences (``llama-server``)
   prompts and generation cannot be told apart, so there it is everything from the request to the last answer; the
   "whole" column has that for all. pyspec's time includes sampling, counters and text; llama-bench's does not.
4. Warm-up: every engine makes one pass or one short generation first. A peer that is a process a run is met by a pyspec
   process a run, so both start with caches of the same kind; a peer that stays up by a pyspec that stays up.
5. Interleaved: a pair is one run of each, one right after the other, in turns which of them is first. A ratio is made
   within a pair; the tables have the median over all pairs of a case, the quartiles, and the worst prompt's median.
6. Checked: the generated text of both is compared; "same" counts pairs with equal text (the peer's may be longer by
   the rest of its last draft). Different text is no fault by itself: kernels depend on the rows of a pass, and
   xllamacpp has other kernels. It is shown because speculation pays by how far the text can be foreseen.

A ratio above 1 means pyspec is faster. Standard library and pyspec only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import peers_setup as setup
from peers_run import (
    Job,
    Result,
    RunError,
    Server,
    Worker,
    pyspec_worker,
    run_llama_bench,
    run_speculative_simple,
    warm_up,
)

ROOT = Path(__file__).resolve().parents[1]
EAGLE3 = ROOT / "examples" / "data" / "smollm2-135m-eagle3.gguf"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
N_CTX = 2048


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        drafter, options: as in :class:`Job`. needs: "draft-simple" or "draft-eagle3" for the draft file, or "".
        n_seq: sequences at a time.
    """

    name: str
    peer: str
    drafter: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    needs: str = ""
    n_seq: int = 1


def make_cases(k: int, p_min: float) -> list[Case]:
    """All cases, for drafts of at most ``k`` tokens from models and ``2 * k`` from n-grams."""
    m = 2 * k
    ngram = {"size_n": 4, "size_m": m}
    drafters: list[tuple[str, str, dict[str, Any], str]] = [
        # drafts are sampled on the CPU on both sides: measured faster there, for both
        ("draft-simple", "draft-simple", {"n_max": k, "backend_sampling": False}, "draft-simple"),
        ("draft-eagle3", "draft-eagle3", {"n_max": k, "backend_sampling": False}, "draft-eagle3"),
        (
            f"draft-eagle3 p_min={p_min:g}", "draft-eagle3",
            {"n_max": k, "p_min": p_min, "backend_sampling": False}, "draft-eagle3",
        ),
        ("ngram-simple", "ngram-simple", ngram, ""),
        ("ngram-map-k", "ngram-map-k", ngram, ""),
        ("ngram-map-k4v", "ngram-map-k4v", ngram, ""),
        ("ngram-mod", "ngram-mod", {"n_match": 16, "mod_n_max": m, "mod_n_min": 1}, ""),
        ("ngram-cache", "ngram-cache", {"n_max": m}, ""),
    ]  # fmt: skip
    cases = [Case("plain", "llama-bench")]
    cases += [Case(name, "llama-speculative-simple", d, o, needs) for name, d, o, needs in drafters]
    eagle = drafters[2]
    for n_seq in (1, 2, 4):
        cases.append(Case(f"plain n_seq={n_seq}", "llama-server", n_seq=n_seq))
        cases.append(Case(f"{eagle[0]} n_seq={n_seq}", "llama-server", eagle[1], eagle[2], eagle[3], n_seq))
    cases.append(Case("plain", "llama-cpp-python"))
    cases.append(Case("plain", "xllamacpp"))
    for name, d, o, needs in drafters:
        # its n-gram tables have no minimum of hits to set, all others are the same options
        cases.append(Case(name, "xllamacpp", d, {**o, "n_max": o.get("n_max", m)}, needs))
    return cases


# ---- what is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    name: str
    text: str
    tokens: list[int]


def make_models(target: Path | None, draft: Path | None) -> tuple[Path, dict[str, Path]]:
    """Target and drafts. Default: SmolLM2 as F16 (limited by memory); its Q4_0 copy or an EAGLE-3 head drafts."""
    import pyspec

    if target is None or draft is None:
        if not MODEL.is_file():
            raise setup.SetupError(f"{MODEL.name} is missing: run python examples/get_models.py smollm2")
        folder = setup.cache_folder() / "models"
        folder.mkdir(parents=True, exist_ok=True)
        for kind in ("F16", "Q4_0"):
            copy = folder / f"SmolLM2-135M-Instruct.{kind}.gguf"
            if not copy.is_file():
                setup.say(f"quantising {MODEL.name} to {kind}")
                pyspec.quantize(MODEL, copy.with_suffix(".part"), kind)
                os.replace(copy.with_suffix(".part"), copy)
        target = target or folder / "SmolLM2-135M-Instruct.F16.gguf"
        draft = draft or folder / "SmolLM2-135M-Instruct.Q4_0.gguf"
    return target, {"draft-simple": draft, "draft-eagle3": EAGLE3}


def make_prompts(target: Path, names: Sequence[str], n: int, n_threads: int) -> list[Prompt]:
    """The prompts of pyspec's suite, in the chat template, whose answers have at least ``n`` tokens."""
    import pyspec
    from pyspec.bench import encode_prompt
    from pyspec.prompts import suite

    known = {p.name: p for p in suite()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise setup.SetupError(f"no prompt {unknown[0]!r}; there are: {', '.join(known)}")
    out = []
    with pyspec.LLM(target, speculation="off", n_ctx=N_CTX, n_threads=n_threads) as llm:
        for name in names or known:
            tokens = encode_prompt(llm.model, known[name].text)
            if llm.generate(tokens, max_tokens=n).finish_reason != "length":
                setup.say(f"prompt {name}: its answer ends before {n} tokens, left out")
                continue
            text = llm.detokenize(tokens, skip_special=False)
            if llm.tokenize(text) != tokens:
                setup.say(f"prompt {name}: its text does not give its tokens back, left out")
                continue
            out.append(Prompt(name, text, tokens))
    if not out:
        raise setup.SetupError(f"no prompt is left whose answer has {n} tokens: lower --tokens")
    return out


class Meter:
    """Runs cases. Peers that stay up are closed at the end of their case."""

    def __init__(self, target: Path, drafts: dict[str, Path], n: int, n_threads: int, tools: setup.Tools):
        self.target, self.drafts, self.n, self.n_threads = target, drafts, n, n_threads
        self.tools = tools
        self.variant = next(iter(tools.cpu))
        self.flash_attn: bool | None = None
        self.trials: dict[str, float] = {}

    def job(self, case: Case, prompts: Sequence[Prompt]) -> Job:
        return Job(
            self.target,
            self.drafts[case.needs] if case.needs else None,
            case.drafter,
            case.options,
            [p.tokens for p in prompts],
            prompts[0].text,
            self.n,
            self.n_threads,
            N_CTX,
            case.n_seq,
        )

    def run(self, case: Case, prompts: Sequence[Prompt], repeats: int) -> list[dict[str, Any]]:
        """All pairs of a case."""
        if case.peer == "llama-bench":
            bos = Prompt("one token", "", prompts[0].tokens[:1])
            prompts = [bos]
            repeats = max(repeats, 5)
        groups = [list(prompts[i : i + 1]) for i in range(len(prompts))]
        if case.n_seq > 1:
            # every prompt is first of a group once
            groups = [[prompts[(i + j) % len(prompts)] for j in range(case.n_seq)] for i in range(len(prompts))]
        self._choose(case, groups)
        if case.peer == "llama-server":
            return self._staying(case, groups, repeats)
        return self._processes(case, groups, repeats)

    def _choose(self, case: Case, groups: list[list[Prompt]]) -> None:
        """Take what makes the peer fastest in this case: the CPU library in two trials each, then attention.

        Attention in a trial with every prompt, because what is faster depends on their length.
        """
        self.trials = {}
        self.flash_attn = None
        if case.peer == "xllamacpp":
            return

        def speed(group: list[Prompt]) -> float:
            result = self._peer(case, self.job(case, group))
            return result.speed or result.speed_whole or 0.0

        for turn in range(2):
            for variant in sorted(self.tools.cpu, reverse=bool(turn)):
                self.variant = variant
                self.trials[variant] = max(self.trials.get(variant, 0.0), speed(groups[0]))
        self.variant = max(self.trials, key=self.trials.__getitem__)
        if case.peer in setup.TOOLS:
            found = {}
            for flash_attn in (True, False):
                self.flash_attn = flash_attn
                found[flash_attn] = self.trials[f"flash attention {'on' if flash_attn else 'off'}"] = (
                    statistics.harmonic_mean([speed(group) for group in groups])
                )
            self.flash_attn = found[True] >= found[False]

    def _peer(self, case: Case, job: Job) -> Result:
        """One run of the peer in a process of its own."""
        job = replace(job, flash_attn=self.flash_attn)
        if case.peer == "llama-bench":
            return run_llama_bench(self.tools, self.variant, job)
        if case.peer == "llama-speculative-simple":
            return run_speculative_simple(self.tools, self.variant, job)
        if case.peer == "llama-server":
            with Server(self.tools, self.variant, job) as server:
                warm_up(server, job)
                return server.run(job)
        python, env = self._python(case.peer)
        with Worker(case.peer, python, job, env) as worker:
            warm_up(worker, job)
            return worker.run(job)

    def _staying(self, case: Case, groups: list[list[Prompt]], repeats: int) -> list[dict[str, Any]]:
        job = self.job(case, groups[0])
        pairs = []
        own = replace(job, flash_attn=self.flash_attn)
        with pyspec_worker(job) as ours, Server(self.tools, self.variant, own) as peer:
            warm_up(peer, job)
            for group, turn in _turns(groups, repeats):
                job = self.job(case, group)
                pairs.append(_pair(group, turn, lambda job=job: ours.run(job), lambda job=job: peer.run(job)))
        return pairs

    def _processes(self, case: Case, groups: list[list[Prompt]], repeats: int) -> list[dict[str, Any]]:
        def ours(job: Job) -> Result:
            with pyspec_worker(job) as worker:
                return worker.run(job)

        pairs = []
        for group, turn in _turns(groups, repeats):
            job = self.job(case, group)
            pairs.append(_pair(group, turn, lambda job=job: ours(job), lambda job=job: self._peer(case, job)))
        return pairs

    def _python(self, peer: str) -> tuple[Path, dict[str, str]]:
        if peer == "xllamacpp":
            return setup.install_xllamacpp(), {}
        env = self.tools.env(self.variant)
        return setup.install_llama_cpp_python(), {
            "LLAMA_CPP_LIB_PATH": str(self.tools.folder),
            "LD_LIBRARY_PATH": env["LD_LIBRARY_PATH"],
        }


def _turns(groups: list[list[Prompt]], repeats: int) -> Iterable[tuple[list[Prompt], int]]:
    for r in range(repeats):
        for i, group in enumerate(groups):
            yield group, r + i


def _pair(group: list[Prompt], turn: int, ours: Callable[[], Result], peer: Callable[[], Result]) -> dict[str, Any]:
    if turn % 2:
        theirs = peer()
        mine = ours()
    else:
        mine = ours()
        theirs = peer()
    return {
        "prompt": group[0].name,
        "pyspec": mine.speed if mine.speed and theirs.speed else mine.speed_whole,
        "peer": theirs.speed if mine.speed and theirs.speed else theirs.speed_whole,
        "pyspec_whole": mine.speed_whole,
        "peer_whole": theirs.speed_whole,
        "same": same_text(mine, theirs),
        "drafted": [mine.drafted, theirs.drafted],
        "accepted": [mine.accepted, theirs.accepted],
        "pyspec_phases_us": mine.phases_us,
        "tokens": mine.tokens,
        "peer_tokens": theirs.tokens,
        "peer_texts": theirs.texts,
    }


def same_text(mine: Result, theirs: Result) -> bool | None:
    """Whether the peer generated the same tokens; None: by text, which the caller decides. The peer's may be longer."""
    if not theirs.tokens or not mine.tokens:
        return None
    return all(t[: len(m)] == m[: len(t)] for m, t in zip(mine.tokens, theirs.tokens, strict=True))


def settle_texts(pairs: list[dict[str, Any]], detokenize: Callable[[list[int]], list[str]]) -> None:
    """Compare texts where the peer tells no tokens; ``detokenize`` gives a text's possible forms. Drops the tokens."""
    for pair in pairs:
        texts, tokens = pair.pop("peer_texts"), pair.pop("tokens")
        pair.pop("peer_tokens")
        if pair["same"] is None and texts:
            pair["same"] = all(
                any(t.startswith(form) or form.startswith(t) for form in detokenize(m))
                for m, t in zip(tokens, texts, strict=True)
            )


# ---- figures -------------------------------------------------------------------------------------------------------


def summarise(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a case: ratios pyspec / peer with their spread, and speeds."""
    ratios = [p["pyspec"] / p["peer"] for p in pairs]
    whole = [p["pyspec_whole"] / p["peer_whole"] for p in pairs if p["pyspec_whole"] and p["peer_whole"]]
    by_prompt: dict[str, list[float]] = {}
    for pair, ratio in zip(pairs, ratios, strict=True):
        by_prompt.setdefault(pair["prompt"], []).append(ratio)
    medians = {name: statistics.median(r) for name, r in by_prompt.items()}
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    known = [p["same"] for p in pairs if p["same"] is not None]
    return {
        "ratio": statistics.median(ratios),
        "p25": quartiles[0],
        "p75": quartiles[2],
        "worst_prompt": min(medians.values()),
        "whole": statistics.median(whole) if whole else None,
        "pyspec_tokens_per_s": statistics.median(p["pyspec"] for p in pairs),
        "peer_tokens_per_s": statistics.median(p["peer"] for p in pairs),
        "n_pairs": len(pairs),
        "n_same": sum(known),
        "n_compared": len(known),
        "drafted": [_sum(p["drafted"][i] for p in pairs) for i in (0, 1)],
        "accepted": [_sum(p["accepted"][i] for p in pairs) for i in (0, 1)],
    }


def _sum(values: Iterable[int | None]) -> int | None:
    values = list(values)
    return None if None in values else sum(v for v in values if v is not None)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(v) for v in values) / len(values))


#: (peer, what, least geometric mean, least single case, only these cases) of the project's own aims.
BARS = (
    ("llama-bench", "plain decoding", 0.99, 0.0, ""),
    ("llama-speculative-simple", "same drafter and k", 1.05, 0.99, ""),
    ("llama-server", "4 sequences", 1.1, 0.0, "n_seq=4"),
    ("xllamacpp", "same settings", 1.05, 0.0, ""),
)


def check_bars(results: Sequence[dict[str, Any]]) -> list[str]:
    """One line a bar that something was measured for."""
    lines = []
    for peer, what, least_mean, least, part in BARS:
        rows = [r for r in results if r["peer"] == peer and part in r["case"]]
        if not rows:
            continue
        ratios = [r["summary"]["ratio"] for r in rows]
        mean, low = geometric_mean(ratios), min(ratios)
        met = mean >= least_mean and low >= least
        bar = f">= {least_mean:g}" + (f", no case below {least:g}" if least else "")
        lines.append(
            f"{'met   ' if met else 'MISSED'} {peer}, {what}: geometric mean {mean:.3f}, lowest {low:.3f} (bar {bar})"
        )
    return lines


def table(results: Sequence[dict[str, Any]]) -> str:
    """All results as a Markdown table."""
    lines = [
        "| peer | case | ratio | quartiles | worst prompt | whole | pyspec t/s | peer t/s | accepted | same | -fa |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    flash = {True: "on", False: "off", None: ""}
    for r in results:
        s = r["summary"]
        whole = "" if s["whole"] is None else f"{s['whole']:.2f}"
        drafted, accepted = s["drafted"], s["accepted"]
        share = ", ".join(
            "?" if d is None or a is None else f"{a / d:.2f}" if d else "-"
            for a, d in zip(accepted, drafted, strict=True)
        )
        lines.append(
            f"| {r['peer']} | {r['case']} | {s['ratio']:.3f} | {s['p25']:.2f} to {s['p75']:.2f} | "
            f"{s['worst_prompt']:.2f} | {whole} | {s['pyspec_tokens_per_s']:.1f} | {s['peer_tokens_per_s']:.1f} | "
            f"{share} | {s['n_same']} of {s['n_compared']} | {flash[r.get('flash_attn')]} |"
        )
    return "\n".join(lines)


# ---- one run ---------------------------------------------------------------------------------------------------------


def make_key(
    options: argparse.Namespace, target: Path, drafts: dict[str, Path], prompts: list[Prompt]
) -> dict[str, Any]:
    from pyspec.measure import cpu_name, file_sha256

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() or "unknown"

    return {
        "commit": git("describe", "--always", "--dirty"),
        "pin": setup.sync_script().read_pin().llama_commit,
        "cpu": cpu_name(),
        "n_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "threads": options.threads,
        "target": {"file": target.name, "sha256": file_sha256(target)},
        "drafts": {name: {"file": p.name, "sha256": file_sha256(p)} for name, p in drafts.items() if p.is_file()},
        "prompts": [p.name for p in prompts],
        "tokens": options.tokens,
        "k": options.k,
        "p_min": options.p_min,
        "mapped": options.mapped,
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    from pyspec.config import usable_n_threads

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", help="only cases in whose 'peer: name' one of these texts is; separated by commas")
    parser.add_argument("--list", action="store_true", help="show the cases, and end")
    parser.add_argument("--repeats", type=int, default=3, help="pairs for each prompt (default 3)")
    parser.add_argument("--prompts", default="", help="names of the suite, separated by commas (default: all)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens to generate (default 96)")
    parser.add_argument("--k", type=int, default=3, help="tokens drafted by models; n-grams draft twice as many")
    parser.add_argument("--p-min", type=float, default=0.6, help="p_min of the cases that have one (default 0.6)")
    parser.add_argument("--threads", type=int, default=usable_n_threads(None), help="threads (default: CPUs to be had)")
    parser.add_argument("--mapped", action="store_true", help="pyspec maps the model files, as the peers do")
    parser.add_argument("--target", type=Path, help="another target (GGUF)")
    parser.add_argument("--draft", type=Path, help="another draft model for draft-simple (GGUF)")
    parser.add_argument("--tools", type=Path, help="a folder with llama-bench etc. built already; not for fair figures")
    parser.add_argument("--jobs", type=int, default=2, help="compile jobs (default 2)")
    parser.add_argument("--setup-only", action="store_true", help="build and install the peers, and end")
    parser.add_argument("--json", type=Path, help="write all figures there; results of other cases in it are kept if "
                        "its key (commit, models, options, machine) is the same")  # fmt: skip
    options = parser.parse_args(argv)
    if min(options.repeats, options.tokens - 7, options.k, options.threads, options.jobs) < 1:
        parser.error("--repeats, --k, --threads and --jobs are at least 1, --tokens at least 8")
    return options


def read_report(path: Path | None, key: dict[str, Any]) -> list[dict[str, Any]]:
    """Results of an earlier run with the same key."""
    if path is None or not path.is_file():
        return []
    report = json.loads(path.read_text(encoding="utf-8"))
    different = [name for name in key if report.get("key", {}).get(name) != key[name]]
    if different:
        raise setup.SetupError(f"{path.name} has another {different[0]}: give another --json")
    return list(report["results"])


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    cases = make_cases(options.k, options.p_min)
    if options.mapped:
        # an option of pyspec alone: the peers have no such name, and no need of it
        cases = [replace(c, options={**c.options, "use_mmap": True}) for c in cases]
    if options.cases:
        parts = [part.strip() for part in options.cases.split(",") if part.strip()]
        cases = [c for c in cases if any(part in f"{c.peer}: {c.name}" for part in parts)]
    if options.list or not cases:
        print("\n".join(f"{c.peer}: {c.name}" for c in cases) or "no such case; --list shows them")
        return 0 if options.list else 2
    try:
        return measure(options, cases)
    except (setup.SetupError, RunError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


def measure(options: argparse.Namespace, cases: list[Case]) -> int:
    import pyspec

    tools = setup.tools_in(options.tools) if options.tools else setup.build_tools(options.jobs)
    if any(c.peer == "xllamacpp" for c in cases):
        setup.install_xllamacpp()
    if any(c.peer == "llama-cpp-python" for c in cases):
        setup.install_llama_cpp_python()
    target, drafts = make_models(options.target, options.draft)
    if options.setup_only:
        return 0
    names = [name.strip() for name in options.prompts.split(",") if name.strip()]
    prompts = make_prompts(target, names, options.tokens, options.threads)
    key = make_key(options, target, drafts, prompts)
    results = read_report(options.json, key)
    meter = Meter(target, drafts, options.tokens, options.threads, tools)

    with pyspec.Model(target, pyspec.ModelParams(vocab_only=True)) as model:

        def forms(tokens: list[int]) -> list[str]:
            return [model.vocab.decode(tokens, skip_special=skip).strip("\n") for skip in (False, True)]

        failed = False
        for case in cases:
            load, start = os.getloadavg()[0] if hasattr(os, "getloadavg") else None, time.monotonic()
            try:
                pairs = meter.run(case, prompts, options.repeats)
            except RunError as e:
                failed = True
                print(f"error: {case.peer}: {case.name}: {e}", file=sys.stderr, flush=True)
                continue
            settle_texts(pairs, forms)
            result = {
                "peer": case.peer, "case": case.name, "drafter": case.drafter, "options": case.options,
                "n_seq": case.n_seq, "load_average": load,
                "cpu_library": meter.variant if meter.trials else "its own", "trials_tokens_per_s": meter.trials,
                "flash_attn": meter.flash_attn,
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "summary": summarise(pairs), "pairs": pairs,
            }  # fmt: skip
            results = [r for r in results if (r["peer"], r["case"]) != (case.peer, case.name)] + [result]
            s = result["summary"]
            setup.say(f"{case.peer}: {case.name}: {s['ratio']:.3f} in {time.monotonic() - start:.0f} s")
            if options.json:
                report = {"key": key, "flags": tools.flags, "results": results}
                options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    order = {(c.peer, c.name): i for i, c in enumerate(make_cases(options.k, options.p_min))}
    results.sort(key=lambda r: order.get((r["peer"], r["case"]), len(order)))
    print()
    print(table(results))
    print()
    print("\n".join(check_bars(results)))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
