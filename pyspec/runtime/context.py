"""A context: one cache, one compute graph, on one model. Implements :class:`pyspec.runtime.evaluator.Evaluator`."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from .. import backends
from ..config import ContextParams, usable_n_threads
from ..errors import NativeError
from ..types import F32Array, Requirements, RollbackKind
from .batch import Batch
from .cache import Rollback
from .model import Model

__all__ = ["Context"]

#: Architectures that are drafts only: they cannot decode plain token rows, so their memory is not probed by a pass.
_DRAFT_ARCHITECTURES = frozenset({"eagle3", "dflash", "gemma4-assistant"})


class Context:
    """A llama.cpp context. Owns the native context, holds its model. A context manager; one thread at a time.

    Args:
        model: the model to run.
        params: see :class:`pyspec.config.ContextParams`.
        other: context of the target, for drafts that share results or memory with it (``ctx_other``).

    Raises:
        ConfigError, UnsupportedError: the model cannot be run like that; the message says why.
        NativeError: libllama could not make the context, for example for lack of memory.
    """

    def __init__(self, model: Model, params: ContextParams | None = None, other: Context | None = None) -> None:
        params = params or ContextParams()
        n_threads = usable_n_threads(params.n_threads)
        n_threads_batch = usable_n_threads(params.n_threads_batch or n_threads, "n_threads_batch")
        self.params: ContextParams = params.override(n_threads=n_threads, n_threads_batch=n_threads_batch)
        self.model = model
        self.other = other
        self.handle: backends.ContextHandle = backends.ContextHandle(
            model.handle, self.params, other.handle if other is not None else None
        )
        h = self.handle
        self.n_vocab = model.n_vocab
        self.n_embd = model.n_embd
        self.n_embd_out = model.n_embd_out
        self.n_batch = h.n_batch
        self.n_ubatch = h.n_ubatch
        self.n_seq_max = h.n_seq_max
        self.n_rs_seq = h.n_rs_seq
        self.n_outputs_max = min(self.params.n_outputs_max or h.n_batch, h.n_batch)
        # libllama rounds n_ctx up; what was asked for is the promise
        asked = self.params.n_ctx if self.params.kv_unified else self.params.n_ctx // h.n_seq_max
        self.n_ctx_seq = min(h.n_ctx_seq, asked) if self.params.n_ctx else h.n_ctx_seq
        try:
            self.memory = Rollback(
                h,
                self._rollback_kind(),
                n_rs_seq=h.n_rs_seq,
                n_swa=0 if self.params.swa_full else model.n_swa,
                n_ubatch=h.n_ubatch,
                partial_state=model.is_recurrent or model.is_hybrid,
            )
        except BaseException:
            h.close()
            raise

    def _rollback_kind(self) -> RollbackKind:
        model, h = self.model, self.handle
        if model.architecture == "gemma4-assistant":
            return RollbackKind.NONE
        if self.params.ctx_type == "mtp" or model.architecture in _DRAFT_ARCHITECTURES:
            # their blocks are plain attention, also in recurrent models
            return RollbackKind.PARTIAL
        if model.is_recurrent or model.is_hybrid:
            return RollbackKind.BOUNDED if h.n_rs_seq else RollbackKind.FULL
        if self.n_ctx_seq < 2 or self.n_batch < 2:
            return RollbackKind.PARTIAL
        # ask the memory itself: two rows in, one out
        probe = Batch(2)
        token = max(model.vocab.bos, 0)
        probe.extend([token, token], 0, 0)
        try:
            h.decode(probe.tokens, probe.pos, probe.seq, probe.output, None, 2)
            removed = h.seq_rm(0, 1, -1)
        except NativeError as e:
            if e.state == "lost":
                raise
            return RollbackKind.FULL
        finally:
            if not h.closed:
                h.memory_clear()
        return RollbackKind.PARTIAL if removed else RollbackKind.FULL

    def require(self, needs: Requirements) -> None:
        """Switch on the hidden rows that drafters read. Call before the first pass.

        Raises:
            UnsupportedError: the architecture does not hand out these rows.
        """
        for layer in needs.layer_inputs:
            if layer == self.model.n_layer:
                self.handle.embeddings_nextn(True, False)
            else:
                self.handle.layer_inputs_enable(layer, True)
        if needs.nextn:
            self.handle.embeddings_nextn(True, False)

    def decode(self, batch: Batch) -> None:
        """See :meth:`Evaluator.decode`."""
        self.handle.decode(
            batch.tokens if batch.use_tokens else None, batch.pos, batch.seq, batch.output, batch.embd, batch.n
        )
        self.memory.note(batch.rows())

    def encode(self, embd: F32Array, n: int) -> None:
        """See :meth:`Evaluator.encode`."""
        self.handle.encode(embd, n)

    def logits(self) -> F32Array:
        """See :meth:`Evaluator.logits`."""
        return self.handle.logits()

    def nextn(self, n_rows: int) -> F32Array:
        """See :meth:`Evaluator.nextn`."""
        return self.handle.nextn(n_rows)

    def layer_input(self, layer: int, n_rows: int) -> F32Array:
        """See :meth:`Evaluator.layer_input`. ``layer == n_layer`` gives the final hidden rows."""
        if layer == self.model.n_layer:
            return self.handle.nextn(n_rows)
        return self.handle.layer_input(layer, n_rows)

    def abort(self) -> None:
        """Stop the decode that is running, or the next one. From any thread or signal handler."""
        self.handle.abort()

    def abort_clear(self) -> None:
        """Withdraw :meth:`abort`."""
        self.handle.abort_clear()

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held for ``model``, ``context`` (the cache) and ``compute`` buffers."""
        return self.handle.memory_bytes()

    @property
    def closed(self) -> bool:
        return self.handle.closed

    def close(self) -> None:
        """Free the context. Idempotent."""
        self.handle.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def describe(self) -> dict[str, Any]:
        """Settings in force, as libllama reports them."""
        return {
            "n_ctx_seq": self.n_ctx_seq,
            "n_batch": self.n_batch,
            "n_ubatch": self.n_ubatch,
            "n_seq_max": self.n_seq_max,
            "n_rs_seq": self.n_rs_seq,
            "cache_type_k": self.params.cache_type_k,
            "cache_type_v": self.params.cache_type_v,
            "rollback": self.memory.kind.value,
        }
