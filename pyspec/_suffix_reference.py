"""The suffix automaton's answers by search of the whole text: what ``pyspec/_suffix.pyx`` is tested against."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Confidence", "SuffixIndex", "SuffixMatch", "resync"]

SEPARATOR = -1

Draft = tuple[list[int], list[float], float, int]


class Confidence:
    """See ``_suffix.Confidence``."""

    def __init__(self, weights: Sequence[float], rate: float) -> None:
        self.weights = tuple(weights)
        self.rate = rate

    @staticmethod
    def features(length: int, count: int, total: int) -> tuple[float, ...]:
        return 1.0, math.log(min(length, 16)) - 1.2, math.log((count + 0.4) / (total - count + 0.4)), math.log(total)

    def chance(self, length: int, count: int, total: int) -> float:
        z = sum(w * x for w, x in zip(self.weights, self.features(length, count, total), strict=True))
        return 1.0 / (1.0 + math.exp(-max(-12.0, min(12.0, z))))

    def learn(self, length: int, count: int, total: int, right: bool) -> None:
        step = self.rate * (right - self.chance(length, count, total))
        x = self.features(length, count, total)
        self.weights = tuple(w + step * v for w, v in zip(self.weights, x, strict=True))


class SuffixIndex:
    """See ``_suffix.SuffixIndex``."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.epoch = 0

    def extend(self, tokens: Sequence[int], begin: int = 0, learner: Confidence | None = None) -> None:
        for token in tokens[begin:]:
            if learner is not None:
                text = self.document()
                self.learn(text, self.longest(text, 2), token, learner)
            self.text.append(token)

    def document(self) -> list[int]:
        """What came after the last separator."""
        return self.text[len(self.text) - self.text[::-1].index(SEPARATOR) :] if SEPARATOR in self.text else self.text

    def following(self, context: Sequence[int]) -> dict[int, list[int]]:
        """Where each token followed a context."""
        found: dict[int, list[int]] = {}
        for end in self.ends(context):
            if end < len(self.text):
                found.setdefault(self.text[end], []).append(end)
        return found

    def learn(self, text: list[int], length: int, token: int, learner: Confidence) -> None:
        """What the ends of ``text`` of that length and below tell of its next token."""
        seen: list[int] = []
        n_contexts = 0
        for k in range(length, 0, -1):
            ends = self.ends(text[len(text) - k :])
            if ends == seen:
                continue
            seen = ends
            n_contexts += 1
            if n_contexts > 2:
                break
            following = self.following(text[len(text) - k :])
            if following:
                likeliest = max(following, key=lambda t: (len(following[t]), following[t][-1]))
                if likeliest >= 0:
                    total = sum(len(x) for x in following.values())
                    learner.learn(k, len(following[likeliest]), total, likeliest == token)

    def end_document(self) -> None:
        self.text.append(SEPARATOR)

    def clear(self) -> None:
        self.text = []
        self.epoch += 1

    @property
    def n_tokens(self) -> int:
        return len(self.text)

    def ends(self, context: Sequence[int]) -> list[int]:
        """Positions behind the occurrences of a context."""
        n, wanted = len(context), list(context)
        return [i + n for i in range(len(self.text) - n + 1) if self.text[i : i + n] == wanted]

    def longest(self, text: Sequence[int], n_least: int) -> int:
        """Length of the longest end of ``text`` that occurs at ``n_least`` places or more."""
        return next((k for k in range(len(text), 0, -1) if len(self.ends(text[len(text) - k :])) >= n_least), 0)

    def path(
        self, context: list[int], budget: int, p_min: float, confidence: Confidence | None
    ) -> tuple[list[int], list[float], float]:
        """The most frequent continuation of a context, as ``_path`` of the compiled one."""
        out: list[int] = []
        probs: list[float] = []
        p, score = 1.0, 0.0
        while len(out) < budget:
            following: dict[int, list[int]] = {}
            while context:
                following = self.following(context)
                if following:
                    break
                context = context[1:]
            if not following:
                break
            token = max(following, key=lambda t: (len(following[t]), following[t][-1]))
            if token < 0:
                break
            count, total = len(following[token]), sum(len(x) for x in following.values())
            p *= count / total if confidence is None else confidence.chance(len(context), count, total)
            if p < p_min:
                break
            out.append(token)
            probs.append(p)
            score += p
            context = [*context, token]
        return out, probs, score

    def best(
        self,
        text: list[int],
        length: int,
        n_max: int,
        min_match: int,
        factor: float,
        offset: float,
        p_min: float,
        confidence: Confidence | None,
    ) -> Draft:
        """The best continuation over the ends of ``text`` of that length and below."""
        answer: Draft = ([], [], 0.0, length)
        seen: list[int] = []
        n_contexts = 0
        for k in range(length, min_match - 1, -1):
            ends = self.ends(text[len(text) - k :])
            if ends == seen:
                continue
            seen = ends
            n_contexts += 1
            budget = int(min(n_max, factor * k + offset))
            if budget < 1 or answer[2] >= budget or n_contexts > 4:
                break
            tokens, probs, score = self.path(text[len(text) - k :], budget, p_min, confidence)
            if score > answer[2]:
                answer = tokens, probs, score, k
        return answer

    def draft(
        self,
        n_max: int,
        min_match: int = 1,
        factor: float = 1.0,
        offset: float = 0.0,
        p_min: float = 0.1,
        confidence: Confidence | None = None,
    ) -> Draft:
        text = self.document()
        return self.best(text, self.longest(text, 2), n_max, min_match, factor, offset, p_min, confidence)


class SuffixMatch:
    """See ``_suffix.SuffixMatch``."""

    def __init__(self, index: SuffixIndex) -> None:
        self.index = index
        self.text: list[int] = []
        self.epoch = index.epoch

    def _settle(self) -> None:
        if self.stale:
            self.text, self.epoch = [], self.index.epoch

    @property
    def stale(self) -> bool:
        return self.epoch != self.index.epoch

    @property
    def match_length(self) -> int:
        self._settle()
        return len(self.text)

    def extend(self, tokens: Sequence[int], begin: int = 0, learner: Confidence | None = None) -> None:
        self._settle()
        # the followed text forgets what the index did not know when it came by
        for token in tokens[begin:]:
            if learner is not None:
                self.index.learn(self.text, len(self.text), token, learner)
            self.text.append(token)
            self.text = self.text[len(self.text) - self.index.longest(self.text, 1) :]

    def draft(
        self,
        n_max: int,
        min_match: int = 1,
        factor: float = 1.0,
        offset: float = 0.0,
        p_min: float = 0.1,
        confidence: Confidence | None = None,
    ) -> Draft:
        self._settle()
        return self.index.best(self.text, len(self.text), n_max, min_match, factor, offset, p_min, confidence)


def resync(text: Sequence[int], tail: Sequence[int], at: int) -> tuple[int, int]:
    """See ``_suffix.resync``."""
    best, best_length, best_distance = at, 0, 0
    for end in range(1, len(text) + 1):
        k = 0
        while k < min(end, len(tail)) and text[end - 1 - k] == tail[len(tail) - 1 - k]:
            k += 1
        distance = abs(end - at)
        if k and (k > best_length or (k == best_length and distance <= best_distance)):
            best, best_length, best_distance = end, k, distance
    return best, best_length
