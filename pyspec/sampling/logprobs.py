"""Log-probabilities of emitted tokens under the target, from the rows that decided them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from .. import _core
from ..types import F32Array

__all__ = ["Logprobs"]


class Logprobs:
    """Collects the natural logarithm of each emitted token's probability; an ``Observer`` of the engine.

    The probability is that of the whole vocabulary at temperature 1, before any filter, also for accepted draft tokens.

    Attributes:
        values: sequence -> one number for each emitted token, in order.
    """

    def __init__(self) -> None:
        self.values: dict[Hashable, list[float]] = {}
        self._out: npt.NDArray[np.float64] = np.zeros(16)

    def __call__(self, seq: Hashable, logits: F32Array, row: int, n_draft: int, emitted: Sequence[int]) -> None:
        """See ``pyspec.engine.Observer``. ``logits``: float32 [n_rows, n_vocab], borrowed for the call."""
        n = len(emitted)
        if n > len(self._out):
            self._out = np.zeros(2 * n)
        _core.logprob_rows(logits[row : row + n], np.asarray(emitted, np.int32), self._out[:n])
        self.values.setdefault(seq, []).extend(self._out[:n].tolist())
