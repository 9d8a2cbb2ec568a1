"""``pyspec bench --oracle`` as a library: how near to the best that could have been done with the same drafts.

For each setting and prompt the text is written once more without verifying anything, while each drafter is asked at
every position. Then the lengths are known with which the text would have been written soonest
(:func:`pyspec.control.oracle.best_lengths`), at the cost of passes by rows and of drafts by tokens as measured here.
What a setting took, compared with that, is its share.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .control.oracle import Drafts, Recorder, best_lengths, n_right

if TYPE_CHECKING:
    from .bench import Bench, Setting
    from .llm import LLM

__all__ = ["ROWS", "measure"]

#: Passes that are measured, by rows; others are interpolated.
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 49)

Progress = Callable[[float], None]


def measure(bench: Bench, runs: Sequence[Mapping[str, Any]], progress: Progress | None = None) -> list[dict[str, Any]]:
    """Shares of the settings of a bench.

    Args:
        bench: after :meth:`Bench.run`. runs: what it returned as "runs". progress: called with 0.0 to 1.0.

    Returns:
        For each setting that drafts: "label", "drafters", "share" (over all prompts), "by_prompt", "oracle_tg" (tokens
        a second in hindsight), "length" (mean length of the best drafts, of those that are not empty).
    """
    settings = [s for s in bench.settings if s.speculation != ("off",)]
    out = []
    for i, setting in enumerate(settings):
        with bench.llm(setting) as llm:
            longest = llm._running().engine.n_draft_max + 1
            rows = [n for n in ROWS if n <= longest] or [1]
            costs = {x["rows"]: x["median_us"] for x in bench.batch_cost(rows)}
            found = []
            for j, (prompt, tokens) in enumerate(bench.prompts):
                mine = [r for r in runs if r["setting"] == setting.label and r["prompt"] == prompt.name]
                us = statistics.median(_us_a_token(r) for r in mine)
                found.append((prompt.name, us, *_hindsight(bench, llm, setting, prompt.prediction, tokens, costs)))
                if progress is not None:
                    progress((i + (j + 1) / len(bench.prompts)) / len(settings))
            names = list(llm.speculation)
        lengths = [k for *_, best in found for k in best if k]
        n_all = sum(n for _, _, n, _, _ in found)
        oracle_us = sum(best_us for *_, best_us, _ in found)
        took = sum(us * n for _, us, n, _, _ in found)
        out.append(
            {
                "label": setting.label,
                "drafters": names,
                "share": oracle_us / took if took else 1.0,
                "by_prompt": {name: best_us / (us * n) for name, us, n, best_us, _ in found if n},
                "oracle_tg": n_all / oracle_us * 1e6 if n_all else 0.0,
                "length": statistics.fmean(lengths) if lengths else 0.0,
            }
        )
    return out


def _us_a_token(run: Mapping[str, Any]) -> float:
    us = float(run["wall_us"] - run["prefill_us"] - run["logprob_us"])
    return max(1.0, us) / max(1, int(run["n_output"]) - int(run["n_first"]))


def _hindsight(
    bench: Bench, llm: LLM, setting: Setting, prediction: str | None, tokens: list[int], costs: Mapping[int, float]
) -> tuple[int, float, list[int]]:
    """Tokens of plain decoding after the prompt's passes, the least time for them, the lengths of the best drafts."""
    engine = llm._running().engine
    control, engine.control = engine.control, None
    threads, engine.threads = engine.threads, None
    n, row_us, other_us = 0, math.inf, math.inf
    drafts: list[Drafts] = []
    try:
        for which, drafter in enumerate(engine.chain.drafters):
            times: dict[int, float] = {}
            # the longest drafts first: their proposals count; of the shorter ones only the time
            for n_max in (0,) if drafter.cheap else (0, 1):
                engine.control = recorder = Recorder(which, n_max)
                with_prediction = prediction if drafter.name == "prediction" else None
                result = llm.generate(tokens, bench.sampling, prediction=with_prediction)
                text = result.tokens[result.stats.n_first :]
                places = recorder.positions[: len(text)]
                n = len(text)
                if not n:
                    return 0, 0.0, []
                took = result.stats.times
                row_us = min(row_us, statistics.median(p.pass_us for p in places))
                other_us = min(other_us, (took.process_us + took.verify_us + took.rollback_us) / n)
                for size in {len(p.draft) for p in places} - {0}:
                    times[size] = statistics.median(p.draft_us for p in places if len(p.draft) == size)
                if not n_max:
                    offered = [len(p.draft) for p in places]
                    right = [n_right(p.draft, text, i) for i, p in enumerate(places)]
            drafts.append(Drafts(offered, right, _by_size(times)))
    finally:
        engine.control, engine.threads = control, threads
    by_rows = _by_size(costs)
    # passes behind this prompt, and what a step costs besides its pass
    scale = row_us / by_rows(1)
    best_us, lengths = best_lengths(n, drafts, lambda rows: by_rows(rows) * scale + other_us)
    return n, best_us, lengths


def _by_size(points: Mapping[int, float]) -> Callable[[int], float]:
    """Straight lines through measured points; the ends are continued."""
    xs = sorted(points)

    def at(x: int) -> float:
        if not xs:
            return 0.0
        if len(xs) == 1:
            return points[xs[0]]
        i = min(max(1, bisect_left(xs, x)), len(xs) - 1)
        x0, x1 = xs[i - 1], xs[i]
        y0, y1 = points[x0], points[x1]
        return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))

    return at
