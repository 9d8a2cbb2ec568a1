"""Owner of a context: evaluation and output rows (cache operations: ``_context_cache``; creation: ``_context_base``).

Everything a caller can get wrong is refused before libllama sees it (here, or row by row in the shim); what slips
through to a failed assertion on this thread marks the context *lost*: further calls raise, ``close()`` still frees.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ..config import ContextParams
from ..errors import ConfigError, InvalidBatchError, NativeError, UnsupportedError
from ..types import F32Array, I8Array, I32Array
from ._context_cache import ContextCache
from ._lora import LoraHandle
from ._model import NEXTN_ARCHITECTURES, ModelHandle
from ._ownership import exiting, park_if_exiting
from ._status import ERR_ABORT, ERR_EXCEPTION, ERR_MEMORY, ERR_NULL, drain_log, last_error, raise_decode
from ._threadpool import ThreadPool, usable_cpus

__all__ = ["ContextHandle"]


def _is_array(array: Any, dtype: Any, ndim: int) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == ndim and array.flags.c_contiguous


def _refused(message: str, func: str = "llama_decode") -> InvalidBatchError:
    return InvalidBatchError(message, func=func, state="unchanged")


class ContextHandle(ContextCache):
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
        super().__init__(model, params, other, embeddings)
        ffi, lib = self._ffi, self._lib
        self._output = lib.pyspec_context_output(self._ptr())
        self._c_decode, self._c_logits = lib.pyspec_decode, lib.pyspec_logits
        self._row_pointer = ffi.new("float **")
        self._pool: ThreadPool | None = None
        self.loras: tuple[tuple[LoraHandle, float], ...] = ()
        self._arrays: tuple[Any, ...] = (None,) * 5
        self._pointers: tuple[Any, ...] = ()
        self._capacity = 0
        self._logits: F32Array | None = None
        self._views: dict[str | int, tuple[Any, int, F32Array]] = {}
        self._nextn: tuple[bool, bool] = (False, False)
        self._nextn_live = False
        self._layers: set[int] = set()
        self._layers_live: frozenset[int] = frozenset()

    # ---- evaluation ----

    def decode(
        self, tokens: I32Array | None, pos: I32Array, seq: I32Array, output: I8Array, embd: F32Array | None, n: int
    ) -> None:
        """Evaluate the first ``n`` rows of the arrays: one ``llama_decode``, GIL released.

        Args:
            tokens: int32 [>= n], or None for embedding rows.
            pos, seq: int32 [>= n]. output: int8 [>= n], 1 where logits are wanted.
            embd: float32 [>= n, n_embd_decode], or None. MTP contexts and EAGLE-3 need both, others one of the two.
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
                raise _refused(f"n is {n}, the arrays have {self._capacity} rows")
            self._logits = None
            p = self._pointers
            pool = self._pool
            if pool is None:
                rc = self._c_decode(ptr, p[0], p[1], p[2], p[3], p[4], n)
            else:
                with pool._open().lock:
                    rc = self._c_decode(ptr, p[0], p[1], p[2], p[3], p[4], n)
            if rc and not exiting():
                self._decode_failed(rc, "llama_decode", f"decoding {n} rows")
            self._nextn_live = self._nextn[0]
            if self._layers or self._layers_live:
                self._layers_live = frozenset(self._layers)
        if rc:
            park_if_exiting()
            self._decode_failed(rc, "llama_decode", f"decoding {n} rows")
        if self._lib.pyspec_log_pending:
            drain_log()

    def reserve_outputs(self, n: int) -> None:
        """Make room for ``n`` output rows at once. The cache is empty afterwards.

        libllama makes the buffer anew, filled with zeroes, whenever a pass has more outputs than any before it.

        Args:
            n: rows with outputs in one pass, spread over all sequences; 1 to n_outputs_max.

        Raises:
            InvalidBatchError: no such pass is possible. NativeError: see ``state``.
        """
        self._own_memory("reserve_outputs")
        with self._open().lock, contextlib.nullcontext() if self._pool is None else self._pool._open().lock:
            self._logits = None
            rc = self._lib.pyspec_reserve_outputs(self._ptr(), n)
            if rc and not exiting():
                self._decode_failed(rc, "llama_decode", f"making room for {n} output rows")
        if rc:
            park_if_exiting()
            self._decode_failed(rc, "llama_decode", f"making room for {n} output rows")

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
            if rc and not exiting():
                self._decode_failed(rc, "llama_encode", f"encoding {n} rows")
            self._nextn_live = self._nextn[0]
            self._layers_live = frozenset()
        if rc:
            park_if_exiting()
            self._decode_failed(rc, "llama_encode", f"encoding {n} rows")
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
            if not _is_array(array, dtype, 1):
                raise _refused(f"{name} must be a contiguous {np.dtype(dtype).name} array of one dimension")
            pointers.append(ffi.from_buffer(ctype, array))
            capacity = min(capacity, len(array))
        if embd is None:
            pointers.append(ffi.NULL)
        else:
            pointers.append(self._float_rows(embd, 0, self.n_embd_decode, "llama_decode"))
            capacity = min(capacity, len(embd))
        self._arrays, self._pointers, self._capacity = (tokens, pos, seq, output, embd), tuple(pointers), capacity

    def _float_rows(self, array: Any, n: int, width: int, func: str) -> Any:
        if not _is_array(array, np.float32, 2):
            raise _refused("embd must be a contiguous float32 array of two dimensions", func)
        if array.shape[1] != width:
            raise _refused(f"embd rows have {array.shape[1]} values, this context takes {width}", func)
        if n > len(array):
            raise _refused(f"n is {n}, embd has {len(array)} rows", func)
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
                raise UnsupportedError("rows sampled on the device have no logits; use sampled_candidates")
            rc = self._c_logits(ptr, self._row_pointer)
            if rc:
                self._fail(rc, "llama_get_logits", "reading logits")
            self._logits = view = self._same_view("logits", self._row_pointer[0], n, self.n_vocab)
            return view

    def _same_view(self, key: str | int, pointer: Any, n_rows: int, width: int) -> F32Array:
        """The view made last time if these rows lie where those did."""
        known = self._views.get(key)
        if known is not None and known[0] == pointer and known[1] == n_rows:
            return known[2]
        view = self._view(pointer, n_rows, width)
        self._views[key] = (pointer, n_rows, view)
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
        func = "llama_get_embeddings_nextn"
        with self._open().lock:
            ptr = self._ptr()
            if not self._nextn_live:
                raise NativeError(
                    "no nextn rows: enable them (embeddings_nextn), then decode", func=func, state="unchanged"
                )
            masked = self._nextn[1]
            n_outputs, n_batch_rows = int(self._output.n_outputs), int(self._output.n_rows)
            if masked and self.is_mtp and n_outputs != n_batch_rows:
                raise NativeError(
                    f"nextn rows of an MTP pass are wrong unless all rows are outputs ({n_outputs} of {n_batch_rows})",
                    func=func,
                    state="unchanged",
                )
            self._check_rows(n_rows, n_outputs if masked else n_batch_rows)
            rc = self._lib.pyspec_nextn(ptr, self._row_pointer)
            if rc:
                self._fail(rc, func, "reading nextn rows", "unchanged")
            return self._same_view("nextn", self._row_pointer[0], n_rows, self.model.n_embd_out)

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
                    func="llama_get_embeddings_layer_inp",
                    state="unchanged",
                )
            self._check_rows(n_rows, int(self._output.n_rows))
            rc = self._lib.pyspec_layer_input(ptr, layer, self._row_pointer)
            if rc:
                self._fail(rc, "llama_get_embeddings_layer_inp", f"reading the inputs of layer {layer}")
            return self._same_view(layer, self._row_pointer[0], n_rows, self.model.n_embd)

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
                    f"architecture {self.model.architecture!r} does not hand out the input rows of layer {layer} "
                    f"(of {self.model.n_layer})"
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

    def set_loras(self, adapters: Sequence[tuple[LoraHandle, float]]) -> None:
        """Add these adapters, each times its scale, to the weights from the next decode on; none: the bare model.

        What is in the cache was computed with the adapters before: clear it.

        Raises:
            ConfigError: an adapter of another model, or twice the same. ClosedError: one is closed.
        """
        loras = [lora for lora, _ in adapters]
        for lora in loras:
            if lora.model is not self.model:
                raise ConfigError(f"LoRA adapter {lora.path!r} was loaded for another model object than this context's")
        if len({id(lora) for lora in loras}) < len(loras):
            raise ConfigError("the same LoRA adapter object is given twice")
        ffi, native = self._ffi, self._open()
        with native.lock:
            ptr = self._ptr()
            pointers = ffi.new("struct llama_adapter_lora *[]", [lora._open().ptr for lora in loras])
            scales = ffi.new("float[]", [float(scale) for _, scale in adapters])
            rc = self._lib.pyspec_set_loras(ptr, pointers, scales, len(loras))
            if rc:
                self._fail(rc, "llama_set_adapters_lora", "setting LoRA adapters")
            before = [lora for lora, _ in self.loras]
            self.loras = tuple((lora, float(scale)) for lora, scale in adapters)
            for lora in before:
                if lora not in loras:
                    lora._forget(self)
            for lora in loras:
                if lora not in before:
                    lora._note(self)
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
        """Threads for one-row passes and for larger ones; at most as many as there are CPUs or an attached pool has."""
        for name, value in (("n_threads", n_threads), ("n_threads_batch", n_threads_batch)):
            if not 1 <= value <= 512:
                raise ConfigError(f"{name} must be between 1 and 512, got {value}")
        with self._open().lock:
            self._n_threads = (n_threads, n_threads_batch)
            self._apply_threads()

    def _apply_threads(self) -> None:
        # ggml would cap and log a warning on every pass
        limit = usable_cpus() if self._pool is None else self._pool.n_threads
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
                self._pool._users.discard(self)
            self._pool = pool
            if pool is not None:
                pool._users.add(self)
            self._apply_threads()

    def abort(self) -> None:
        """Stop the running or next decode between two graph nodes. Any thread, signal handlers too; takes no lock."""
        self._abort_flag[0] = 1

    def abort_clear(self) -> None:
        """Allow decoding again after :meth:`abort`; not once the interpreter is exiting."""
        if not exiting():
            self._abort_flag[0] = 0

    def memory_bytes(self) -> dict[str, int]:
        """Bytes on all devices: "model" (its weights), "context" (cache), "compute" (work buffers)."""
        out = self._ffi.new("struct pyspec_memory *")
        with self._open().lock:
            rc = self._lib.pyspec_memory_breakdown(self._ptr(), out)
            if rc:
                self._fail(rc, "llama_get_memory_breakdown", "memory breakdown", "unchanged")
        return {"model": int(out.model), "context": int(out.context), "compute": int(out.compute)}
