"""``grammar``: propose what the grammar of a request forces, in the model's own spelling. Costs no model.

Where a JSON schema leaves no choice (the quote after a key, the next key, ``true`` after ``t``) the target would only
confirm it, token by token; with the draft it confirms a run of them in one pass. Requests without a grammar, and places
where there is a choice, are left to the next drafter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ..config import SpeculationParams
from ..types import CONSTRAINT, DraftRequest, Requirements
from .base import Drafter, Plan

if TYPE_CHECKING:
    from ..runtime.evaluator import Evaluator
    from ..runtime.model import Model

__all__ = ["Grammar"]


class Grammar(Drafter):
    """See the module. ``grammar_n_max``: most tokens proposed a step."""

    name: ClassVar[str] = "grammar"
    cheap: ClassVar[bool] = True

    def __init__(self, target: Evaluator, draft: Evaluator | None, params: SpeculationParams, n_seq: int) -> None:
        super().__init__(target, draft, params, n_seq)
        self.n_max = params.grammar_n_max

    @classmethod
    def plan(cls, target: Model, draft: Model | None, params: SpeculationParams, n_seq: int) -> Plan:
        """See :meth:`Drafter.plan`. Works with any target."""
        return Plan(Requirements(), None, params.grammar_n_max)

    def draft(self, requests: list[DraftRequest]) -> None:
        """See :meth:`Drafter.draft`."""
        for request in requests:
            constraint = request.extra.get(CONSTRAINT)
            if constraint is not None:
                request.draft.extend(constraint.forced()[: self.limit(request)])
