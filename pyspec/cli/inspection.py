"""``pyspec inspect``: what a model file is, and what it can be used with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..config import ModelParams, SpeculationParams
from ..errors import PyspecError
from . import terminal

if TYPE_CHECKING:
    from ..runtime import Model

__all__ = ["inspect", "run"]

_VOCAB_TYPES = {0: "none", 1: "SPM", 2: "BPE", 3: "WPM", 4: "UGM", 5: "RWKV", 6: "PLaMo-2"}  # llama.h


def run(path: str, draft_path: str | None, as_json: bool) -> None:
    """Print what :func:`inspect` finds."""
    found = inspect(path, draft_path)
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        _print(found)


def inspect(path: str, draft_path: str | None = None) -> dict[str, Any]:
    """Facts about a model file, as JSON-ready values.

    ``target``: for each speculation type None, or why it cannot be used with this model as the target.
    ``draft_type``: the type that this file is the draft of.
    ``pair`` (with a draft): the type that fits both files, or the reason why none does.

    Raises:
        ModelLoadError: a file cannot be loaded.
    """
    from ..drafters.choose import kind_of_file, usable
    from ..runtime import Model

    # Without repacking and offloading a mapped file is there at once: weights are never read.
    params = ModelParams(n_gpu_layers=0, devices=(), use_extra_bufts=False)
    with terminal.progress(f"reading {terminal.printable(path)}") as step, Model(path, params, step) as model:
        found = _facts(model)
        found["target"] = usable(model)
        found["draft_type"] = kind_of_file(path)
        if draft_path is not None:
            with Model(draft_path, params) as draft:
                found["pair"] = {"draft": str(draft.path), **_pair(model, draft)}
    return found


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
    pair = found.get("pair")
    if pair:
        verdict = f"no: {pair['problem']}" if pair["problem"] else "yes"
        write(terminal.printable(f"\nwith draft {pair['draft']} as {pair['type']}: {verdict}\n"))


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
