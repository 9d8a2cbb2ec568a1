"""Drafters by name: the built-in ones, those other packages offer, and those registered by hand.

Another package adds a drafter through the entry-point group ``pyspec.drafters`` (name = drafter name, value =
``package.module:Class``), or by calling :func:`register`. Nothing is imported until a drafter is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import threading
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from ..errors import ConfigError
from .base import Drafter

__all__ = ["BUILTIN", "GROUP", "get", "names", "register"]

log = logging.getLogger("pyspec")

#: Entry-point group that other packages use.
GROUP = "pyspec.drafters"

#: Built-in drafters in llama.cpp's order of priority: what needs no model comes first.
BUILTIN: dict[str, str] = {
    "grammar": "pyspec.drafters.grammar:Grammar",
    "prediction": "pyspec.drafters.prediction:Prediction",
    "ngram-simple": "pyspec.drafters.ngram_simple:NgramSimple",
    "ngram-map-k": "pyspec.drafters.ngram_map:NgramMapK",
    "ngram-map-k4v": "pyspec.drafters.ngram_map:NgramMapK4v",
    "ngram-mod": "pyspec.drafters.ngram_mod:NgramMod",
    "ngram-cache": "pyspec.drafters.ngram_cache:NgramCache",
    "suffix": "pyspec.drafters.suffix:Suffix",
    "draft-simple": "pyspec.drafters.draft_simple:DraftSimple",
    "draft-eagle3": "pyspec.drafters.draft_eagle3:DraftEagle3",
    "draft-mtp": "pyspec.drafters.draft_mtp:DraftMtp",
    "draft-dflash": "pyspec.drafters.draft_dflash:DraftDflash",
    "draft-dspark": "pyspec.drafters.draft_dspark:DraftDspark",
}

_lock = threading.Lock()
_registered: dict[str, type[Drafter]] = {}
_plugins: dict[str, list[EntryPoint]] | None = None

D = TypeVar("D", bound="type[Drafter]")


def register(cls: D) -> D:
    """Add a drafter class under its ``name``. Can be used as a decorator.

    Raises:
        ConfigError: not a drafter, no name, or the name is taken by another class.
    """
    candidate: object = cls
    if not (isinstance(candidate, type) and issubclass(candidate, Drafter)):
        raise ConfigError(f"a drafter must be a subclass of pyspec.drafters.Drafter, got {cls!r}")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"drafter class {cls.__qualname__} needs a class attribute 'name'")
    if name in BUILTIN:
        raise ConfigError(f"drafter name {name!r} is taken by the built-in {BUILTIN[name]}")
    plugin = _plugin(name)
    if plugin is not None:
        raise ConfigError(f"drafter name {name!r} is taken by {_origin(plugin)}")
    with _lock:
        old = _registered.get(name)
        if old is not None and old is not cls:
            raise ConfigError(f"drafter name {name!r} is taken by {old.__module__}:{old.__qualname__}")
        _registered[name] = cls
    return cls


def names() -> list[str]:
    """Every name that :func:`get` knows: built-in ones in order of priority, then the others by name."""
    others = (set(_registered) | set(_entry_points())) - set(BUILTIN)
    return [*BUILTIN, *sorted(others)]


def get(name: str) -> type[Drafter]:
    """The drafter class of that name.

    Raises:
        ConfigError: unknown name (the message lists all, and a close match), or a package's drafter cannot be loaded.
    """
    if name in BUILTIN:
        module, _, attribute = BUILTIN[name].partition(":")
        cls: type[Drafter] = getattr(importlib.import_module(module), attribute)
        return cls
    found = _registered.get(name)
    if found is not None:
        return found
    plugin = _plugin(name)
    if plugin is None:
        close = difflib.get_close_matches(str(name), names(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"unknown speculation type {name!r}{hint}. Known: {', '.join(names())}")
    try:
        loaded = plugin.load()
    except Exception as e:
        raise ConfigError(f"drafter {name!r} of {_origin(plugin)} cannot be loaded: {type(e).__name__}: {e}") from e
    if not (isinstance(loaded, type) and issubclass(loaded, Drafter)):
        raise ConfigError(f"drafter {name!r} of {_origin(plugin)} is not a subclass of pyspec.drafters.Drafter")
    return loaded


def _origin(plugin: EntryPoint) -> str:
    dist = getattr(plugin, "dist", None)
    return f"package {dist.name!r} ({plugin.value})" if dist is not None else plugin.value


def _entry_points() -> dict[str, list[EntryPoint]]:
    """Entry points by name, read once. Built-in names belong to us: a package's is left out with a warning."""
    global _plugins
    with _lock:
        if _plugins is None:
            found: dict[str, list[EntryPoint]] = {}
            for point in entry_points(group=GROUP):
                if point.name in BUILTIN:
                    log.warning("drafter %r of %s is left out: the name is built in", point.name, _origin(point))
                    continue
                same = found.setdefault(point.name, [])
                # an editable install can list the same entry point twice
                if all(point.value != p.value for p in same):
                    same.append(point)
            _plugins = found
        return _plugins


def _plugin(name: str) -> EntryPoint | None:
    points = _entry_points().get(name, [])
    if len(points) > 1:
        raise ConfigError(f"drafter name {name!r} is offered by several: {', '.join(map(_origin, points))}; remove one")
    return points[0] if points else None
