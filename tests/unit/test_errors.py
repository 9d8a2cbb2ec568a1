"""The tree of exceptions: bases a caller expects, and what a native error carries."""

from __future__ import annotations

import inspect
import pickle

import pytest

from pyspec import errors
from pyspec.errors import (
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

TREE: dict[type[Exception], tuple[type[Exception], ...]] = {
    ConfigError: (PyspecError, ValueError),
    VocabMismatchError: (ConfigError,),
    GrammarError: (ConfigError,),
    BackendNotFoundError: (BackendError, LookupError),
    BackendLoadError: (BackendError, OSError),
    AbiMismatchError: (BackendError,),
    UnsupportedError: (BackendError, NotImplementedError),
    BackendError: (PyspecError,),
    ModelLoadError: (PyspecError, OSError),
    DoesNotFitError: (ModelLoadError,),
    DataFileError: (PyspecError, OSError),
    ClosedError: (PyspecError, ValueError),
    NativeError: (PyspecError, RuntimeError),
    InvalidBatchError: (NativeError,),
    ContextFullError: (NativeError,),
    DecodeAborted: (NativeError,),
    DecodeFailed: (NativeError,),
    NativeAbortError: (NativeError,),
    RollbackError: (PyspecError, RuntimeError),
    SamplingError: (PyspecError, ValueError),
}


@pytest.mark.parametrize("cls", TREE, ids=lambda c: c.__name__)
def test_bases(cls: type[Exception]) -> None:
    for base in TREE[cls]:
        assert issubclass(cls, base)


def test_all_in_one_tree() -> None:
    found = {c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)}
    assert found == {*TREE, PyspecError}


@pytest.mark.parametrize("cls", [c for c in TREE if not issubclass(c, NativeError)], ids=lambda c: c.__name__)
def test_message_is_kept(cls: type[Exception]) -> None:
    """OSError gives arguments meanings of its own; one argument stays a message."""
    assert str(cls("n_ctx must be >= 8, got 3")) == "n_ctx must be >= 8, got 3"
    assert str(pickle.loads(pickle.dumps(cls("lost")))) == "lost"


@pytest.mark.parametrize("cls", [c for c in TREE if issubclass(c, NativeError)], ids=lambda c: c.__name__)
def test_native_errors(cls: type[NativeError]) -> None:
    error = cls("decode failed", func="llama_decode", code=-3, log=("a", "b"), state="partial")
    assert (error.func, error.code, error.log, error.state) == ("llama_decode", -3, ("a", "b"), "partial")
    assert str(error) == "decode failed\nnative log:\n  a\n  b"
    plain = cls("decode failed")
    assert (plain.func, plain.code, plain.log, plain.state) == ("", None, (), "lost")
    assert str(plain) == "decode failed"
