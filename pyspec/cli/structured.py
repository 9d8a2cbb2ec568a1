"""Options of ``pyspec generate`` that bound the text, and log-probabilities."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..results import TokenLogprob

__all__ = ["given", "logprobs_dict"]

JsonSchema = Annotated[
    str | None, typer.Option("--json-schema", metavar="FILE|JSON", help="The text is JSON that fits this schema.")
]
CompactJson = Annotated[
    bool, typer.Option("--compact-json", help="No white space between the tokens of JSON: more tokens are forced.")
]
Regex = Annotated[
    str | None, typer.Option("--regex", metavar="RE", help="The whole text matches this regular expression.")
]
Choice = Annotated[
    list[str] | None, typer.Option("--choice", metavar="TEXT", help="The text is this, or another --choice.")
]
GrammarFile = Annotated[
    str | None, typer.Option("--grammar-file", metavar="FILE", help="The text fits this grammar: GBNF or Lark.")
]
TopLogprobs = Annotated[
    int | None,
    typer.Option(
        "--top-logprobs", metavar="N", help="With --json: log-probabilities, and those of the N best; 0: none."
    ),
]


def given(
    json_schema: str | None,
    compact_json: bool,
    regex: str | None,
    choice: list[str] | None,
    grammar_file: str | None,
    top_logprobs: int | None,
) -> dict[str, Any]:
    """Options of ``SamplingParams`` that were given.

    Raises:
        ConfigError: a file that cannot be read.
    """
    options: dict[str, Any] = {"json_whitespace": not compact_json}
    if json_schema is not None:
        inline = json_schema.lstrip().startswith(("{", "true", "false"))
        options["json_schema"] = json_schema if inline else _read(json_schema, "--json-schema")
    if grammar_file is not None:
        options["grammar"] = _read(grammar_file, "--grammar-file")
    if top_logprobs is not None:
        options.update(logprobs=True, top_logprobs=top_logprobs)
    options.update({k: v for k, v in (("regex", regex), ("choice", choice)) if v is not None})
    return options


def _read(path: str, option: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise ConfigError(f"{option} {path!r} cannot be read: {e}") from None


def logprobs_dict(entries: list[TokenLogprob] | None) -> list[dict[str, Any]] | None:
    """As plain values; bytes as a list of numbers, as OpenAI's API has them."""

    def plain(entry: dict[str, Any]) -> dict[str, Any]:
        out = {**entry, "bytes": list(entry["bytes"])}
        if "top" in entry:
            out["top"] = [plain(t) for t in entry["top"]]
        return out

    return None if entries is None else [plain(asdict(e)) for e in entries]
