"""What the drafters that look up n-grams of one text have in common: options, log, plan, and one index a sequence."""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

from ..config import SpeculationParams
from ..types import Requirements
from .base import Drafter, Plan

if TYPE_CHECKING:
    from ..runtime.evaluator import Evaluator
    from ..runtime.model import Model

__all__ = ["MAX_HITS", "NgramDrafter"]

log = logging.getLogger("pyspec")

#: Occurrences are counted in 32 bits.
MAX_HITS = 2**31

Index = TypeVar("Index")


class NgramDrafter(Drafter, Generic[Index]):
    """Proposes up to ``size_m`` tokens after the last ``size_n`` ones; one ``Index`` for each sequence."""

    def __init__(self, target: Evaluator, draft: Evaluator | None, params: SpeculationParams, n_seq: int) -> None:
        super().__init__(target, draft, params, n_seq)
        self.n_max = params.size_m
        self._indexes: dict[int, Index] = {}
        log.info(
            "speculation: adding %s: size_n=%d, size_m=%d, min_hits=%d",
            self.name, params.size_n, params.size_m, params.min_hits,
        )  # fmt: skip

    @classmethod
    def plan(cls, target: Model, draft: Model | None, params: SpeculationParams, n_seq: int) -> Plan:
        """See :meth:`Drafter.plan`. Works with any target; a draft is for others in the chain."""
        return Plan(Requirements(), None, params.size_m)

    @abstractmethod
    def make_index(self) -> Index:
        """An empty index."""

    def index(self, seq: int) -> Index:
        """The index of a sequence; made if there is none."""
        found = self._indexes.get(seq)
        if found is None:
            found = self._indexes[seq] = self.make_index()
        return found

    def end(self, seq: int) -> None:
        """See :meth:`Drafter.end`."""
        self._indexes.pop(seq, None)
