"""Drafters of every quality, and the fake target of :mod:`pyspec.testing`: the whole loop without a native library."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

from pyspec.config import SpeculationParams
from pyspec.drafters.base import Drafter, Plan
from pyspec.runtime.batch import Batch
from pyspec.testing.fakes import (
    BOS,
    CORRUPT,
    EMPTY,
    EOS,
    EOT,
    N_SPECIAL,
    N_VOCAB,
    FakeEvaluator,
    FakeMemory,
    FakeVocab,
    Rule,
    advance,
)
from pyspec.types import DraftRequest

__all__ = [
    "BOS",
    "CORRUPT",
    "EMPTY",
    "EOS",
    "EOT",
    "N_SPECIAL",
    "N_VOCAB",
    "QUALITIES",
    "Choose",
    "FakeDrafter",
    "FakeEvaluator",
    "FakeMemory",
    "FakeVocab",
    "Rule",
    "advance",
]

#: Gets the request, the tokens the target will choose (n_max + 8 of them) and a random generator.
Choose = Callable[[DraftRequest, list[int], random.Random], list[int]]


def _wrong(token: int) -> int:
    return N_SPECIAL + 32 + (token + 1 - N_SPECIAL - 32) % 95


def _rate(p: float) -> Choose:
    return lambda r, right, rng: [t if rng.random() < p else _wrong(t) for t in right[: r.n_max]]


#: Drafters by quality. All obey the request's n_max but the ones named for not doing so.
QUALITIES: dict[str, Choose] = {
    "perfect": lambda r, right, rng: right[: r.n_max],
    "wrong": lambda r, right, rng: [_wrong(t) for t in right[: r.n_max]],
    "empty": lambda r, right, rng: [],
    "random": lambda r, right, rng: [rng.randrange(N_VOCAB) for _ in range(rng.randint(0, r.n_max))],
    "half": _rate(0.5),
    "most": _rate(0.9),
    "seldom": lambda r, right, rng: right[: r.n_max] if rng.random() < 0.2 else [],
    "short": lambda r, right, rng: right[: rng.randint(0, r.n_max)],
    "last-wrong": lambda r, right, rng: [*right[: r.n_max - 1], _wrong(right[r.n_max - 1])],
    "first-wrong": lambda r, right, rng: [_wrong(right[0]), *right[1 : r.n_max]],
    "too-long": lambda r, right, rng: right[: r.n_max + 8],
    "id-too-large": lambda r, right, rng: [*right[: r.n_max // 2], N_VOCAB, *right[: r.n_max]],
    "id-negative": lambda r, right, rng: [*right[: r.n_max // 2], -1, *right[: r.n_max]],
    "id-huge": lambda r, right, rng: [2**40, *right[: r.n_max]],
}


class FakeDrafter(Drafter):
    """Knows what the target will say and proposes something of the wanted quality; checks how it is called.

    Args:
        target: the fake target.
        quality: a name of ``QUALITIES``, or a function.
        raise_in: verb -> the call (from 0) at which it raises.

    Attributes:
        violations: what the engine did wrong.
        heard: for each call of accept: (sequence, n_accepted, is_other, length of own draft).
    """

    name: ClassVar[str] = "fake"

    def __init__(
        self,
        target: FakeEvaluator,
        quality: str | Choose = "perfect",
        *,
        n_max: int = 4,
        seed: int = 0,
        raise_in: dict[str, int] | None = None,
        error: Callable[[], BaseException] = lambda: RuntimeError("drafter out of order"),
    ) -> None:
        super().__init__(target, None, SpeculationParams(n_max=n_max), target.n_seq_max)
        self.rule = target.rule
        self.choose = QUALITIES[quality] if isinstance(quality, str) else quality
        self.rng = random.Random(seed)
        self.raise_in = raise_in or {}
        self.error = error
        self.violations: list[str] = []
        self.heard: list[tuple[int, int, bool, int]] = []
        self.requests: list[tuple[int, int, int]] = []
        self.n_calls: dict[str, int] = {}
        self.n_end = 0
        self.closed = False
        # per sequence: positions mirrored, first position of the last pass, own draft, hash of so many tokens
        self._mirror: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._own: dict[int, list[int]] = {}
        self._hash: dict[int, tuple[int, int]] = {}

    @classmethod
    def plan(cls, target: Any, draft: Any, params: SpeculationParams, n_seq: int) -> Plan:
        return Plan(n_max=params.n_max)

    def _call(self, verb: str) -> None:
        n = self.n_calls.get(verb, 0)
        self.n_calls[verb] = n + 1
        if self.raise_in.get(verb) == n:
            raise self.error()

    def _check(self, ok: bool, text: str) -> None:
        if not ok:
            self.violations.append(text)

    def begin(self, seq: int, tokens: list[int]) -> None:
        self._mirror[seq] = 0
        self._own[seq] = []
        self._hash[seq] = (0, EMPTY)
        self._call("begin")

    def process(self, batch: Batch) -> None:
        for seq, (begin, end) in batch.rows().items():
            if seq in self._mirror:
                first = int(batch.pos[begin])
                self._check(first == self._mirror[seq], f"process: sequence {seq} at {first}, not {self._mirror[seq]}")
                self._first[seq] = first
                self._mirror[seq] = first + end - begin
        self._call("process")

    def draft(self, requests: list[DraftRequest]) -> None:
        self._check(len({r.seq for r in requests}) == len(requests) > 0, "draft: sequences repeat, or none")
        for r in requests:
            self.requests.append((r.seq, r.n_past, r.n_max))
            self._check(r.n_past == len(r.tokens) - 1, f"draft: n_past {r.n_past}, {len(r.tokens)} tokens")
            self._check(r.id_last == r.tokens[-1], "draft: id_last is not the last token")
            self._check(r.n_max >= 1 and not r.draft, f"draft: n_max {r.n_max}, draft {r.draft}")
            self._check(self._mirror.get(r.seq) == r.n_past, f"draft: mirrored {self._mirror.get(r.seq)} of {r.n_past}")
            n, h = self._hash.get(r.seq, (0, EMPTY))
            h = self.rule.hash(r.tokens[n:], h)
            self._hash[r.seq] = (len(r.tokens), h)
            right = []
            for _ in range(r.n_max + 8):
                right.append(self.rule.next(h))
                h = advance(h, right[-1])
            self._own[r.seq] = self.choose(r, right, self.rng)
            r.draft.extend(self._own[r.seq])
        self._call("draft")

    def accept(self, seq: int, n_accepted: int, is_other: bool) -> None:
        own = len(self._own[seq]) if not is_other else 0
        rows = self._mirror[seq] - self._first[seq]
        self._check(0 <= n_accepted < rows, f"accept: {n_accepted} of a pass of {rows} rows")
        self._check(is_other or bool(own), "accept: no draft of this drafter")
        self.heard.append((seq, n_accepted, is_other, own))
        self._mirror[seq] = self._first[seq] + 1 + n_accepted
        self._own[seq] = []
        self._call("accept")

    def end(self, seq: int) -> None:
        self.n_end += 1
        self._mirror.pop(seq, None)
        self._call("end")

    def close(self) -> None:
        self.closed = True
        self._call("close")
