"""Plain data that travels between the layers. Imports nothing of pyspec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "CONSTRAINT",
    "DraftRequest",
    "DraftSampling",
    "F32Array",
    "FinishReason",
    "I8Array",
    "I32Array",
    "Requirements",
    "RollbackKind",
    "TokenLogprob",
]

#: Name of a request's grammar in ``DraftRequest.extra``: a ``pyspec.sampling.GrammarConstraint``.
CONSTRAINT = "constraint"

I8Array = npt.NDArray[np.int8]
I32Array = npt.NDArray[np.int32]
F32Array = npt.NDArray[np.float32]

#: ``stop``: end-of-generation token or stop string. ``length``: max_tokens reached or the context is full.
#: ``cancelled``: cancelled by the caller.
FinishReason = Literal["stop", "length", "cancelled"]


class TokenLogprob(NamedTuple):
    """Natural logarithm of an emitted token's probability, and the most likely tokens with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RollbackKind(Enum):
    """How a context's memory can forget the last positions of a sequence (see ``runtime/cache.py``)."""

    NONE = "none"  # nothing can be taken back
    PARTIAL = "partial"  # any suffix can be removed (attention KV cache)
    BOUNDED = "bounded"  # at most n_rs_seq positions, and fewer than the last pass held (recurrent snapshots)
    FULL = "full"  # only as a whole: restore a checkpoint, then re-evaluate


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a drafter needs from the target context; merged over all drafters before the target context is made.

    Attributes:
        layer_inputs: target layers whose input rows must be extracted; n_layer means the final hidden row.
        nextn: the target's nextn (pre-norm hidden) rows are needed for every token of a pass.
        load_mtp: the target model must be loaded with its MTP blocks.
        n_rs_seq: recurrent snapshots per sequence wanted for rollback (0: use checkpoints).
    """

    layer_inputs: tuple[int, ...] = ()
    nextn: bool = False
    load_mtp: bool = False
    n_rs_seq: int = 0


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How drafted tokens are to be drawn, so that they can be verified by rejection sampling.

    A drafter that follows it must draw each token, once, from the distribution it gives in ``DraftRequest.q``, with
    ``_core.philox_uniform(seed, stream, pos)`` or other random numbers that nothing else uses. Whether it goes on must
    not depend on a token it has drawn and then leaves out: a token that was drawn is proposed.

    Attributes:
        temperature: above 0. top_k: 0: all. top_p, min_p: see ``SamplingParams``. A hint: any q is right.
        seed, stream: of the random numbers; ``pos`` is the index of the token in the sequence.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stream: int


@dataclass(slots=True)
class DraftRequest:
    """One sequence that wants a draft. The engine makes it; a drafter fills ``draft``.

    Attributes:
        seq: sequence id, 0 <= seq < n_seq_max.
        n_past: rows of this sequence in the target's cache; the position of ``id_last``.
        id_last: last committed token, not evaluated yet; equals ``tokens[n_past]``.
        tokens: every committed token, prompt and output, ``len == n_past + 1``. Borrowed: do not change or keep.
        n_max: upper limit for the draft's length in this step, >= 1.
        draft: proposed token ids, filled by the drafter. Left empty: no draft.
        probs: draft probability of each proposed token (top-1 of its softmax), where the drafter has it.
        sampling: not None: tokens drawn as it says are welcome; a drafter that cannot ignores it.
        q: for a draft that was drawn: for each token what it was drawn from, int32 [n] ids, each once, and float32 [n]
            probabilities. Left empty: the draft is verified as one that was not drawn.
        temperature: the request's temperature (0 is greedy).
        drafters: names of the drafters that may propose for it; None: all.
        p_min: stop at the first token less likely than this; None: the drafter's own ``params.p_min``.
        extra: what the request brings for drafters, by name, such as its prediction. Shared by all steps; read only.
        more: for drafters that make their tokens one by one: called with the probability of each one that was
            proposed; False: another one would not pay. None: as many as ``n_max``.
    """

    seq: int
    n_past: int
    id_last: int
    tokens: list[int]
    n_max: int
    draft: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    sampling: DraftSampling | None = None
    q: list[tuple[I32Array, F32Array]] = field(default_factory=list)
    temperature: float = 0.0
    drafters: tuple[str, ...] | None = None
    p_min: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[float], bool] | None = None
