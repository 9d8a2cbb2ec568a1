"""The picture of ``pyspec bench``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

__all__ = ["draw"]

#: Colour-blind safe (Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_STYLES = ("-", "--", ":", "-.")


def draw(report: dict[str, Any], path: str) -> None:
    """Speed-up by setting and acceptance by position; the sweep and the cost of passes where they were measured.

    Args:
        report: as ``pyspec bench --json`` writes it. path: of the picture; its ending says the format.
    """
    settings = report["settings"]
    n_panels = 2 + ("ctx_sweep" in report) + ("batch_cost" in report)
    n_rows = -(-n_panels // 2)
    height = max(3.6, 1.6 + 0.36 * len(settings))
    figure = Figure(figsize=(13, 0.9 + height * n_rows), layout="constrained")
    key = report["key"]
    figure.suptitle(
        f"{key['model']['file']} on {key['machine']['cpu'] or key['machine']['machine']}, "
        f"{key['options']['n_threads']} thread(s), {len(key['prompts'])} prompts, {key['options']['repeat']} repeat(s)"
    )
    panels = list(figure.subplots(n_rows, 2, squeeze=False).flat)
    looks = {
        s["label"]: {
            "color": _COLOURS[i % len(_COLOURS)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "linestyle": _STYLES[i // len(_COLOURS) % len(_STYLES)],
        }
        for i, s in enumerate(settings)
    }
    _speedup(panels[0], settings, looks)
    _acceptance(panels[1], settings, looks)
    used = 2
    if "ctx_sweep" in report:
        _sweep(panels[used], report["ctx_sweep"], looks)
        used += 1
    if "batch_cost" in report:
        _cost(panels[used], report["batch_cost"])
        used += 1
    for panel in panels[used:]:
        panel.set_axis_off()
    figure.savefig(path, dpi=120)


def _speedup(panel: Any, settings: Sequence[dict[str, Any]], looks: dict[str, dict[str, Any]]) -> None:
    """A bar for the speed-up over all tokens, dots for each prompt's."""
    places = list(range(len(settings)))[::-1]
    for place, s in zip(places, settings, strict=True):
        speedup = s["speedup"]
        panel.barh(place, speedup["total"], height=0.6, color=looks[s["label"]]["color"], alpha=0.75)
        by_prompt = list(speedup["by_prompt"].values())
        panel.plot(by_prompt, [place] * len(by_prompt), "|", color="black", markersize=11, markeredgewidth=1.2)
    right = max(max(s["speedup"]["total"], *s["speedup"]["by_prompt"].values()) for s in settings)
    for place, s in zip(places, settings, strict=True):
        panel.text(right * 1.03, place, f"{s['speedup']['total']:.2f}x", va="center")
    panel.set_xlim(0, right * 1.16)
    panel.axvline(1.0, color="black", linewidth=1)
    panel.set_yticks(places, [s["label"] for s in settings])
    panel.set_xlabel("speed of plain decoding = 1; bar: all tokens, strokes: single prompts")
    panel.set_title("Speed-up")


def _acceptance(panel: Any, settings: Sequence[dict[str, Any]], looks: dict[str, dict[str, Any]]) -> None:
    drawn = [s for s in settings if s["acceptance_per_pos"]]
    for s in drawn:
        rates = s["acceptance_per_pos"]
        panel.plot(range(1, len(rates) + 1), rates, label=s["label"], markersize=5, **looks[s["label"]])
    panel.set_ylim(-0.03, 1.03)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_xlabel("position in the draft")
    panel.set_ylabel("accepted / drafted there")
    panel.set_title("Acceptance by position")
    panel.grid(alpha=0.3)
    if drawn:
        panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        panel.text(0.5, 0.5, "nothing was drafted", ha="center", transform=panel.transAxes)


def _sweep(panel: Any, sweep: Sequence[dict[str, Any]], looks: dict[str, dict[str, Any]]) -> None:
    for label, look in looks.items():
        points = [(x["n_ctx_used"], x["TG"]) for x in sweep if x["label"] == label]
        panel.plot(*zip(*sorted(points), strict=True), label=label, markersize=5, **look)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("tokens in the context")
    panel.set_ylabel("generated tokens per second")
    panel.set_title("Speed as the context grows")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _cost(panel: Any, cost: Sequence[dict[str, Any]]) -> None:
    """Above the line a pass costs more than the same tokens one by one."""
    cost = sorted(cost, key=lambda x: x["rows"])
    rows = [x["rows"] for x in cost]
    median = [x["median_us"] / 1000 for x in cost]
    spread = [
        [(x["median_us"] - x["p25_us"]) / 1000 for x in cost],
        [(x["p75_us"] - x["median_us"]) / 1000 for x in cost],
    ]
    panel.errorbar(rows, median, yerr=spread, marker="o", capsize=4, color=_COLOURS[0], label="measured (p25 - p75)")
    one_by_one = [median[0] / rows[0] * n for n in rows]
    panel.plot(rows, one_by_one, "--", color="grey", label="as many single passes")
    panel.set_ylim(0, max(*median, median[0] * 2) * 1.3)
    panel.set_xlabel("rows of a pass")
    panel.set_ylabel("ms")
    panel.set_title("One pass of the target")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
