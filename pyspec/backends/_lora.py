"""Owner of a LoRA adapter: low-rank changes to some weights of one model."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import Any

from ..errors import ModelLoadError, NativeError
from . import _binding
from ._gguf import check_file
from ._model import ModelHandle
from ._ownership import Handle, Native, creating
from ._status import ERR_ABORT, drain_log, last_error, last_log

__all__ = ["LoraHandle"]


class LoraHandle(Handle):
    """Owner of a ``llama_adapter_lora``. Holds its model. Closing it takes it off the contexts that use it.

    libllama compares names and the first two dimensions of the tensors only; the caller has checked the rest, see
    ``pyspec.lora``.

    Args:
        model: the model it is for. path: a GGUF file made by ``convert_lora_to_gguf.py``.

    Raises:
        ModelLoadError: the file cannot be read, is malformed, or is for another model.
    """

    def __init__(self, model: ModelHandle, path: str | os.PathLike[str]) -> None:
        self.model = model
        self.path = check_file(path)
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()  # contexts it is set on
        out = _binding.ffi.new("struct llama_adapter_lora **")
        lib = _binding.lib
        with creating(), _model_at_rest(model) as (native, ptr):
            rc = lib.pyspec_lora_load(ptr, os.fsencode(self.path), out)
            if not rc:
                self._native = Native("LoRA adapter", out[0], lib.pyspec_lora_free, (native,), native.lock)
        if rc:
            reason, log = last_error(), last_log()
            drain_log()
            if rc == ERR_ABORT:
                raise NativeError(
                    f"loading LoRA adapter {self.path!r}: a native assertion failed: {reason}",
                    func="llama_adapter_lora_init",
                    log=log,
                )
            lines = "\n  ".join((reason, *log))
            raise ModelLoadError(
                f"LoRA adapter {self.path!r} cannot be loaded for {model.path!r}; native log:\n  {lines}"
            )
        drain_log()

    def close(self) -> None:
        """Take it off every context, then free it; waits for running passes. Idempotent."""
        if not self.closed:
            for context in list(self._users):
                if not context.closed and not context.lost:
                    others = [(lora, scale) for lora, scale in context.loras if lora is not self]
                    context.set_loras(others)
            with _model_at_rest(self.model):
                super().close()

    def _note(self, context: Any) -> None:
        self._users.add(context)
        self._open().adopt(context._open())

    def _forget(self, context: Any) -> None:
        self._users.discard(context)
        if not self.closed:
            self._open().disown(context._open())

    def __repr__(self) -> str:
        return f"<LoraHandle {self.path!r}{' closed' if self.closed else ''}>"


@contextlib.contextmanager
def _model_at_rest(model: ModelHandle) -> Iterator[tuple[Native, Any]]:
    """The model's native object and pointer, while no context of it computes: graphs are sized by its adapters."""
    native = model._open()
    with contextlib.ExitStack() as stack:
        stack.enter_context(native.lock)
        pointer = model._open().ptr
        for child in native.children:
            stack.enter_context(child.lock)
        yield native, pointer
