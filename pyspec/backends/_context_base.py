"""Creation and guards of a context; evaluation is in ``_context``, the cache in ``_context_cache``."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, NoReturn

from ..config import CACHE_TYPES, ContextParams, default_n_threads
from ..errors import ConfigError, NativeError, State, UnsupportedError
from . import _binding
from ._attention import check_attention
from ._context_checks import check_context, check_memory
from ._model import ModelHandle, native_model_params
from ._ownership import Handle, Native, creating
from ._select import devices_in_use
from ._status import ERR_ABORT, ERR_EXCEPTION, ERR_MEMORY, drain_log, last_error, last_log, raise_status
from ._threadpool import usable_cpus

if TYPE_CHECKING:
    from ._context_cache import ContextCache

__all__ = ["ContextBase", "context_memory", "native_context_params"]

# options that llama_context_params has under the same name
_SAME_NAME = (
    "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "rope_freq_base", "rope_freq_scale",
    "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx", "offload_kqv",
    "op_offload", "swa_full", "kv_unified",
)  # fmt: skip


class ContextBase(Handle):
    """What the parts of :class:`ContextHandle` share: the native context, actual sizes, the lost flag.

    Attributes:
        skips_logits: a decode without outputs computes no logits, though the architecture has those of all rows in its
            graph. Where libllama lets a GPU help a model on the CPU, it may still do so.
    """

    def __init__(
        self,
        model: ModelHandle,
        params: ContextParams | None = None,
        other: ContextCache | None = None,
        embeddings: bool = False,
    ) -> None:
        params = ContextParams() if params is None else params
        model_native = model._open()
        other_native = None if other is None else other._open()
        check_context(model, params, other)
        check_attention(model, params)
        ffi, lib = _binding.ffi, _binding.lib
        self._ffi, self._lib = ffi, lib
        self.model, self.other, self.params = model, other, params
        self._abort_flag = ffi.new("int *")
        self.n_embd_encode, self.n_embd_decode = _input_widths(model, params.ctx_type == "mtp")
        native_params = native_context_params(params, embeddings)
        check_memory(model, params, native_params)
        out = ffi.new("pyspec_context **")
        # libllama multiplies every row of an EAGLE-3 head with the output matrix, most of which nobody looks at
        self.skips_logits = model.architecture == "eagle3" and not devices_in_use(model.params)
        self._shared_memory = model.architecture == "gemma4-assistant"
        with creating():
            with model_native.lock:
                ptr = model._open().ptr
                other_ptr = ffi.NULL if other is None else other._open().ptr
                rc = lib.pyspec_context_new(ptr, native_params, other_ptr, self.skips_logits, self._abort_flag, out)
            if not rc:
                parents = (model_native,) if other_native is None else (model_native, other_native)
                # a shared cache needs a shared lock
                lock = other_native.lock if other_native is not None and self._shared_memory else None
                # the context reads the flag until it is freed
                release = functools.partial(_free_context, lib, self._abort_flag)
                self._native = Native("context", out[0], release, parents, lock)
                # not self.abort: the native object must not hold its handle
                self._native.interrupt = functools.partial(_raise_flag, self._abort_flag)
        if rc:
            self._raise_create(rc)

        info = ffi.new("struct pyspec_context_info *")
        lib.pyspec_get_context_info(out[0], info)
        self.n_ctx = int(info.n_ctx)
        self.n_ctx_seq = int(info.n_ctx_seq)
        self.n_batch = int(info.n_batch)
        self.n_ubatch = int(info.n_ubatch)
        self.n_seq_max = int(info.n_seq_max)
        self.n_rs_seq = int(info.n_rs_seq)
        self.n_outputs_max = int(info.n_outputs_max)
        self.n_vocab = model.n_vocab
        self.is_mtp = params.ctx_type == "mtp"
        self._lost: str | None = None
        self._n_threads = (int(native_params.n_threads), int(native_params.n_threads_batch))
        self._device_states: dict[int, bytes] = {}
        # output arguments of frequent calls, used under the lock
        self._out_bool = ffi.new("bool *")
        self._out_pos = (ffi.new("int32_t *"), ffi.new("int32_t *"))
        drain_log()

    def _raise_create(self, rc: int) -> NoReturn:
        reason, log = last_error(), last_log()
        drain_log()
        path, p = self.model.path, self.params
        if any("requires ctx_other" in line for line in log):
            raise ConfigError(
                f"{path!r} has no token embeddings or output head of its own: pass the target's context as other"
            )
        refused = next((line for line in log if "cache type" in line or "V cache" in line), None)
        if refused is not None:
            types = f"cache_type_k={p.cache_type_k!r}, cache_type_v={p.cache_type_v!r}"
            raise UnsupportedError(f"{path!r} cannot be run with {types}: {refused.strip()}")
        what = f"context on {path!r} (n_ctx={p.n_ctx}, n_batch={p.n_batch}, n_seq_max={p.n_seq_max})"
        if rc == ERR_ABORT:
            reason = f"a native assertion failed: {reason}"
        message = f"{what} could not be made: {reason}"
        raise NativeError(message, func="llama_init_from_model", code=rc, log=log, state="unchanged")

    def __repr__(self) -> str:
        state = " closed" if self.closed else " lost" if self._lost else ""
        return f"<ContextHandle n_ctx={self.n_ctx} n_seq_max={self.n_seq_max} of {self.model.path!r}{state}>"

    # ---- guards ----

    def _ptr(self) -> Any:
        """Pointer for a call under the lock.

        Raises:
            ClosedError: closed. NativeError: lost.
        """
        native = self._native
        if native is None or native.ptr is None:
            raise self._closed_error()
        if self._lost is not None:
            raise NativeError(f"this context is lost; close it. It failed with: {self._lost}", state="lost")
        return native.ptr

    def _fail(self, rc: int, func: str, what: str, state: State = "lost") -> NoReturn:
        """Raise for a failed wrapper call and mark the context if it can no longer be trusted."""
        if rc == ERR_ABORT or (state == "lost" and rc in (ERR_EXCEPTION, ERR_MEMORY)):
            self._lost = f"{what}: {last_error()}"
        raise_status(rc, func, what, state)

    def _seq(self, seq: int) -> int:
        if not 0 <= seq < self.n_seq_max:
            raise ConfigError(f"sequence {seq} is not in [0, {self.n_seq_max}) (n_seq_max)")
        return seq

    @property
    def lost(self) -> bool:
        """A native assertion failed here: only ``close()`` is left."""
        return self._lost is not None


def _free_context(lib: Any, _abort_flag: Any, ptr: Any) -> None:
    lib.pyspec_context_free(ptr)


def _raise_flag(abort_flag: Any) -> None:
    abort_flag[0] = 1


def native_context_params(params: ContextParams, embeddings: bool) -> Any:
    """``llama_context_params`` for the options."""
    ffi, lib = _binding.ffi, _binding.lib
    p = ffi.new("struct llama_context_params *", lib.llama_context_default_params())
    for name in _SAME_NAME:
        setattr(p, name, getattr(params, name))
    n_threads = params.n_threads or default_n_threads()
    p.n_threads = min(n_threads, usable_cpus())
    p.n_threads_batch = min(params.n_threads_batch or n_threads, usable_cpus())
    # only sets the size of device-side sampling
    p.n_outputs_max_per_seq = max(1, params.n_outputs_max // params.n_seq_max)
    p.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP if params.ctx_type == "mtp" else lib.LLAMA_CONTEXT_TYPE_DEFAULT
    p.flash_attn_type = params.flash_attn_code
    p.type_k = CACHE_TYPES[params.cache_type_k]
    p.type_v = CACHE_TYPES[params.cache_type_v]
    p.embeddings = embeddings
    p.no_perf = True
    return p


def context_memory(model: ModelHandle, params: ContextParams) -> dict[str, int]:
    """What a context would take: libllama computes the sizes and allocates nothing.

    Returns:
        Bytes on all devices: "context" (cache), "compute" (work buffers).

    Raises:
        ConfigError, UnsupportedError: no such context can be made. NativeError: libllama refuses it.
    """
    check_context(model, params, None)
    check_attention(model, params)
    out = _binding.ffi.new("struct pyspec_memory *")
    model_params = native_model_params(model.params)
    path = os.fsencode(model.path)
    rc = _binding.lib.pyspec_context_memory(path, model_params.params, native_context_params(params, False), out)
    if rc:
        reason = last_error()
        drain_log()
        raise NativeError(
            f"context on {model.path!r}: {reason}", func="llama_init_from_model", code=rc, state="unchanged"
        )
    drain_log()
    return {"context": int(out.context), "compute": int(out.compute)}


def _input_widths(model: ModelHandle, is_mtp: bool) -> tuple[int, int]:
    """Width of embedding rows for encode and decode; libllama checks neither (``llama_batch_compat``)."""
    encode = model.n_embd_inp
    if model.architecture == "eagle3":
        encode = len(model.target_layer_ids) * int(model.metadata()["eagle3.target_hidden_size"])
    elif model.architecture == "dflash":
        encode = len(model.target_layer_ids) * model.n_embd
    if is_mtp:
        return encode, model.n_embd_out
    return encode, encode if model.architecture == "dflash" else model.n_embd_inp
