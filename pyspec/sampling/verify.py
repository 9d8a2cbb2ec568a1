"""Verification: which drafted tokens stand, and the token that follows them.

Row i of a sequence's verification rows holds the target's logits after the last token and i drafted ones. While drafted
tokens stand they are *accepted*; instead of the first that does not, a *recovered* token is emitted; after a draft that
stands as a whole, a *bonus* token. Rows are looked at one by one, and the chain hears each emitted token before it sees
the next row, so penalties, DRY, mirostat and constraints know at every row what they would know without a draft.

- *match*: the target's own choice at each row is emitted; a drafted token stands if it is that choice. At temperature 0
  (*greedy*) the choice is the most likely token. The draft changes how many rows are looked at, never what is said.
- *rejection*, for drafts that were drawn from a known distribution q: token x stands with probability
  ``min(1, p(x) / q(x))``; the recovered token is drawn from ``max(0, p - q)``. The text has the target's distribution
  (Leviathan et al. 2023, Chen et al. 2023), and more tokens stand, but which text it is depends on the draft.
- *block*: the same for the draft as a whole, by the joint probability of its beginnings: never fewer tokens stand on
  average (Sun et al. 2024, arXiv 2403.10444, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import _sample
from ..types import F32Array, I32Array
from .chain import ACCEPT, RECOVER, SAMPLE, Candidates, SamplerChain, row_error

__all__ = ["Q", "Verifier"]

#: What each drafted token was drawn from: int32 [n] ids, each once, and float32 [n] probabilities.
Q = Sequence[tuple[I32Array, F32Array]]


class Verifier:
    """Verifies sequences against logits rows. One thread at a time."""

    def __call__(
        self,
        logits: F32Array,
        row: int,
        draft: Sequence[int],
        chain: SamplerChain,
        pos: int,
        q: Q = (),
    ) -> tuple[int, list[int]]:
        """Verify one sequence.

        Args:
            logits: float32, [n_rows, n_vocab], C-contiguous, borrowed for the call.
            row: the sequence's first row; ``len(draft)`` more follow it.
            draft: proposed token ids.
            chain: how the request is sampled; it hears the emitted tokens.
            pos: index, in the sequence, of the token that row ``row`` decides.
            q: what the drafted tokens were drawn from. Empty: the draft is no sample.

        Returns:
            Number of accepted tokens, and the tokens to emit: the accepted ones and the recovered or bonus token. The
            latter is missing where an accepted token ends the text.

        Raises:
            SamplingError: a row that matters is unfit, or leaves nothing.
        """
        if chain.greedy:
            return self._greedy(logits, row, draft, chain, pos)
        if q and len(q) == len(draft) and chain.params.temperature > 0:
            if chain.params.verification == "block" and chain.constraint is None:
                return self._block(logits, row, draft, chain, pos, q)
            if chain.params.verification != "match":
                return self._rejection(logits, row, draft, chain, pos, q)
        return self._match(logits, row, draft, chain, pos)

    def _greedy(
        self, logits: F32Array, row: int, draft: Sequence[int], chain: SamplerChain, pos: int
    ) -> tuple[int, list[int]]:
        emitted = _sample.greedy_tokens(logits, row, draft if isinstance(draft, list) else list(draft))
        if isinstance(emitted, int):
            raise row_error(logits, row - 1 - emitted, pos - 1 - emitted)
        if chain.trace is not None:
            chain.trace += [Candidates(np.array([t], np.int32), np.ones(1, np.float32)) for t in emitted]
        return len(emitted) - 1, emitted

    def _match(
        self, logits: F32Array, row: int, draft: Sequence[int], chain: SamplerChain, pos: int
    ) -> tuple[int, list[int]]:
        emitted: list[int] = []
        n = len(draft)
        for i in range(n + 1):
            chain.look(logits, row + i, pos + i)
            token = chain.sample(chain.uniform(SAMPLE, pos + i))
            chain.accept(token)
            emitted.append(token)
            if i == n or token != draft[i]:
                return i, emitted
            if chain.over(token):
                return i + 1, emitted
        raise AssertionError

    def _rejection(
        self, logits: F32Array, row: int, draft: Sequence[int], chain: SamplerChain, pos: int, q: Q
    ) -> tuple[int, list[int]]:
        emitted: list[int] = []
        for i, token in enumerate(draft):
            chain.look(logits, row + i, pos + i)
            ids, probs = q[i]
            q_token = _prob(ids, probs, token)
            if chain.uniform(ACCEPT, pos + i) * q_token < chain.prob(token):
                if chain.trace is not None:
                    chain.trace.append(chain.candidates())
                chain.accept(token)
                emitted.append(token)
                if chain.over(token):
                    return i + 1, emitted
                continue
            token = chain.residual(1.0, ids, probs, chain.uniform(RECOVER, pos + i))
            chain.accept(token)
            return i, [*emitted, token]
        return self._last(logits, row, chain, pos, emitted)

    def _last(
        self, logits: F32Array, row: int, chain: SamplerChain, pos: int, emitted: list[int], start: int = 0
    ) -> tuple[int, list[int]]:
        """The bonus token."""
        n = len(emitted)
        chain.look(logits, row + n, pos + n, start)
        token = chain.sample(chain.uniform(SAMPLE, pos + n))
        chain.accept(token)
        return n, [*emitted, token]

    def _block(
        self, logits: F32Array, row: int, draft: Sequence[int], chain: SamplerChain, pos: int, q: Q
    ) -> tuple[int, list[int]]:
        n, n_before = len(draft), chain.n
        trace, chain.trace = chain.trace, None
        # which random numbers decide here depends on the whole draft, so no other step may use them again
        streams = [stream | (pos << 32) for stream in (ACCEPT, RECOVER)]
        weights = [1.0]
        n_acc = 0
        for i, token in enumerate(draft):
            chain.look(logits, row + i, pos + i, pos)
            if i and self._stands(chain, streams[0], pos + i - 1, weights[i], q[i]):
                n_acc = i
            q_token = _prob(*q[i], token)
            weights.append(min(1.0, weights[i] * chain.prob(token) / q_token) if q_token > 0 else 0.0)
            chain.accept(token)
            if chain.over(token):
                n, draft = i + 1, draft[: i + 1]
                break
        if chain.uniform(streams[0], pos + n - 1) < weights[n]:
            n_acc = n
        chain.rewind(n_before)
        chain.trace = trace
        emitted: list[int] = []
        for i, token in enumerate(draft[:n_acc]):
            if chain.stateful or chain.trace is not None:
                chain.look(logits, row + i, pos + i, pos)
                if chain.trace is not None:
                    chain.trace.append(chain.candidates())
            chain.accept(token)
            emitted.append(token)
        if n_acc and chain.over(draft[n_acc - 1]):
            return n_acc, emitted
        if n_acc == n:
            return self._last(logits, row, chain, pos, emitted, pos)
        chain.look(logits, row + n_acc, pos + n_acc, pos)
        token = chain.residual(weights[n_acc], *q[n_acc], chain.uniform(streams[1], pos + n_acc))
        chain.accept(token)
        return n_acc, [*emitted, token]

    @staticmethod
    def _stands(chain: SamplerChain, stream: int, pos: int, weight: float, q: tuple[I32Array, F32Array]) -> bool:
        """Whether the draft up to here stands, given the row after it, which is being looked at."""
        left = max(0.0, weight - chain.overlap(weight, *q))
        total = left + 1.0 - weight
        return total <= 0.0 or chain.uniform(stream, pos) * total < left


def _prob(ids: I32Array, probs: F32Array, token: int) -> float:
    at = np.flatnonzero(ids == token)
    return float(probs[at[0]]) if at.size else 0.0
