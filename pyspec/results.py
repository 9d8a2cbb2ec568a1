"""What a generation gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .runtime import Piece as EnginePiece
from .runtime import Sequence as EngineSequence
from .runtime import Vocab
from .stats import SpecStats
from .types import FinishReason
from .types import TokenLogprob as RawLogprob

__all__ = ["GenerationResult", "Logprob", "Piece", "TokenLogprob", "Usage", "logprobs_of", "result_of"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token and the natural logarithm of its probability.

    Attributes:
        token: its id. logprob: 0 is certain; -inf: impossible.
        text: for reading: control tokens by their names, half a character as U+FFFD.
        bytes: what it adds to the output; empty for control tokens that are left out of the text.
    """

    token: int
    logprob: float
    text: str
    bytes: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprob(Logprob):
    """An output token. top: the most likely tokens at its place, best first."""

    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one generation. ``completion_tokens`` is the number of tokens delivered."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One finished generation.

    Attributes:
        text: the output, cut right before a stop string.
        tokens: output token ids; an end-of-generation token, or the one that completed a stop string, is the last.
        drafted: for each token, whether it was an accepted draft token.
        finish_reason: "stop", "length" or "cancelled".
        usage: token counts. stats: how it went. prompt_tokens: the prompt's ids.
        logprobs: one entry for each of ``tokens`` where the request asks for them, else None.
    """

    text: str
    tokens: list[int]
    drafted: list[bool]
    finish_reason: FinishReason
    usage: Usage
    stats: SpecStats
    prompt_tokens: list[int]
    logprobs: list[TokenLogprob] | None = None

    @property
    def valid(self) -> bool:
        """False for benchmarks with synthetic acceptance: text and tokens are not the target's."""
        return not self.stats.synthetic


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stream. The texts of all pieces joined are the result's text.

    Attributes:
        text: new text; empty while half a character or a possible stop string is held back.
        tokens, drafted: new token ids, and whether each was an accepted draft token.
        finish_reason, result: set on the last piece.
        logprobs: an entry for each token, where the request asks for them.
    """

    text: str
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    result: GenerationResult | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


def logprobs_of(vocab: Vocab, raw: Sequence[RawLogprob], skip_special: bool) -> list[TokenLogprob]:
    """With texts and bytes. ``skip_special``: the request's option."""

    def names(token: int) -> tuple[str, bytes]:
        return vocab.token_bytes(token, True).decode("utf-8", "replace"), vocab.token_bytes(token, not skip_special)

    return [
        TokenLogprob(r.token, r.logprob, *names(r.token), tuple(Logprob(t, x, *names(t)) for t, x in r.top))
        for r in raw
    ]


def result_of(vocab: Vocab, seq: EngineSequence, pieces: Sequence[EnginePiece]) -> GenerationResult:
    """The result of a sequence that is done; ``pieces``: all it produced."""
    tokens = seq.output
    assert seq.finish_reason is not None
    raw = [r for p in pieces for r in p.logprobs]
    return GenerationResult(
        text="".join(p.text for p in pieces),
        tokens=tokens,
        drafted=list(seq.drafted),
        finish_reason=seq.finish_reason,
        usage=Usage(seq.n_prompt, len(tokens)),
        stats=seq.stats,
        prompt_tokens=seq.tokens[: seq.n_prompt],
        logprobs=logprobs_of(vocab, raw, seq.params.skip_special) if seq.params.logprobs else None,
    )
