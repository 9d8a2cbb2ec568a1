"""Drafters that are given as classes or instances: their names, and errors that say whose mistake it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..config import SpeculationParams
from ..errors import ConfigError, PyspecError
from . import registry
from .base import Drafter, Plan

if TYPE_CHECKING:
    from ..runtime.evaluator import Evaluator
    from ..runtime.model import Model

__all__ = ["Maker", "make", "plan", "resolve"]

Maker = type[Drafter] | Drafter


def resolve(given: Any) -> tuple[Any, dict[str, Maker]]:
    """Take drafter classes and instances out of what ``LLM(speculation=...)`` was given.

    Returns:
        The same with names in their place, and the classes and instances by name. What is neither stays as it is.

    Raises:
        ConfigError: no name, or one that is taken.
    """
    custom: dict[str, Maker] = {}

    def name_of(item: Any) -> Any:
        if not isinstance(item, Drafter) and not (isinstance(item, type) and issubclass(item, Drafter)):
            return item
        cls = item if isinstance(item, type) else type(item)
        name = getattr(item, "name", None)
        if not isinstance(name, str) or not name:
            raise ConfigError(f"drafter class {cls.__qualname__} needs a class attribute 'name'")
        if name in ("auto", "off") or (name in registry.BUILTIN and registry.get(name) is not cls):
            raise ConfigError(f"drafter class {cls.__qualname__}: the name {name!r} is taken")
        custom[name] = item
        return name

    if isinstance(given, (list, tuple)):
        return tuple(name_of(item) for item in given), custom
    return name_of(given), custom


def plan(maker: Maker, target: Model, draft: Model | None, params: SpeculationParams, n_seq: int) -> Plan:
    """The drafter's plan.

    Raises:
        PyspecError: the plan's own. ConfigError: it raised something else, or gave no sensible plan.
    """
    try:
        found: Any = maker.plan(target, draft, params, n_seq)
    except PyspecError:
        raise
    except Exception as e:
        raise ConfigError(f"drafter {maker.name!r}: plan failed: {type(e).__name__}: {e}") from e
    if not isinstance(found, Plan):
        raise ConfigError(f"drafter {maker.name!r}: plan must return a Plan, got {found!r}")
    if isinstance(found.n_max, bool) or not isinstance(found.n_max, int) or found.n_max < 1:
        raise ConfigError(f"drafter {maker.name!r}: n_max of its plan must be an integer >= 1, got {found.n_max!r}")
    return found


def make(
    maker: Maker, plan: Plan, target: Evaluator, draft: Evaluator | None, params: SpeculationParams, n_seq: int
) -> Drafter:
    """A drafter of a class, or an instance attached.

    Raises:
        PyspecError: its own. ConfigError: it raised something else.
    """
    try:
        if isinstance(maker, type):
            return maker(target, draft, params, n_seq)
        maker.attach(target, draft, params, n_seq)
    except PyspecError:
        raise
    except Exception as e:
        raise ConfigError(f"drafter {maker.name!r} cannot be made: {type(e).__name__}: {e}") from e
    maker.n_max = plan.n_max
    return maker
