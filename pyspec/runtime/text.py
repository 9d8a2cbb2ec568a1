"""Tokens to text while they arrive: whole characters only, stop strings never shown."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

__all__ = ["TextStream", "TokenBytes"]


class TokenBytes(Protocol):
    """The one thing a text stream needs of a vocabulary."""

    def token_bytes(self, token: int, special: bool = False) -> bytes: ...


class TextStream:
    """Incremental detokenizer with stop strings, for one sequence.

    Bytes that do not make a whole character yet are held back, and so is text that may be the start of a stop string.
    The pieces joined are exactly the text of the whole output, cut right before the first stop string.

    Args:
        vocab: gives the bytes of a token.
        stop: stop strings; the one that starts first in the text wins, whatever order they are in.
        skip_special: leave out control tokens.
    """

    def __init__(self, vocab: TokenBytes, stop: Sequence[str] = (), skip_special: bool = True) -> None:
        self._vocab = vocab
        self._stop = tuple(stop)
        self._special = not skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._in_character = False
        self.stopped = False

    def push(self, token: int) -> str:
        """Add one token; returns the text that is now certain. Sets ``stopped`` when a stop string was completed."""
        data = self._vocab.token_bytes(token, self._special)
        if data.isascii() and not self._in_character:
            return self._take(data.decode("ascii"))
        text = self._decoder.decode(data)
        self._in_character = bool(self._decoder.getstate()[0])
        return self._take(text)

    def flush(self) -> str:
        """The text still held back, at the end of the output. Half a character becomes U+FFFD."""
        if self.stopped:
            return ""
        text = self._take(self._decoder.decode(b"", True))
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _take(self, new: str) -> str:
        if self.stopped or not new:
            return ""
        if not self._stop:
            return new
        text = self._held + new
        at = min((i for i in (text.find(s) for s in self._stop) if i >= 0), default=-1)
        if at >= 0:
            self.stopped = True
            self._held = ""
            return text[:at]
        # the longest tail that could still grow into a stop string stays here
        n_hold = max(
            (n for s in self._stop for n in range(min(len(s) - 1, len(text)), 0, -1) if text.endswith(s[:n])), default=0
        )
        cut = len(text) - n_hold
        self._held = text[cut:]
        return text[:cut]
