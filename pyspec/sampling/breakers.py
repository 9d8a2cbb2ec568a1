"""DRY's sequence breakers: strings that no repetition goes across, as token ids.

A breaker may lie inside a token, or be spread over several, and start in the middle of one. So it becomes a set of
*heads*, tokens whose text holds the breaker or ends with a beginning of it, each with the *tails* that complete it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np

from ..types import I32Array

__all__ = ["Breakers", "VocabLike", "make_breakers"]

#: (first [n_vocab + 1], start [m + 1], tails), see ``_sample.Sampler``.
Breakers: TypeAlias = tuple[I32Array, I32Array, I32Array]

#: Longest breaker in bytes, and longest tail in tokens, as in llama.cpp.
_BYTES_MAX, _TAIL_MAX = 40, 20


class VocabLike(Protocol):
    """What is asked of a vocabulary (``pyspec.runtime.Vocab``)."""

    def token_bytes(self, token: int, special: bool = False) -> bytes: ...
    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]: ...


def make_breakers(vocab: VocabLike, n_vocab: int, strings: Sequence[str]) -> Breakers:
    """Find heads and tails of ``strings``. Looks at every token: some hundred milliseconds for a big vocabulary."""
    tails_of: dict[int, list[tuple[int, ...]]] = {}
    encoded: dict[bytes, tuple[int, ...]] = {}
    for string in strings:
        wanted = string.encode("utf-8", "replace")[:_BYTES_MAX]
        for token in range(n_vocab):
            text = vocab.token_bytes(token, True)
            if wanted in text:
                rests = {b""}
            else:
                first = max(0, len(text) - len(wanted) + 1)
                rests = {wanted[len(text) - i :] for i in range(first, len(text)) if wanted.startswith(text[i:])}
            for rest in rests:
                if rest not in encoded:
                    ids = vocab.encode(rest.decode("utf-8", "replace"), False, False) if rest else []
                    encoded[rest] = tuple(ids[:_TAIL_MAX])
                tails = tails_of.setdefault(token, [])
                if encoded[rest] not in tails:
                    tails.append(encoded[rest])
    first_of = np.zeros(n_vocab + 1, np.int32)
    for token, found in tails_of.items():
        first_of[token + 1] = len(found)
    np.cumsum(first_of, out=first_of)
    flat = [tail for token in sorted(tails_of) for tail in tails_of[token]]
    start = np.cumsum([0, *(len(tail) for tail in flat)]).astype(np.int32)
    return first_of, start, np.array([t for tail in flat for t in tail], np.int32)
