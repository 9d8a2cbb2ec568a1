"""What engine and drafters see of a model: rows in, logits and hidden rows out.

:class:`pyspec.runtime.Context` implements it on libllama; tests implement it on tables, so the whole loop also runs
without any native library.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ..types import F32Array
from .batch import Batch
from .cache import Rollback

__all__ = ["Evaluator"]


@runtime_checkable
class Evaluator(Protocol):
    """One model with one cache. Not thread-safe: one caller at a time.

    Attributes:
        n_vocab: width of a logits row. n_embd: width of a layer-input row; n_embd_out: of a nextn row.
        n_ctx_seq: most positions of one sequence. n_batch: most rows of one decode. n_ubatch: most rows computed at
            once. n_seq_max: sequences. n_outputs_max: most output rows of one decode.
        memory: rollback of this cache.
    """

    @property
    def n_vocab(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def n_embd_out(self) -> int: ...
    @property
    def n_ctx_seq(self) -> int: ...
    @property
    def n_batch(self) -> int: ...
    @property
    def n_ubatch(self) -> int: ...
    @property
    def n_seq_max(self) -> int: ...
    @property
    def n_outputs_max(self) -> int: ...
    @property
    def memory(self) -> Rollback: ...

    def decode(self, batch: Batch) -> None:
        """Evaluate the batch's rows and put them into the cache. Raises NativeError, see its ``state``."""
        ...

    def encode(self, embd: F32Array, n: int) -> None:
        """Run the encoder on ``embd``, float32, [>= n, width], C-contiguous; no cache is touched."""
        ...

    def logits(self) -> F32Array:
        """float32, [n_outputs, n_vocab], output rows in batch order. Borrowed until the next decode or encode."""
        ...

    def nextn(self, n_rows: int) -> F32Array:
        """float32, [n_rows, n_embd_out]: hidden rows before the final norm. Borrowed until the next decode or encode.

        One row per row of the batch on a target (unmasked), one per output row on a draft (masked).
        """
        ...

    def layer_input(self, layer: int, n_rows: int) -> F32Array:
        """float32, [n_rows, n_embd]: input rows of ``layer``, one per row of the batch. Borrowed like logits."""
        ...

    def abort_clear(self) -> None:
        """Withdraw a request to abort, so that decode works again."""
        ...
