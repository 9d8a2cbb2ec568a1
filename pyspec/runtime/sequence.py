"""One sequence on its way through the engine."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import SamplingParams
from ..stats import DrafterStats, SpecStats
from ..types import FinishReason, TokenLogprob
from .text import TextStream

__all__ = ["Piece", "Sequence"]


@dataclass(slots=True)
class Piece:
    """What one step added to a sequence.

    Attributes:
        text: new text, maybe empty while bytes or a possible stop string are held back.
        tokens: new token ids.
        drafted: for each token, whether it was an accepted draft token.
        finish_reason: set on the last piece.
        logprobs: one entry for each token, where the request asks for them.
    """

    text: str
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Sequence:
    """A request and its state. Made by :meth:`pyspec.engine.Engine.submit`, owned by the engine until it is done.

    Attributes:
        id: slot in the caches, -1 while waiting. turn: its number among those that got one.
        tokens: prompt and output. n_prompt: how many are prompt.
        n_past: positions in the target's cache; ``tokens[n_past:]`` is not evaluated yet.
        prompt_pending: not all of the prompt has been read yet (after an error: of the prompt and the output so far).
        drafted: one flag per output token.
        finish_reason: None while it runs. error: what ended it, if it did not finish by itself.
        pieces: what has been produced and not been fetched.
        extra: what the request brings for drafters, see ``DraftRequest.extra``.
        sampler: its ``pyspec.sampling.SamplerChain``, put there by the engine.
    """

    __slots__ = (
        "cancelled",
        "drafted",
        "error",
        "extra",
        "finish_reason",
        "id",
        "n_past",
        "n_prompt",
        "params",
        "pieces",
        "prompt_pending",
        "sampler",
        "seed",
        "stats",
        "text",
        "tokens",
        "turn",
    )

    def __init__(
        self, prompt: list[int], params: SamplingParams, text: TextStream | None, extra: Mapping[str, Any] | None = None
    ) -> None:
        self.id = -1
        self.turn = 0
        self.params = params
        self.tokens = list(prompt)
        self.n_prompt = len(prompt)
        self.n_past = 0
        self.prompt_pending = True
        self.drafted: list[bool] = []
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.sampler: Any = None
        self.text = text
        self.pieces: deque[Piece] = deque()
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.stats = SpecStats()
        self.extra: Mapping[str, Any] = extra or {}

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def output(self) -> list[int]:
        """Generated token ids (a copy)."""
        return self.tokens[self.n_prompt :]

    def drafter_stats(self, name: str) -> DrafterStats:
        """This sequence's counters for one drafter."""
        for stats in self.stats.drafters:
            if stats.name == name:
                return stats
        self.stats.drafters.append(DrafterStats(name))
        return self.stats.drafters[-1]
