"""The sampler chain of one request: from a row of logits to candidates, and what is remembered between rows.

A row goes through logit bias, the constraint's mask, and then ``SamplingParams.samplers`` in their order. What comes
out depends on the tokens accepted so far, in the prompt and since; :meth:`SamplerChain.accept` is called with every
emitted token and with no other. So a rejected draft leaves no trace.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from .. import _core, _sample
from ..config import SAMPLERS, SamplingParams
from ..errors import ConfigError, SamplingError
from ..types import DraftSampling, F32Array, I32Array
from .breakers import Breakers
from .constraint import Constraint

__all__ = ["ACCEPT", "DRAFT", "RECOVER", "SAMPLE", "SYNTHETIC", "Candidates", "SamplerChain"]

#: Streams of random numbers. Each is keyed by (seed, stream, position), so none depends on another or on the batch.
SAMPLE, SYNTHETIC, DRAFT, ACCEPT, RECOVER, _XTC = range(6)


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a token was drawn from.

    Attributes:
        ids: int32 [n], most likely first. Owned.
        probs: float32 [n], after all filters and the temperature; they add up to 1. Owned.
    """

    ids: I32Array
    probs: F32Array


class SamplerChain:
    """See the module's text. One thread at a time; ``scratch`` is shared with other chains of the same engine.

    Args:
        params: how the request is sampled.
        n_vocab: width of a logits row.
        prompt: token ids that penalties and DRY count as said.
        seed: the request's seed.
        scratch: arrays of the vocabulary's size; None: its own.
        constraint: which tokens are allowed, if not all.
        breakers: DRY's, see :func:`make_breakers`.
        ends: tokens after which nothing is looked at any more.

    Attributes:
        greedy: the most likely token of the bare row is always taken.
        trace: where a caller has put a list, the candidates of each row that decided a token are appended to it.

    Raises:
        ConfigError: a token id in ``logit_bias`` is unknown.
    """

    __slots__ = ("_draft", "_sampler", "_xtc", "constraint", "ends", "greedy", "params", "seed", "trace")

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        prompt: Sequence[int] = (),
        seed: int = 0,
        scratch: _sample.Scratch | None = None,
        constraint: Constraint | None = None,
        breakers: Breakers | None = None,
        ends: Collection[int] = (),
    ) -> None:
        for token in params.logit_bias:
            if token >= n_vocab:
                raise ConfigError(f"logit_bias: token id {token} is out of range: the model has {n_vocab} tokens")
        self.params = params
        self.seed = seed
        self.constraint = constraint
        self.ends = ends
        self.trace: list[Candidates] | None = None
        self._draft: DraftSampling | None = None
        steps = _steps(params)
        self._xtc = any(code == _sample.XTC for code, *_ in steps)
        self.greedy = not params.logit_bias and constraint is None and [s[0] for s in steps] == [_sample.TEMPERATURE]
        self.greedy = self.greedy and params.temperature == 0.0
        bias = [(t, b) for t, b in params.logit_bias.items() if b]
        self._sampler = _sample.Sampler(
            scratch if scratch is not None else _sample.Scratch(n_vocab),
            steps,
            np.asarray(prompt, np.int32),
            np.array([t for t, _ in bias], np.int32),
            np.array([b for _, b in bias], np.float32),
            params.penalty_last_n,
            params.dry_penalty_last_n,
            breakers if params.dry_multiplier > 0 else None,
        )

    @property
    def n(self) -> int:
        """Accepted tokens, the prompt not included."""
        return self._sampler.n

    @property
    def stateful(self) -> bool:
        """Whether accepted tokens change what comes next."""
        return self._sampler.stateful or self.constraint is not None

    @property
    def mirostat_mu(self) -> float:
        """mirostat's upper limit of surprise at present, in bits."""
        return self._sampler.mirostat_mu

    def uniform(self, stream: int, pos: int) -> float:
        """The random number in [0, 1) of this request, stream and position."""
        return _core.philox_uniform(self.seed, stream, pos)

    def draft_sampling(self, pos: int) -> DraftSampling | None:
        """How drafted tokens should be drawn for a verification whose first token is at ``pos``; None: not at all."""
        p = self.params
        if p.temperature == 0.0 or p.verification == "match":
            return None
        if p.verification == "auto" and p.seed is not None:
            # who gives a seed wants the same text again, also with another drafter or none
            return None
        # a block's fate depends on all its tokens, so no random number of it may be used again
        stream = DRAFT | (pos << 32) if p.verification == "block" else DRAFT
        if self._draft is None or (self._draft.stream, self._draft.seed) != (stream, self.seed):
            self._draft = DraftSampling(p.temperature, p.top_k, p.top_p, p.min_p, self.seed, stream)
        return self._draft

    def look(self, logits: F32Array, row: int, pos: int, start: int = 0) -> None:
        """Find the candidates of a row, for the methods below. They hold until any chain looks at another row.

        Args:
            logits: float32, [n_rows, n_vocab], C-contiguous, borrowed.
            row: the row.
            pos: index, in the sequence, of the token that it decides.
            start: where the block starts, if the row has a say in tokens before ``pos`` too.

        Raises:
            SamplingError: the row holds NaN or +inf, or nothing is allowed.
        """
        mask = self.constraint.mask() if self.constraint is not None else None
        u = self.uniform(_XTC | (start << 32), pos) if self._xtc else 1.0
        status = self._sampler.apply(logits, row, mask, u)
        if status != _sample.OK:
            raise row_error(logits, row, pos)

    def candidates(self) -> Candidates:
        """What the row that was looked at leaves, most likely first."""
        ids, probs = self._sampler.candidates()
        order = np.argsort(-probs, kind="stable")
        return Candidates(ids[order], probs[order])

    def sample(self, u: float) -> int:
        """A candidate, drawn with ``u`` in [0, 1)."""
        token = self._sampler.draw(u)
        if self.trace is not None:
            self.trace.append(self.candidates())
        return token

    def prob(self, token: int) -> float:
        """Probability of a token at the row that was looked at; 0 for what is no candidate."""
        return self._sampler.prob(token)

    def overlap(self, a: float, ids: I32Array, q: F32Array) -> float:
        """Sum of ``min(a * p, q)`` over the tokens of another distribution."""
        return self._sampler.overlap(a, ids, q)

    def residual(self, a: float, ids: I32Array, q: F32Array, u: float) -> int:
        """A token drawn from ``max(0, a * p - q)``, normalised."""
        if self.trace is not None:
            self.trace.append(self.candidates())
        return self._sampler.residual(a, ids, q, u)

    def accept(self, token: int) -> None:
        """``token`` was emitted at the row that was looked at."""
        self._sampler.accept(token)
        if self.constraint is not None:
            self.constraint.accept(token)

    def over(self, token: int) -> bool:
        """Whether nothing follows ``token``, just accepted."""
        return token in self.ends or (self.constraint is not None and self.constraint.stopped)

    def rewind(self, n: int) -> None:
        """Be again as after ``n`` accepted tokens.

        Raises:
            SamplingError: a constraint has heard more, and cannot forget.
        """
        if self.greedy or n == self.n:
            return
        if self.constraint is not None:
            self.constraint.rewind(n)
        self._sampler.rewind(n)


def row_error(logits: F32Array, row: int, pos: int) -> SamplingError:
    """Say why no token can be taken from a row."""
    values = logits[row]
    bad = np.flatnonzero(np.isnan(values) | np.isposinf(values))
    if bad.size:
        return SamplingError(
            f"token {pos} of the sequence: the model's logits hold NaN or +inf at {bad.size} of {values.size} tokens, "
            f"first at id {int(bad[0])}: the weights or a kernel are broken"
        )
    return SamplingError(
        f"token {pos} of the sequence: no token is allowed: logit_bias, penalties and constraint forbid them all"
    )


def _steps(params: SamplingParams) -> list[tuple[float, ...]]:
    """``params.samplers`` as steps of ``_sample.Sampler``; what is off is left out."""
    active = params.active_samplers()
    greedy = params.temperature == 0.0
    if greedy and not active & {"typical_p", "xtc"}:
        # other cuts never drop the most likely token
        active &= {"penalties", "dry"}
    p, keep = params, params.min_keep
    numbers: dict[str, tuple[float, ...]] = {
        "penalties": (_sample.PENALTIES, p.penalty_repeat, p.penalty_freq, p.penalty_present),
        "dry": (_sample.DRY, p.dry_multiplier, p.dry_base, p.dry_allowed_length),
        "top_n_sigma": (_sample.TOP_N_SIGMA, p.top_n_sigma),
        "top_k": (_sample.TOP_K, p.top_k),
        "typical_p": (_sample.TYPICAL_P, p.typical_p, keep),
        "top_p": (_sample.TOP_P, p.top_p, keep),
        "min_p": (_sample.MIN_P, p.min_p, keep),
        "xtc": (_sample.XTC, p.xtc_probability, p.xtc_threshold, keep),
        "temperature": (_sample.DYNATEMP, p.temperature, p.dynatemp_range, p.dynatemp_exponent)
        if p.dynatemp_range > 0 and not greedy
        else (_sample.TEMPERATURE, p.temperature),
    }
    assert set(numbers) == set(SAMPLERS)
    steps = [numbers[name] for name in p.samplers if name in active and not (greedy and name == "temperature")]
    if p.mirostat and not greedy:
        steps.append((_sample.MIROSTAT if p.mirostat == 1 else _sample.MIROSTAT2, p.mirostat_tau, p.mirostat_eta))
    if greedy:
        steps.append((_sample.TEMPERATURE, 0.0))
    return steps
