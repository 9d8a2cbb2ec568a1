"""``pyspec lookup``: files of n-gram counts for ``ngram-cache``, in llama.cpp's format."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from .. import _lookup
from .._lookup import LookupCache
from ..config import ModelParams
from ..drafters.ngram_cache import N_DRAFT, read_cache, write_cache
from ..errors import ConfigError
from ..runtime import Model
from ..types import I32Array
from . import generate, terminal

__all__ = ["app"]

#: N-grams of the static level, as llama.cpp reads them.
N_STATIC = 2

app = typer.Typer(
    name="lookup",
    help="Make, join and examine lookup caches: files of n-gram counts for --spec-type ngram-cache.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Force = Annotated[bool, typer.Option("--force", help="Overwrite the file.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Texts = Annotated[
    list[str] | None, typer.Option("-f", "--file", metavar="FILE", help="Text; -: stdin. May be repeated.")
]


@app.command()
@terminal.guard
def create(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="GGUF file whose tokens are counted.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="File to write.")],
    file: Texts = None,
    force: Force = False,
) -> None:
    """Count what follows every two tokens of a text: the static level (lookup_cache_static)."""
    _check_out(out, force)
    cache = LookupCache()
    n = 0
    for tokens in _tokens(model, file)[0]:
        cache.update(tokens, 0, len(tokens), N_STATIC, N_STATIC)
        n += len(tokens)
    write_cache(out, cache)
    print(f"{out}: {len(cache):,} n-grams of {n:,} tokens", file=sys.stderr)


@app.command()
@terminal.guard
def merge(
    files: Annotated[list[str], typer.Argument(metavar="IN... OUT", help="Files to add up, and the file to write.")],
    force: Force = False,
) -> None:
    """Add up the counts of several files of the same model."""
    *sources, out = files
    if not sources:
        raise typer.BadParameter("name the files to merge, then the file to write")
    _check_out(out, force)
    cache = read_cache(sources[0])
    for source in sources[1:]:
        cache.merge(read_cache(source))
    write_cache(out, cache)
    print(f"{out}: {len(cache):,} n-grams from {len(sources)} files", file=sys.stderr)


@app.command()
@terminal.guard
def stats(
    path: Annotated[str, typer.Argument(metavar="FILE", help="Lookup cache.")],
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Draft through a text with this model's tokens.")
    ] = None,
    file: Texts = None,
    dynamic: Annotated[
        str | None, typer.Option("--dynamic", metavar="FILE", help="Dynamic level; FILE is the static one.")
    ] = None,
    n_ctx: Annotated[int, typer.Option("-c", "--n-ctx", min=2, help="Tokens of a text that stand alone.")] = 4096,
    n_draft: Annotated[int, typer.Option("--n-draft", min=1, max=64, help="Most tokens drafted.")] = N_DRAFT,
    as_json: Json = False,
) -> None:
    """Say what a file holds; with --model and -f, how many drafts from it would have been right in a text."""
    if (model is None) != (file is None):
        raise typer.BadParameter("--model and --file go together")
    if model is None and dynamic is not None:
        raise typer.BadParameter("--dynamic needs --model and --file")
    texts, n_vocab = _tokens(model, file) if model is not None else ([], 2**31 - 1)
    fixed = read_cache(path, n_vocab)
    lengths: Counter[int] = Counter()
    n_counted = 0
    for ngram, counts in fixed.items():
        lengths[len(ngram)] += 1
        n_counted += sum(counts.values())
    found: dict[str, Any] = {
        "file": path,
        "size_bytes": Path(path).stat().st_size,
        "n_grams": len(fixed),
        "n_grams_by_length": {str(n): lengths[n] for n in sorted(lengths)},
        "n_continuations": fixed.n_continuations,
        "n_counted": n_counted,
        "memory_bytes": fixed.n_bytes,
    }
    if model is not None:
        known = read_cache(dynamic, n_vocab) if dynamic is not None else LookupCache()
        found |= _simulate(texts, fixed, known, n_ctx, n_draft)
    if as_json:
        print(json.dumps(found))
        return
    rows = []
    for name, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{v:,} of {k}" for k, v in value.items()) or "-"
        elif isinstance(value, float):
            value = f"{value:.3f}"
        elif isinstance(value, int):
            value = f"{value:,}"
        rows.append((name, "-" if value is None else terminal.printable(value)))
    terminal.write(terminal.columns(rows))


def _check_out(out: str, force: bool) -> None:
    if Path(out).exists() and not force:
        raise ConfigError(f"{out!r} exists; --force overwrites it")


def _tokens(model: str, files: list[str] | None) -> tuple[list[I32Array], int]:
    """Tokens of each text, and the size of the model's vocabulary."""
    if not files:
        raise typer.BadParameter("no text: name a file with -f, or - for stdin")
    texts = [generate.read_prompt(None, name) or "" for name in files]
    # no weights: the tokenizer is all that is needed
    with Model(model, ModelParams(vocab_only=True)) as loaded:
        return [np.array(loaded.vocab.encode(text), np.int32) for text in texts], loaded.vocab.n_tokens


def _simulate(
    texts: list[I32Array], fixed: LookupCache, dynamic: LookupCache, n_ctx: int, n_draft: int
) -> dict[str, Any]:
    """Draft through the texts as if they had been generated in pieces of ``n_ctx`` tokens.

    Each piece's counts go into the dynamic level when it is done.
    """
    n_drafts = n_drafted = n_accepted = n_tokens = draft_ns = 0
    for text in texts:
        for begin in range(0, len(text), n_ctx):
            piece = np.ascontiguousarray(text[begin : begin + n_ctx])
            context = LookupCache()
            n = 1
            while n < len(piece):
                start = time.perf_counter_ns()
                draft = _lookup.draft(context, dynamic, fixed, piece, n, n_draft)
                draft_ns += time.perf_counter_ns() - start
                n_right = 0
                while n_right < len(draft) and n + n_right < len(piece) and draft[n_right] == piece[n + n_right]:
                    n_right += 1
                n_drafts += 1
                n_drafted += len(draft)
                n_accepted += n_right
                # the target adds a token of its own, if the text goes on
                end = min(n + n_right + 1, len(piece))
                context.update(piece, n, end)
                n = end
            n_tokens += len(piece)
            dynamic.merge(context)
    return {
        "n_tokens": n_tokens,
        "n_passes": n_drafts,
        "n_drafted": n_drafted,
        "n_accepted": n_accepted,
        "acceptance_rate": n_accepted / n_drafted if n_drafted else None,
        "tokens_per_pass": n_tokens / n_drafts if n_drafts else None,
        "draft_us": draft_ns / 1000 / n_drafts if n_drafts else None,
    }
