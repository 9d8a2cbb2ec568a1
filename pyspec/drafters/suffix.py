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

from .._suffix import SuffixIndex, SuffixMatch
from ..config import SpeculationParams
from ..errors import PyspecError
from ..types import DraftRequest, Requirements
from .base import Drafter, Plan
from .suffix_corpus import SuffixCorpus

if TYPE_CHECKING:
    from ..runtime.batch import Batch
    from ..runtime.evaluator import Evaluator
    from ..runtime.model import Model

__all__ = ["Suffix"]

log = logging.getLogger("pyspec")

#: Tokens of the prompt's end that go into the corpus before the output, so that a first token can be proposed; also how
#: far back a text is matched again after the corpus has changed.
N_BEFORE = 32


class _Text:
    """One sequence: its own index, where it is in the corpus, and its output."""

    def __init__(self, tokens: list[int], corpus: SuffixCorpus | None) -> None:
        self.index = SuffixIndex()
        self.match = SuffixMatch(corpus.index) if corpus is not None else None
        self.n_corpus = -1
        self.n = 0
        #: the prompt's end and the output
        self.recent: list[int] = []
        self.n_before = min(N_BEFORE, len(tokens))
        #: rows of the last pass: the position of the first, and the tokens
        self.rows: tuple[int, list[int]] = (0, [])
        self.follow(tokens)

    def follow(self, tokens: list[int]) -> None:
        """Bring everything up to ``tokens``, of which the part taken in so far is a prefix."""
        if len(tokens) > self.n:
            self.take(tokens[-N_BEFORE:] if self.n == 0 else tokens[self.n :], tokens)

    def take(self, new: list[int], tokens: list[int] | None = None) -> None:
        """Go on with ``new``. tokens: the whole text, where ``new`` is only its end."""
        if tokens is None:
            self.index.extend(new)
            self.n += len(new)
        else:
            self.index.extend(tokens, self.n)
            self.n = len(tokens)
        self.recent.extend(new)
        if self.match is not None and self.n_corpus == self.match.index.n_tokens:
            self.match.extend(new)

    def in_corpus(self) -> SuffixMatch | None:
        """Where the text is in the corpus. Looked up again from its last tokens when the corpus has changed."""
        if self.match is not None and self.n_corpus != self.match.index.n_tokens:
            self.n_corpus = self.match.index.n_tokens
            self.match = SuffixMatch(self.match.index)
            self.match.extend(self.recent, max(0, len(self.recent) - N_BEFORE))
        return self.match

    def is_prefix_of(self, tokens: list[int]) -> bool:
        """Whether ``tokens`` may go on from what was taken in (its last tokens are compared)."""
        n_compared = min(len(self.recent), self.n)
        return len(tokens) >= self.n and tokens[self.n - n_compared : self.n] == self.recent[-n_compared:]


class Suffix(Drafter):
    """See the module. Options: ``suffix_*`` of :class:`pyspec.SpeculationParams`.

    Attributes:
        corpus: texts generated before, shared by all sequences; None with ``suffix_corpus_max=0``.
    """

    name: ClassVar[str] = "suffix"
    limit_option: ClassVar[str] = "suffix_n_max"

    def __init__(self, target: Evaluator, draft: Evaluator | None, params: SpeculationParams, n_seq: int) -> None:
        super().__init__(target, draft, params, n_seq)
        self.n_max = params.suffix_n_max
        self.corpus: SuffixCorpus | None = None
        self._texts: dict[int, _Text] = {}
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
        if text is None or not text.is_prefix_of(tokens):
            self._texts[seq] = _Text(tokens, self.corpus)

    def process(self, batch: Batch) -> None:
        """See :meth:`Drafter.process`."""
        # only what `accept` may confirm is of interest: rows with output
        if batch.n_outputs:
            for seq, (begin, end) in batch.rows().items():
                text = self._texts.get(seq)
                if text is not None:
                    text.rows = int(batch.pos[begin]), batch.tokens[begin:end].tolist()

    def draft(self, requests: list[DraftRequest]) -> None:
        """See :meth:`Drafter.draft`."""
        p = self.params
        options = (p.suffix_min_match, p.suffix_factor, p.suffix_offset, p.suffix_p_min)
        for request in requests:
            text = self._texts.get(request.seq)
            if text is None:
                text = self._texts[request.seq] = _Text(request.tokens, self.corpus)
            text.follow(request.tokens)
            n_max = self.limit(request)
            tokens, probs, score, _ = text.index.draft(n_max, *options)
            match = text.in_corpus() if score < n_max else None
            if match is not None:
                others = match.draft(n_max, *options)
                if others[2] > score:
                    tokens, probs = others[:2]
            request.draft.extend(tokens)
            request.probs.extend(probs)

    def accept(self, seq: int, n_accepted: int, is_other: bool) -> None:
        """See :meth:`Drafter.accept`. Without this the end of an output would be missing in the corpus."""
        text = self._texts.get(seq)
        if text is not None:
            first, tokens = text.rows
            known = tokens[text.n - first : n_accepted + 1] if text.n >= first else []
            text.rows = 0, []
            if known:
                text.take(known)

    def end(self, seq: int) -> None:
        """See :meth:`Drafter.end`. The output goes into the corpus."""
        text = self._texts.pop(seq, None)
        if text is not None and self.corpus is not None and len(text.recent) > text.n_before + 1:
            self.corpus.add(text.recent)

    def inherit(self, previous: Drafter) -> None:
        """See :meth:`Drafter.inherit`. The corpus goes on."""
        if isinstance(previous, Suffix) and self.corpus is not None and previous.corpus is not None:
            self.corpus = previous.corpus

    def close(self) -> None:
        """See :meth:`Drafter.close`. Saves the corpus when it has a file."""
        self._texts.clear()
        if self.corpus is not None and self.params.suffix_corpus is not None:
            self.corpus.save(self.params.suffix_corpus)


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
