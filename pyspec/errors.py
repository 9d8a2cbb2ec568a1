"""Every exception pyspec raises, in one tree.

Each class also derives from the builtin a caller would expect to catch. A message names the option or file,
the values on both sides, and what to do about it.
"""

from __future__ import annotations

from typing import Literal

#: What a failed native call left behind: ``unchanged`` (retry is safe), ``partial`` (finished parts remain in the
#: cache; query positions before going on) or ``lost`` (close the object).
State = Literal["unchanged", "partial", "lost"]


class PyspecError(Exception):
    """Root of all pyspec exceptions."""


class ConfigError(PyspecError, ValueError):
    """An option, or a combination of options, that cannot work. Found before any native call."""


class VocabMismatchError(ConfigError):
    """Draft and target vocabularies do not fit; the message names the first difference."""


class GrammarError(ConfigError):
    """A JSON schema, regular expression or grammar that is wrong, and where; or that admits no text."""


class BackendError(PyspecError):
    """Something about the native libraries or devices."""


class BackendNotFoundError(BackendError, LookupError):
    """No native library or device of that name; the message lists every place tried."""


class BackendLoadError(BackendError, OSError):
    """A native library was found but would not open; keeps the system's message."""


class AbiMismatchError(BackendError):
    """The opened library is not the one this binding was built for; both versions are in the message."""


class UnsupportedError(BackendError, NotImplementedError):
    """This model, backend or build cannot do what was asked; the message says why."""


class ModelLoadError(PyspecError, OSError):
    """A model file that is missing, malformed, or too large. Native log lines are attached."""


class DoesNotFitError(ModelLoadError):
    """Model, caches and work buffers need more memory than a device has free; the message says what would fit.

    Attributes:
        needed_bytes, free_bytes: by device; host memory is "CPU".
    """

    def __init__(
        self, message: str, needed_bytes: dict[str, int] | None = None, free_bytes: dict[str, int] | None = None
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes or {}
        self.free_bytes = free_bytes or {}


class DataFileError(PyspecError, OSError):
    """A file of recorded tokens that is missing, damaged, or of another vocabulary. Nothing of it was taken over."""


class ClosedError(PyspecError, ValueError):
    """The object was closed, or belongs to the parent of this forked process."""


class SamplingError(PyspecError, ValueError):
    """No token can be sampled for a request: its logits are NaN or +inf, or bias and constraint forbid every token.

    Only that request ends; the others go on.
    """


class NativeError(PyspecError, RuntimeError):
    """A native call failed.

    Attributes:
        func: name of the C function.
        code: its return code, or None when it raised or aborted.
        log: the last native log lines.
        state: what is left behind, see :data:`State`.
    """

    def __init__(
        self,
        message: str,
        *,
        func: str = "",
        code: int | None = None,
        log: tuple[str, ...] = (),
        state: State = "lost",
    ) -> None:
        details = [message]
        if log:
            details.append("native log:\n  " + "\n  ".join(log))
        super().__init__("\n".join(details))
        self.func = func
        self.code = code
        self.log = log
        self.state: State = state


class InvalidBatchError(NativeError):
    """The batch was rejected before anything was computed (``unchanged``)."""


class ContextFullError(NativeError):
    """No room in the KV cache for this batch (``unchanged``): retry with fewer tokens or a larger ``n_ctx``."""


class DecodeAborted(NativeError):
    """Stopped on request. Micro-batches that had finished remain in the cache (``partial``)."""


class DecodeFailed(NativeError):
    """The backend failed while computing (``partial`` or ``lost``)."""


class NativeAbortError(NativeError):
    """A native assertion failed and was turned into this exception; the context is ``lost``."""


class RollbackError(PyspecError, RuntimeError):
    """The cache cannot be put back to the wanted position; the sequence is finished."""
