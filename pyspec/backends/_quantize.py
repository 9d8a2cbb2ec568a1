"""Requantise a model file; used by tests and ``make demo``."""

from __future__ import annotations

import os

from ..errors import ConfigError, ModelLoadError
from . import _binding
from ._gguf import check_file
from ._ownership import creating
from ._status import drain_log, last_error, last_log

__all__ = ["FTYPES", "quantize"]

#: File types by name, with llama.cpp's numbers (``enum llama_ftype``).
FTYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k_s": 11, "q3_k_m": 12,
    "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18, "iq4_nl": 25, "iq4_xs": 30,
    "bf16": 32,
}  # fmt: skip


def quantize(src: str | os.PathLike[str], dst: str | os.PathLike[str], ftype: str, n_threads: int = 1) -> None:
    """Write ``src`` with another weight type to ``dst``; already quantised sources are allowed.

    Args:
        src: a GGUF model. dst: the file to write; must not be ``src``.
        ftype: one of :data:`FTYPES`, case ignored.
        n_threads: threads to use.

    Raises:
        ConfigError: unknown ftype, or ``dst`` is ``src``. ModelLoadError: ``src`` cannot be read, or writing failed;
            an unfinished ``dst`` is removed.
    """
    number = FTYPES.get(ftype.lower())
    if number is None:
        raise ConfigError(f"ftype must be one of {', '.join(FTYPES)}; got {ftype!r}")
    if not 1 <= n_threads <= 512:
        raise ConfigError(f"n_threads must be between 1 and 512, got {n_threads}")
    source, target = check_file(src), os.fspath(dst)
    existed = os.path.exists(target)
    if existed and os.path.samefile(source, target):
        raise ConfigError(f"dst is src: {source}")
    try:
        with open(target, "ab"):
            pass
    except OSError as exc:
        raise ModelLoadError(f"{target} cannot be written: {exc.strerror}") from exc
    _binding.load()
    with creating():
        rc = _binding.lib.pyspec_quantize(os.fsencode(source), os.fsencode(target), number, n_threads, True)
    if rc:
        log = "\n  ".join((last_error(), *last_log()))
        if not existed:
            os.unlink(target)
        raise ModelLoadError(f"{source} could not be requantised to {ftype}:\n  {log}")
    drain_log()
