"""``draft-eagle3``: a one-layer head that reads three of the target's layers.

An encoder fuses the three layer inputs of a position P to one row g[P]; the decoder gets pairs (token[P+1], g[P]) and
continues with its own hidden rows in place of g. Reduced draft vocabularies (d2t) are mapped by libllama: logits have
the target's width, -inf where the draft has no token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from .. import _core
from ..config import SpeculationParams
from ..errors import ConfigError, UnsupportedError
from ..runtime.batch import Batch
from ..types import F32Array, Requirements
from .base import Plan, log_setup
from .carry import N_STASH, CarryDrafter
from .choose import require_kind
from .compat import HIDDEN_ROW_ARCHITECTURES, LAYER_INPUT_ARCHITECTURES, check_token_texts
from .gguf import read_header

if TYPE_CHECKING:
    from ..runtime.evaluator import Evaluator
    from ..runtime.model import Model

__all__ = ["N_LAYERS", "DraftEagle3", "check_layers"]

#: Layers of the target that an EAGLE-3 head reads.
N_LAYERS = 3


class DraftEagle3(CarryDrafter):
    """See the module's text and :class:`CarryDrafter`."""

    name: ClassVar[str] = "draft-eagle3"
    shift: ClassVar[int] = 0

    def __init__(self, target: Evaluator, draft: Evaluator | None, params: SpeculationParams, n_seq: int) -> None:
        if draft is None:
            raise ConfigError(f"{self.name} needs a draft model")
        self._layers: tuple[int, ...] = cast(Any, draft).model.target_layer_ids
        raw_width = len(self._layers) * target.n_embd
        super().__init__(target, draft, params, n_seq, draft.n_embd, raw_width=raw_width)
        self._raw: F32Array = np.zeros((min(target.n_batch, target.n_ubatch), raw_width), np.float32)
        self._features: F32Array = np.zeros((draft.n_ubatch, raw_width), np.float32)
        self._g: F32Array = np.zeros((max(target.n_batch, n_seq * N_STASH), draft.n_embd), np.float32)
        self._sample_on_device()
        log_setup(self, draft, f"layers={list(self._layers)}, sampling={'device' if self._on_device else 'cpu'}")

    @classmethod
    def plan(cls, target: Model, draft: Model | None, params: SpeculationParams, n_seq: int) -> Plan:
        """See :meth:`Drafter.plan`."""
        if draft is None:
            raise ConfigError(f"{cls.name} needs a draft model: pass draft='file.gguf'")
        require_kind(DraftEagle3.name, draft)
        layers = draft.target_layer_ids
        if len(layers) != N_LAYERS:
            raise UnsupportedError(
                f"{draft.path.name!r} reads {len(layers)} layers of the target, EAGLE-3 has {N_LAYERS}"
            )
        header = read_header(draft.path)
        made_for = header.get("target_hidden_size", 0)
        if made_for != target.n_embd:
            raise ConfigError(
                f"draft {draft.path.name!r} is made for a target of hidden size {made_for}, "
                f"{target.path.name!r} has {target.n_embd}"
            )
        check_layers(target, draft, final_row=True)
        check_token_texts(target.vocab, draft.vocab)
        n_rs_seq = params.n_max if target.is_recurrent or target.is_hybrid else 0
        return Plan(
            Requirements(layer_inputs=layers, n_rs_seq=n_rs_seq),
            {"n_rs_seq": 0, "n_outputs_max": n_seq * (params.n_max + 1), "other": True},
            params.n_max,
        )

    def _hidden(self, batch: Batch) -> F32Array:
        """The layers' rows side by side."""
        target, n = self.target, batch.n
        if n > len(self._raw):
            self._raw = np.zeros((n, self._raw.shape[1]), np.float32)
        _core.interleave_rows(self._raw[:n], [target.layer_input(layer, n) for layer in self._layers], n)
        return self._raw[:n]

    def _fuse(self, parts: list[F32Array]) -> list[F32Array]:
        """The encoder's rows, of all parts together, in chunks that fit its micro-batch."""
        n_all = sum(len(part) for part in parts)
        if n_all > len(self._g):
            self._g = np.zeros((n_all, self._g.shape[1]), np.float32)
        out, waiting, at = [], 0, 0
        for part in parts:
            done = 0
            while done < len(part):
                m = min(len(part) - done, len(self._features) - waiting)
                self._features[waiting : waiting + m] = part[done : done + m]
                waiting, done = waiting + m, done + m
                if waiting == len(self._features):
                    at, waiting = self._encode(at, waiting), 0
            out.append(len(part))
        if waiting:
            self._encode(at, waiting)
        ends = np.cumsum(out).tolist()
        return [self._g[end - n : end] for end, n in zip(ends, out, strict=True)]

    def _encode(self, at: int, n: int) -> int:
        self._draft.encode(self._features, n)
        self._g[at : at + n] = self._draft.nextn(n)
        return at + n


def check_layers(target: Model, draft: Model, *, final_row: bool) -> None:
    """Check that the target hands out what a draft reads of its layers.

    Args:
        final_row: whether the layer id n_layer may stand for the final hidden row.

    Raises:
        UnsupportedError: libllama does not hand these rows out for the target's architecture.
        ConfigError: the draft reads a layer that the target does not have.
    """
    arch = target.architecture
    if arch not in LAYER_INPUT_ARCHITECTURES:
        raise UnsupportedError(
            f"draft {draft.path.name!r} reads layer inputs, which libllama does not hand out for {arch} models"
        )
    for layer in draft.target_layer_ids:
        if layer == target.n_layer and final_row:
            if arch not in HIDDEN_ROW_ARCHITECTURES:
                raise UnsupportedError(
                    f"draft {draft.path.name!r} reads the target's final hidden rows (layer {layer}); "
                    f"libllama does not hand them out for {arch} models"
                )
        elif not 0 <= layer < target.n_layer:
            raise ConfigError(
                f"draft {draft.path.name!r} reads layer {layer}; the target {target.path.name!r} has "
                f"{target.n_layer} layers: it is made for another target"
            )
