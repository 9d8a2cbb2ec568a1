"""From logits to tokens, and which of a draft's tokens stand."""

from __future__ import annotations

from .logprobs import Logprobs
from .synthetic import SyntheticVerifier, synthetic_rates
from .verify import Verifier

__all__ = ["Logprobs", "SyntheticVerifier", "Verifier", "synthetic_rates"]
