"""From logits to tokens, and which of a draft's tokens stand."""

from __future__ import annotations

from .._sample import Scratch
from .breakers import Breakers, VocabLike, make_breakers
from .chain import Candidates, SamplerChain
from .constraint import Constraint, Mask
from .logprobs import Logprobs
from .synthetic import SyntheticVerifier, synthetic_rates
from .verify import Q, Verifier

__all__ = [
    "Breakers",
    "Candidates",
    "Constraint",
    "Logprobs",
    "Mask",
    "Q",
    "SamplerChain",
    "Scratch",
    "SyntheticVerifier",
    "Verifier",
    "VocabLike",
    "make_breakers",
    "synthetic_rates",
]
