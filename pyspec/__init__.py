"""Speculative decoding for GGUF models: a draft proposes tokens, the target checks them in one pass.

Importing pyspec opens no native library, starts no thread and prints nothing; that happens at first use.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .config import ContextParams, ModelParams, SamplingParams, SpeculationParams
from .errors import (
    AbiMismatchError,
    BackendError,
    BackendLoadError,
    BackendNotFoundError,
    ClosedError,
    ConfigError,
    ContextFullError,
    DataFileError,
    DecodeAborted,
    DecodeFailed,
    DoesNotFitError,
    GrammarError,
    InvalidBatchError,
    ModelLoadError,
    NativeAbortError,
    NativeError,
    PyspecError,
    RollbackError,
    SamplingError,
    UnsupportedError,
    VocabMismatchError,
)
from .stats import DrafterStats, PhaseTimes, SpecStats

if TYPE_CHECKING:
    from .backends import build_info, devices, quantize
    from .drafters import Drafter
    from .engine import Engine
    from .llm import LLM
    from .results import GenerationResult, Logprob, Piece, TokenLogprob, Usage
    from .runtime import Batch, Context, Evaluator, Model, Vocab

__all__ = [
    "LLM",
    "AbiMismatchError",
    "BackendError",
    "BackendLoadError",
    "BackendNotFoundError",
    "Batch",
    "ClosedError",
    "ConfigError",
    "Context",
    "ContextFullError",
    "ContextParams",
    "DataFileError",
    "DecodeAborted",
    "DecodeFailed",
    "DoesNotFitError",
    "Drafter",
    "DrafterStats",
    "Engine",
    "Evaluator",
    "GenerationResult",
    "GrammarError",
    "InvalidBatchError",
    "Logprob",
    "Model",
    "ModelLoadError",
    "ModelParams",
    "NativeAbortError",
    "NativeError",
    "PhaseTimes",
    "Piece",
    "PyspecError",
    "RollbackError",
    "SamplingError",
    "SamplingParams",
    "SpecStats",
    "SpeculationParams",
    "TokenLogprob",
    "UnsupportedError",
    "Usage",
    "Vocab",
    "VocabMismatchError",
    "__version__",
    "build_info",
    "devices",
    "quantize",
]

# silent until the application configures logging: without this, warnings would reach stderr
logging.getLogger("pyspec").addHandler(logging.NullHandler())

# names that need compiled modules or NumPy work are imported when they are asked for
_LAZY = {
    "LLM": "llm",
    "GenerationResult": "results",
    "Logprob": "results",
    "Piece": "results",
    "TokenLogprob": "results",
    "Usage": "results",
    "Engine": "engine",
    "Drafter": "drafters",
    "Batch": "runtime",
    "Context": "runtime",
    "Evaluator": "runtime",
    "Model": "runtime",
    "Vocab": "runtime",
    "build_info": "backends",
    "devices": "backends",
    "quantize": "backends",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'pyspec' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
