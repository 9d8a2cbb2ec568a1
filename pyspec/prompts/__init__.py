"""Prompts for ``pyspec bench`` and ``pyspec verify``: the suite beside this file, and files of the user's own."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError

__all__ = ["SUITE", "Prompt", "read_prompts", "suite"]

#: Names of the suite's prompts, in the order in which they are run.
SUITE = ("code-edit", "summary-quotes", "chat", "translation", "creative", "json")

_PREDICTION = ".prediction.txt"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: a name for reports, its text, and what the answer will mostly repeat (None: not known)."""

    name: str
    text: str
    prediction: str | None = None


def suite() -> list[Prompt]:
    """The prompts that come with pyspec: they differ in how much of the answer can be foreseen."""
    folder = Path(__file__).parent
    prompts = []
    for name in SUITE:
        prediction = folder / f"{name}{_PREDICTION}"
        prompts.append(
            Prompt(
                name,
                (folder / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n"),
                prediction.read_text(encoding="utf-8") if prediction.exists() else None,
            )
        )
    return prompts


def read_prompts(source: str | os.PathLike[str]) -> list[Prompt]:
    """Prompts of a file; "suite": those of :func:`suite`, "suite:NAME,NAME": some of them; "-": stdin.

    A file whose name ends in ``.json`` holds an array of strings, or of objects with "text" and, if wanted, "name" and
    "prediction"; ``.jsonl`` holds one of these a line. Any other file is text: prompts with lines ``---`` between them.

    Raises:
        ConfigError: there is no such file, or it is empty or malformed.
    """
    if source == "suite":
        return suite()
    if isinstance(source, str) and source.startswith("suite:"):
        wanted = source.removeprefix("suite:").split(",")
        unknown = [name for name in wanted if name not in SUITE]
        if unknown:
            raise ConfigError(f"the suite has no prompt {unknown[0]!r}; it has {', '.join(SUITE)}")
        return [p for p in suite() if p.name in wanted]
    path = Path(source)
    try:
        text = sys.stdin.buffer.read().decode("utf-8") if source == "-" else path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"prompts cannot be read from {str(path)!r}: {e.strerror or e}") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{str(path)!r} is not UTF-8: {e.reason} at byte {e.start}") from None
    prompts = _from_json(path, text) if path.suffix in {".json", ".jsonl"} else _from_text(text)
    if not prompts:
        raise ConfigError(f"{str(path)!r} holds no prompt")
    names = [p.name for p in prompts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{str(path)!r}: two prompts are named {twice!r}")
    return prompts


def _from_text(text: str) -> list[Prompt]:
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip() == "---":
            parts.append([])
        else:
            parts[-1].append(line)
    texts = ["\n".join(lines).strip("\n") for lines in parts]
    return [Prompt(str(i), t) for i, t in enumerate((t for t in texts if t.strip()), 1)]


def _from_json(path: Path, text: str) -> list[Prompt]:
    try:
        if path.suffix == ".jsonl":
            items: Any = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            items = json.loads(text)
    except ValueError as e:
        raise ConfigError(f"{str(path)!r} is not JSON: {e}") from None
    if not isinstance(items, list):
        raise ConfigError(f"{str(path)!r} must hold a JSON array, not a {type(items).__name__}")
    prompts = []
    for i, item in enumerate(items, 1):
        fields = {"text": item} if isinstance(item, str) else item
        if not isinstance(fields, dict) or not isinstance(fields.get("text"), str) or not fields["text"]:
            raise ConfigError(f'{str(path)!r}: prompt {i} must be a string or an object with a non-empty "text"')
        unknown = sorted(set(fields) - {"text", "name", "prediction"})
        if unknown:
            raise ConfigError(f"{str(path)!r}: prompt {i} has an unknown key {unknown[0]!r}")
        for key in ("name", "prediction"):
            if not isinstance(fields.get(key, ""), str):
                raise ConfigError(f"{str(path)!r}: {key!r} of prompt {i} must be a string")
        prompts.append(Prompt(fields.get("name") or str(i), fields["text"], fields.get("prediction") or None))
    return prompts
