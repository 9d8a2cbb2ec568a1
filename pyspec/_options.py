"""What the option classes of ``config`` share: checks, replacing by keyword, and schemas as text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import ConfigError, GrammarError

__all__ = ["GrammarSpec", "Options", "check_finite", "check_float", "check_int", "json_text", "strings"]


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        limit = f">= {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{name} must be {limit}, got {value}")


def check_float(name: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    if value < low or value > high or (open_low and value == low):
        raise ConfigError(f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}], got {value!r}")


def check_finite(name: str, value: Any, low: float = -math.inf, *, open_low: bool = False) -> None:
    check_float(name, value, low, open_low=open_low)
    if math.isinf(value):
        raise ConfigError(f"{name} must be finite")


def strings(name: str, value: Any) -> tuple[str, ...]:
    """A string or several as a tuple."""
    if not isinstance(value, (str, list, tuple)):
        raise ConfigError(f"{name} must be a string or a list of strings, got {value!r}")
    strings = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(s, str) and s for s in strings):
        raise ConfigError(f"{name} must be non-empty strings, got {value!r}")
    return strings


class Options:
    """Shared by the option classes: replace by keyword with a helpful message."""

    __slots__ = ()

    @classmethod
    def names(cls) -> frozenset[str]:
        return frozenset(f.name for f in fields(cls))  # type: ignore[arg-type]

    def override(self, **changes: Any) -> Any:
        """A copy with some options changed. Raises ConfigError for an unknown name or a bad value."""
        unknown = sorted(set(changes) - self.names())
        if unknown:
            known = ", ".join(sorted(self.names()))
            raise ConfigError(f"unknown option {unknown[0]!r}; {type(self).__name__} has: {known}")
        return replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What bounds the text of a request.

    Attributes:
        kind: the option it came by: "json_schema", "regex", "choice" or "grammar".
        source: its text; JSON for a schema and for choices.
        compact: no white space between the tokens of JSON.
    """

    kind: str
    source: str
    compact: bool = False


def json_text(schema: Any) -> str:
    """A JSON schema as text."""
    to_schema = getattr(schema, "model_json_schema", None)
    if callable(to_schema):  # a pydantic model class
        schema = to_schema()
    if not isinstance(schema, (str, dict, bool, Mapping)):
        raise ConfigError(
            f"json_schema must be a dict, JSON text or a pydantic model class, got {type(schema).__name__}"
        )
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
            if not isinstance(schema, (dict, bool)):
                raise GrammarError(f"json_schema must be a JSON object, its text holds {type(schema).__name__}")
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except json.JSONDecodeError as e:
        raise GrammarError(f"json_schema is no JSON: line {e.lineno}, column {e.colno}: {e.msg}") from None
    except (TypeError, ValueError, RecursionError) as e:
        if isinstance(e, GrammarError):
            raise
        raise GrammarError(f"json_schema cannot be written as JSON: {e}") from None
