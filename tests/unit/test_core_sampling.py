"""sample_row and philox_uniform, compiled and NumPy."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pyspec import _core, _reference

PROFILE = settings(derandomize=True, database=None, deadline=None, max_examples=300)
BOTH = pytest.mark.parametrize("kernels", [_core, _reference], ids=["core", "reference"])
NAN, INF = math.nan, math.inf
#: How far u or top_p may be from a step of the cumulative sum for both float32 and float64 to see the same side.
MARGIN = 2e-6


def sample(
    kernels: ModuleType,
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    u: float = 0.5,
) -> int:
    v = len(logits)
    scratch = np.full(v, -7, np.int32), np.full(v, NAN, np.float32)
    token: int = kernels.sample_row(logits, temperature, top_k, top_p, min_p, u, *scratch)
    return token


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def logs(*probs: float) -> np.ndarray:
    """Logits of these probabilities, moved up as a model's logits may be."""
    with np.errstate(divide="ignore"):
        return (np.log(np.array(probs)) + 11).astype(np.float32)


def spread(kernels: ModuleType, logits: np.ndarray, n: int, **options: float) -> np.ndarray:
    """Share of each token over n evenly spaced u: by the inverse CDF its probability to within 1 / n."""
    us = (np.arange(n) + 0.5) / n
    tokens = [sample(kernels, logits, u=float(u), **options) for u in us]  # type: ignore[arg-type]
    return np.bincount(tokens, minlength=len(logits)) / n


# ---- known answers ---------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_greedy(kernels: ModuleType, u: float) -> None:
    for temperature in (0.0, 1e-39, 1e-300):
        assert sample(kernels, f32(1, 3, NAN, 3), temperature, u=u) == 1
    for options in (
        {"top_k": 1},
        {"top_p": 0.0},
        {"top_p": -1.0},
        {"min_p": 1.0},
        {"min_p": 5.0},
        {"temperature": 1e-3},
    ):
        assert sample(kernels, f32(1, 3, NAN, 2), u=u, **options) == 1  # type: ignore[arg-type]


@BOTH
def test_descending_order(kernels: ModuleType) -> None:
    """The CDF runs over tokens from likely to unlikely, ties by id."""
    logits = logs(0.1, 0.4, 0.4, 0.1)
    for u, token in [(0.0, 1), (0.39, 1), (0.41, 2), (0.79, 2), (0.81, 0), (0.89, 0), (0.91, 3), (1 - 2**-53, 3)]:
        assert sample(kernels, logits, u=u) == token
        assert sample(kernels, logits, u=u, top_k=4) == token
        assert sample(kernels, logits, u=u, min_p=0.01) == token
        assert sample(kernels, logits, u=u, top_p=0.999) == token


@BOTH
@pytest.mark.parametrize(
    ("options", "probs"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_k": -1}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_p": 0.75}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.45}, [1, 0, 0, 0]),
        ({"top_p": 0.99}, [0.5, 0.3, 0.15, 0.05]),
        ({"min_p": 0.25}, [10 / 19, 6 / 19, 3 / 19, 0]),
        ({"top_k": 3, "top_p": 0.6}, [0.625, 0.375, 0, 0]),  # of 0.95: 0.526, 0.842
        ({"top_p": 0.9, "min_p": 0.5}, [0.625, 0.375, 0, 0]),
        # top_p and min_p see the softmax before the temperature, which then flattens what is left
        ({"top_p": 0.75, "temperature": INF}, [0.5, 0.5, 0, 0]),
        ({"min_p": 0.25, "temperature": INF}, [1 / 3, 1 / 3, 1 / 3, 0]),
        ({"temperature": 0.5}, list(np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365)),
    ],
)
def test_distribution(kernels: ModuleType, options: dict[str, float], probs: list[float]) -> None:
    order = [2, 0, 3, 1]
    logits = logs(0.5, 0.3, 0.15, 0.05)[order]
    n = 1000
    np.testing.assert_allclose(spread(kernels, logits, n, **options)[np.argsort(order)], probs, atol=1.01 / n)


@BOTH
@pytest.mark.parametrize("top_k", [0, 8])
def test_steps_belong_to_the_next_token(kernels: ModuleType, top_k: int) -> None:
    """u on a step of the CDF gives the token after it; top_p on a step keeps no further token. Exact in float32."""
    logits = f32(*[0.0] * 8, -INF if top_k == 0 else -1)
    for i in range(8):
        assert sample(kernels, logits, top_k=top_k, u=i / 8) == i
    for n in range(1, 8):
        assert sample(kernels, logits, top_k=top_k, top_p=n / 8, u=1 - 2**-53) == n - 1


@BOTH
@pytest.mark.parametrize(("u", "top_p"), [(0.9, 1.0), (0.999, 0.9), (0.5, 0.5)])
def test_flat_tail(kernels: ModuleType, u: float, top_p: float) -> None:
    """One token of probability 0.85, 0.15 in 2999 equal ones: as hard as it gets for a cut of what is not needed."""
    logits = logs(*[0.15 / 2999] * 1000, 0.85, *[0.15 / 2999] * 1999)
    step = u * max(0.85, top_p) - 0.85
    token = sample(kernels, logits, u=u, top_p=top_p)
    if step < 0:
        assert token == 1000
    else:
        assert abs(token - (token > 1000) - step / 0.15 * 2999) < 3


@BOTH
def test_llama_cpp_defaults_cut_before_the_temperature(kernels: ModuleType) -> None:
    """With the temperature first, 1.0 of the mass at temperature 0.1 would be the top token alone."""
    logits = logs(0.5, 0.4, 0.1)
    assert spread(kernels, logits, 500, temperature=3.0, top_k=40, top_p=0.8, min_p=0.05)[2] == 0
    hot = spread(kernels, logits, 500, temperature=3.0, top_k=40, top_p=0.95, min_p=0.05)
    np.testing.assert_allclose(
        hot, np.array([0.5, 0.4, 0.1]) ** (1 / 3) / sum(p ** (1 / 3) for p in (0.5, 0.4, 0.1)), atol=0.003
    )


@BOTH
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.5}])
def test_odd_logits(kernels: ModuleType, options: dict[str, float]) -> None:
    for u in (0.0, 0.3, 0.7, 1 - 2**-53):

        def token(*row: float, u: float = u) -> int:
            return sample(kernels, f32(*row), u=u, **options)  # type: ignore[arg-type]

        assert token(0, INF, 5, INF) == 1
        assert token(NAN, -INF, 2, NAN) == 2
        assert token(NAN, -INF, -INF, NAN) == 1
        assert token(NAN, NAN) == 0
        assert token(3) == 0
        assert token(-3e38, 3e38, 1) == 1
        assert token(NAN, 0, -INF, 0) in (1, 3)


# ---- parity ----------------------------------------------------------------------------

SIZES = [1, 2, 3, 17, 64, 65, 700, 1024, 1025, 3000, 5000]


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    v = draw(st.sampled_from(SIZES))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    logits = rng.normal(draw(st.sampled_from([0, -50, 90])), draw(st.sampled_from([0, 0.1, 2, 6])), v).astype(
        np.float32
    )
    kind = draw(st.sampled_from(["smooth", "ties", "holes", "peaked"]))
    if kind == "ties":
        logits = np.round(logits * 2) / np.float32(2)
    if kind == "holes":
        logits[rng.random(v) < 0.5] = -INF
        logits[rng.random(v) < 0.2] = NAN
    if kind == "peaked":
        logits[rng.integers(v)] += np.float32(12)
    return logits


@PROFILE
@given(
    logits=rows(),
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 1.7, 50.0, INF]),
    top_k=st.sampled_from([-1, 0, 1, 2, 40, 1000, 1024, 1025, 2000, 5000, 10**6]),
    top_p=st.one_of(st.sampled_from([1.0, 2.0, 0.95, 0.5]), st.floats(-0.1, 1.1)),
    min_p=st.one_of(st.sampled_from([0.0, 0.05, 1e-60]), st.floats(-0.1, 1.1)),
    u=st.one_of(st.sampled_from([0.0, 0.5, 1 - 2**-53]), st.floats(0, 1, exclude_max=True)),
)
def test_sample_parity(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> None:
    greedy = temperature == 0 or not (logits > -INF).any()
    if not greedy:
        kept = {
            len(_reference.candidates(logits, temperature, top_k, top_p + delta, min_p)[0])
            for delta in ((-MARGIN, 0, MARGIN) if top_p < 1 else (0,))
        }
        assume(len(kept) == 1)  # top_p right on a step: either side is right
    allowed = {
        sample(_reference, logits, temperature, top_k, top_p, min_p, min(max(u + delta, 0.0), 1 - 2**-53))
        for delta in (-MARGIN, 0, MARGIN)
    }
    assert sample(_core, logits, temperature, top_k, top_p, min_p, u) in allowed
    if u == 0:
        assert sample(_core, logits, temperature, top_k, top_p, min_p, u) == sample(_reference, logits, 0.0)


@pytest.mark.parametrize("v", [49152, 262144])
@pytest.mark.parametrize("sd", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
        {"temperature": 0.8},
        {"temperature": 1.5, "top_p": 0.9},
        {"temperature": 0.7, "min_p": 0.02},
        {"temperature": 1.0, "top_p": 0.98, "min_p": 0.001},
        {"temperature": 1.0, "top_k": 3000, "top_p": 0.9},
        {"temperature": INF, "top_k": 3000},
    ],
    ids=str,
)
def test_big_rows(v: int, sd: int, options: dict[str, float]) -> None:
    logits = np.random.default_rng(v + sd).normal(0, sd, v).astype(np.float32)
    ids, probs = _reference.candidates(
        logits,
        options["temperature"],
        int(options.get("top_k", 0)),
        options.get("top_p", 1.0),
        options.get("min_p", 0.0),
    )
    cdf = np.cumsum(probs)
    for u in (0.001, 0.1, 0.5, 0.9, 0.999):
        token = sample(_core, logits, u=u, **options)  # type: ignore[arg-type]
        rank = np.flatnonzero(ids == token)
        assert rank.size, "a token that should have been cut"
        low = cdf[rank[0]] - probs[rank[0]]
        assert low - 1e-5 <= u <= cdf[rank[0]] + 1e-5


def test_scratch_content_does_not_matter() -> None:
    logits = np.random.default_rng(3).normal(0, 3, 3000).astype(np.float32)
    big_ids, big_p = np.full(5000, 123, np.int32), np.full(5000, INF, np.float32)
    for options in ((0.8, 40, 0.95, 0.05), (0.8, 0, 0.9, 0.0), (0.8, 0, 1.0, 0.0), (0.8, 2000, 0.9, 0.0)):
        first = sample(_core, logits, *options, u=0.6)
        for _ in range(2):
            assert _core.sample_row(logits, *options, 0.6, big_ids, big_p) == first
        assert (big_ids[3000:] == 123).all()


@BOTH
def test_sample_refuses(kernels: ModuleType) -> None:
    def call(**change: object) -> None:
        args: dict[str, object] = {
            "logits": f32(1, 2, 3),
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 0.9,
            "min_p": 0.0,
            "u": 0.5,
            "scratch_ids": np.zeros(3, np.int32),
            "scratch_p": np.zeros(3, np.float32),
        }
        kernels.sample_row(**(args | change))

    call()
    for change, message in [
        ({"u": 1.0}, "u must be"),
        ({"u": -1e-9}, "u must be"),
        ({"u": NAN}, "u must be"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"top_p": NAN}, "top_p"),
        ({"min_p": NAN}, "min_p"),
        ({"scratch_ids": np.zeros(2, np.int32)}, "hold 3"),
        ({"scratch_p": np.zeros(2, np.float32)}, "hold 3"),
        ({"logits": np.zeros(0, np.float32)}, "column"),
        ({"scratch_ids": np.zeros(3, np.int64)}, r"dtype|-d"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**change)  # type: ignore[arg-type]
    logits = f32(1, 2, 3)
    with pytest.raises(ValueError, match="shares memory"):
        call(logits=logits, scratch_p=logits)


# ---- philox_uniform --------------------------------------------------------------------

# Known answers for Philox4x32-10 of the authors' library Random123 (tests/kat_vectors): counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "block"), VECTORS)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], block: tuple[int, ...]) -> None:
    assert _reference.philox4x32(counter, key) == block
    expected = ((block[0] >> 5) * 2**26 + (block[1] >> 6)) / 2**53
    seed, seq, pos = (low | high << 32 for low, high in (key, counter[2:], counter[:2]))
    for kernels in (_core, _reference):
        assert kernels.philox_uniform(seed, seq, pos) == expected


@PROFILE
@given(seed=st.integers(0, 2**64 - 1), seq=st.integers(0, 2**64 - 1), pos=st.integers(0, 2**64 - 1))
def test_philox_parity(seed: int, seq: int, pos: int) -> None:
    value = _core.philox_uniform(seed, seq, pos)
    assert value == _reference.philox_uniform(seed, seq, pos)
    assert 0 <= value < 1


@BOTH
@pytest.mark.parametrize("bad", [-1, 2**64])
def test_philox_refuses(kernels: ModuleType, bad: int) -> None:
    for position in range(3):
        args = [1, 2, 3]
        args[position] = bad
        with pytest.raises(OverflowError):
            kernels.philox_uniform(*args)


def test_philox_is_uniform_in_each_argument() -> None:
    """Means, variances and lag-1 correlations of 20000 numbers along each argument, all within 5 standard errors."""
    n = 20_000
    for position in range(3):
        args = [7, 7, 7]
        values = np.empty(n)
        for i in range(n):
            args[position] = i
            values[i] = _core.philox_uniform(*args)
        error = 5 / math.sqrt(n)
        centred = (values - 0.5) * math.sqrt(12)
        assert abs(centred.mean()) < error
        assert abs((centred**2).mean() - 1) < error * math.sqrt(0.8)
        assert abs((centred[1:] * centred[:-1]).mean()) < error
        assert len(np.unique(values)) == n
