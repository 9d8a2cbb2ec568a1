"""From logits to tokens, and which of a draft's tokens stand."""

from __future__ import annotations

from .._sample import Scratch
from .breakers import Breakers, VocabLike, make_breakers
from .chain import Candidates, SamplerChain
from .constraint import Constraint, Mask
from .grammar import GrammarConstraint, Grammars
from .logprobs import LogprobRows, Logprobs, processed_logprobs
from .synthetic import SyntheticVerifier, synthetic_rates
from .verify import Q, Verifier

__all__ = [
    "Breakers",
    "Candidates",
    "Constraint",
    "GrammarConstraint",
    "Grammars",
    "LogprobRows",
    "Logprobs",
    "Mask",
    "Q",
    "SamplerChain",
    "Scratch",
    "SyntheticVerifier",
    "Verifier",
    "VocabLike",
    "make_breakers",
    "processed_logprobs",
    "synthetic_rates",
]
