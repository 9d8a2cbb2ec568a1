"""One generation's figures, and those of all generations in one setting."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Run", "summarise"]


@dataclass(slots=True)
class Run:
    """One generation. Times in microseconds; ``logprob_us`` is in none of the others but ``wall_us``.

    Attributes:
        n_prompt: tokens of the prompt. n_prefill: how many of them were read in passes of their own, which gave
            the first ``n_first`` tokens of the output; 0 or 1.
        logprob: sum over the output of the natural logarithm of each token's probability under the target.
        first_difference: index of the first output token that is not plain decoding's; None: there is none.
        drafters: for each drafter in use its drafts, the tokens in them, and those that were accepted.
    """

    setting: str
    prompt: str
    repeat: int
    n_prompt: int
    n_prefill: int
    n_output: int
    n_first: int
    n_pass: int
    n_draft: int
    n_accepted: int
    drafted_per_pos: list[int]
    accepted_per_pos: list[int]
    finish_reason: str
    wall_us: int
    prefill_us: int
    draft_us: int
    decode_us: int
    process_us: int
    verify_us: int
    rollback_us: int
    logprob_us: int
    logprob: float
    first_difference: int | None = None
    drafters: dict[str, list[int]] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)

    @property
    def generate_us(self) -> int:
        """Everything but the prompt and the measurement of log-probabilities."""
        return max(1, self.wall_us - self.prefill_us - self.logprob_us)

    @property
    def n_later(self) -> int:
        """Tokens of the output that did not come with the prompt: what was generated in ``generate_us``."""
        return self.n_output - self.n_first

    @property
    def tokens_per_s(self) -> float:
        return self.n_later / self.generate_us * 1e6

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "tokens"}


def summarise(runs: Sequence[Run], base: Sequence[Run]) -> dict[str, Any]:
    """One setting's figures over all its runs.

    Sums over runs: "PN" prompt tokens, "generated", "DN" drafted, "DA" accepted, "LOGPROB"; "drafters" has "drafts",
    "DN" and "DA" of each drafter of a chain. Tokens per second: "PP", "TG". "speedup" compares tokens per second with
    the run of ``base`` that had the same prompt and repeat; ``base`` itself is compared with the median of its repeats.
    """
    n_output = sum(r.n_output for r in runs)
    n_later = sum(r.n_later for r in runs)
    n_draft, n_accepted = sum(r.n_draft for r in runs), sum(r.n_accepted for r in runs)
    n_prefill, prefill_us = sum(r.n_prefill for r in runs), sum(r.prefill_us for r in runs)
    generate_us = sum(r.generate_us for r in runs)
    logprob = math.fsum(r.logprob for r in runs)
    n_pass = sum(r.n_pass for r in runs)
    drafted, accepted = _add(r.drafted_per_pos for r in runs), _add(r.accepted_per_pos for r in runs)
    accepted += [0] * (len(drafted) - len(accepted))
    drafters: dict[str, list[int]] = {}
    for run in runs:
        for name, counts in run.drafters.items():
            drafters[name] = [a + b for a, b in zip(drafters.get(name, [0, 0, 0]), counts, strict=True)]
    phases = ("draft", "decode", "process", "verify", "rollback")
    times = {name: sum(getattr(r, f"{name}_us") for r in runs) for name in phases}
    times["other"] = max(0, generate_us - sum(times.values()))
    return {
        "PN": sum(r.n_prompt for r in runs),
        "generated": n_output,
        "PP": n_prefill / prefill_us * 1e6 if prefill_us else None,
        "TG": n_later / generate_us * 1e6,
        "DN": n_draft,
        "DA": n_accepted,
        "LOGPROB": logprob,
        "PERPLEXITY": math.exp(-logprob / n_output) if n_output else None,
        "acceptance_rate": n_accepted / n_draft if n_draft else None,
        "acceptance_per_pos": [a / d for a, d in zip(accepted, drafted, strict=True)],
        "drafted_per_pos": drafted,
        "drafters": {n: {"drafts": c[0], "DN": c[1], "DA": c[2]} for n, c in drafters.items()},
        "mean_accepted_length": n_later / n_pass if n_pass else None,
        "n_pass": n_pass,
        "time_us": {"prefill": prefill_us, **times},
        "time_share": {name: us / generate_us for name, us in times.items()},
        "same_as_plain": sum(r.first_difference is None for r in runs),
        "n_runs": len(runs),
        "speedup": _speedup(runs, base),
    }


def _add(lists: Iterable[Sequence[int]]) -> list[int]:
    out: list[int] = []
    for values in lists:
        out += [0] * (len(values) - len(out))
        for i, value in enumerate(values):
            out[i] += value
    return out


def _ratio(speed: float, base: float) -> float:
    return speed / base if speed and base else 1.0


def _speedup(runs: Sequence[Run], base: Sequence[Run]) -> dict[str, Any]:
    reference = {(r.prompt, r.repeat): r.tokens_per_s for r in base}
    if runs and runs[0].setting == base[0].setting:
        # compared with itself: how far its repeats lie apart, which is the noise in all the other figures
        same = {p: statistics.median(r.tokens_per_s for r in base if r.prompt == p) for p in {r.prompt for r in base}}
        reference = {(r.prompt, r.repeat): same[r.prompt] for r in base}
    # answers that ended with the token that came with the prompt: there was nothing to be sooner with
    pairs = [(r.prompt, _ratio(r.tokens_per_s, reference[r.prompt, r.repeat])) for r in runs]
    ratios = [ratio for _, ratio in pairs]
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    by_prompt: dict[str, list[float]] = {}
    for prompt, ratio in pairs:
        by_prompt.setdefault(prompt, []).append(ratio)
    total = sum(r.n_later for r in runs) / sum(r.generate_us for r in runs)
    total_base = sum(r.n_later for r in base) / sum(r.generate_us for r in base)
    return {
        "total": _ratio(total, total_base),
        "median": statistics.median(ratios),
        "p25": quartiles[0],
        "p75": quartiles[2],
        "min": min(ratios),
        "max": max(ratios),
        "n": len(ratios),
        "by_prompt": {prompt: statistics.median(values) for prompt, values in by_prompt.items()},
    }
