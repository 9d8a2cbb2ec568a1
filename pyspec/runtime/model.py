"""A loaded model file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from .. import backends
from ..config import ContextParams, ModelParams
from ..errors import ConfigError
from .vocab import Vocab

__all__ = ["Model"]


class Model:
    """A GGUF model in memory: weights, metadata, tokenizer. Contexts run it.

    Thread-safe. Owns the native model; ``close()`` frees it (contexts on it are closed first). A context manager.

    Args:
        path: the GGUF file (of a split model: the first part).
        params: how to load it.
        progress: called with 0.0 to 1.0 while loading; returning False stops the load.

    Raises:
        ModelLoadError: the file is missing or malformed, or memory ran out.
        ConfigError: an option is wrong, for example an unknown device name.

    Attributes:
        path: where it was loaded from. params: how. vocab: its tokenizer.
        metadata: all scalar GGUF key-value pairs, as text. architecture: ``general.architecture``.
        n_layer, n_layer_nextn: transformer blocks; multi-token-prediction blocks.
        n_embd, n_embd_inp, n_embd_out: hidden width; input row width; output row width.
        n_vocab, n_ctx_train, n_swa, n_params, size_bytes, description.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        params: ModelParams | None = None,
        progress: Callable[[float], bool | None] | None = None,
    ) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise ConfigError(f"model path must be str or Path, got {type(path).__name__}")
        self.params = params or ModelParams()
        backends.load()
        self.path = Path(path)
        self.handle = backends.ModelHandle(os.fspath(path), self.params, progress)
        h = self.handle
        self.metadata: dict[str, str] = h.metadata()
        self.architecture: str = self.metadata.get("general.architecture", "")
        self.vocab = Vocab(h, self.metadata)
        self.n_vocab = h.n_vocab
        self.n_ctx_train = h.n_ctx_train
        self.n_embd = h.n_embd
        self.n_embd_inp = h.n_embd_inp
        self.n_embd_out = h.n_embd_out
        self.n_layer = h.n_layer
        self.n_layer_nextn = h.n_layer_nextn
        self.n_head = h.n_head
        self.n_head_kv = h.n_head_kv
        self.n_swa = h.n_swa
        self.n_params = h.n_params
        self.size_bytes = h.size_bytes
        self.description = h.desc
        self.file_type = h.ftype_name
        self.is_recurrent = h.is_recurrent
        self.is_hybrid = h.is_hybrid
        self.target_layer_ids: tuple[int, ...] = h.target_layer_ids
        self.dflash_selector_top_k = h.dflash_selector_top_k

    def chat_template(self, name: str | None = None) -> str | None:
        """The model's own chat template (Jinja), or None."""
        return self.handle.chat_template(name)

    def context_memory(self, params: ContextParams) -> dict[str, int]:
        """Bytes that a context would take: "context" (the cache) and "compute". Nothing is allocated.

        Raises:
            ConfigError, UnsupportedError, NativeError: no such context can be made.
        """
        return backends.context_memory(self.handle, params)

    @property
    def on_gpu(self) -> bool:
        """Whether layers of this model are on a GPU."""
        return bool(backends.devices_in_use(self.params))

    @property
    def closed(self) -> bool:
        return self.handle.closed

    def close(self) -> None:
        """Free the model and the contexts on it. Idempotent."""
        self.handle.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<pyspec.Model {self.path.name!r} {self.description}{' closed' if self.closed else ''}>"
