"""From logits to tokens, and which of a draft's tokens stand."""

from __future__ import annotations

from .verify import Verifier

__all__ = ["Verifier"]
