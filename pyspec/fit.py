"""Do target and draft fit into the memory of their devices? Asked before anything is loaded.

libllama itself computes the sizes (weights, caches, work buffers), without allocating. That takes a fraction of a
second a model, so it is only asked where a rough upper bound from the files comes near the free memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from . import backends
from .backends import HOST, Device, MemoryUse
from .config import ContextParams, ModelParams
from .drafters import choose
from .drafters.gguf import GgufHeader, read_header
from .errors import ConfigError, DoesNotFitError

__all__ = ["Estimate", "Part", "check", "estimate"]

Estimator: TypeAlias = Callable[[str, ModelParams, ContextParams], "list[MemoryUse] | None"]

#: What drivers and libraries take besides, on a device with memory of its own.
MARGIN_BYTES = 64 * 2**20
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Part:
    """A model and the context it is to get.

    Attributes:
        what: "target" or "draft". path: its file. model, context: its options.
        loaded: its weights are in memory already, or are counted with another part.
    """

    what: str
    path: str
    model: ModelParams
    context: ContextParams
    loaded: bool = False


@dataclass(frozen=True, slots=True)
class Estimate:
    """What each part takes on each device.

    Attributes:
        uses: for "target" and "draft" (a target's own draft heads count as "draft"), what it takes, device by device.
        free_bytes: free memory by device, as of now; devices that do not say are left out.
    """

    uses: Mapping[str, Sequence[MemoryUse]]
    free_bytes: Mapping[str, int]
    #: Host memory of weights that stay in the file's pages, which can be dropped and read again.
    mapped: Mapping[str, bool] = field(default_factory=dict)

    def needed_bytes(self, *parts: str) -> dict[str, int]:
        """Memory that has to be there, by device, for some parts (none named: all)."""
        needed: dict[str, int] = {}
        for part in parts or tuple(self.uses):
            for use in self.uses.get(part, ()):
                size = use.total_bytes
                if use.device == HOST and self.mapped.get(part):
                    size -= use.weights_bytes
                needed[use.device] = needed.get(use.device, 0) + size
        return needed

    def overfull(self, *parts: str) -> list[str]:
        """Devices that lack the memory for some parts (none named: all)."""
        needed = self.needed_bytes(*parts)
        return [name for name, size in needed.items() if name in self.free_bytes and size > self._usable(name)]

    def _usable(self, name: str) -> int:
        return self.free_bytes[name] - (0 if name == HOST else MARGIN_BYTES)


def free_memory(known: Sequence[Device]) -> dict[str, int]:
    """Free bytes by device; host memory as far as this process may have it."""
    free = {d.name: d.memory_free_bytes for d in known if d.is_gpu and d.memory_total_bytes}
    host = backends.available_bytes()
    if host is not None:
        free[HOST] = host
    return free


def estimate(
    parts: Sequence[Part], known: Sequence[Device], estimator: Estimator = backends.estimate_memory
) -> Estimate | None:
    """What the parts take together; None: libllama cannot say for the target.

    A draft that it cannot say for (its context needs the target's) counts with the size of its file.
    """
    uses: dict[str, list[MemoryUse]] = {}
    for part in parts:
        found = estimator(part.path, part.model, part.context)
        if found is None:
            if part.what == "target":
                return None
            devices = backends.devices_in_use(part.model, list(known))
            found = [MemoryUse(devices[0].name if devices else HOST, _file_size(part.path), 0, 0, 0)]
        if part.loaded:
            found = [replace(use, weights_bytes=0, repacked_bytes=0) for use in found]
        uses.setdefault(part.what, []).extend(found)
    mapped = {part.what: part.model.use_mmap is not False and not part.model.use_mlock for part in parts}
    return Estimate(uses, free_memory(known), mapped)


def check(parts: Sequence[Part], known: Sequence[Device], estimator: Estimator = backends.estimate_memory) -> None:
    """Refuse parts that do not fit, before they are loaded.

    Args:
        parts: target first.
        known: the devices there are.
        estimator: as :func:`pyspec.backends.estimate_memory`.

    Raises:
        DoesNotFitError: names each device with its need, and what would fit.
        BackendNotFoundError, ConfigError: devices or their split do not fit.
    """
    free = free_memory(known)
    for part in parts:
        for device in backends.devices_in_use(part.model, list(known)):
            if not device.memory_total_bytes:
                continue
            if free[device.name] <= MARGIN_BYTES:
                raise DoesNotFitError(
                    f"the {part.what} {Path(part.path).name!r} cannot be put on {device.name} ({device.description}): "
                    f"{_mib(device.memory_free_bytes)} of {_mib(device.memory_total_bytes)} MiB are free there. Name "
                    f"other devices ({_option(part, 'devices')}=[...], 'pyspec devices' lists them; [] is the CPU), or "
                    "end what uses it",
                    {device.name: MARGIN_BYTES},
                    {device.name: device.memory_free_bytes},
                )
    if not free or _clearly_fits(parts, known, free):
        return
    found = estimate(parts, known, estimator)
    if found is None:
        return
    if full := found.overfull("target"):
        _refuse(found, parts, known, estimator, "target", full)
    if full := found.overfull():
        _refuse(found, parts, known, estimator, "draft", full)


def _refuse(
    found: Estimate,
    parts: Sequence[Part],
    known: Sequence[Device],
    estimator: Estimator,
    culprit: str,
    full: Sequence[str],
) -> None:
    """Raise the error.

    Raises:
        DoesNotFitError: always.
    """
    shown = ("target",) if culprit == "target" else tuple(found.uses)
    needed = found.needed_bytes(*shown)
    part = next(p for p in parts if p.what == culprit)
    lines = []
    for name in full:
        details = "; ".join(
            f"{what}: {_use_text(use)}" for what in shown for use in found.uses[what] if use.device == name
        )
        where = "this process may have" if name == HOST else "are free"
        lines.append(f"{name}: {_mib(needed[name])} MiB needed, {_mib(found.free_bytes[name])} {where} ({details})")
    remedies = _remedies(parts, known, estimator, part, full)
    advice = "; or ".join(remedies) if remedies else "a smaller quantization of the model, or a smaller model"
    beside = " beside its target" if culprit == "draft" else ""
    raise DoesNotFitError(
        "\n".join(
            (
                f"the {culprit} {Path(part.path).name!r} does not fit{beside}:",
                *(f"  {line}" for line in lines),
                f"What would fit: {advice}",
            )
        ),
        needed,
        dict(found.free_bytes),
    )


def _remedies(
    parts: Sequence[Part], known: Sequence[Device], estimator: Estimator, culprit: Part, full: Sequence[str]
) -> list[str]:
    """Changes of one option that make everything fit, each tried; the least painful first."""

    def fits(**changes: Any) -> bool:
        trial = [_changed(part, changes) if part.what == culprit.what else part for part in parts]
        try:
            found = estimate(trial, known, estimator)
        except ConfigError:
            return False
        return found is not None and not found.overfull(*(("target",) if culprit.what == "target" else ()))

    out = []
    context = culprit.context
    is_f16 = (context.cache_type_k, context.cache_type_v) == ("f16", "f16")
    if is_f16 and context.flash_attn_code and fits(cache_type_k="q8_0", cache_type_v="q8_0"):
        k, v = _option(culprit, "cache_type_k"), _option(culprit, "cache_type_v")
        out.append(f"{k}='q8_0', {v}='q8_0'")
    n_slots = 1 if context.kv_unified else context.n_seq_max
    per_seq = context.n_ctx // n_slots
    for n_ctx in (2**k for k in range(20, 7, -1)):
        if n_ctx < per_seq and fits(n_ctx=n_ctx * n_slots):
            out.append(f"n_ctx={n_ctx} (now {per_seq})")
            break
    if set(full) != {HOST} and not culprit.loaded and fits(devices=()):
        n_layer = _n_layer(culprit.path) + 1  # the output layer counts
        low, high = 0, n_layer if culprit.model.n_gpu_layers < 0 else min(n_layer, culprit.model.n_gpu_layers)
        while high - low > 1:  # low fits, high does not
            middle = (low + high) // 2
            low, high = (middle, high) if fits(n_gpu_layers=middle) else (low, middle)
        if low:
            out.append(f"{_option(culprit, 'n_gpu_layers')}={low} (of {n_layer})")
        if not low or culprit.what == "draft":
            out.append(f"{_option(culprit, 'devices')}=[], which is the CPU")
    if culprit.what == "draft":
        out.append("a smaller draft, or none")
    return out


def _changed(part: Part, changes: Mapping[str, Any]) -> Part:
    model = {k: v for k, v in changes.items() if k in ModelParams.names()}
    context = {k: v for k, v in changes.items() if k in ContextParams.names()}
    return replace(part, model=part.model.override(**model), context=part.context.override(**context))


def _option(part: Part, name: str) -> str:
    return name if part.what == "target" else f"draft_{name}"


def _use_text(use: MemoryUse) -> str:
    weights = use.weights_bytes + use.repacked_bytes
    sizes = (("weights", weights), ("cache", use.context_bytes), ("work", use.compute_bytes))
    return ", ".join(f"{name} {_mib(size)}" for name, size in sizes if size)


def _mib(size: int) -> str:
    return f"{size / _MIB:,.0f}"


def _file_size(path: str) -> int:
    return sum(os.path.getsize(each) for each in backends.split_paths(path))


def _n_layer(path: str) -> int:
    return int(read_header(path).get("block_count", 0))


def _clearly_fits(parts: Sequence[Part], known: Sequence[Device], free: Mapping[str, int]) -> bool:
    """Whether rough upper bounds stay below half of what the fullest device has free."""
    names = {HOST} | {d.name for part in parts for d in backends.devices_in_use(part.model, list(known))}
    room = min((free[name] for name in names if name in free), default=0)
    return sum(_upper_bound(part) for part in parts) < room // 2


def _upper_bound(part: Part) -> int:
    """Bytes a part takes at most: its file, twice for repacking, and every row of its cache in the widest type."""
    header: GgufHeader = read_header(part.path)

    def number(key: str, default: int) -> int:
        value = header.get(key, default)
        return int(value) if isinstance(value, (int, float)) else default

    n_embd, n_layer = number("embedding_length", 16384), number("block_count", 256)
    n_head = number("attention.head_count", 0) or n_embd // 64
    width = max(n_embd, n_head * max(number("attention.key_length", 0), number("attention.value_length", 0)))
    cache = part.context.n_ctx * n_layer * width * 2 * 4
    n_vocab = next((shape[-1] for name, shape in header.tensors.items() if name.startswith("token_embd.")), 262_144)
    rows = min(part.context.n_ubatch, max(part.context.n_ctx, 1))
    work = 4 * rows * (n_vocab + 64 * n_embd) + 256 * _MIB
    weights = 0 if part.loaded else 2 * _file_size(part.path)
    return weights + cache + work


def parts_of(
    target: Part, draft: str | None, draft_model: ModelParams, draft_context: Mapping[str, Any], own_heads: bool
) -> list[Part]:
    """Describe what an ``LLM`` is about to load.

    Args:
        target: with ``n_ctx`` for all sequences.
        draft: its file. draft_model: its options. draft_context: what differs from the target's context.
        own_heads: the target's own multi-token-prediction blocks draft.
    """
    parts, context = [target], target.context
    own = {k: v for k, v in draft_context.items() if k != "n_ctx"}
    drafts: dict[str, Any] = {"n_outputs_max": context.n_seq_max, "n_rs_seq": 0}
    drafts |= {"cache_type_k": "f16", "cache_type_v": "f16", **own}
    if draft_context.get("n_ctx"):
        drafts["n_ctx"] = draft_context["n_ctx"] * (1 if context.kv_unified else context.n_seq_max)
    if draft is not None:
        model = draft_model
        if choose.kind_of_file(draft) == "draft-mtp":
            model, drafts["ctx_type"] = replace(model, load_mtp=True), "mtp"
        parts.append(Part("draft", draft, model, context.override(**drafts)))
    elif own_heads:
        drafts["ctx_type"] = "mtp"
        parts.append(Part("draft", target.path, target.model, context.override(**drafts), loaded=True))
    return parts
