"""The sampler of ``_sample`` in plain NumPy: same steps, same results, everything sorted and in float64.

The oracle of the tests, written to be read. What a step does is said in ``_sample.pyx`` and ``docs/sampling.md``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _sample as S

__all__ = ["Sampler", "dry_penalties", "residual"]

_F32 = npt.NDArray[np.float32]
_F64 = npt.NDArray[np.float64]
_I32 = npt.NDArray[np.int32]
_U32 = npt.NDArray[np.uint32]

_MIROSTAT_M = 100
_FLOAT_MAX_LOG = 88.7228391


def dry_penalties(
    tokens: Sequence[int],
    multiplier: float,
    base: float,
    allowed: int,
    breakers: Sequence[tuple[int, tuple[int, ...]]] = (),
) -> dict[int, float]:
    """What DRY takes from the logits of which tokens, after ``tokens``.

    For every earlier place whose last tokens equal the last tokens of all, up to the last breaker, the token that
    followed there.
    """
    n = len(tokens)
    if n <= allowed:
        return {}
    limit = n
    for i in range(n):
        lengths = [
            len(tail)
            for head, tail in breakers
            if head == tokens[n - 1 - i] and len(tail) <= i and tuple(tokens[n - i : n - i + len(tail)]) == tail
        ]
        if lengths:
            limit = i - max(lengths)
            break
    if limit < allowed:
        return {}
    longest: dict[int, int] = {}
    for k in range(1, n):
        m = 0
        while k + m < n and tokens[n - 1 - m] == tokens[n - 1 - k - m]:
            m += 1
        m = min(m, limit)
        if m >= allowed:
            longest[tokens[n - k]] = max(longest.get(tokens[n - k], 0), m)
    most = int(_FLOAT_MAX_LOG / math.log(base)) if base > 1.000001 else 0
    single = {head for head, tail in breakers if not tail}
    return {
        t: multiplier * base ** min(m - allowed, most if most else m - allowed)
        for t, m in longest.items()
        if t not in single
    }


def residual(ids: _I32, p: _F64, a: float, q_ids: _I32, q: _F32) -> _F64:
    """``max(0, a * p - q)`` over ``ids``, normalised."""
    other = dict(zip(q_ids.tolist(), q.tolist(), strict=True))
    left: _F64 = np.array([max(0.0, a * x - other.get(t, 0.0)) for t, x in zip(ids.tolist(), p.tolist(), strict=True)])
    left /= left.sum()
    return left


class Sampler:
    """See ``_sample.Sampler``; ``breakers`` are (head, tail) pairs here, and ``scratch`` is the vocabulary's size."""

    def __init__(
        self,
        n_vocab: int,
        steps: Sequence[tuple[Any, ...]],
        prompt: Sequence[int] = (),
        bias_ids: Sequence[int] = (),
        bias: Sequence[float] = (),
        penalty_last_n: int = -1,
        dry_last_n: int = -1,
        breakers: Sequence[tuple[int, tuple[int, ...]]] = (),
    ) -> None:
        self.n_vocab = n_vocab
        self.steps = steps
        self.tokens = list(prompt)
        self.bias = list(zip(bias_ids, bias, strict=True))
        self.last_n = (penalty_last_n, dry_last_n)
        self.breakers = breakers
        self.mu = next((2.0 * s[1] for s in steps if s[0] in (S.MIROSTAT, S.MIROSTAT2)), 0.0)
        self.ids: _I32 = np.zeros(0, np.int32)
        self.p: _F64 = np.zeros(0)

    def _last(self, n: int) -> list[int]:
        return self.tokens if n < 0 else self.tokens[len(self.tokens) - min(n, len(self.tokens)) :]

    def accept(self, token: int) -> None:
        """See ``_sample.Sampler.accept``."""
        self.tokens.append(token)
        for code, *a in self.steps:
            at = np.flatnonzero(self.ids == token)
            if code in (S.MIROSTAT, S.MIROSTAT2) and at.size:
                self.mu -= a[1] * (-math.log2(self.p[at[0]]) - a[0])

    def apply(self, logits: _F32, row: int, mask: _U32 | None = None, u: float = 1.0) -> int:
        """Find ``ids``, in descending order, and their probabilities ``p``. See ``_sample.Sampler.apply``."""
        x = logits[row].astype(np.float64)
        if np.isnan(x).any() or np.isposinf(x).any():
            return S.NOT_FINITE
        for token, value in self.bias:
            x[token] += value
        if mask is not None:
            x[np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.n_vocab] == 0] = -np.inf
        ids = np.arange(self.n_vocab)
        size = self.n_vocab
        scale = 1.0
        for code, *a in self.steps:
            keep = int(a[1]) if len(a) > 1 else 0
            if code == S.PENALTIES:
                for token, n in Counter(self._last(self.last_n[0])).items():
                    x[token] = x[token] * a[0] if x[token] <= 0 else x[token] / a[0]
                    x[token] -= (n * a[1] + a[2]) / scale
            elif code == S.DRY:
                last = self._last(self.last_n[1])
                for token, value in dry_penalties(last, a[0], a[1], int(a[2]), self.breakers).items():
                    x[token] -= value / scale
            ids = ids[np.argsort(-x[ids], kind="stable")]
            ids = ids[x[ids] > -np.inf]
            if not ids.size:
                return S.NOTHING_LEFT
            z = x[ids] * scale
            p = np.exp(z - z[0])
            p /= p.sum()
            n = len(ids)
            if code == S.TOP_K:
                size, n = min(size, int(a[0])), min(n, int(a[0]))
            elif code == S.TOP_P:
                size = n = max(1 + int((np.cumsum(p) < a[0]).sum()), keep)
            elif code == S.MIN_P:
                size = n = max(int((p >= a[0] * p[0] * (1 - 1e-12)).sum()), keep)
            elif code == S.TOP_N_SIGMA and size > 1:
                n = int((z >= z[0] - a[0] * z.std()).sum())
            elif code == S.TYPICAL_P:
                order = np.argsort(np.abs(-np.log(p) + (p * np.log(p)).sum()), kind="stable")
                n = max(1 + int((np.cumsum(p[order]) <= a[0]).sum()), keep)
                ids = ids[np.sort(order[:n])]
                size = n = len(ids)
            elif code == S.XTC and u <= a[0]:
                above = int((p >= a[1]).sum())
                if size > 1 and above > 1 and size - above + 1 >= a[2]:
                    ids = ids[above - 1 :]
                    size -= above - 1
                n = len(ids)
            elif code == S.TEMPERATURE:
                n, scale = (1, scale) if a[0] == 0 else (n, scale / a[0])
            elif code == S.DYNATEMP and size > 1:
                entropy = -float((p[p > 0] * np.log(p[p > 0])).sum())
                low, high = max(0.0, a[0] - a[1]), a[0] + a[1]
                scale /= low + (high - low) * max(0.0, entropy / math.log(size)) ** a[2]
            elif code == S.MIROSTAT:
                m = min(_MIROSTAT_M, n)
                t = np.log(np.arange(2, m + 1) / np.arange(1, m))
                s = float((t * (z[: m - 1] - z[1:m])).sum() / (t * t).sum())
                k = ((s - 1) * 2**self.mu / (1 - self.n_vocab ** (1 - s))) ** (1 / s)
                n = max(int(k), 1)
            elif code == S.MIROSTAT2:
                n = max(1, int((-np.log2(p) <= self.mu).sum()))
            ids = ids[:n]
        ids = ids[np.argsort(-x[ids], kind="stable")]
        ids = ids[x[ids] > -np.inf]
        if not ids.size:
            return S.NOTHING_LEFT
        z = x[ids] * scale
        p = np.exp(z - z.max())
        self.ids, self.p = ids.astype(np.int32), p / p.sum()
        return S.OK

    def draw(self, u: float) -> int:
        """See ``_sample.Sampler.draw``."""
        cdf = np.cumsum(self.p)
        beyond = np.flatnonzero(cdf > u * cdf[-1])
        return int(self.ids[beyond[0]] if beyond.size else self.ids[-1])
