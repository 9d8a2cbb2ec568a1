"""Models, contexts and what the engine needs to run them. ``Evaluator`` is the border to drafters and engine."""

from __future__ import annotations

from .batch import ALL, LAST, NONE, Batch
from .cache import Rollback
from .context import Context
from .evaluator import Evaluator
from .model import Model
from .sequence import Piece, Sequence
from .text import TextStream
from .vocab import Vocab

__all__ = [
    "ALL",
    "LAST",
    "NONE",
    "Batch",
    "Context",
    "Evaluator",
    "Model",
    "Piece",
    "Rollback",
    "Sequence",
    "TextStream",
    "Vocab",
]
