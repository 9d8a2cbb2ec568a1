"""Log-probabilities of emitted tokens under the target, from the rows that decided them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from .. import _core
from ..types import F32Array, I32Array, TokenLogprob
from .chain import Candidates

__all__ = ["LogprobRows", "Logprobs", "processed_logprobs"]


class LogprobRows:
    """Log-probabilities of emitted tokens and of the most likely ones, from the rows that decided them.

    Owns arrays that are used again; one thread at a time.

    Args:
        n_rows: most rows of one call.
    """

    def __init__(self, n_rows: int) -> None:
        self._out: npt.NDArray[np.float64] = np.zeros(n_rows)
        self._ids: I32Array = np.zeros(0, np.int32)
        self._top: npt.NDArray[np.float64] = np.zeros(0)

    def __call__(self, logits: F32Array, row: int, emitted: Sequence[int], n_top: int) -> list[TokenLogprob]:
        """One entry for each token of ``emitted``: of the whole vocabulary, at temperature 1, before any filter.

        Args:
            logits: float32, [n_rows, n_vocab], borrowed for the call; row ``row + i`` decided ``emitted[i]``.
            n_top: how many of the most likely tokens, 0 to 64; fewer where fewer have a probability.
        """
        n = len(emitted)
        if n > len(self._out):
            self._out = np.zeros(2 * n)
        rows, tokens, out = logits[row : row + n], np.asarray(emitted, np.int32), self._out[:n]
        if not n_top:
            _core.logprob_rows(rows, tokens, out)
            return [TokenLogprob(t, lp) for t, lp in zip(emitted, out.tolist(), strict=True)]
        if n * n_top > len(self._ids):
            self._ids, self._top = np.zeros(n * n_top, np.int32), np.zeros(n * n_top)
        ids, top = self._ids[: n * n_top].reshape(n, n_top), self._top[: n * n_top].reshape(n, n_top)
        _core.top_logprob_rows(rows, tokens, out, ids, top)
        return [
            TokenLogprob(token, lp, tuple((i, x) for i, x in zip(best, values, strict=True) if i >= 0))
            for token, lp, best, values in zip(emitted, out.tolist(), ids.tolist(), top.tolist(), strict=True)
        ]


def processed_logprobs(emitted: Sequence[int], trace: Sequence[Candidates], n_top: int) -> list[TokenLogprob]:
    """Like :class:`LogprobRows`, of the distributions that the tokens were drawn from: ``trace``, one for each."""
    out = []
    for token, candidates in zip(emitted, trace, strict=False):
        with np.errstate(divide="ignore"):
            values = np.log(candidates.probs.astype(np.float64))
        at = np.flatnonzero(candidates.ids == token)
        top = zip(candidates.ids[:n_top].tolist(), values[:n_top].tolist(), strict=True)
        out.append(TokenLogprob(token, float(values[at[0]]) if at.size else -np.inf, tuple(top)))
    return out


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
