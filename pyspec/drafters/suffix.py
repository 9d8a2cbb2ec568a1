"""``suffix``: propose what followed the longest earlier occurrences of the text's end, as far as it is likely.

The idea is that of SuffixDecoding (Oliaro et al., 2024): a suffix structure over the text so far and one over past
outputs; a draft follows the most frequent continuations while their probability lasts, and a longer match may propose
more. Needs no model. What it proposes grows with what has been generated before: good for agents, code edits and
everything else that repeats itself or its input.
"""

from __future__ import annotations

import logging
import os
import zlib
from typing import TYPE_CHECKING, ClassVar

from .._suffix import Confidence, SuffixIndex, SuffixMatch
from ..config import SpeculationParams
from ..errors import PyspecError
from ..types import DraftRequest, Requirements
from .base import Drafter, Plan
from .suffix_corpus import SuffixCorpus

if TYPE_CHECKING:
    from ..runtime.evaluator import Evaluator
    from ..runtime.model import Model

__all__ = ["Suffix"]

log = logging.getLogger("pyspec")

#: Tokens of the prompt's end that go into the corpus before the output, so that a first token can be proposed; also how
#: far back a text is matched again after the corpus has changed.
N_BEFORE = 32

#: Weights of :class:`Confidence` that the first text starts with, for its own repeats and for those of past outputs: a
#: fit to what SmolLM2-135M and Gemma 3 270M wrote, rounded. What followed one token the only time that it was seen has
#: a chance of 0.4, two tokens 0.6, four 0.8, eight 0.9.
WEIGHTS = (-0.6, 1.3, 1.4, 0.8)

#: How far a text that ends takes the weights that later ones start with to where it has come itself.
_KEPT = 0.5


class _Text:
    """One sequence: its own index, where it is in the corpus, and how much can be made of either.

    Attributes:
        tokens: the sequence's own list, which grows.
        here, there: what is learned while it grows, of its own repeats and of past outputs; None: nothing.
    """

    def __init__(
        self, tokens: list[int], corpus: SuffixCorpus | None, here: Confidence | None, there: Confidence | None
    ) -> None:
        self.index = SuffixIndex()
        self.tokens = tokens
        self.n = 0
        self.n_prompt = len(tokens)
        self.corpus = corpus
        self.matches: list[SuffixMatch] = []
        self.version = -1
        self.here = here
        self.there = there
        self.follow(tokens)

    def follow(self, tokens: list[int]) -> None:
        """Bring everything up to ``tokens``, of which the part taken in so far is a prefix."""
        self.tokens = tokens
        n, self.n = self.n, len(tokens)
        if n == self.n:
            return
        # a prompt says little about how well the output can be foretold
        self.index.extend(tokens, n, self.here if n else None)
        if self.corpus is not None and self.version == self.corpus.version:
            for match in self.matches:
                match.extend(tokens, n, self.there)

    def in_corpus(self) -> list[SuffixMatch]:
        """Where the text is in the corpus. Looked up again from its last tokens when the corpus has changed."""
        if self.corpus is not None and self.version != self.corpus.version:
            self.version = self.corpus.version
            self.matches = [SuffixMatch(index) for index in self.corpus.indexes]
            for match in self.matches:
                match.extend(self.tokens, max(0, self.n - N_BEFORE))
        return self.matches

    def is_prefix_of(self, tokens: list[int]) -> bool:
        """Whether ``tokens`` may go on from what was taken in (its last tokens are compared)."""
        begin = max(0, self.n - N_BEFORE)
        return tokens[begin : self.n] == self.tokens[begin : self.n]


class Suffix(Drafter):
    """See the module. Options: ``suffix_*`` of :class:`pyspec.SpeculationParams`.

    Attributes:
        corpus: texts generated before, shared by all sequences; None with ``suffix_corpus_max=0``.
    """

    name: ClassVar[str] = "suffix"
    cheap: ClassVar[bool] = True
    joint_probs: ClassVar[bool] = True
    limit_option: ClassVar[str] = "suffix_n_max"

    def __init__(self, target: Evaluator, draft: Evaluator | None, params: SpeculationParams, n_seq: int) -> None:
        super().__init__(target, draft, params, n_seq)
        self.n_max = params.suffix_n_max
        self.calibrated = params.suffix_rate > 0
        self.corpus: SuffixCorpus | None = None
        self._texts: dict[int, _Text] = {}
        # what texts start with: of their own repeats, and of past outputs
        self._here: tuple[float, ...] = WEIGHTS
        self._there: tuple[float, ...] = WEIGHTS
        if params.suffix_corpus_max:
            self.corpus = SuffixCorpus(params.suffix_corpus_max, target.n_vocab, _fingerprint(target))
            if params.suffix_corpus is not None and os.path.exists(params.suffix_corpus):
                n = self.corpus.load(params.suffix_corpus)
                log.info("suffix: %d texts read from %s", n, params.suffix_corpus)
        log.info(
            "speculation: adding %s: n_max=%d, min_match=%d, factor=%g, offset=%g, p_min=%g, corpus_max=%d",
            self.name, self.n_max, params.suffix_min_match, params.suffix_factor, params.suffix_offset,
            params.suffix_p_min, params.suffix_corpus_max,
        )  # fmt: skip

    @classmethod
    def plan(cls, target: Model, draft: Model | None, params: SpeculationParams, n_seq: int) -> Plan:
        """See :meth:`Drafter.plan`. Works with any target."""
        return Plan(Requirements(), None, params.suffix_n_max)

    def begin(self, seq: int, tokens: list[int]) -> None:
        """See :meth:`Drafter.begin`. A sequence that starts over goes on with what is indexed."""
        text = self._texts.get(seq)
        if text is not None and text.is_prefix_of(tokens):
            text.follow(tokens)
        else:
            self._texts[seq] = self._text(tokens)

    def _text(self, tokens: list[int]) -> _Text:
        rate = self.params.suffix_rate
        if not rate:
            return _Text(tokens, self.corpus, None, None)
        return _Text(tokens, self.corpus, Confidence(self._here, rate), Confidence(self._there, rate))

    def draft(self, requests: list[DraftRequest]) -> None:
        """See :meth:`Drafter.draft`."""
        p = self.params
        options = (p.suffix_min_match, p.suffix_factor, p.suffix_offset, p.suffix_p_min)
        for request in requests:
            text = self._texts.get(request.seq)
            if text is None:
                text = self._texts[request.seq] = self._text(request.tokens)
            text.follow(request.tokens)
            n_max = self.limit(request)
            tokens, probs, score, _ = text.index.draft(n_max, *options, text.here)
            for match in text.in_corpus():
                if score < n_max:
                    others = match.draft(n_max, *options, text.there)
                    if others[2] > score:
                        tokens, probs, score, _ = others
            request.draft.extend(tokens)
            request.probs.extend(probs)

    def end(self, seq: int) -> None:
        """See :meth:`Drafter.end`. The output goes into the corpus, with the token that ended it.

        What was learned of the text is where later ones start from, half of the way.
        """
        text = self._texts.pop(seq, None)
        if text is None:
            return
        if text.here is not None and text.there is not None:
            self._here, self._there = _towards(self._here, text.here), _towards(self._there, text.there)
        if self.corpus is not None and len(text.tokens) > text.n_prompt + 1:
            self.corpus.add(text.tokens[max(0, text.n_prompt - N_BEFORE) :])

    def inherit(self, previous: Drafter) -> None:
        """See :meth:`Drafter.inherit`. The corpus goes on, and what was learned."""
        if isinstance(previous, Suffix):
            self._here, self._there = previous._here, previous._there
            if self.corpus is not None and previous.corpus is not None:
                self.corpus = previous.corpus

    def close(self) -> None:
        """See :meth:`Drafter.close`. Saves the corpus when it has a file."""
        self._texts.clear()
        if self.corpus is not None and self.params.suffix_corpus is not None:
            self.corpus.save(self.params.suffix_corpus)


def _towards(weights: tuple[float, ...], learned: Confidence) -> tuple[float, ...]:
    return tuple(w + _KEPT * (v - w) for w, v in zip(weights, learned.weights, strict=True))


def _fingerprint(target: Evaluator) -> int:
    """Tells vocabularies of one size apart by some of their tokens; 0 where the target has none to ask."""
    vocab = getattr(getattr(target, "model", None), "vocab", None)
    if vocab is None:
        return 0
    try:
        step = max(1, target.n_vocab // 256)
        return zlib.crc32(b"\0".join(vocab.token_text(i) for i in range(0, target.n_vocab, step))) or 1
    except PyspecError:
        return 0
