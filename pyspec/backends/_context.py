"""Owner of a context: evaluation, cache, output rows.

Everything a caller can get wrong is refused before libllama sees it (here, or row by row in the shim); what slips
through to a failed assertion on this thread marks the context *lost*: further calls raise, ``close()`` still frees.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..config import CACHE_TYPES, ContextParams, default_n_threads
from ..errors import ConfigError, InvalidBatchError, NativeError, RollbackError, State, UnsupportedError
from ..types import F32Array, I8Array, I32Array
from . import _binding
from ._context_checks import check_context, check_memory
from ._model import NEXTN_ARCHITECTURES, ModelHandle
from ._ownership import Handle, Native
from ._status import ERR_ABORT, ERR_EXCEPTION, ERR_MEMORY, ERR_NULL, drain_log, last_error, last_log, raise_decode, raise_status
from ._threadpool import ThreadPool

__all__ = ["ContextHandle"]

_U8Array = npt.NDArray[np.uint8]
_ON_DEVICE = 2  # LLAMA_STATE_SEQ_FLAGS_ON_DEVICE


class ContextHandle(Handle):
    """Owner of a ``llama_context``. Holds its model and ``other``. One lock: threads are served one after the other.

    Rows returned by :meth:`logits`, :meth:`nextn`, :meth:`layer_input` and :meth:`sampled_candidates` are *borrowed*
    read-only views of native memory, valid until the next ``decode`` or ``encode`` on this context, or its closing.

    Args:
        model: the model; stays open as long as this is.
        params: sizes and options; the actual sizes are properties (libllama rounds some up).
        other: the target's context, for drafts that share its cache (gemma4-assistant) or its embeddings and head.
        embeddings: every row is an output and its embedding is kept.

    Raises:
        ConfigError, UnsupportedError: options that cannot work, found before the native call.
        NativeError: libllama could not make it (memory, for one); names what failed, nothing is kept.
    """

    def __init__(
        self,
        model: ModelHandle,
        params: ContextParams | None = None,
        other: ContextHandle | None = None,
        embeddings: bool = False,
    ) -> None:
        params = ContextParams() if params is None else params
        model_native = model._open()
        other_native = None if other is None else other._open()
        check_context(model, params, other)
        ffi, lib = _binding.ffi, _binding.lib
        self._ffi, self._lib = ffi, lib
        self.model, self.other, self.params = model, other, params
        self._abort_flag = ffi.new("int *")
        native_params = _native_params(params, embeddings)
        check_memory(model, params, native_params)
        out = ffi.new("pyspec_context **")
        with model_native.lock:
            ptr = model._open().ptr
            other_ptr = ffi.NULL if other is None else other._open().ptr
            rc = lib.pyspec_context_new(ptr, native_params, other_ptr, self._abort_flag, out)
        if rc:
            self._raise_create(rc)
        # the release function keeps the flag alive: the context reads it until it is freed
        flag = self._abort_flag
        parents = (model_native,) if other_native is None else (model_native, other_native)
        self._native = Native("context", out[0], lambda p, _flag=flag: lib.pyspec_context_free(p), parents)

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
        self._shared_memory = model.architecture == "gemma4-assistant"
        self.n_embd_encode, self.n_embd_decode = _input_widths(model, self.is_mtp)

        self._output = lib.pyspec_context_output(out[0])
        self._c_decode, self._c_logits = lib.pyspec_decode, lib.pyspec_logits
        self._row_pointer = ffi.new("float **")
        self._lost: str | None = None
        self._pool: ThreadPool | None = None
        self._n_threads = (int(native_params.n_threads), int(native_params.n_threads_batch))
        self._arrays: tuple[Any, ...] = (None,) * 5
        self._pointers: tuple[Any, ...] = ()
        self._capacity = 0
        self._logits: F32Array | None = None
        self._logits_key: tuple[Any, int] = (None, -1)
        self._nextn: tuple[bool, bool] = (False, False)
        self._nextn_live = False
        self._layers: set[int] = set()
        self._layers_live: frozenset[int] = frozenset()
        self._samplers: set[int] = set()
        self._device_states: dict[int, bytes] = {}
        drain_log()

    def _raise_create(self, rc: int) -> NoReturn:
        reason, log = last_error(), last_log()
        drain_log()
        text = "\n".join(log)
        if "requires ctx_other" in text:
            raise ConfigError(
                f"{self.model.path!r} has no token embeddings or output head of its own: pass the target's context as other"
            )
        what = f"context on {self.model.path!r} (n_ctx={self.params.n_ctx}, n_batch={self.params.n_batch}, n_seq_max={self.params.n_seq_max})"
        if rc == ERR_ABORT:
            reason = f"a native assertion failed: {reason}"
        raise NativeError(f"{what} could not be made: {reason}", func="llama_init_from_model", code=rc, log=log, state="unchanged")

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

    # ---- evaluation ----

    def decode(
        self, tokens: I32Array | None, pos: I32Array, seq: I32Array, output: I8Array, embd: F32Array | None, n: int
    ) -> None:
        """Evaluate the first ``n`` rows of the arrays: one ``llama_decode``, GIL released.

        Args:
            tokens: int32 [>= n], or None for embedding rows.
            pos, seq: int32 [>= n]. output: int8 [>= n], 1 where logits are wanted.
            embd: float32 [>= n, n_embd_decode], or None; with ``tokens`` both are used (MTP).
            n: rows, 1 to n_batch. All arrays C-contiguous, borrowed for the call (their addresses are remembered
                as long as the same arrays are passed).

        Raises:
            InvalidBatchError: refused, nothing changed. ContextFullError: no room, nothing changed.
            DecodeAborted: :meth:`abort` was called; finished micro-batches stay in the cache.
            DecodeFailed, NativeAbortError: see ``state``.
        """
        native = self._native
        if native is None or native.ptr is None or native.pid != os.getpid():
            raise self._closed_error()
        with native.lock:
            ptr = self._ptr()
            a = self._arrays
            if tokens is not a[0] or pos is not a[1] or seq is not a[2] or output is not a[3] or embd is not a[4]:
                self._bind_arrays(tokens, pos, seq, output, embd)
            if n > self._capacity:
                raise InvalidBatchError(f"n is {n}, the arrays have {self._capacity} rows", func="llama_decode", state="unchanged")
            self._logits = None
            p = self._pointers
            pool = self._pool
            if pool is None:
                rc = self._c_decode(ptr, p[0], p[1], p[2], p[3], p[4], n)
            else:
                with pool._open().lock:
                    rc = self._c_decode(ptr, p[0], p[1], p[2], p[3], p[4], n)
            if rc:
                self._decode_failed(rc, "llama_decode", f"decoding {n} rows")
            self._nextn_live = self._nextn[0]
            if self._layers or self._layers_live:
                self._layers_live = frozenset(self._layers)
        if self._lib.pyspec_log_pending:
            drain_log()

    def encode(self, embd: F32Array, n: int) -> None:
        """Run the encoder of a draft model (EAGLE-3, DFlash) on the first ``n`` feature rows: one ``llama_encode``.

        Args:
            embd: float32 [>= n, n_embd_encode], C-contiguous, borrowed for the call.
            n: rows, 1 to n_ubatch.

        Raises:
            UnsupportedError: the model has no encoder. InvalidBatchError: refused. Others as :meth:`decode`.
        """
        if not self.model.has_encoder:
            raise UnsupportedError(f"{self.model.path!r} ({self.model.architecture}) has no encoder")
        native = self._open()
        pointer = self._float_rows(embd, n, self.n_embd_encode, "llama_encode")
        with native.lock:
            ptr = self._ptr()
            self._logits = None
            pool = self._pool
            if pool is None:
                rc = self._lib.pyspec_encode(ptr, pointer, n)
            else:
                with pool._open().lock:
                    rc = self._lib.pyspec_encode(ptr, pointer, n)
            if rc:
                self._decode_failed(rc, "llama_encode", f"encoding {n} rows")
            self._nextn_live = self._nextn[0]
            self._layers_live = frozenset()
        drain_log()

    def _decode_failed(self, rc: int, func: str, what: str) -> NoReturn:
        self._nextn_live = False
        self._layers_live = frozenset()
        if rc in (ERR_ABORT, ERR_EXCEPTION, ERR_MEMORY):
            self._lost = f"{what}: {last_error()}"
        raise_decode(rc, func, what)

    def _bind_arrays(self, tokens: Any, pos: Any, seq: Any, output: Any, embd: Any) -> None:
        """Check the arrays once and remember their addresses; the arrays are kept so that the addresses stay theirs."""
        ffi, capacity, pointers = self._ffi, 2**31 - 1, []
        for name, array, dtype, ctype in (
            ("tokens", tokens, np.int32, "int32_t[]"),
            ("pos", pos, np.int32, "int32_t[]"),
            ("seq", seq, np.int32, "int32_t[]"),
            ("output", output, np.int8, "int8_t[]"),
        ):
            if array is None and name == "tokens":
                pointers.append(ffi.NULL)
                continue
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
                raise InvalidBatchError(
                    f"{name} must be a contiguous {np.dtype(dtype).name} array of one dimension", func="llama_decode", state="unchanged"
                )
            pointers.append(ffi.from_buffer(ctype, array))
            capacity = min(capacity, len(array))
        if embd is None:
            pointers.append(ffi.NULL)
        else:
            pointers.append(self._float_rows(embd, 0, self.n_embd_decode, "llama_decode"))
            capacity = min(capacity, len(embd))
        if tokens is None and embd is None:
            raise InvalidBatchError("a batch needs tokens or embeddings", func="llama_decode", state="unchanged")
        self._arrays, self._pointers, self._capacity = (tokens, pos, seq, output, embd), tuple(pointers), capacity

    def _float_rows(self, array: Any, n: int, width: int, func: str) -> Any:
        if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.ndim != 2 or not array.flags.c_contiguous:
            raise InvalidBatchError("embd must be a contiguous float32 array of two dimensions", func=func, state="unchanged")
        if array.shape[1] != width:
            raise InvalidBatchError(f"embd rows have {array.shape[1]} values, this context takes {width}", func=func, state="unchanged")
        if n > len(array):
            raise InvalidBatchError(f"n is {n}, embd has {len(array)} rows", func=func, state="unchanged")
        return self._ffi.from_buffer("float[]", array)

    # ---- output rows ----

    @property
    def n_outputs(self) -> int:
        """Rows of logits of the last successful decode; 0 after a failed one."""
        with self._open().lock:
            self._ptr()
            return int(self._output.n_outputs)

    def logits(self) -> F32Array:
        """Logits of the last decode, in the order of its output rows.

        Returns:
            float32 [n_outputs, n_vocab], C-contiguous, borrowed, read-only.

        Raises:
            UnsupportedError: an output row was sampled on the device (see :meth:`set_backend_sampler`).
        """
        native = self._native
        if native is None or native.ptr is None or native.pid != os.getpid():
            raise self._closed_error()
        with native.lock:
            ptr = self._ptr()
            view = self._logits
            if view is not None:
                return view
            output = self._output
            n = output.n_outputs
            if n == 0:
                return np.empty((0, self.n_vocab), np.float32)
            if output.n_unsampled != n:
                raise UnsupportedError("rows of sequences with a backend sampler have no logits; use sampled_candidates")
            rc = self._c_logits(ptr, self._row_pointer)
            if rc:
                self._fail(rc, "llama_get_logits", "reading logits")
            pointer = self._row_pointer[0]
            if self._logits_key == (pointer, n):
                view = self._logits_view
            else:
                view = self._view(pointer, n, self.n_vocab)
                self._logits_key, self._logits_view = (pointer, n), view
            self._logits = view
            return view

    def _view(self, pointer: Any, n_rows: int, width: int) -> F32Array:
        rows = np.frombuffer(self._ffi.buffer(pointer, 4 * n_rows * width), np.float32).reshape(n_rows, width)
        rows.flags.writeable = False
        return rows

    def nextn(self, n_rows: int) -> F32Array:
        """Nextn (pre-norm hidden) rows of the last decode or encode.

        Returns:
            float32 [n_rows, n_embd_out], borrowed, read-only: the first rows of the batch (unmasked) or of its output
            rows (masked).

        Raises:
            NativeError: not enabled before that call, or it failed. ConfigError: more rows than it had.
        """
        with self._open().lock:
            ptr = self._ptr()
            if not self._nextn_live:
                raise NativeError("no nextn rows: enable them (embeddings_nextn), then decode", func="llama_get_embeddings_nextn", state="unchanged")
            masked = self._nextn[1]
            n_outputs, n_batch_rows = int(self._output.n_outputs), int(self._output.n_rows)
            if masked and self.is_mtp and n_outputs != n_batch_rows:
                raise NativeError(
                    f"nextn rows of an MTP pass are wrong when only some rows are outputs ({n_outputs} of {n_batch_rows})",
                    func="llama_get_embeddings_nextn", state="unchanged",
                )  # fmt: skip
            self._check_rows(n_rows, n_outputs if masked else n_batch_rows)
            rc = self._lib.pyspec_nextn(ptr, self._row_pointer)
            if rc:
                self._fail(rc, "llama_get_embeddings_nextn", "reading nextn rows", "unchanged")
            return self._view(self._row_pointer[0], n_rows, self.model.n_embd_out)

    def layer_input(self, layer: int, n_rows: int) -> F32Array:
        """Input rows of a layer in the last decode.

        Returns:
            float32 [n_rows, n_embd], the first rows of the batch, borrowed, read-only.

        Raises:
            NativeError: the layer was not enabled before that decode, or it failed. ConfigError: more rows than it had.
        """
        with self._open().lock:
            ptr = self._ptr()
            if layer not in self._layers_live:
                raise NativeError(
                    f"no input rows of layer {layer}: enable it (layer_inputs_enable), then decode",
                    func="llama_get_embeddings_layer_inp", state="unchanged",
                )  # fmt: skip
            self._check_rows(n_rows, int(self._output.n_rows))
            rc = self._lib.pyspec_layer_input(ptr, layer, self._row_pointer)
            if rc:
                self._fail(rc, "llama_get_embeddings_layer_inp", f"reading the inputs of layer {layer}")
            return self._view(self._row_pointer[0], n_rows, self.model.n_embd)

    def _check_rows(self, n_rows: int, limit: int) -> None:
        if not 0 <= n_rows <= limit:
            raise ConfigError(f"{n_rows} rows asked for, the last batch has {limit}")

    # ---- what is computed ----

    def embeddings_nextn(self, value: bool, masked: bool) -> None:
        """Keep nextn rows from the next decode on: of every row, or (``masked``) of output rows.

        Raises:
            UnsupportedError: the architecture has none (libllama would give rows of zeros).
        """
        if value and self.model.architecture not in NEXTN_ARCHITECTURES:
            raise UnsupportedError(f"architecture {self.model.architecture!r} does not hand out nextn rows")
        with self._open().lock:
            rc = self._lib.pyspec_set_nextn(self._ptr(), value, masked)
            if rc:
                self._fail(rc, "llama_set_embeddings_nextn", "enabling nextn rows")
            self._nextn = (value, masked)
            self._nextn_live = False

    def layer_inputs_enable(self, layer: int, value: bool) -> None:
        """Keep the input rows of a layer from the next decode on.

        Enabling builds a one-row graph first, to see whether the architecture hands this layer out. Layer ``n_layer``
        is the last layer's output; few architectures have it (use :meth:`nextn`).

        Raises:
            ConfigError: no such layer. UnsupportedError: the architecture does not hand it out; nothing changed.
        """
        if not 0 <= layer <= self.model.n_layer:
            raise ConfigError(f"layer {layer} is not in [0, {self.model.n_layer}]")
        with self._open().lock:
            ptr = self._ptr()
            rc = self._lib.pyspec_set_layer_input(ptr, layer, value)
            if rc == ERR_NULL:
                drain_log()
                raise UnsupportedError(
                    f"architecture {self.model.architecture!r} does not hand out the input rows of layer {layer} (of {self.model.n_layer})"
                )
            if rc:
                self._fail(rc, "llama_set_embeddings_layer_inp", f"layer inputs of layer {layer}")
            (self._layers.add if value else self._layers.discard)(layer)
            self._logits = None
        drain_log()

    def nextn_layer_offset(self, offset: int) -> None:
        """Which MTP block the next decodes run, 0 to n_layer_nextn - 1. Only for MTP contexts."""
        if not self.is_mtp:
            raise ConfigError("nextn_layer_offset is for contexts of ctx_type 'mtp'")
        if not 0 <= offset < self.model.n_layer_nextn:
            raise ConfigError(f"MTP block {offset} is not in [0, {self.model.n_layer_nextn})")
        with self._open().lock:
            rc = self._lib.pyspec_set_nextn_layer_offset(self._ptr(), offset)
            if rc:
                self._fail(rc, "llama_set_nextn_layer_offset", f"MTP block {offset}")

    def causal_attn(self, value: bool) -> None:
        """Causal attention (the default) or full attention within a batch, then of at most n_ubatch rows."""
        with self._open().lock:
            rc = self._lib.pyspec_set_causal_attn(self._ptr(), value)
            if rc:
                self._fail(rc, "llama_set_causal_attn", "causal attention")

    # ---- cache ----

    def seq_rm(self, seq: int, p0: int, p1: int = -1) -> bool:
        """Forget positions [p0, p1) of a sequence; negative: from the start, to the end.

        Returns:
            False if this cache cannot (recurrent state, too few snapshots, sliding window overwritten); unchanged then.
        """
        self._seq(seq)
        removed = self._ffi.new("bool *")
        with self._open().lock:
            rc = self._lib.pyspec_seq_rm(self._ptr(), seq, p0, p1, removed)
            if rc:
                self._fail(rc, "llama_memory_seq_rm", f"seq_rm({seq}, {p0}, {p1})")
        drain_log()
        return bool(removed[0])

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let ``dst`` see the positions [p0, p1) of ``src`` too.

        Raises:
            UnsupportedError: part of a sequence without ``kv_unified``, or memory that belongs to the target.
        """
        self._seq(src)
        self._seq(dst)
        self._own_memory("seq_cp")
        if not self.params.kv_unified and (p0 > 0 or p1 >= 0) and src != dst:
            raise UnsupportedError("copying part of a sequence needs kv_unified=True")
        with self._open().lock:
            rc = self._lib.pyspec_seq_cp(self._ptr(), src, dst, p0, p1)
            if rc:
                self._fail(rc, "llama_memory_seq_cp", f"seq_cp({src}, {dst}, {p0}, {p1})")
        drain_log()

    def seq_keep(self, seq: int) -> None:
        """Forget every sequence but one (without ``kv_unified`` libllama looks at that one's own cells only)."""
        self._seq(seq)
        self._own_memory("seq_keep")
        with self._open().lock:
            rc = self._lib.pyspec_seq_keep(self._ptr(), seq)
            if rc:
                self._fail(rc, "llama_memory_seq_keep", f"seq_keep({seq})")

    def memory_clear(self) -> None:
        """Forget everything.

        Raises:
            UnsupportedError: the memory belongs to the target's context, which libllama would clear.
        """
        self._own_memory("memory_clear")
        with self._open().lock:
            rc = self._lib.pyspec_memory_clear(self._ptr())
            if rc:
                self._fail(rc, "llama_memory_clear", "memory_clear")

    def _own_memory(self, what: str) -> None:
        if self._shared_memory:
            raise UnsupportedError(f"{what}: this draft uses the target's cache; act on the target's context")

    def seq_pos_min(self, seq: int) -> int:
        """Smallest position in the cache, -1 if empty; above 0 once a sliding window moved on."""
        return self._seq_pos(seq)[0]

    def seq_pos_max(self, seq: int) -> int:
        """Largest position in the cache, -1 if empty."""
        return self._seq_pos(seq)[1]

    def _seq_pos(self, seq: int) -> tuple[int, int]:
        self._seq(seq)
        low, high = self._ffi.new("int32_t *"), self._ffi.new("int32_t *")
        with self._open().lock:
            rc = self._lib.pyspec_seq_pos(self._ptr(), seq, low, high)
            if rc:
                self._fail(rc, "llama_memory_seq_pos_min", f"positions of sequence {seq}")
        return int(low[0]), int(high[0])

    def state_seq_get(self, seq: int, flags: int = 0) -> _U8Array:
        """The state of one sequence.

        Args:
            seq: sequence id.
            flags: llama.h's: 1 only what cannot be recomputed (sliding window, recurrent), 2 keep it on the device.

        Returns:
            uint8 [n], owned by the caller. With flag 2 the next such call for ``seq`` makes it void.
        """
        self._seq(seq)
        self._own_memory("state_seq_get")
        size, n = self._ffi.new("uint64_t *"), self._ffi.new("uint64_t *")
        with self._open().lock:
            ptr = self._ptr()
            rc = self._lib.pyspec_state_seq_size(ptr, seq, flags, size)
            if rc:
                self._fail(rc, "llama_state_seq_get_size_ext", f"state of sequence {seq}", "unchanged")
            out = np.empty(int(size[0]), np.uint8)
            rc = self._lib.pyspec_state_seq_get(ptr, seq, flags, self._ffi.from_buffer("uint8_t[]", out), len(out), n)
            if rc:
                self._fail(rc, "llama_state_seq_get_data_ext", f"state of sequence {seq}", "unchanged")
            if flags & _ON_DEVICE:
                self._device_states[seq] = out[: n[0]].tobytes()
        return out[: int(n[0])]

    def state_seq_set(self, seq: int, data: Any, flags: int = 0) -> None:
        """Put back a state of :meth:`state_seq_get` with the same flags, into any sequence.

        Raises:
            RollbackError: the data does not fit this context, or (flag 2) is not the last state taken of its sequence.
                The sequence's cache is then undefined: remove it.
        """
        self._seq(seq)
        self._own_memory("state_seq_set")
        view = np.frombuffer(data, np.uint8)
        n = self._ffi.new("uint64_t *")
        with self._open().lock:
            ptr = self._ptr()
            if flags & _ON_DEVICE and view.tobytes() not in self._device_states.values():
                raise RollbackError(f"sequence {seq}: this is not the last on-device state of its sequence")
            rc = self._lib.pyspec_state_seq_set(ptr, seq, flags, self._ffi.from_buffer("uint8_t[]", view), len(view), n)
            if rc == ERR_ABORT:
                self._fail(rc, "llama_state_seq_set_data_ext", f"state of sequence {seq}")
            if rc:
                log = last_log()
                drain_log()
                raise RollbackError("\n  ".join((f"sequence {seq}: the state ({len(view)} bytes) cannot be put back", *log)))
        drain_log()

    # ---- sampling on the device ----

    def set_backend_sampler(self, seq: int, top_k: int | None) -> bool:
        """Let the device keep only the ``top_k`` best candidates of this sequence's output rows; None: off.

        Returns:
            True if the backend does it; False leaves the sequence without one (read :meth:`logits` then).
        """
        self._seq(seq)
        if top_k is not None and not 1 <= top_k <= self.n_vocab:
            raise ConfigError(f"top_k must be between 1 and n_vocab ({self.n_vocab}), got {top_k}")
        taken = self._ffi.new("bool *")
        with self._open().lock:
            rc = self._lib.pyspec_set_top_k(self._ptr(), seq, top_k or 0, taken)
            if rc:
                self._fail(rc, "llama_set_sampler", f"sampler of sequence {seq}")
        drain_log()
        return bool(taken[0])

    def sampled_candidates(self, i: int) -> tuple[I32Array, F32Array] | None:
        """Candidates of row ``i`` of the last batch: ids and their logits (probabilities if there are no logits).

        Returns:
            (int32 [k], float32 [k]), borrowed, read-only, in no particular order; None if the row was not sampled on
            the device.
        """
        ffi = self._ffi
        ids, logits, probs = ffi.new("int32_t **"), ffi.new("float **"), ffi.new("float **")
        n = ffi.new("int32_t *")
        with self._open().lock:
            ptr = self._ptr()
            if not 0 <= i < int(self._output.n_rows):
                raise ConfigError(f"row {i} is not in [0, {int(self._output.n_rows)})")
            rc = self._lib.pyspec_sampled(ptr, i, ids, logits, probs, n)
            if rc:
                self._fail(rc, "llama_get_sampled_candidates_ith", f"candidates of row {i}")
            values = logits[0] if logits[0] != ffi.NULL else probs[0]
            if n[0] == 0 or values == ffi.NULL:
                return None
            id_view = np.frombuffer(ffi.buffer(ids[0], 4 * n[0]), np.int32)
            id_view.flags.writeable = False
            return id_view, self._view(values, 1, int(n[0]))[0]

    # ---- threads, abort, memory ----

    def set_n_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """Threads for one-row passes and for larger ones; at most those of an attached pool are used."""
        for name, value in (("n_threads", n_threads), ("n_threads_batch", n_threads_batch)):
            if not 1 <= value <= 512:
                raise ConfigError(f"{name} must be between 1 and 512, got {value}")
        with self._open().lock:
            self._n_threads = (n_threads, n_threads_batch)
            self._apply_threads()

    def _apply_threads(self) -> None:
        # ggml would cap and log a warning on every pass
        limit = 512 if self._pool is None else self._pool.n_threads
        rc = self._lib.pyspec_set_n_threads(self._ptr(), *(min(n, limit) for n in self._n_threads))
        if rc:
            self._fail(rc, "llama_set_n_threads", "threads")

    def attach_threadpool(self, pool: ThreadPool | None) -> None:
        """Compute with these threads instead of new ones for every pass; None: detach."""
        pool_native = None if pool is None else pool._open()
        with self._open().lock:
            ptr = self._ptr()
            rc = self._lib.pyspec_attach_threadpool(ptr, self._ffi.NULL if pool_native is None else pool_native.ptr)
            if rc:
                self._fail(rc, "llama_attach_threadpool", "thread pool")
            if self._pool is not None:
                self._pool._users.pop(id(self), None)
            self._pool = pool
            if pool is not None:
                pool._users[id(self)] = self
            self._apply_threads()

    def abort(self) -> None:
        """Stop the running or next decode between two graph nodes. Any thread, signal handlers too; takes no lock."""
        self._abort_flag[0] = 1

    def abort_clear(self) -> None:
        """Allow decoding again after :meth:`abort`."""
        self._abort_flag[0] = 0

    def memory_bytes(self) -> dict[str, int]:
        """Bytes on all devices: "model" (its weights), "context" (cache), "compute" (work buffers)."""
        out = self._ffi.new("struct pyspec_memory *")
        with self._open().lock:
            rc = self._lib.pyspec_memory_breakdown(self._ptr(), out)
            if rc:
                self._fail(rc, "llama_get_memory_breakdown", "memory breakdown", "unchanged")
        return {"model": int(out.model), "context": int(out.context), "compute": int(out.compute)}


def _native_params(params: ContextParams, embeddings: bool) -> Any:
    ffi, lib = _binding.ffi, _binding.lib
    p = ffi.new("struct llama_context_params *", lib.llama_context_default_params())
    for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "rope_freq_base", "rope_freq_scale",
                 "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx",
                 "offload_kqv", "op_offload", "swa_full", "kv_unified"):  # fmt: skip
        setattr(p, name, getattr(params, name))
    n_threads = params.n_threads or default_n_threads()
    p.n_threads = n_threads
    p.n_threads_batch = params.n_threads_batch or n_threads
    # only sets the size of device-side sampling
    p.n_outputs_max_per_seq = max(1, params.n_outputs_max // params.n_seq_max)
    p.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP if params.ctx_type == "mtp" else lib.LLAMA_CONTEXT_TYPE_DEFAULT
    p.flash_attn_type = params.flash_attn_code
    p.type_k = CACHE_TYPES[params.cache_type_k]
    p.type_v = CACHE_TYPES[params.cache_type_v]
    p.embeddings = embeddings
    p.no_perf = True
    return p


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
