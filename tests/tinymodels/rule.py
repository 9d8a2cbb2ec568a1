"""The next-token rule that all models of one seed share: embeddings, head and the context code."""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np

from .vocab import EOS, MASK, Vocab

D = 64  # hidden size of every target
NORM = D**0.5  # length of a vector whose RMS is 1
BIAS = [0]  # the same positive value in every ordinary token
A = list(range(1, 49))  # token identity
NEAR = list(range(49, 57))  # context code: the previous token
FAR = list(range(57, 64))  # context code: the rest of the context
MASK_DIM = FAR[0]  # embeddings leave this free; only the mask token has it
B_VALUE = 0.3  # share of the bias dimension in a unit embedding
A_VALUE = (1 - B_VALUE**2) ** 0.5
ONE = B_VALUE * NORM  # what the bias dimension of an ordinary token holds
PERIOD = 17  # orbit length
GAIN = 18.0  # logit of a sure next token, before the hidden state's norm
NEAR_SIZE, FAR_SIZE = 0.6, 0.4  # length of the two code parts relative to the embedding
NEAR_RMS = (1 + NEAR_SIZE**2) ** 0.5  # of embedding and near code
HIDDEN_RMS = (1 + NEAR_SIZE**2 + FAR_SIZE**2) ** 0.5  # of both and the far code


def rng_for(seed: int, *tags: object) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(repr(tags).encode())])


def place(shape: tuple[int, int], rows, cols, block) -> np.ndarray:
    out = np.zeros(shape)
    out[np.ix_(rows, cols)] = block
    return out


class Rule:
    """Embeddings ``E`` (rows of RMS 1) and head ``W`` for one seed and vocabulary."""

    def __init__(self, seed: int, vocab: Vocab, wander: float = 1.0, eos: int = 0):
        rng = rng_for(seed, "rule")
        n = len(vocab)
        clean = vocab.clean()
        orbits = len(clean) // PERIOD
        self.orbit = rng.permutation(clean)[: orbits * PERIOD].reshape(orbits, PERIOD)
        self.members = np.sort(self.orbit.ravel())

        # one step along an orbit is the same rotation for every orbit
        half = (PERIOD - 1) // 2
        turn = 2 * np.pi * (np.arange(len(A) // 2) % half + 1) / PERIOD
        self.step = np.zeros((len(A), len(A)))
        for j, angle in enumerate(turn):
            c, s = np.cos(angle), np.sin(angle)
            self.step[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] = [[c, -s], [s, c]]

        ident = np.zeros((n, len(A)))
        start = rng.uniform(0, 2 * np.pi, (orbits, len(turn)))
        for o in range(orbits):
            phase = start[o] + np.arange(PERIOD)[:, None] * turn
            rows = np.stack([np.cos(phase), np.sin(phase)], -1).reshape(PERIOD, -1)
            ident[self.orbit[o]] = rows / len(turn) ** 0.5
        for t in np.setdiff1d(np.arange(n), self.members):  # bytes, specials, leftovers
            v = ident[rng.choice(self.members)] + 0.05 * rng.standard_normal(len(A))
            ident[t] = v / np.linalg.norm(v)

        self.E = np.zeros((n, D))
        self.E[:, BIAS] = ONE
        self.E[:, A] = ident * A_VALUE * NORM
        self.E[MASK] = 0
        self.E[MASK, MASK_DIM] = NORM

        self.W = np.zeros((n, D))
        follow = np.roll(self.orbit, -1, axis=1)
        self.W[np.ix_(follow.ravel(), A)] += ident[self.orbit.ravel()]
        self.W[np.ix_(rng.permutation(self.members), A)] += 0.8 * wander * ident[self.members]
        self.W[np.ix_(self.members, NEAR + FAR)] = (
            0.33 * wander * rng.standard_normal((len(self.members), len(NEAR + FAR)))
        )
        reachable = self.members
        if eos:  # EOS follows `eos` of the tokens
            at = rng.choice(orbits * PERIOD, eos, replace=False)
            before = ident[self.orbit.ravel()[at]]
            self.W[np.ix_(follow.ravel()[at], A)] -= before
            self.W[np.ix_([EOS], A)] = before.sum(0)
            reachable = np.append(reachable, EOS)
        self.W[np.ix_(np.setdiff1d(np.arange(n), reachable), BIAS)] = -2.0

        # the near code of a token: some of its identity, a fixed part of the length
        planes = rng.choice(len(turn), len(NEAR) // 2, replace=False)
        scale = NEAR_SIZE / A_VALUE * (len(turn) / len(planes)) ** 0.5
        self.code = place(
            (len(NEAR), len(A)),
            range(len(NEAR)),
            np.stack([2 * planes, 2 * planes + 1], 1).ravel(),
            scale * np.eye(len(NEAR)),
        )

    def head(self, gain: float = GAIN) -> np.ndarray:
        """Output matrix for hidden states of RMS 1."""
        return self.W * (gain / NORM)


@lru_cache(maxsize=8)
def rule_for(seed: int, kind: str = "bpe", wander: float = 1.0, eos: int = 0) -> tuple[Vocab, Rule]:
    vocab = Vocab(kind)
    return vocab, Rule(seed, vocab, wander, eos)


def disagree(rows: np.ndarray, rule: Rule, agreement: float, seed: int) -> np.ndarray:
    """Exchange the rows of a share ``1 - agreement`` of the orbit tokens."""
    rng = rng_for(seed, "disagree")
    members = rng.permutation(rule.members)
    hit = members[: round((1 - agreement) * len(members))]
    rows = rows.copy()
    rows[hit] = rows[np.roll(hit, 1)]
    return rows
