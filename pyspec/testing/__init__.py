"""For tests of your own drafters: a target without a model, and the proof that a drafter never changes the output.

:func:`assert_exact` runs a drafter through the real loop on every kind of memory and compares with plain decoding.
"""

from __future__ import annotations

from .exact import ExactReport, assert_exact
from .fakes import MEMORY, FakeEvaluator, Rule

__all__ = ["MEMORY", "ExactReport", "FakeEvaluator", "Rule", "assert_exact"]
