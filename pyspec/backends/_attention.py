"""Where attention on a cache of some types is computed, asked before a context is made.

libllama ends the process where no device can write a cache, and moves flash attention to the CPU in silence where it
was asked for and the GPU has no kernel for these types.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import CACHE_TYPES, ContextParams
from ..errors import UnsupportedError
from . import _binding
from ._model import ModelHandle

__all__ = ["Support", "check_attention", "judge", "support"]

log = logging.getLogger("pyspec")

#: Types without blocks.
_PLAIN = ("f32", "f16", "bf16")
_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Support:
    """What one device computes itself.

    Attributes:
        device: its name. is_gpu: it is no CPU.
        writes: rows into the cache. flash: flash attention. matmul: attention without it.
    """

    device: str
    is_gpu: bool
    writes: bool
    flash: bool
    matmul: bool


def check_attention(model: ModelHandle, params: ContextParams) -> None:
    """Log a warning where attention leaves the GPU.

    Raises:
        UnsupportedError: the cache types do not fit the model's heads, or no device can compute with them.
    """
    heads = _head_sizes(model)
    if not heads or model.n_head < 1 or model.n_head_kv < 1:
        return  # no attention, or not in this form: libllama has its own checks
    name = f"{model.path!r} ({model.architecture})"
    for option, cache_type, sizes in (
        ("cache_type_k", params.cache_type_k, {k for k, _ in heads}),
        ("cache_type_v", params.cache_type_v, {v for _, v in heads}),
    ):
        odd = next((size for size in sorted(sizes) if size % _BLOCK), None)
        if cache_type not in _PLAIN and odd is not None:
            raise UnsupportedError(
                f"{option}={cache_type!r} stores blocks of {_BLOCK} values, the heads of {name} have {odd}: "
                f"use {', '.join(_PLAIN)}"
            )
    offloaded = params.offload_kqv and model.params.n_gpu_layers != 0
    n_devices = _binding.lib.pyspec_model_n_devices(model._open().ptr) if offloaded else 0
    for head_k, head_v in sorted(heads):
        found = [support(model, i, params, head_k, head_v) for i in (*range(n_devices), -1)]
        for warning in judge(found, params):
            log.warning("%s", warning)


def judge(devices: Sequence[Support], params: ContextParams) -> list[str]:
    """Warnings for these devices, of which the last is the CPU.

    Raises:
        UnsupportedError: a device cannot write such a cache, or nothing can compute attention on it.
    """
    types = f"cache_type_k={params.cache_type_k!r}, cache_type_v={params.cache_type_v!r}"
    must_flash = params.flash_attn_code == 1 or params.cache_type_v not in _PLAIN
    cpu = devices[-1]
    warnings = []
    for d in devices:
        if not d.writes:
            raise UnsupportedError(f"{types}: device {d.device} cannot write a cache of these types")
        here = d.flash if must_flash else d.matmul if params.flash_attn_code == 0 else d.flash or d.matmul
        if here:
            continue
        what = "flash attention" if must_flash else "attention"
        if not (cpu.flash if must_flash else cpu.flash or cpu.matmul):
            raise UnsupportedError(
                f"{types}: neither device {d.device} nor the CPU has {what} on a cache of these types"
            )
        if d.is_gpu:
            warnings.append(
                f"{types}: device {d.device} has no {what} on a cache of these types, so it runs on the CPU, with "
                "copies in every layer, and is slow. f16 for both, or the same type for both, runs on more devices"
            )
    return warnings


def support(model: ModelHandle, i: int, params: ContextParams, head_k: int, head_v: int) -> Support:
    """Ask device ``i`` of the model's (-1: the CPU)."""
    out = _binding.ffi.new("struct pyspec_attention *")
    types = CACHE_TYPES[params.cache_type_k], CACHE_TYPES[params.cache_type_v]
    rc = _binding.lib.pyspec_attention_support(
        model._open().ptr, i, *types, head_k, head_v, model.n_head, model.n_head_kv, out
    )
    if rc:  # heads of another form: nothing is known
        return Support("", False, True, True, True)
    name = _binding.ffi.string(out.device).decode("utf-8", "replace")
    return Support(name, bool(out.is_gpu), bool(out.writes), bool(out.flash), bool(out.matmul))


def _head_sizes(model: ModelHandle) -> set[tuple[int, int]]:
    """(K, V) sizes of heads: of all layers, and of those with a sliding window. Empty: compressed or unknown."""
    meta, prefix = model.metadata(), f"{model.architecture}.attention."
    if f"{prefix}kv_lora_rank" in meta or model.n_head < 1:
        return set()
    default = str(model.n_embd // model.n_head)
    try:
        k, v = (int(meta.get(prefix + key, default)) for key in ("key_length", "value_length"))
        k_swa, v_swa = (
            int(meta.get(prefix + key, size)) for key, size in (("key_length_swa", k), ("value_length_swa", v))
        )
    except ValueError:
        return set()
    return {(k, v), (k_swa, v_swa)}
