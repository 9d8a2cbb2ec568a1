"""The hindsight bound: with these drafts and these costs, the best draft length at every step.

A :class:`Recorder` is a controller that asks a drafter at every position and verifies nothing, so the text is plain
decoding's and every position has its draft. :func:`best_lengths` then knows the whole text, and finds the lengths with
which it would have been written soonest. No controller can beat that with the same drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..drafters.base import Drafter
    from ..drafters.chain import DrafterChain
    from ..types import DraftRequest

__all__ = ["Drafts", "Recorded", "Recorder", "best_lengths", "n_right"]


@dataclass(slots=True)
class Recorded:
    """What a drafter proposed before one output token.

    Attributes:
        draft, probs: its proposal, nothing of which was verified. draft_us: what that took.
        pass_us: the pass that gave the token, of one row.
    """

    draft: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    draft_us: float = 0.0
    pass_us: float = 0.0


class Recorder:
    """Implements ``Controller`` for one sequence at a time: asks one drafter at every position, and verifies nothing.

    Args:
        which: which of the engine's drafters.
        n_max: most tokens asked for; 0: as many as there may be.
        clock: nanoseconds.

    Attributes:
        positions: one entry for each output token since the last ``begin``, without the one that comes with a prompt.
    """

    def __init__(self, which: int = 0, n_max: int = 0, clock: Callable[[], int] = perf_counter_ns) -> None:
        self.which = which
        self.n_max = n_max
        self.positions: list[Recorded] = []
        self._clock = clock

    def begin(self, seq: int) -> None:
        """See :class:`Controller`."""
        self.positions = []

    def draft(self, chain: DrafterChain, requests: Sequence[DraftRequest], n_seq: int) -> dict[int, Drafter]:
        """See :class:`Controller`. Nothing is to be verified."""
        found = Recorded()
        for request in requests:
            if self.n_max:
                request.n_max = min(request.n_max, self.n_max)
            start = self._clock()
            chain.ask(chain.drafters[self.which], [request])
            found = Recorded(request.draft, request.probs, (self._clock() - start) / 1000)
            request.draft, request.probs, request.q = [], [], []
        self.positions.append(found)
        return {}

    def accept(self, seq: int, n_draft: int, n_accepted: int, emitted: Sequence[int]) -> None:
        """See :class:`Controller`."""

    def prefilled(self, n_rows: int, ns: int) -> None:
        """See :class:`Controller`. Of no interest here."""

    def passed(self, n_rows: int, ns: int) -> None:
        """See :class:`Controller`."""
        if self.positions:
            self.positions[-1].pass_us = ns / 1000


def n_right(draft: Sequence[int], text: Sequence[int], at: int) -> int:
    """How many tokens of ``draft`` are what ``text`` has from ``at`` on, before the first that is not."""
    n = 0
    for token in draft:
        if at + n >= len(text) or text[at + n] != token:
            break
        n += 1
    return n


@dataclass(slots=True)
class Drafts:
    """One drafter's part of a recording.

    Attributes:
        offered: for each output token, how many tokens were proposed in its place and after it.
        right: how many of them are right. us: time of a draft of so many tokens; 0 for 0.
    """

    offered: Sequence[int]
    right: Sequence[int]
    us: Callable[[int], float]


def best_lengths(n: int, drafts: Sequence[Drafts], pass_us: Callable[[int], float]) -> tuple[float, list[int]]:
    """The drafters and lengths that write a text of ``n`` tokens soonest, by dynamic programming from its end.

    Args:
        drafts: of each drafter, with an entry for each token. pass_us: time of a step with so many rows in its pass.

    Returns:
        Microseconds, and the length at each position (also at those that are jumped over).
    """
    longest = max((min(max(d.offered, default=0), n) for d in drafts), default=0)
    rows_us = [pass_us(k + 1) for k in range(longest + 1)]
    step_us = [[0.0 if not k else rows_us[k] + d.us(k) for k in range(longest + 1)] for d in drafts]
    rest = [0.0] * (n + 1)
    lengths = [0] * n
    for i in range(n - 1, -1, -1):
        best, length = rows_us[0] + rest[i + 1], 0
        for d, us in zip(drafts, step_us, strict=True):
            good = d.right[i]
            for k in range(1, min(d.offered[i], n - i - 1) + 1):
                total = us[k] + rest[i + 1 + min(k, good)]
                if total < best:
                    best, length = total, k
        rest[i], lengths[i] = best, length
    return rest[0], lengths
