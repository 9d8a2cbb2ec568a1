"""``pyspec inspect``: what a model file is, and what it can be used with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..assemble import N_RS_SEQ_MAX
from ..config import ContextParams, ModelParams, SpeculationParams
from ..errors import ConfigError, PyspecError
from . import terminal

if TYPE_CHECKING:
    from ..runtime import Model

__all__ = ["inspect", "run"]

_VOCAB_TYPES = {0: "none", 1: "SPM", 2: "BPE", 3: "WPM", 4: "UGM", 5: "RWKV", 6: "PLaMo-2"}  # llama.h


@dataclass(frozen=True, slots=True)
class Sizes:
    """A context whose cache is to be sized. ``n_ctx``: tokens of one sequence. ``types``: of K and V."""

    n_ctx: int
    k: int = 3
    n_seq: int = 1
    kv_unified: bool = False
    n_ubatch: int = 512
    types: tuple[str, str] = ("f16", "f16")
    draft_types: tuple[str, str] = ("f16", "f16")

    def params(self, types: tuple[str, str], swa_full: bool, recurrent: bool = False) -> ContextParams:
        """Options of such a context. ``recurrent``: with the snapshots that drafts of ``k`` need."""
        return ContextParams(
            n_ctx=self.n_ctx if self.kv_unified else self.n_ctx * self.n_seq,
            n_batch=max(ContextParams().n_batch, self.n_ubatch, self.n_seq),
            n_ubatch=self.n_ubatch,
            n_seq_max=self.n_seq,
            n_outputs_max=self.n_seq,
            n_rs_seq=max(0, min(self.k, self.n_ubatch - 2)) if recurrent and self.k <= N_RS_SEQ_MAX else 0,
            kv_unified=self.kv_unified,
            cache_type_k=types[0],
            cache_type_v=types[1],
            swa_full=swa_full,
        )


def run(path: str, draft_path: str | None, as_json: bool, sizes: Sizes | None = None) -> None:
    """Print what :func:`inspect` finds."""
    found = inspect(path, draft_path, sizes)
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        _print(found)


def inspect(path: str, draft_path: str | None = None, sizes: Sizes | None = None) -> dict[str, Any]:
    """Facts about a model file, as JSON-ready values.

    ``target``: for each speculation type None, or why it cannot be used with this model as the target.
    ``draft_type``: the type that this file is the draft of.
    ``pair`` (with a draft): the type that fits both files, or the reason why none does.
    ``cache`` (with sizes): what :func:`cache_sizes` finds; ``draft_cache``: the same for the draft, where it has one.

    Raises:
        ModelLoadError: a file cannot be loaded. ConfigError, UnsupportedError: no such cache can be made.
    """
    from ..drafters.choose import kind_of_file, usable
    from ..runtime import Model

    # Without repacking and offloading a mapped file is there at once: weights are never read.
    if sizes is not None and sizes.n_ctx < 1:
        raise ConfigError(f"--ctx must be 1 or more, got {sizes.n_ctx}")
    params = ModelParams(n_gpu_layers=0, devices=(), use_extra_bufts=False)
    with terminal.progress(f"reading {terminal.printable(path)}") as step, Model(path, params, step) as model:
        found = _facts(model)
        found["target"] = usable(model)
        found["draft_type"] = kind_of_file(path)
        if sizes is not None:
            found["cache"] = cache_sizes(model, sizes, sizes.types)
        if draft_path is not None:
            with Model(draft_path, params) as draft:
                found["pair"] = {"draft": str(draft.path), **_pair(model, draft)}
                if sizes is not None and found["pair"]["type"] == "draft-simple":
                    found["draft_cache"] = cache_sizes(draft, sizes, sizes.draft_types)
    return found


def cache_sizes(model: Model, sizes: Sizes, types: tuple[str, str]) -> dict[str, Any]:
    """Bytes of a cache as libllama would allocate them, and whether drafts of ``k`` tokens can be taken back from it.

    Returns:
        "small_window_bytes", "full_window_bytes"; without a window both are the same. "n_swa". "margin": rows of a
        micro-batch that drafts of ``k`` need (None without a window), "n_ubatch" what they have, "fits".

    Raises:
        ConfigError, UnsupportedError: no such cache can be made.
    """
    if sizes.k < 1:
        raise ConfigError(f"--k must be 1 or more, got {sizes.k}")
    recurrent = model.is_recurrent or model.is_hybrid
    small, full = (model.context_memory(sizes.params(types, swa, recurrent))["context"] for swa in (False, True))
    margin = sizes.k + 1 if model.n_swa else None
    n_ubatch = min(sizes.n_ubatch, sizes.params(types, False).n_ctx)
    return {
        "n_ctx": sizes.n_ctx,
        "n_seq": sizes.n_seq,
        "kv_unified": sizes.kv_unified,
        "cache_type_k": types[0],
        "cache_type_v": types[1],
        "small_window_bytes": small,
        "full_window_bytes": full,
        "n_swa": model.n_swa,
        "k": sizes.k,
        "n_ubatch": n_ubatch,
        "margin": margin,
        "fits": margin is None or margin <= n_ubatch,
    }


def _facts(model: Model) -> dict[str, Any]:
    vocab = model.vocab
    return {
        "path": str(model.path),
        "name": model.metadata.get("general.name"),
        "architecture": model.architecture,
        "description": model.description,
        "file_type": model.file_type,
        "license": model.metadata.get("general.license"),
        "n_params": model.n_params,
        "size_bytes": model.size_bytes,
        "n_layer": model.n_layer,
        "n_layer_nextn": model.n_layer_nextn,
        "n_embd": model.n_embd,
        "n_head": model.n_head,
        "n_head_kv": model.n_head_kv,
        "n_ctx_train": model.n_ctx_train,
        "n_swa": model.n_swa,
        "is_recurrent": model.is_recurrent,
        "is_hybrid": model.is_hybrid,
        "vocab": {
            "type": _VOCAB_TYPES.get(vocab.type, str(vocab.type)),
            "n_tokens": vocab.n_tokens,
            "bos": vocab.bos,
            "eos": vocab.eos,
            "add_bos": vocab.add_bos,
            "add_eos": vocab.add_eos,
            "eog": sorted(vocab.eog_tokens),
        },
        "has_chat_template": bool(model.metadata.get("tokenizer.chat_template")),
    }


def _pair(target: Model, draft: Model) -> dict[str, Any]:
    from ..drafters import registry
    from ..drafters.choose import choose

    name = choose(target, draft)
    try:
        registry.get(name).plan(target, draft, SpeculationParams(), 1)
    except PyspecError as e:
        return {"type": name, "problem": str(e)}
    return {"type": name, "problem": None}


def _print(found: dict[str, Any]) -> None:
    write = terminal.write
    write(terminal.columns([(key, terminal.printable(value)) for key, value in _rows(found)]))
    write("\nas target, with --spec-type:\n")
    verdicts = [
        ("  " + name, terminal.printable(f"no: {reason}") if reason else _YES.get(name, "yes"))
        for name, reason in found["target"].items()
    ]
    write(terminal.columns(verdicts))
    write(f"\nas draft: {found['draft_type']}\n")
    for key, title in (("cache", "cache"), ("draft_cache", "cache of the draft")):
        if key in found:
            _print_cache(title, found[key])
    pair = found.get("pair")
    if pair:
        verdict = f"no: {pair['problem']}" if pair["problem"] else "yes"
        write(terminal.printable(f"\nwith draft {pair['draft']} as {pair['type']}: {verdict}\n"))


def _print_cache(title: str, c: dict[str, Any]) -> None:
    small, full = c["small_window_bytes"], c["full_window_bytes"]
    kind = f" in one cache for {c['n_seq']}" if c["kv_unified"] else f", {c['n_seq']} sequence(s)"
    terminal.write(f"\n{title} for {c['n_ctx']} tokens{kind}, K {c['cache_type_k']}, V {c['cache_type_v']}:\n")
    if c["margin"] is None:
        terminal.write(
            f"  {full:,} bytes ({full / 2**20:,.1f} MiB); no sliding window, so drafts may have any length\n"
        )
        return
    rows = [
        ("  small window", f"{small:,} bytes", f"({small / 2**20:,.1f} MiB,", f"{small / full:.1%} of the full)"),
        ("  full window (swa_full)", f"{full:,} bytes", f"({full / 2**20:,.1f} MiB)", ""),
    ]
    terminal.write(terminal.columns(rows, right={1, 2}))
    verdict = "enough" if c["fits"] else "too small: raise it, lower --k, or use swa_full"
    terminal.write(
        f"  margin: drafts of {c['k']} need micro-batches of {c['margin']} rows or more; n_ubatch = {c['n_ubatch']} "
        f"is {verdict}\n"
    )


#: What else it takes.
_YES = {
    "draft-simple": "yes, with a smaller model of the same vocabulary",
    "draft-eagle3": "yes, with a head made for this model",
    "draft-dflash": "yes, with a draft made for this model",
    "draft-dspark": "yes, with a draft made for this model",
}


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    vocab = found["vocab"]
    memory = (
        "recurrent"
        if found["is_recurrent"]
        else "hybrid (attention and recurrent)"
        if found["is_hybrid"]
        else "attention"
    )
    if found["n_swa"]:
        memory += f", sliding window of {found['n_swa']}"
    layers = f"{found['n_layer']}"
    if found["n_layer_nextn"]:
        layers += f", of these {found['n_layer_nextn']} for multi-token prediction"
    rows = [
        ("file", found["path"]),
        ("name", found["name"] or ""),
        ("architecture", found["architecture"]),
        ("licence", found["license"] or ""),
        ("parameters", f"{found['n_params']:,}"),
        ("size", f"{found['size_bytes'] / 1e6:,.1f} MB, {found['file_type']}"),
        ("layers", layers),
        ("width", f"{found['n_embd']}, {found['n_head']} heads, {found['n_head_kv']} of keys and values"),
        ("memory", memory),
        ("context", f"{found['n_ctx_train']:,} tokens in training"),
        ("vocabulary", f"{vocab['n_tokens']:,} tokens, {vocab['type']}, bos {vocab['bos']}, eos {vocab['eos']}"),
        ("chat template", "yes" if found["has_chat_template"] else "no"),
    ]
    return [(key, value) for key, value in rows if value]
