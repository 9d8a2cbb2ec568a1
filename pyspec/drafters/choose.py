"""Which drafter fits a draft file and a target, and what a target can be sped up with.

:func:`kind_of_file` reads a header only, because the answer decides how a file has to be loaded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..config import SpeculationParams
from ..errors import PyspecError, UnsupportedError
from . import registry
from .compat import HIDDEN_ROW_ARCHITECTURES, LAYER_INPUT_ARCHITECTURES
from .gguf import GgufHeader, read_header

if TYPE_CHECKING:
    from ..runtime.model import Model

__all__ = [
    "choose",
    "for_auto",
    "is_mtp_only",
    "kind_of_file",
    "kind_of_header",
    "mtp_reason",
    "require_kind",
    "usable",
]

#: Drafter of a file by its architecture, where that says it all.
_BY_ARCHITECTURE = {"eagle3": "draft-eagle3", "gemma4-assistant": "draft-mtp"}
_WITHOUT_DRAFT = "suffix"


def kind_of_header(header: GgufHeader) -> str:
    """The drafter that a file is made for, by architecture and tensors; ``draft-simple`` for ordinary models."""
    arch = header.architecture
    if arch == "dflash":
        # nothing in the metadata tells them apart
        return "draft-dspark" if "markov_w1.weight" in header.tensors else "draft-dflash"
    return _BY_ARCHITECTURE.get(arch, "draft-mtp" if is_mtp_only(header) else "draft-simple")


def is_mtp_only(header: GgufHeader) -> bool:
    """True for a file with multi-token-prediction blocks and no trunk: it ends the process in an ordinary context."""
    return (
        bool(header.get("nextn_predict_layers", 0))
        and header.architecture not in _BY_ARCHITECTURE
        and "blk.0.attn_norm.weight" not in header.tensors
    )


def kind_of_file(path: str | os.PathLike[str]) -> str:
    """The drafter that a GGUF file is made for. Reads its header only.

    Raises:
        ModelLoadError: no such file, or not a GGUF file.
    """
    return kind_of_header(read_header(path))


def require_kind(name: str, draft: Model) -> None:
    """Refuse a draft file that is made for another drafter than ``name``.

    Raises:
        UnsupportedError: says what the file is made for.
    """
    kind = kind_of_file(draft.path)
    if kind != name and not (name == "draft-mtp" and draft.n_layer_nextn):
        raise UnsupportedError(
            f"draft file {draft.path.name!r} ({draft.architecture}) is made for {kind}, not for {name}: "
            f"use speculation={kind!r}"
        )


def choose(target: Model, draft: Model | None) -> str:
    """The drafter for a draft that is loaded: the one that its file is made for.

    Without a draft: ``draft-mtp`` if the target was loaded with its multi-token-prediction blocks, else ``suffix``.

    Raises:
        ModelLoadError: the draft's file has gone.
    """
    if draft is not None:
        return kind_of_file(draft.path)
    return "draft-mtp" if target.params.load_mtp and mtp_reason(target) is None else _WITHOUT_DRAFT


def for_auto(target: Model, draft: Model | None) -> tuple[str, ...]:
    """The drafters that ``speculation="auto"`` has to choose from: one that costs nothing, and :func:`choose`'s.

    Raises:
        ModelLoadError: the draft's file has gone.
    """
    return tuple(dict.fromkeys((_WITHOUT_DRAFT, choose(target, draft))))


def usable(target: Model) -> dict[str, str | None]:
    """For every drafter: None if ``target`` can be used with it (given a matching draft file), else the reason."""
    out: dict[str, str | None] = {}
    arch = target.architecture
    for name in registry.names():
        reason: str | None = None
        if name in ("draft-eagle3", "draft-dflash", "draft-dspark"):
            if arch not in LAYER_INPUT_ARCHITECTURES:
                reason = f"libllama does not hand out the layer inputs of {arch} models"
        elif name == "draft-mtp":
            # gemma4 has its heads in an assistant file
            reason = None if arch == "gemma4" else mtp_reason(target)
        elif name not in registry.BUILTIN:
            try:
                registry.get(name).plan(target, None, SpeculationParams(), 1)
            except UnsupportedError as e:
                reason = str(e)
            except PyspecError:
                reason = None  # it only wants a draft, or other options
        out[name] = reason
    return out


def mtp_reason(target: Model) -> str | None:
    """Why ``draft-mtp`` cannot be had from the target's own file; None if it can."""
    arch = target.architecture
    if arch not in HIDDEN_ROW_ARCHITECTURES:
        return f"libllama does not hand out the hidden rows of {arch} models"
    if arch == "gemma4" or target.n_layer_nextn < 1:
        return "the file has no multi-token-prediction blocks; a separate draft file may have them"
    return None
