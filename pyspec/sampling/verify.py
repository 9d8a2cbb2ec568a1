"""Verification: which drafted tokens stand, and the token that follows them.

Row i of a sequence's verification rows holds the target's logits after the last token and i drafted ones. The target's
own choice at row i is taken: the most likely token at temperature 0, else a sample drawn with a counter-based random
number keyed by (seed, position). While the draft agrees, its token is *accepted*; at the first difference the target's
choice is the *recovered* token; after a fully accepted draft it is the *bonus* token. So every emitted token is the
target's choice, whatever was drafted: the draft changes how many rows are looked at, never what a row says
(sample-and-match; the exactness argument of Leviathan et al. 2023, section 2, for a draft that proposes one token).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import _core
from ..config import SamplingParams
from ..types import F32Array, I32Array

__all__ = ["Verifier"]


class Verifier:
    """Verifies sequences against logits rows. Owns scratch arrays of the vocabulary's size; one thread at a time.

    Args:
        n_vocab: width of a logits row.
        n_draft_max: longest draft.
    """

    def __init__(self, n_vocab: int, n_draft_max: int) -> None:
        self._out: I32Array = np.zeros(n_draft_max + 1, np.int32)
        self._n_vocab = n_vocab
        self._ids: I32Array | None = None
        self._p: F32Array | None = None

    def __call__(
        self,
        logits: F32Array,
        row: int,
        draft: Sequence[int],
        params: SamplingParams,
        seed: int,
        pos: int,
    ) -> tuple[int, list[int]]:
        """Verify one sequence.

        Args:
            logits: float32, [n_rows, n_vocab], C-contiguous, borrowed for the call.
            row: the sequence's first row; ``len(draft)`` more follow it.
            draft: proposed token ids.
            params: how the request is sampled.
            seed: the request's seed.
            pos: index, in the sequence, of the token that row ``row`` decides.

        Returns:
            Number of accepted tokens, and the tokens to emit: the accepted ones and the recovered or bonus token.
        """
        if params.temperature == 0.0:
            ids = np.asarray(draft, dtype=np.int32)
            n_acc = _core.verify_greedy(logits, row, ids, self._out)
            return n_acc, self._out[: n_acc + 1].tolist()
        if self._ids is None or self._p is None:
            self._ids = np.zeros(self._n_vocab, np.int32)
            self._p = np.zeros(self._n_vocab, np.float32)
        emitted: list[int] = []
        for i in range(len(draft) + 1):
            token = _core.sample_row(
                logits[row + i],
                params.temperature,
                params.top_k,
                params.top_p,
                params.min_p,
                _core.philox_uniform(seed, 0, pos + i),
                self._ids,
                self._p,
            )
            emitted.append(token)
            if i == len(draft) or token != draft[i]:
                break
        return len(emitted) - 1, emitted
