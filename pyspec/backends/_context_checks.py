"""What a context must satisfy before libllama is asked for it: each of these ends the process there, or goes wrong in
silence."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..config import CACHE_TYPES, ContextParams
from ..errors import ConfigError, NativeError, UnsupportedError
from . import _binding
from ._memory import available_bytes
from ._model import ModelHandle, native_model_params
from ._select import devices_in_use

if TYPE_CHECKING:
    from ._context_cache import ContextCache

__all__ = ["check_context", "check_memory"]

# ggml type number -> (bytes, values) of a block
_BLOCKS = {
    0: (4, 1), 1: (2, 1), 2: (18, 32), 3: (20, 32), 6: (22, 32), 7: (24, 32), 8: (34, 32), 20: (18, 32), 30: (2, 1),
}  # fmt: skip


# position, shift, extra and the set of sequences of one cell, in host memory (src/llama-kv-cells.h)
_CELL_BYTES = 48


def check_context(model: ModelHandle, params: ContextParams, other: ContextCache | None) -> None:
    """Raise ConfigError or UnsupportedError for a combination that cannot work."""
    name = f"{model.path!r} ({model.architecture})"
    if model.params.vocab_only:
        raise UnsupportedError(f"{name} was loaded with vocab_only=True; it has no weights to compute with")
    _check_sizes(model, params)
    _check_mtp(model, params, name)
    if model.architecture == "gemma4-assistant":
        _check_assistant(params, other, name)
    if other is not None and other.model is not model:
        _check_borrowed(model, other.model, name)


def _check_sizes(model: ModelHandle, params: ContextParams) -> None:
    n_ctx = params.n_ctx or model.n_ctx_train
    if n_ctx <= 0:
        raise ConfigError(f"n_ctx must be given: {model.path!r} does not say for which length it was trained")
    n_batch = min(n_ctx, params.n_batch)  # as libllama caps it
    if n_batch < params.n_seq_max:
        raise ConfigError(f"n_ctx ({n_ctx}) must be at least n_seq_max ({params.n_seq_max})")
    if 0 < params.n_outputs_max < params.n_seq_max:
        raise ConfigError(
            f"n_outputs_max ({params.n_outputs_max}) must be at least n_seq_max ({params.n_seq_max}): one row each"
        )
    n_ubatch = min(n_batch, params.n_ubatch)
    if params.n_rs_seq and n_ubatch < params.n_rs_seq + 2:
        raise ConfigError(
            f"n_rs_seq ({params.n_rs_seq}) needs micro-batches of at least n_rs_seq + 2 rows; "
            f"n_ctx, n_batch and n_ubatch leave {n_ubatch}"
        )
    if params.cache_type_v not in ("f32", "f16", "bf16") and params.flash_attn_code == 0:
        raise ConfigError(f"cache_type_v={params.cache_type_v!r} needs flash attention; flash_attn is off")


def _check_mtp(model: ModelHandle, params: ContextParams, name: str) -> None:
    if params.ctx_type == "mtp":
        if model.n_layer_nextn == 0:
            raise UnsupportedError(f"{name} has no multi-token-prediction blocks, ctx_type 'mtp' needs them")
        if not model.load_mtp and model.architecture != "gemma4-assistant":
            raise ConfigError(f"{name} was loaded without its multi-token-prediction blocks; use load_mtp=True")
    elif model.is_mtp_only:
        raise UnsupportedError(
            f"{name} holds only multi-token-prediction blocks: use it as the draft of its target, with ctx_type 'mtp'"
        )


def _check_borrowed(model: ModelHandle, target: ModelHandle, name: str) -> None:
    """A context has the devices of its own model alone; what lies on another one cannot be computed with."""
    missing = [d.name for d in devices_in_use(target.params)]
    if missing:
        own = [d.name for d in devices_in_use(model.params)]
        missing = [d for d in missing if d not in own]
    if not missing:
        return
    if model.architecture == "gemma4-assistant":
        what = "cache"
    elif model.has_tensor("output.weight"):
        return
    else:
        what = "output matrix"
    raise ConfigError(
        f"{name} has no {what} of its own and uses its target's, which lies on {', '.join(missing)}: give it the "
        f"target's devices (draft_devices, draft_n_gpu_layers), or put the target on the CPU (devices=[])"
    )


def _check_assistant(params: ContextParams, other: ContextCache | None, name: str) -> None:
    if params.ctx_type != "mtp":
        raise ConfigError(f"{name} needs ctx_type='mtp'")
    if other is None:
        raise ConfigError(f"{name} reads its target's cache: pass the target's context as other")
    if other.model.architecture != "gemma4":
        raise ConfigError(f"{name} needs a gemma4 target, got {other.model.path!r} ({other.model.architecture})")
    if params.n_seq_max != other.n_seq_max or params.kv_unified != other.params.kv_unified:
        raise ConfigError(
            f"{name} shares its target's cache: n_seq_max and kv_unified must be the target's "
            f"({other.n_seq_max}, {other.params.kv_unified}), got ({params.n_seq_max}, {params.kv_unified})"
        )
    used = [seq for seq in range(other.n_seq_max) if other.seq_pos_max(seq) >= 0]
    if used:
        raise ConfigError(
            f"making a context for {name} clears its target's cache, and sequence {used[0]} of it is in use: "
            "make it before the first prompt is decoded"
        )


def check_memory(model: ModelHandle, params: ContextParams, native_params: Any) -> None:
    """Refuse a context larger than the memory there is.

    Where memory is overcommitted or limited by a container, an allocation that is too large succeeds and the process
    is killed when it is first written. Only asked when a rough upper bound comes near; then libllama itself computes
    the size, without allocating.
    """
    available = available_bytes()
    if available is None or model.architecture == "gemma4-assistant":
        return
    lower, upper = _cache_bounds(model, params)
    needed = lower
    if lower <= available and upper > 0.8 * available:
        out = _binding.ffi.new("struct pyspec_memory *")
        model_params = native_model_params(model.params)
        rc = _binding.lib.pyspec_context_memory(os.fsencode(model.path), model_params.params, native_params, out)
        needed = 0 if rc else int(out.host_new)
    if needed > available:
        raise NativeError(
            f"context on {model.path!r} with n_ctx={params.n_ctx or model.n_ctx_train}, n_seq_max={params.n_seq_max} "
            f"needs {needed / 2**20:.0f} MiB or more, {available / 2**20:.0f} MiB are free: lower n_ctx or n_seq_max, "
            "or use a smaller cache_type_k and cache_type_v",
            func="llama_init_from_model",
            state="unchanged",
        )


def _cache_bounds(model: ModelHandle, params: ContextParams) -> tuple[int, int]:
    """Bytes the cache takes at least (one layer and the bookkeeping of each cell) and at most."""
    meta = model.metadata()

    def number(key: str, default: int) -> int:
        try:
            return int(meta.get(f"{model.architecture}.{key}", default))
        except ValueError:
            return default

    head = model.n_embd // max(1, model.n_head)
    n_cells = (params.n_ctx or model.n_ctx_train) + 256 * params.n_seq_max
    per_head = 0.0
    for key, cache_type in (
        ("attention.key_length", params.cache_type_k),
        ("attention.value_length", params.cache_type_v),
    ):
        block_bytes, block_values = _BLOCKS[CACHE_TYPES[cache_type]]
        per_head += max(number(key, head), head) * block_bytes / block_values
    n_layers = model.n_layer + model.n_layer_nextn
    upper = n_cells * (_CELL_BYTES + int(max(model.n_head, model.n_head_kv) * per_head) * n_layers)
    upper += 4 * model.n_vocab * min(params.n_batch, n_cells)
    if model.is_recurrent:
        return 0, upper
    compressed = f"{model.architecture}.attention.kv_lora_rank" in meta
    return n_cells * (_CELL_BYTES + (0 if compressed or model.is_hybrid else int(model.n_head_kv * per_head))), upper
