"""Turn ``_cdef.h`` and the shim's headers into the C source of the cffi extension (API mode)."""

from __future__ import annotations

from pathlib import Path

from build_support.config import BuildError

MODULE = "pyspec.backends._llama"

#: Our own C API; with ``_cdef.h`` all that Python sees.
SHIM_HEADERS = ("_shim.h", "_shim_devices.h")
_HEADERS = ("llama.h", "ggml.h", "ggml-backend.h", "ggml-cpu.h", "ggml-alloc.h", "gguf.h", *SHIM_HEADERS)


def strip_preprocessor(text: str) -> str:
    """Return a header as cffi can parse it: without preprocessor lines and ``extern "C"`` braces.

    Lines continued with a backslash go as one. Text under a condition stays, so a header must not hold alternatives,
    except the ``__cplusplus`` blocks: those go as a whole.
    """
    kept: list[str] = []
    continued = False
    skip_depth = 0  # > 0 inside #ifdef __cplusplus
    for line in text.splitlines():
        stripped = line.strip()
        is_directive = stripped.startswith("#") or continued
        continued = is_directive and stripped.endswith("\\")
        if is_directive:
            words = stripped.lstrip("#").split()
            if skip_depth and words and words[0] in ("if", "ifdef", "ifndef"):
                skip_depth += 1
            elif skip_depth and words and words[0] == "endif":
                skip_depth -= 1
            elif words[:2] == ["ifdef", "__cplusplus"]:
                skip_depth = 1
            continue
        if skip_depth or stripped.startswith('extern "C"') or stripped == '} // extern "C"':
            continue
        kept.append(line)
    return "\n".join(kept) + "\n"


def generate(backends_dir: Path, target: Path) -> Path:
    """Write the extension's C source to ``target`` (untouched if it would not change) and return it.

    Raises:
        BuildError: cffi is missing, or a declaration cannot be parsed.
    """
    try:
        import cffi
    except ImportError:
        raise BuildError("cffi was not found. Install it: python -m pip install cffi") from None
    ffi = cffi.FFI()
    for name in ("_cdef.h", *SHIM_HEADERS):
        try:
            ffi.cdef(strip_preprocessor((backends_dir / name).read_text(encoding="utf-8")))
        except OSError as exc:
            raise BuildError(f"pyspec/backends/{name} cannot be read: {exc.strerror}") from None
        except (cffi.CDefError, cffi.FFIError) as exc:
            raise BuildError(f"pyspec/backends/{name} cannot be parsed: {exc}") from None
    ffi.set_source(MODULE, "".join(f'#include "{header}"\n' for header in _HEADERS))
    target.parent.mkdir(parents=True, exist_ok=True)
    ffi.emit_c_code(str(target))  # writes only when the text differs
    return target
