"""Synthetic acceptance: drafts are accepted by lot instead of by what the target says. For benchmarks only.

It answers "how fast would this be with a draft that is right so often", with the real cost of drafting, verification
and rollback. The text is not the target's. Meaning and limits of the options are llama.cpp's (``--spec-synth-len``,
``--spec-synth-rates``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from ..config import SpeculationParams
from ..errors import ConfigError
from ..types import F32Array
from .chain import SYNTHETIC, SamplerChain
from .verify import Q, Verifier

__all__ = ["SyntheticVerifier", "synthetic_rates"]


def synthetic_rates(params: SpeculationParams, n_max: int) -> list[float]:
    """How often a draft is accepted up to each position, for drafts of up to ``n_max`` tokens; empty: not asked for.

    ``synth_rates`` are these numbers. ``synth_len``, the mean number of tokens a pass with a full draft (the target's
    own included), gives p, p^2, ..., p^n_max with the p that makes ``1 + p + ... + p^n_max`` equal to it.

    Raises:
        ConfigError: nothing can be drafted, or the numbers do not fit ``n_max``.
    """
    length, rates = params.synth_len, params.synth_rates
    if length is None and not rates:
        return []
    if n_max < 1:
        raise ConfigError("synth_len and synth_rates need a drafter, and a target that allows drafts")
    if rates:
        if len(rates) != n_max:
            raise ConfigError(f"synth_rates must have {n_max} values, one for each drafted token, got {len(rates)}")
        return list(rates)
    assert length is not None
    if length > n_max + 1:
        raise ConfigError(f"synth_len must be in [1, {n_max + 1}] with drafts of up to {n_max} tokens, got {length:g}")
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        if math.fsum(p**i for i in range(1, n_max + 1)) < length - 1:
            low = p
        else:
            high = p
    # the ends are meant exactly
    p = 0.0 if length == 1 else 1.0 if length == n_max + 1 else (low + high) / 2
    return [p**i for i in range(1, n_max + 1)]


class SyntheticVerifier:
    """Stands in for :class:`Verifier`.

    A token is accepted with the probability of its position, given that those before it were; one that would end the
    generation never is.

    Args:
        verifier: gives the target's own tokens.
        rates: see :func:`synthetic_rates`; drafts are no longer.
        eog_tokens: tokens that end a generation.
    """

    def __init__(self, verifier: Verifier, rates: Sequence[float], eog_tokens: Collection[int]) -> None:
        self._verifier = verifier
        self._eog = eog_tokens
        self.probs = [r / before if before > 0 else 0.0 for before, r in zip([1.0, *rates], rates, strict=False)]

    def __call__(
        self,
        logits: F32Array,
        row: int,
        draft: Sequence[int],
        chain: SamplerChain,
        pos: int,
        q: Q = (),
    ) -> tuple[int, list[int]]:
        """See :meth:`Verifier.__call__`."""
        n_acc = 0
        for i, token in enumerate(draft):
            if chain.uniform(SYNTHETIC, pos + i) >= self.probs[i] or token in self._eog:
                break
            chain.accept(token)
            n_acc += 1
        _, emitted = self._verifier(logits, row + n_acc, (), chain, pos + n_acc)
        return n_acc, [*draft[:n_acc], *emitted]
