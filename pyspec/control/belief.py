"""How likely a proposed token is right: counted by what the drafter said itself, and by place, and quickly corrected.

Counts are kept for each drafter over all its sequences, in classes of (length of the proposal, position, confidence).
They change slowly. On top of them each sequence has a correction of the odds from its own last few proposals, which
changes within some ten tokens: text that suddenly repeats itself, or stops to.

A drafter that corrects its probabilities itself is believed (:class:`Trust`); only the last few tokens correct it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

__all__ = ["Belief", "Mood", "Trust"]

#: Classes of confidence: a probability that the drafter gave.
P_EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
#: Classes of length: a look-up proposes more after a longer match.
N_EDGES = (2, 4, 8, 16)
_N_P, _N_N, _N_POS = len(P_EDGES) + 1, len(N_EDGES) + 1, 4
#: What is assumed before anything was counted, in tokens of weight; and for look-ups by length.
_WEIGHT = 4.0
_PRIOR_BY_LENGTH = (0.5, 0.6, 0.7, 0.8, 0.9)
#: Tokens less likely than this are not worth a thought.
_NOTHING = 0.02
#: A class forgets the older half of what it knows at so many.
_N_HALVE = 64.0
#: A sequence's own correction: weight of "as counted", and how much of it is left after each token.
_MOOD_WEIGHT = 1.0
_MOOD_DECAY = 0.94


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

    def weigh(self, n: int, probs: Sequence[float], mood: Mood) -> tuple[list[int], list[float]]:
        """What a proposal of ``n`` tokens is worth. Without probabilities, each token is taken for sure.

        Returns:
            For each token what :meth:`add` wants to know, here its class; and the probability that it and all before it
            are right. The latter ends where that is next to nothing, the former one token later.
        """
        rates, odds, joint = self._rates, mood.odds, self.joint
        base = bisect(N_EDGES, n) * _N_POS * _N_P if self.by_length else 0
        sure = len(probs) < n
        p_class = _N_P - 1
        classes: list[int] = []
        chances: list[float] = []
        chance = before = 1.0
        for i in range(n):
            if not sure:
                p = probs[i]
                if joint:
                    p, before = (p / before if before else 0.0), p
                p_class = bisect(P_EDGES, p)
            c = base + (i if i < _N_POS else _N_POS - 1) * _N_P + p_class
            classes.append(c)
            rate = rates[c]
            r = rate * odds
            chance *= r / (r + 1.0 - rate)
            if chance < _NOTHING:
                break
            chances.append(chance)
        return classes, chances

    def chance_at(self, i: int, prob: float, mood: Mood) -> float:
        """Probability that the ``i``-th token of a proposal that is still being made is right, if those before are."""
        rate = self._rates[(i if i < _N_POS else _N_POS - 1) * _N_P + bisect(P_EDGES, prob)]
        r = rate * mood.odds
        return r / (r + 1.0 - rate)

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

    def rates(self) -> list[tuple[float, float]]:
        """Of each class of confidence its lower edge, and the counted rate of first tokens (shortest proposals)."""
        return [(P_EDGES[i - 1] if i else 0.0, self._rates[i]) for i in range(_N_P)]


#: Probabilities are told to :meth:`Trust.add` in parts of this.
_PARTS = 1000


class Trust:
    """Stands for :class:`Belief` where the drafter's probabilities are corrected by what came true already.

    Args:
        joint: see :class:`Belief`.
    """

    def __init__(self, joint: bool) -> None:
        self.joint = joint
        # for reports only
        self._right = [0.0] * _N_P
        self._all = [0.0] * _N_P

    def weigh(self, n: int, probs: Sequence[float], mood: Mood) -> tuple[list[int], list[float]]:
        """See :meth:`Belief.weigh`. A token without a probability has no chance."""
        odds, joint = mood.odds, self.joint
        parts: list[int] = []
        chances: list[float] = []
        chance = before = 1.0
        for p in probs[:n]:
            rate = p
            if joint:
                rate, before = (p / before if before else 0.0), p
            part = min(995, max(5, int(rate * _PARTS)))
            parts.append(part)
            r = part * odds
            chance *= r / (r + _PARTS - part)
            if chance < _NOTHING:
                break
            chances.append(chance)
        return parts, chances

    def chance_at(self, i: int, prob: float, mood: Mood) -> float:
        """See :meth:`Belief.chance_at`."""
        p = min(0.995, max(0.005, prob))
        r = p * mood.odds
        return r / (r + 1.0 - p)

    def add(self, part: int, right: bool, mood: Mood) -> None:
        """See :meth:`Belief.add`."""
        p = part / _PARTS
        mood.add(p, right)
        i = bisect(P_EDGES, p)
        self._right[i] += right
        self._all[i] += 1.0

    def rates(self) -> list[tuple[float, float]]:
        """See :meth:`Belief.rates`; tokens at all places."""
        found = zip(self._right, self._all, strict=True)
        return [(P_EDGES[i - 1] if i else 0.0, right / n if n else 0.0) for i, (right, n) in enumerate(found)]
