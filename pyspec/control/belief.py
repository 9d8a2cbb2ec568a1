"""How likely a proposed token is right: counted by what the drafter said itself, and by place, and quickly corrected.

Counts are kept for each drafter over all its sequences, in classes of (length of the proposal, position, confidence).
They change slowly. On top of them each sequence has a correction of the odds from its own last few proposals, which
changes within some ten tokens: text that suddenly repeats itself, or stops to.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

__all__ = ["Belief", "Mood"]

#: Classes of confidence: a probability that the drafter gave.
P_EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
#: Classes of length: a look-up proposes more after a longer match.
N_EDGES = (2, 4, 8, 16)
_N_P, _N_N, _N_POS = len(P_EDGES) + 1, len(N_EDGES) + 1, 4
#: What is assumed before anything was counted, in tokens of weight; and for look-ups by length.
_WEIGHT = 4.0
_PRIOR_BY_LENGTH = (0.5, 0.6, 0.7, 0.8, 0.9)
#: A class forgets the older half of what it knows at so many.
_N_HALVE = 64.0
#: A sequence's own correction: weight of "as counted", and how much of it is left after each token.
_MOOD_WEIGHT = 1.5
_MOOD_DECAY = 0.88


class Mood:
    """A sequence's correction for one drafter: tokens right and wrong lately, against what the counts expected."""

    __slots__ = ("odds", "right", "right_expected", "wrong", "wrong_expected")

    def __init__(self) -> None:
        self.right = self.right_expected = self.wrong = self.wrong_expected = 0.0
        self.odds = 1.0

    def add(self, expected: float, right: bool) -> None:
        """A token that the counts gave the probability ``expected``."""
        d, w = _MOOD_DECAY, _MOOD_WEIGHT
        self.right = self.right * d + right
        self.wrong = self.wrong * d + (not right)
        self.right_expected = self.right_expected * d + expected
        self.wrong_expected = self.wrong_expected * d + 1.0 - expected
        self.odds = (self.right + w) / (self.right_expected + w) * (self.wrong_expected + w) / (self.wrong + w)


class Belief:
    """See the module.

    Args:
        by_length: the length of a proposal says something (look-ups).
        joint: the drafter's probabilities are of the whole proposal up to a token, not of the token alone.
    """

    def __init__(self, by_length: bool, joint: bool) -> None:
        self.by_length = by_length
        self.joint = joint
        n = _N_N * _N_POS * _N_P
        self._rates: list[float] = []
        for i in range(n):
            p = (P_EDGES[max(0, i % _N_P - 1)] + P_EDGES[min(i % _N_P, _N_P - 2)]) / 2
            length = i // (_N_POS * _N_P)
            self._rates.append(min(0.97, p * (_PRIOR_BY_LENGTH[length] if by_length else 1.0)))
        self._right = [r * _WEIGHT for r in self._rates]
        self._all = [_WEIGHT] * n

    def classes(self, n: int, probs: Sequence[float]) -> list[int]:
        """Class of each of ``n`` proposed tokens. Without probabilities, each is taken for sure."""
        base = bisect(N_EDGES, n) * _N_POS * _N_P if self.by_length else 0
        if len(probs) < n:
            top = _N_P - 1
            return [base + min(i, _N_POS - 1) * _N_P + top for i in range(n)]
        out = []
        before = 1.0
        for i in range(n):
            p = probs[i]
            if self.joint:
                p, before = p / before if before else 0.0, p
            out.append(base + (i if i < _N_POS else _N_POS - 1) * _N_P + bisect(P_EDGES, p))
        return out

    def classes_at(self, i: int, prob: float) -> tuple[int]:
        """Class of the ``i``-th token of a proposal of unknown length that is still being made."""
        return ((i if i < _N_POS else _N_POS - 1) * _N_P + bisect(P_EDGES, prob),)

    def chances(self, classes: Sequence[int], mood: Mood) -> list[float]:
        """For each token, the probability that it and all before it are right; cut where that is next to nothing."""
        rates, odds = self._rates, mood.odds
        out = []
        chance = 1.0
        for c in classes:
            r = rates[c] * odds
            chance *= r / (r + 1.0 - rates[c])
            if chance < 0.02:
                break
            out.append(chance)
        return out

    def add(self, c: int, right: bool, mood: Mood) -> None:
        """A token of this class was right, or not; those before it were right."""
        mood.add(self._rates[c], right)
        self._right[c] += right
        self._all[c] += 1.0
        if self._all[c] > _N_HALVE:
            self._right[c] *= 0.5
            self._all[c] *= 0.5
        # one success in a row of a hundred is worth knowing, certainty is not
        self._rates[c] = min(0.995, max(0.005, self._right[c] / self._all[c]))

    def p_min(self, threshold: float, mood: Mood) -> float:
        """The least confidence with which a first token is right with a probability above ``threshold``."""
        rates, odds = self._rates, mood.odds
        for i in range(_N_P):
            r = rates[i] * odds
            if r / (r + 1.0 - rates[i]) >= threshold:
                return P_EDGES[i - 1] if i else 0.0
        return 1.0

    def rates(self) -> list[tuple[float, float]]:
        """Of each class of confidence its lower edge, and the counted rate of first tokens (shortest proposals)."""
        return [(P_EDGES[i - 1] if i else 0.0, self._rates[i]) for i in range(_N_P)]
