"""libllama's own samplers through ctypes, from the library that pyspec brings: what ours are compared with."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pyspec
from pyspec import _sample as S
from pyspec import backends

#: ``llama_token_data``
TOKEN = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])

_F, _I, _U, _N, _P = ctypes.c_float, ctypes.c_int32, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p

_INIT: dict[str, list[Any]] = {
    "greedy": [],
    "dist": [_U],
    "top_k": [_I],
    "top_p": [_F, _N],
    "min_p": [_F, _N],
    "typical": [_F, _N],
    "temp": [_F],
    "temp_ext": [_F, _F, _F],
    "xtc": [_F, _F, _N, _U],
    "top_n_sigma": [_F],
    "mirostat": [_I, _U, _F, _F, _I],
    "mirostat_v2": [_U, _F, _F],
    "penalties": [_I, _I, _F, _F, _F],
    "dry": [_P, _F, _F, _I, _I, _P, _N],
}


class _Array(ctypes.Structure):
    _fields_ = (("data", _P), ("size", _N), ("selected", ctypes.c_int64), ("sorted", ctypes.c_bool))


class _ChainParams(ctypes.Structure):
    _fields_ = (("no_perf", ctypes.c_bool),)


def _library() -> ctypes.CDLL:
    backends.load()
    found = [p for p in (Path(pyspec.__file__).parent / "backends" / "lib").iterdir() if "pyspec-llama" in p.name]
    # pyspec has loaded it, with what it needs
    lib = ctypes.CDLL(str(found[0]))
    for name, types in _INIT.items():
        init = getattr(lib, f"llama_sampler_init_{name}")
        init.argtypes, init.restype = types, _P
    lib.llama_sampler_chain_init.argtypes, lib.llama_sampler_chain_init.restype = [_ChainParams], _P
    lib.llama_sampler_chain_add.argtypes, lib.llama_sampler_chain_add.restype = [_P, _P], None
    lib.llama_sampler_accept.argtypes, lib.llama_sampler_accept.restype = [_P, _I], None
    lib.llama_sampler_apply.argtypes, lib.llama_sampler_apply.restype = [_P, _P], None
    lib.llama_sampler_free.argtypes, lib.llama_sampler_free.restype = [_P], None
    return lib


class LibChain:
    """A chain of libllama's samplers over one vocabulary; ``array`` is its list of candidates.

    Args:
        samplers: (name, arguments ...) as ``llama_sampler_init_<name>`` takes them.
    """

    def __init__(self, n_vocab: int, samplers: Sequence[tuple[Any, ...]]) -> None:
        self._lib = _library()
        self.n_vocab = n_vocab
        self.data = np.zeros(n_vocab, TOKEN)
        self.array = _Array()
        self._chain = self._lib.llama_sampler_chain_init(_ChainParams(True))
        for name, *arguments in samplers:
            self._lib.llama_sampler_chain_add(self._chain, getattr(self._lib, f"llama_sampler_init_{name}")(*arguments))

    def fill(self, logits: Any) -> None:
        """What ``llama_sampler_sample`` does first: a list of all tokens."""
        self.data["id"] = np.arange(self.n_vocab, dtype=np.int32)
        self.data["logit"] = logits
        self.reset()

    def reset(self) -> None:
        """The list in ``data`` is whole again."""
        self.array.data, self.array.size = self.data.ctypes.data, self.n_vocab
        self.array.selected, self.array.sorted = -1, False

    def put_back(self, ready: Any) -> None:
        """Copy a list of all tokens into ``data``."""
        ctypes.memmove(self.data.ctypes.data, ready.ctypes.data, self.data.nbytes)
        self.reset()

    def apply(self) -> None:
        """Run the chain over the list."""
        self._lib.llama_sampler_apply(self._chain, ctypes.byref(self.array))

    def accept(self, token: int) -> None:
        self._lib.llama_sampler_accept(self._chain, token)

    def candidates(self) -> tuple[Any, Any]:
        """Ids and logits that are left, without those at -inf."""
        at = (self.array.data - self.data.ctypes.data) // TOKEN.itemsize
        left = self.data[at : at + self.array.size]
        left = left[left["logit"] > -np.inf]
        return left["id"].copy(), left["logit"].copy()

    @property
    def selected(self) -> int:
        at = (self.array.data - self.data.ctypes.data) // TOKEN.itemsize
        return int(self.data["id"][at + self.array.selected])

    def close(self) -> None:
        self._lib.llama_sampler_free(self._chain)


def as_lib(step: tuple[Any, ...], n_vocab: int, penalty_last_n: int, dry_last_n: int) -> tuple[Any, ...]:
    """A step of ``_sample.Sampler`` as one of libllama's. XTC: always acts. mirostat: with any seed."""
    code, *a = step
    return {
        S.PENALTIES: lambda: ("penalties", n_vocab, penalty_last_n, *a),
        S.DRY: lambda: ("dry", None, a[0], a[1], a[2], dry_last_n, None, 0),
        S.TOP_N_SIGMA: lambda: ("top_n_sigma", a[0]),
        S.TOP_K: lambda: ("top_k", a[0]),
        S.TYPICAL_P: lambda: ("typical", a[0], a[1]),
        S.TOP_P: lambda: ("top_p", a[0], a[1]),
        S.MIN_P: lambda: ("min_p", a[0], a[1]),
        S.XTC: lambda: ("xtc", 1.0, a[1], a[2], 1),
        S.TEMPERATURE: lambda: ("temp", a[0]),
        S.DYNATEMP: lambda: ("temp_ext", *a),
        S.MIROSTAT: lambda: ("mirostat", n_vocab, 1, a[0], a[1], 100),
        S.MIROSTAT2: lambda: ("mirostat_v2", 1, a[0], a[1]),
    }[code]()
