"""``prediction``: propose from a text that the caller expects the answer to repeat, and find back after an edit.

A request brings its text in ``DraftRequest.extra["prediction"]`` (token ids); requests without one are left alone. The
idea is OpenAI's "predicted outputs": rewriting a file costs little where the file stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from .. import _suffix
from ..config import SpeculationParams
from ..types import DraftRequest, I32Array, Requirements
from .base import Drafter, Plan

if TYPE_CHECKING:
    from ..runtime.evaluator import Evaluator
    from ..runtime.model import Model

__all__ = ["KEY", "Prediction"]

#: Name of a request's prediction in ``DraftRequest.extra``: int32 [n] or a sequence of ids.
KEY = "prediction"

#: As many tokens that agree are a place one can rely on.
SURE = 4
#: Output tokens that are compared to find the place again.
N_TAIL = 32
#: How far from the last sure place a match of so many tokens may be; longer ones may be anywhere.
REACH = {1: 16, 2: 128, 3: 512}


class _Place:
    """Where in its prediction an output is.

    Attributes:
        at: the token expected next. length: tokens before it that agree with the output, 0 while the place is lost.
    """

    def __init__(self, prediction: Sequence[int] | I32Array, n: int) -> None:
        self.prediction: I32Array = np.ascontiguousarray(prediction, np.int32)
        self.n = n  # tokens of the sequence looked at; the output begins here
        self.n_prompt = n
        self.at = 0
        self.length = SURE
        self.sure = 0

    def follow(self, tokens: list[int]) -> None:
        """Look at the new ones of ``tokens``."""
        n_left = len(self.prediction)
        for i in range(self.n, len(tokens)):
            if self.length and self.at < n_left and self.prediction[self.at] == tokens[i]:
                self.at += 1
                self.length += 1
            else:
                tail = np.array(tokens[max(self.n_prompt, i + 1 - N_TAIL) : i + 1], np.int32)
                at, length = _suffix.resync(self.prediction, tail, self.sure)
                near = length > 0 and abs(at - self.sure) <= REACH.get(length, n_left)
                self.at, self.length = (at, length) if near else (self.sure, 0)
            if self.length >= SURE:
                self.sure = self.at
        self.n = max(self.n, len(tokens))


class Prediction(Drafter):
    """See the module. ``prediction_n_max``: most tokens proposed a step; fewer while the place is not sure."""

    name: ClassVar[str] = "prediction"
    cheap: ClassVar[bool] = True
    limit_option: ClassVar[str] = "prediction_n_max"

    def __init__(self, target: Evaluator, draft: Evaluator | None, params: SpeculationParams, n_seq: int) -> None:
        super().__init__(target, draft, params, n_seq)
        self.n_max = params.prediction_n_max
        self._n_prompt: dict[int, int] = {}
        self._places: dict[int, _Place] = {}

    @classmethod
    def plan(cls, target: Model, draft: Model | None, params: SpeculationParams, n_seq: int) -> Plan:
        """See :meth:`Drafter.plan`. Works with any target."""
        return Plan(Requirements(), None, params.prediction_n_max)

    def begin(self, seq: int, tokens: list[int]) -> None:
        """See :meth:`Drafter.begin`. A sequence that starts over keeps its place."""
        self._n_prompt.setdefault(seq, len(tokens))

    def draft(self, requests: list[DraftRequest]) -> None:
        """See :meth:`Drafter.draft`."""
        for request in requests:
            prediction = request.extra.get(KEY)
            if prediction is None:
                continue
            place = self._places.get(request.seq)
            if place is None:
                n = self._n_prompt.get(request.seq, len(request.tokens))
                place = self._places[request.seq] = _Place(prediction, n)
            place.follow(request.tokens)
            n_max = self.limit(request)
            n = n_max if place.length >= SURE else min(n_max, 2 * place.length)
            request.draft.extend(place.prediction[place.at : place.at + n].tolist())

    def end(self, seq: int) -> None:
        """See :meth:`Drafter.end`."""
        self._n_prompt.pop(seq, None)
        self._places.pop(seq, None)
