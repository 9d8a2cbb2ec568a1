"""``ngram-map-k`` and ``ngram-map-k4v``: n-grams of the text so far, and how well proposals after them did.

Need no model. Rules and limits are llama.cpp's (``common/ngram-map``), and so are the drafts. A proposal after an
n-gram is never longer than what was accepted of the one before it after the same n-gram, so an n-gram of which nothing
was accepted is silent from then on.
"""

from __future__ import annotations

from typing import ClassVar

from .._ngram import NgramMap
from ..types import DraftRequest
from .ngram import MAX_HITS, NgramDrafter

__all__ = ["NgramMapK", "NgramMapK4v"]


class NgramMapK(NgramDrafter[NgramMap]):
    """Proposes up to ``size_m`` tokens that followed an earlier occurrence of the last ``size_n`` tokens.

    The text has to have ``2 * size_n + size_m`` tokens before the last one. ``min_hits`` is for ``ngram-map-k4v``
    only, as in llama.cpp.
    """

    name: ClassVar[str] = "ngram-map-k"
    cheap: ClassVar[bool] = True
    limit_option: ClassVar[str] = "size_m"
    key_only: ClassVar[bool] = True

    def make_index(self) -> NgramMap:
        """See :meth:`NgramDrafter.make_index`."""
        p = self.params
        return NgramMap(p.size_n, p.size_m, self.key_only, min(p.min_hits, MAX_HITS))

    def begin(self, seq: int, tokens: list[int]) -> None:
        """See :meth:`Drafter.begin`."""
        self.index(seq).begin(tokens)

    def draft(self, requests: list[DraftRequest]) -> None:
        """See :meth:`Drafter.draft`."""
        for request in requests:
            request.draft.extend(self.index(request.seq).draft(request.tokens, self.limit(request)))

    def accept(self, seq: int, n_accepted: int, is_other: bool) -> None:
        """See :meth:`Drafter.accept`."""
        if not is_other:
            self.index(seq).accept(n_accepted)


class NgramMapK4v(NgramMapK):
    """As ``ngram-map-k``, but tells up to four continuations of an n-gram apart.

    Proposes only where one was seen at least twice as often as the others together, and only when the n-gram was found
    ``min_hits`` times.
    """

    name: ClassVar[str] = "ngram-map-k4v"
    cheap: ClassVar[bool] = True
    key_only: ClassVar[bool] = False
