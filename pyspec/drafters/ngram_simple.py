"""``ngram-simple``: propose what followed the last n tokens when they occurred before in the same text.

Needs no model. Rules and limits are llama.cpp's (``common/ngram-map``); with the defaults a text has to have
more than 61 tokens. Helps where output repeats input: code edits, summaries, quotations.
"""

from __future__ import annotations

from typing import ClassVar

from .._ngram import NgramIndex
from ..types import DraftRequest
from .ngram import MAX_HITS, NgramDrafter

__all__ = ["NgramSimple"]


class NgramSimple(NgramDrafter[NgramIndex]):
    """Looks up the last ``size_n`` tokens in the text so far and proposes up to ``size_m`` tokens that followed.

    The latest earlier occurrence wins; one at position 0 does not count. Fewer than ``size_n`` following tokens are
    not proposed, and the text has to be longer than ``size_n + size_m + 1``. ``min_hits``: occurrences needed.
    """

    name: ClassVar[str] = "ngram-simple"
    cheap: ClassVar[bool] = True
    limit_option: ClassVar[str] = "size_m"

    def make_index(self) -> NgramIndex:
        """See :meth:`NgramDrafter.make_index`."""
        return NgramIndex(self.params.size_n)

    def begin(self, seq: int, tokens: list[int]) -> None:
        """See :meth:`Drafter.begin`."""
        self.index(seq).clear()

    def draft(self, requests: list[DraftRequest]) -> None:
        """See :meth:`Drafter.draft`."""
        size_n, size_m, min_hits = self.params.size_n, self.params.size_m, min(self.params.min_hits, MAX_HITS)
        for request in requests:
            tokens = request.tokens
            n_past = len(tokens) - 1
            if n_past <= size_n + size_m + 1:
                continue
            found = self.index(request.seq).find(tokens, min_hits)
            if found < 0:
                continue
            begin = found + size_n
            n_copy = min(size_m, n_past - begin)
            if n_copy >= size_n:
                request.draft.extend(tokens[begin : begin + min(n_copy, self.limit(request))])
