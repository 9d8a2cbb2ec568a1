"""Sampling options of ``pyspec generate``; names are llama.cpp's."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..config import SAMPLERS, VERIFICATIONS

__all__ = ["given", "parse_logit_bias"]

Temp = Annotated[float, typer.Option("--temp", "--temperature", help="0: always the most likely token.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the K most likely tokens; 0: all.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the most likely tokens with this probability in all.")]
MinP = Annotated[float, typer.Option("--min-p", help="Drop tokens less likely than this times the best.")]
Typical = Annotated[float, typer.Option("--typical", help="Keep the least surprising set with this probability.")]
Sigma = Annotated[float, typer.Option("--top-n-sigma", help="Drop logits so many deviations below the best; -1: off.")]
XtcProbability = Annotated[float, typer.Option("--xtc-probability", help="How often to drop the top tokens.")]
XtcThreshold = Annotated[float, typer.Option("--xtc-threshold", help="What a top token is, for XTC.")]
DynatempRange = Annotated[float, typer.Option("--dynatemp-range", help="Temperature moves by this much; 0: off.")]
DynatempExponent = Annotated[float, typer.Option("--dynatemp-exp", help="How entropy becomes temperature.")]
RepeatPenalty = Annotated[float, typer.Option("--repeat-penalty", help="Divides logits of recent tokens; 1: off.")]
FrequencyPenalty = Annotated[float, typer.Option("--frequency-penalty", help="Taken from them, times their count.")]
PresencePenalty = Annotated[float, typer.Option("--presence-penalty", help="Taken from them, once.")]
RepeatLastN = Annotated[int, typer.Option("--repeat-last-n", help="How many tokens are recent; -1: all.")]
DryMultiplier = Annotated[float, typer.Option("--dry-multiplier", help="Penalty for longer repetitions; 0: off.")]
DryBase = Annotated[float, typer.Option("--dry-base", help="How it grows with their length.")]
DryAllowed = Annotated[int, typer.Option("--dry-allowed-length", help="Repetitions up to this length are free.")]
DryLastN = Annotated[int, typer.Option("--dry-penalty-last-n", help="Tokens looked at; -1: all.")]
DryBreakers = Annotated[
    list[str] | None,
    typer.Option("--dry-sequence-breaker", metavar="TEXT", help="No repetition goes across it; may be repeated."),
]
Mirostat = Annotated[int, typer.Option("--mirostat", help="Steer the surprise: version 1 or 2; 0: off.")]
MirostatTau = Annotated[float, typer.Option("--mirostat-ent", metavar="TAU", help="Surprise aimed at, in bits.")]
MirostatEta = Annotated[float, typer.Option("--mirostat-lr", metavar="ETA", help="Its learning rate.")]
LogitBias = Annotated[
    list[str] | None,
    typer.Option("-l", "--logit-bias", metavar="ID(+/-)BIAS", help="15043+1, 15043-1, 15043-inf; may be repeated."),
]
MinKeep = Annotated[int, typer.Option("--min-keep", help="Cuts by probability leave this many tokens.")]
Samplers = Annotated[
    str | None, typer.Option("--samplers", metavar="A;B;...", help=f"Order: {';'.join(SAMPLERS)} (all by default).")
]
Seed = Annotated[int | None, typer.Option("--seed", help="For the same text at a temperature above 0.")]
Verification = Annotated[
    str, typer.Option("--verification", help=f"How drafted tokens are checked: {', '.join(VERIFICATIONS)}.")
]


def parse_logit_bias(items: list[str] | None) -> dict[int, float]:
    """``["15043+1", "7-inf"]`` as a dict.

    Raises:
        typer.BadParameter: what is no such thing.
    """
    found: dict[int, float] = {}
    for item in items or ():
        at = max(item.find("+"), item.find("-"))
        try:
            if at < 1:
                raise ValueError
            found[int(item[:at])] = float(item[at:])
        except ValueError:
            raise typer.BadParameter(f"--logit-bias is ID+BIAS or ID-BIAS, such as 15043-1.5; got {item!r}") from None
    return found


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}
