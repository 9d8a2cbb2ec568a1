"""Does speculation keep the distribution? A small world in which every probability is known.

A target and a draft give a row of logits for each prefix. Texts are written by the real verifier from drafts that the
real draft sampler has drawn, step after step, and counted; what their distribution should be is worked out with the
plain twin of the sampler.

False alarms: a test compares a chi-square value with its 1e-6 quantile, so it fails by chance once in a million; the
seeds are fixed, so it does not fail by chance at all until something in the path of the random numbers changes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pyspec import SamplingParams, _sample_reference
from pyspec.drafters.base import DraftSampler
from pyspec.sampling import SamplerChain, Verifier
from pyspec.sampling.chain import _steps
from pyspec.types import DraftRequest

#: Standard normal quantile of 1 - 1e-6.
Z = 4.7534

Prefix = tuple[int, ...]


class World:
    """Rows of logits by prefix, for texts of up to ``length`` tokens.

    Args:
        n_vocab: tokens. length: of a text. n_draft: tokens a draft.
        likeness: 0: the draft knows nothing; 1: it is the target.
        prompt: token ids that penalties see.
    """

    def __init__(
        self, n_vocab: int = 5, length: int = 3, n_draft: int = 2, likeness: float = 0.6, prompt: Any = (1, 1, 2)
    ) -> None:
        self.n_vocab, self.length, self.n_draft, self.prompt = n_vocab, length, n_draft, list(prompt)
        rng = np.random.default_rng(11)
        self.prefixes = [p for n in range(length + n_draft + 1) for p in itertools.product(range(n_vocab), repeat=n)]
        self.at = {p: i for i, p in enumerate(self.prefixes)}
        n = len(self.prefixes)
        self.target = rng.normal(0, 1.3, (n, n_vocab)).astype(np.float32)
        noise = rng.normal(0, 1.3, (n, n_vocab)).astype(np.float32)
        self.draft = (likeness * self.target + (1 - likeness) * noise).astype(np.float32)

    def expected(self, params: SamplingParams) -> dict[Prefix, np.ndarray[Any, Any]]:
        """For each prefix the probabilities of the next token, by the plain twin."""
        laws = {}
        for prefix in self.prefixes:
            if len(prefix) >= self.length:
                continue
            twin = _sample_reference.Sampler(
                self.n_vocab, _steps(params), self.prompt, penalty_last_n=params.penalty_last_n
            )
            for i, token in enumerate(prefix):
                twin.apply(self.target, self.at[prefix[:i]])
                twin.accept(token)
            laws[prefix] = np.zeros(self.n_vocab)
            # XTC acts by lot
            x = params.xtc_probability
            for share, u in ((x, 0.0), (1 - x, 1.0)):
                assert twin.apply(self.target, self.at[prefix], None, u) == 0
                laws[prefix][twin.ids] += share * twin.p
        return laws

    def write(
        self, params: SamplingParams, n: int, drawn: bool = True, verifier: Any = None
    ) -> Iterator[tuple[Prefix, list[tuple[int, Prefix, int]]]]:
        """``n`` texts, each with (index in the draft, prefix, token) for every token.

        Args:
            drawn: the draft is drawn; False: it is the draft's best token each time.
            verifier: another one than the real one, which must be caught.
        """
        verify = verifier if verifier is not None else Verifier()
        sampler = DraftSampler(1, self.n_vocab)
        chain = SamplerChain(params, self.n_vocab, self.prompt, 0)
        rows = np.zeros((self.n_draft + 1, self.n_vocab), np.float32)
        n_prompt = len(self.prompt)
        for seed in range(n):
            chain.rewind(0)
            chain.seed = seed
            text: Prefix = ()
            events = []
            while len(text) < self.length:
                request = DraftRequest(0, 0, 0, [*self.prompt, *text], self.n_draft)
                request.sampling = chain.draft_sampling(n_prompt + len(text))
                for _ in range(self.n_draft):
                    at = self.at[text + tuple(request.draft)]
                    if drawn and request.sampling is not None:
                        assert sampler.draw(self.draft, at, request, self.n_vocab)
                    else:
                        request.draft.append(int(self.draft[at].argmax()))
                places = [self.at[text + tuple(request.draft[:i])] for i in range(self.n_draft + 1)]
                self.target.take(places, axis=0, out=rows)
                n_acc, emitted = verify(rows, 0, request.draft, chain, n_prompt + len(text), request.q)
                assert emitted[:n_acc] == request.draft[:n_acc]
                assert len(emitted) == n_acc + 1
                for i, token in enumerate(emitted):
                    if len(text) < self.length:
                        events.append((i, text, token))
                        text += (token,)
            yield text, events


def surprise(counts: Any, expected: Any) -> float:
    """:func:`deviations` of counts from what is expected; cells below 5 are pooled."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    if counts[expected == 0].sum() > 0:
        return math.inf
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    n_small = int((np.cumsum(expected) < 5).sum()) + 1 if expected.sum() >= 5 else len(expected)
    n_small = max(n_small, int((expected < 5).sum()))
    counts = np.append(counts[n_small:], counts[:n_small].sum())
    expected = np.append(expected[n_small:], expected[:n_small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    k = len(expected) - 1
    if k < 1:
        return 0.0
    chi = float(((counts - expected) ** 2 / expected).sum())
    return deviations(chi, k)


def deviations(chi: float, k: int) -> float:
    """Standard deviations by which chi-square with ``k`` degrees of freedom is above its mean (Wilson-Hilferty)."""
    return float(((chi / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k)))


def check(world: World, params: SamplingParams, n: int, **how: Any) -> dict[str, float]:
    """Write ``n`` texts and compare: texts as a whole, and the tokens at each place of the draft given their prefix.

    Returns:
        By comparison, standard deviations above the mean; :func:`fails` says which are too many. And "length", tokens
        a step.
    """
    laws = world.expected(params)
    texts: Counter[Prefix] = Counter()
    by_index: dict[int, Counter[tuple[Prefix, int]]] = {}
    n_steps = n_tokens = 0
    for text, events in world.write(params, n, **how):
        texts[text] += 1
        n_tokens += len(events)
        for i, prefix, token in events:
            n_steps += i == 0
            by_index.setdefault(i, Counter())[prefix, token] += 1
    joint = {}
    for text in itertools.product(range(world.n_vocab), repeat=world.length):
        joint[text] = n * math.prod(laws[text[:i]][t] for i, t in enumerate(text))
    found = {"text": surprise([texts[t] for t in joint], list(joint.values()))}
    for i, seen in sorted(by_index.items()):
        totals: Counter[Prefix] = Counter()
        for (prefix, _), count in seen.items():
            totals[prefix] += count
        cells = [(p, t) for p in totals for t in range(world.n_vocab)]
        chi, k = 0.0, 0
        for p, group in itertools.groupby(cells, key=lambda c: c[0]):
            tokens = [t for _, t in group if laws[p][t] > 0]
            assert sum(seen[p, t] for t in tokens) == totals[p], "a token that the filters forbid"
            wanted = [totals[p] * laws[p][t] for t in tokens]
            if min(wanted) >= 5 and len(wanted) > 1:
                chi += sum((seen[p, t] - w) ** 2 / w for t, w in zip(tokens, wanted, strict=True))
                k += len(tokens) - 1
        if k:
            found[f"at {i}"] = deviations(chi, k)
    found["length"] = n_tokens / n_steps
    return found


def fails(found: dict[str, float]) -> list[str]:
    """Comparisons that a right distribution fails once in a million."""
    return [name for name, value in found.items() if name != "length" and value > Z]


def planted(kind: str, n_draft: int) -> Callable[..., Any]:
    """A verifier with a fault, for tests of the tests."""
    verify = Verifier()

    def wrong(rows: Any, row: int, draft: Any, chain: Any, pos: int, q: Any) -> Any:
        if kind == "q too small":
            q = [(ids, (probs * np.float32(0.8)).astype(np.float32)) for ids, probs in q]
        if kind == "draft believed" and chain.uniform(77, pos) < 0.15:
            chain.look(rows, row, pos)
            if chain.prob(draft[0]) > 0:
                chain.accept(draft[0])
                return 0, [draft[0]]
        if kind == "state kept":
            for token in draft:
                chain.accept(token)
            n_acc, emitted = verify(rows, row, draft, chain, pos, q)
            return n_acc, emitted
        return verify(rows, row, draft, chain, pos, q)

    return wrong
