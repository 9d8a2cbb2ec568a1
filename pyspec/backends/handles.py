"""The owner classes of native objects, one a file: ownership rules in ``_ownership``."""

from __future__ import annotations

from ._context import ContextHandle
from ._context_base import context_memory
from ._lora import LoraHandle
from ._model import ModelHandle
from ._ownership import Handle
from ._quantize import quantize
from ._threadpool import ThreadPool

__all__ = ["ContextHandle", "Handle", "LoraHandle", "ModelHandle", "ThreadPool", "context_memory", "quantize"]
