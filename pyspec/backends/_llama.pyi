"""The compiled cffi module: declarations of ``_cdef.h`` and ``_shim.h``."""

from typing import Any

ffi: Any
lib: Any
