"""Options that ``pyspec bench`` and ``pyspec verify`` share."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from . import terminal

if TYPE_CHECKING:
    from ..bench import Mode

__all__ = [
    "cache_modes", "check_writable", "flash_attn", "integers", "lookup_options", "names", "numbers", "write_json",
]  # fmt: skip

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Target model (GGUF file).")]
Drafts = Annotated[
    list[str] | None, typer.Option("--draft", metavar="FILE", help="Draft model (GGUF file); may be repeated.")
]
SpecType = Annotated[
    str, typer.Option("--spec-type", metavar="A,B,...", help="Drafters, one after the other; A+B is a chain of two.")
]
Ks = Annotated[str | None, typer.Option("--k", metavar="2,4,8", help="Draft lengths; default: each drafter's own.")]
Prompts = Annotated[
    str,
    typer.Option(
        "--prompts",
        metavar="FILE|suite",
        help="JSON array, or text with lines '---' between prompts; -: stdin; suite: ours; suite:chat,json: two of it.",
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Do not put prompts into the model's chat template.")]
NCtx = Annotated[int, typer.Option("-c", "--n-ctx", help="Context length; 0: as long as needed.")]
Threads = Annotated[int | None, typer.Option("-t", "--threads", help="CPU threads; default: all CPUs it may use.")]
GpuLayers = Annotated[int | None, typer.Option("--n-gpu-layers", metavar="N", help="Layers on the GPU; -1: all.")]
Devices = Annotated[
    list[str] | None, typer.Option("--device", metavar="NAME", help="As 'pyspec devices' lists it; may be repeated.")
]
PMin = Annotated[float | None, typer.Option("--p-min", metavar="P", help="Stop a draft at a token less likely.")]
FlashAttn = Annotated[str, typer.Option("--flash-attn", metavar="on|off|auto", help="Flash attention.")]
Loras = Annotated[
    list[str] | None,
    typer.Option("--lora", metavar="FILE[:SCALE]", help="LoRA adapter for the target; may be repeated."),
]
Kv = Annotated[
    str | None,
    typer.Option("--kv", metavar="TYPE,...|both", help="Types of the K and V cache to compare; both: f16 and q8_0."),
]
SwaFull = Annotated[
    str, typer.Option("--swa-full", metavar="off|on|both", help="Full-size cache for sliding-window layers.")
]
UBatch = Annotated[int | None, typer.Option("--n-ubatch", metavar="N", help="Rows computed at once; default: 512.")]
CacheTypeK = Annotated[
    str | None, typer.Option("--cache-type-k", metavar="T", help="Type of the K cache: f16, q8_0, ...")
]
CacheTypeV = Annotated[str | None, typer.Option("--cache-type-v", metavar="T", help="Type of the V cache.")]
DraftCacheTypeK = Annotated[
    str | None, typer.Option("--draft-cache-type-k", metavar="T", help="Type of the draft's K cache.")
]
DraftCacheTypeV = Annotated[
    str | None, typer.Option("--draft-cache-type-v", metavar="T", help="Type of the draft's V cache.")
]
JsonOut = Annotated[
    str | None, typer.Option("--json", metavar="OUT", help="Write everything as JSON to a file; -: to stdout.")
]


def _option(kind: Any, metavar: str, text: str) -> Callable[[str], Any]:
    return lambda name: Annotated[kind | None, typer.Option(f"--{name.replace('_', '-')}", metavar=metavar, help=text)]


#: Options of the methods that need no draft model: names of :class:`pyspec.SpeculationParams`.
_LOOKUP: dict[str, Callable[[str], Any]] = {
    "size_n": _option(int, "N", "ngram-simple, ngram-map-*: length of the n-gram looked up."),
    "size_m": _option(int, "M", "The same: most tokens proposed after it."),
    "min_hits": _option(int, "H", "ngram-simple, ngram-map-k4v: how often it must have been found."),
    "n_match": _option(int, "N", "ngram-mod: tokens that are hashed."),
    "mod_n_max": _option(int, "K", "ngram-mod: most tokens proposed."),
    "mod_n_min": _option(int, "K", "ngram-mod: shorter proposals are not made."),
    "lookup_cache_static": _option(str, "FILE", "ngram-cache: counts of a corpus, read only ('pyspec lookup create')."),
    "lookup_cache_dynamic": _option(str, "FILE", "ngram-cache: counts of earlier texts; what is new is added."),
    "suffix_n_max": _option(int, "K", "suffix: most tokens proposed."),
    "suffix_min_match": _option(int, "N", "suffix: shortest end of the text that is looked up."),
    "suffix_factor": _option(float, "X", "suffix: at most X times the length of the match is proposed,"),
    "suffix_offset": _option(float, "X", "and so many tokens more."),
    "suffix_p_min": _option(float, "P", "suffix: least probability of a proposal."),
    "suffix_rate": _option(float, "X", "suffix: how fast it learns how likely repeats are; 0: by frequency alone."),
    "suffix_corpus_max": _option(int, "N", "suffix: tokens of past outputs to remember; 0: none."),
    "suffix_corpus": _option(str, "FILE", "suffix: keep past outputs in this file."),
    "prediction_n_max": _option(int, "K", "prediction: most tokens proposed."),
}


def lookup_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of the methods that need no draft model.

    It gets those that were given as ``lookup``, a dict for :class:`pyspec.LLM`.
    """

    @functools.wraps(command)
    def with_options(*args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name, None) for name in _LOOKUP}
        command(*args, lookup={name: value for name, value in given.items() if value is not None}, **kwargs)

    # evaluated: typer looks into annotations for its options, and does not evaluate those of a given signature
    signature = inspect.signature(command, eval_str=True)
    added = {name: make(name) for name, make in _LOOKUP.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [p for p in signature.parameters.values() if p.name != "lookup"]
    parameters += [inspect.Parameter(name, keyword, default=None, annotation=a) for name, a in added.items()]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_options


def names(text: str) -> list[str]:
    """Parts of a comma-separated option. Raises BadParameter where one is empty."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise typer.BadParameter(f"{text!r}: give names with commas between them")
    return parts


def integers(text: str | None, option: str) -> list[int]:
    """Positive numbers of a comma-separated option; none for None.

    Raises:
        BadParameter: something else stands there, or a number twice.
    """
    if text is None:
        return []
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1 or len(set(numbers)) != len(numbers):
        raise typer.BadParameter(f"{option} {text!r}: give different numbers from 1 up, with commas between them")
    return numbers


def numbers(text: str | None, option: str) -> tuple[float, ...]:
    """Numbers of a comma-separated option; none for None. Raises BadParameter for anything else."""
    try:
        return tuple(float(part) for part in text.split(",")) if text is not None else ()
    except ValueError:
        raise typer.BadParameter(f"{option} {text!r}: give numbers with commas between them") from None


def cache_modes(swa_full: str, kv: str | None, *types: str | None) -> list[Mode]:
    """The caches that --swa-full and --kv compare; ``types``: those of --cache-type-k and --cache-type-v.

    Raises:
        BadParameter: an unknown value, or two ways to say the type.
    """
    from ..bench import make_modes

    if kv is not None and any(t is not None for t in types):
        raise typer.BadParameter("give --kv or --cache-type-k and --cache-type-v, not both")
    try:
        return make_modes(swa_full, kv)
    except ConfigError as e:
        raise typer.BadParameter(str(e)) from None


def flash_attn(value: str) -> str:
    """The value of --flash-attn. Raises BadParameter for an unknown one."""
    if value not in ("on", "off", "auto"):
        raise typer.BadParameter(f"--flash-attn must be on, off or auto, not {value!r}")
    return value


def load_options(**given: Any) -> dict[str, Any]:
    """Options of :class:`pyspec.LLM` from those of the command line that were given."""
    flash = flash_attn(given.pop("flash_attn", "auto"))
    return {"flash_attn": flash, **{name: value for name, value in given.items() if value is not None}}


def loras(given: list[str] | None) -> list[tuple[str, float]] | None:
    """Adapters and their scales from ``FILE[:SCALE]``; None for none."""
    if not given:
        return None
    out = []
    for text in given:
        path, colon, scale = text.rpartition(":")
        try:
            # a file of just that name is meant as it stands
            out.append((text, 1.0) if not colon or Path(text).exists() else (path, float(scale)))
        except ValueError:
            out.append((text, 1.0))
    return out


def check_writable(path: str | None) -> None:
    """Raise ConfigError now, not after the work, if a file cannot be written."""
    if path is None or path == "-":
        return
    was_there = Path(path).exists()
    try:
        with open(path, "ab"):
            pass
    except OSError as e:
        raise ConfigError(f"{path!r} cannot be written: {e.strerror or e}") from None
    if not was_there:
        os.unlink(path)


def write_json(path: str, value: Any) -> None:
    """JSON to a file, or to stdout for "-"."""
    text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
    if path == "-":
        terminal.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
