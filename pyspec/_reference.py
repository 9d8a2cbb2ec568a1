"""The kernels of ``_core`` in plain NumPy: same names, signatures, checks and results.

The oracle of the parity tests, written to be read. Slow, and free to allocate. What a function does is said in
``_core.pyx``; here are only the differences: sums are float64, so results agree up to float32 rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_F32 = npt.NDArray[np.float32]
_F64 = npt.NDArray[np.float64]
_I8 = npt.NDArray[np.int8]
_I32 = npt.NDArray[np.int32]

_INT32_MAX = 2**31 - 1
_MAX_SOURCES = 64


def _check(name: str, array: Any, dtype: type[np.generic], ndim: int, *, out: bool = False) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be an array, got {type(array).__name__}")
    if array.dtype != dtype or array.ndim != ndim:
        raise ValueError(f"{name} must be {ndim}-d {np.dtype(dtype)}, got {array.ndim}-d {array.dtype}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous")
    if out and not array.flags.writeable:
        raise ValueError(f"{name} is an output and read-only")


def _check_batch(tokens: _I32, pos: _I32, seq: _I32, output: _I8) -> int:
    _check("tokens", tokens, np.int32, 1, out=True)
    _check("pos", pos, np.int32, 1, out=True)
    _check("seq", seq, np.int32, 1, out=True)
    _check("output", output, np.int8, 1, out=True)
    sizes = {len(tokens), len(pos), len(seq), len(output)}
    if len(sizes) != 1:
        raise ValueError(f"tokens, pos, seq and output must have one length, got {sorted(sizes)}")
    return len(tokens)


def _check_logits(logits: _F32, out: npt.NDArray[Any], out_dtype: type[np.generic], n: int, ndim: int = 1) -> None:
    _check("logits", logits, np.float32, 2)
    _check("out", out, out_dtype, ndim, out=True)
    if logits.shape[1] < 1:
        raise ValueError("logits must have at least one column")
    if out.shape[0] < n:
        raise ValueError(f"out must hold {n} values, got room for {out.shape[0]}")


def _check_ids(name: str, ids: _I32, limit: int) -> None:
    _check(name, ids, np.int32, 1)
    bad = np.flatnonzero((ids < 0) | (ids >= limit))
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}] must be in [0, {limit - 1}], got {ids[bad[0]]}")


def _no_nan(logits: _F32) -> _F32:
    return np.where(np.isnan(logits), np.float32(-np.inf), logits)


def fill_batch(
    tokens: _I32,
    pos: _I32,
    seq: _I32,
    output: _I8,
    start: int,
    new_tokens: _I32,
    pos0: int,
    seq_id: int,
    output_mode: int,
) -> int:
    """See ``_core.fill_batch``."""
    cap = _check_batch(tokens, pos, seq, output)
    _check("new_tokens", new_tokens, np.int32, 1)
    n = len(new_tokens)
    if not 0 <= start <= cap or n > cap - start:
        raise ValueError(f"{n} rows from row {start} do not fit a batch of {cap} rows")
    if not 0 <= pos0 <= _INT32_MAX or pos0 + n > _INT32_MAX + 1:
        raise ValueError(f"positions {pos0} to {pos0 + n - 1} are not all in [0, {_INT32_MAX}]")
    if not 0 <= seq_id <= _INT32_MAX:
        raise ValueError(f"seq_id must be in [0, {_INT32_MAX}], got {seq_id}")
    if output_mode not in (0, 1, 2):
        raise ValueError(f"output_mode must be 0 (none), 1 (all) or 2 (last), got {output_mode}")
    rows = slice(start, start + n)
    tokens[rows] = new_tokens
    pos[rows] = np.arange(pos0, pos0 + n)
    seq[rows] = seq_id
    output[rows] = output_mode == 1
    if output_mode == 2 and n:
        output[start + n - 1] = 1
    return start + n


def fill_rows(
    tokens: _I32,
    pos: _I32,
    seq: _I32,
    output: _I8,
    last_tokens: _I32,
    drafts: _I32,
    n_draft: _I32,
    pos0: _I32,
    seq_ids: _I32,
) -> int:
    """See ``_core.fill_rows``."""
    cap = _check_batch(tokens, pos, seq, output)
    for name, array in (("last_tokens", last_tokens), ("n_draft", n_draft), ("pos0", pos0), ("seq_ids", seq_ids)):
        _check(name, array, np.int32, 1)
    _check("drafts", drafts, np.int32, 2)
    m, k_max = len(last_tokens), drafts.shape[1]
    if {drafts.shape[0], len(n_draft), len(pos0), len(seq_ids)} != {m}:
        raise ValueError(f"last_tokens, drafts, n_draft, pos0 and seq_ids must have one length, {m}")
    if np.any((n_draft < 0) | (n_draft > k_max)):
        raise ValueError(f"n_draft must be in [0, {k_max}], got {n_draft}")
    if np.any((pos0 < 0) | (pos0.astype(np.int64) + n_draft > _INT32_MAX)) or np.any(seq_ids < 0):
        raise ValueError("pos0 and seq_ids must be >= 0 and positions must fit int32")
    if m + int(n_draft.sum()) > cap:
        raise ValueError(f"{m + int(n_draft.sum())} rows do not fit a batch of {cap} rows")
    row = 0
    for i in range(m):
        ids = np.concatenate([last_tokens[i : i + 1], drafts[i, : n_draft[i]]])
        row = fill_batch(tokens, pos, seq, output, row, ids, int(pos0[i]), int(seq_ids[i]), 1)
    return row


def interleave_rows(dst: _F32, src: Sequence[_F32], n: int) -> None:
    """See ``_core.interleave_rows``."""
    _check("dst", dst, np.float32, 2, out=True)
    k = len(src)
    if not 1 <= k <= _MAX_SOURCES:
        raise ValueError(f"src must hold 1 to {_MAX_SOURCES} arrays, got {k}")
    if not 0 <= n <= len(dst):
        raise ValueError(f"n must be in [0, {len(dst)}], the rows of dst, got {n}")
    for j, block in enumerate(src):
        _check(f"src[{j}]", block, np.float32, 2)
        if block.shape[1] * k != dst.shape[1] or len(block) < n:
            raise ValueError(f"src[{j}] of {block.shape} does not fit {n} rows of dst {dst.shape}")
        if np.may_share_memory(dst, block):
            raise ValueError(f"src[{j}] shares memory with dst")
    dst[:n] = np.concatenate([block[:n] for block in src], axis=1)


def shift_rows(dst: _F32, src: _F32, carry: _F32, n: int) -> None:
    """See ``_core.shift_rows``."""
    _check("dst", dst, np.float32, 2, out=True)
    _check("src", src, np.float32, 2)
    _check("carry", carry, np.float32, 1, out=True)
    if not dst.shape[1] == src.shape[1] == len(carry):
        raise ValueError(f"dst, src and carry must have one width, got {dst.shape[1]}, {src.shape[1]}, {len(carry)}")
    if not 0 <= n <= min(len(dst), len(src)):
        raise ValueError(f"n must be in [0, {min(len(dst), len(src))}], got {n}")
    if np.may_share_memory(carry, dst[:n]) or np.may_share_memory(carry, src[:n]):
        raise ValueError("carry shares memory with dst or src")
    same = dst.ctypes.data == src.ctypes.data
    if not same and np.may_share_memory(dst[:n], src[:n]):
        raise ValueError("dst and src overlap without being the same rows")
    if n:
        rows = np.concatenate([carry[None], src[:n]])
        dst[:n] = rows[:n]
        carry[:] = rows[n]


def gather_rows(dst: _F32, src: _F32, idx: _I32) -> None:
    """See ``_core.gather_rows``."""
    _check("dst", dst, np.float32, 2, out=True)
    _check("src", src, np.float32, 2)
    if dst.shape[1] != src.shape[1]:
        raise ValueError(f"dst and src must have one width, got {dst.shape[1]} and {src.shape[1]}")
    _check_ids("idx", idx, len(src))
    if len(idx) > len(dst):
        raise ValueError(f"{len(idx)} rows do not fit dst of {len(dst)} rows")
    if len(idx) and np.may_share_memory(dst, src):
        raise ValueError("dst shares memory with src")
    dst[: len(idx)] = src[idx]


def argmax_rows(logits: _F32, out: _I32) -> None:
    """See ``_core.argmax_rows``."""
    _check_logits(logits, out, np.int32, len(logits))
    out[: len(logits)] = _no_nan(logits).argmax(axis=1)
    # In a row of NaN and -inf a NaN may not win against -inf.
    for i in np.flatnonzero(_no_nan(logits).max(axis=1, initial=-np.inf) == -np.inf):
        out[i] = int((logits[i] == -np.inf).argmax())


def topk_softmax_rows(logits: _F32, ids: _I32, probs: _F32) -> None:
    """See ``_core.topk_softmax_rows``."""
    _check_logits(logits, ids, np.int32, len(logits), 2)
    _check_logits(logits, probs, np.float32, len(logits), 2)
    v, k = logits.shape[1], ids.shape[1]
    if probs.shape[1] != k or not 1 <= k <= v:
        raise ValueError(f"ids and probs must both have 1 to {v} columns, got {k} and {probs.shape[1]}")
    for i, row in enumerate(_no_nan(logits)):
        order = np.argsort(-row, kind="stable")[:k]
        top = row[order].astype(np.float64)
        if top[0] == np.inf:
            weights = (top == np.inf).astype(np.float64)
        else:
            weights = np.where(top > -np.inf, np.exp(top - max(top[0], -1e300)), 0.0)
        ids[i] = order
        probs[i] = weights / max(weights.sum(), 1e-300)


def verify_greedy(logits: _F32, row0: int, draft: _I32, out: _I32) -> int:
    """See ``_core.verify_greedy``."""
    _check("draft", draft, np.int32, 1)
    k = len(draft)
    _check_logits(logits, out, np.int32, k + 1)
    if not 0 <= row0 <= len(logits) or k + 1 > len(logits) - row0:
        raise ValueError(f"{k + 1} rows from row {row0} are needed, logits has {len(logits)}")
    best = np.empty(k + 1, np.int32)
    argmax_rows(logits[row0 : row0 + k + 1], best)
    wrong = np.flatnonzero(best[:k] != draft)
    n_accepted = int(wrong[0]) if wrong.size else k
    out[: n_accepted + 1] = best[: n_accepted + 1]
    return n_accepted


def logsumexp_rows(logits: _F32, out: _F64) -> None:
    """See ``_core.logsumexp_rows``."""
    _check_logits(logits, out, np.float64, len(logits))
    for i, row in enumerate(_no_nan(logits).astype(np.float64)):
        top = row.max()
        out[i] = top + np.log(np.exp(row - top).sum()) if np.isfinite(top) else top


def logprob_rows(logits: _F32, ids: _I32, out: _F64) -> None:
    """See ``_core.logprob_rows``."""
    _check_logits(logits, out, np.float64, len(logits))
    _check_ids("ids", ids, logits.shape[1])
    if len(ids) != len(logits):
        raise ValueError(f"ids must hold one token for each of {len(logits)} rows, got {len(ids)}")
    lse = np.empty(len(logits))
    logsumexp_rows(logits, lse)
    for i, token in enumerate(ids):
        logit = float(_no_nan(logits[i])[token])
        if lse[i] == np.inf:
            out[i] = 0.0 if logit == np.inf else -np.inf
        else:
            out[i] = logit - lse[i] if logit > -np.inf else -np.inf


def top_logprob_rows(logits: _F32, ids: _I32, out: _F64, top_ids: _I32, top: _F64) -> None:
    """See ``_core.top_logprob_rows``."""
    _check_logits(logits, out, np.float64, len(logits))
    k = top_ids.shape[1]
    if not 1 <= k <= 64 or top.shape[1] != k or min(len(top_ids), len(top)) < len(logits):
        raise ValueError(f"top_ids and top must hold {len(logits)} rows of 1 to 64 values")
    logprob_rows(logits, ids, out)
    for i, row in enumerate(_no_nan(logits)):
        best = np.argsort(-row, kind="stable")[:k].astype(np.int32)
        best = best[row[best] > -np.inf]
        top_ids[i], top[i] = -1, -np.inf
        top_ids[i, : len(best)] = best
        for j, token in enumerate(best):
            logprob_rows(logits[i : i + 1], np.array([token], np.int32), top[i, j : j + 1])


def candidates(logits: _F32, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[_I32, _F64]:
    """What ``sample_row`` draws from, for finite maximum and temperature > 0.

    Returns:
        ids int32 [m] in descending order, and their probabilities float64 [m] after all cuts and the temperature.
    """
    row = _no_nan(logits)
    ids = np.argsort(-row, kind="stable").astype(np.int32)
    ids = ids[row[ids] > -np.inf]
    if top_k > 0:
        ids = ids[:top_k]
    with np.errstate(over="ignore"):  # -3e38 - 3e38
        below_top = row[ids] - row[ids[0]]
    n = len(ids)
    if top_p < 1.0:
        weights = np.exp(below_top.astype(np.float64))
        n = min(n, 1 + int((np.cumsum(weights) < top_p * weights.sum()).sum()))
    if np.float32(min_p) > 0.0:
        low = row[ids[0]] + np.float32(math.log(np.float32(min_p)))
        n = min(n, max(1, int((row[ids] >= min(low, row[ids[0]])).sum())))
    with np.errstate(over="ignore", invalid="ignore"):  # a temperature near 0; -inf * 0
        scaled = below_top[:n] * (np.float32(1.0) / np.float32(temperature))
    weights = np.nan_to_num(np.exp(scaled.astype(np.float64)))
    return ids[:n], weights / weights.sum()


def sample_row(
    logits: _F32,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    u: float,
    scratch_ids: _I32,
    scratch_p: _F32,
) -> int:
    """See ``_core.sample_row``. The scratch arrays are checked and left alone."""
    _check("logits", logits, np.float32, 1)
    _check_logits(logits[None], scratch_ids, np.int32, len(logits))
    _check_logits(logits[None], scratch_p, np.float32, len(logits))
    if not 0.0 <= u < 1.0:
        raise ValueError(f"u must be in [0, 1), got {u}")
    if not temperature >= 0.0:
        raise ValueError(f"temperature must be >= 0, got {temperature}")
    if math.isnan(top_p) or math.isnan(min_p):
        raise ValueError(f"top_p and min_p must be numbers, got {top_p} and {min_p}")
    if np.may_share_memory(logits, scratch_ids) or np.may_share_memory(logits, scratch_p):
        raise ValueError("scratch shares memory with logits")
    with np.errstate(divide="ignore", over="ignore"):
        greedy = np.isinf(np.float32(1.0) / np.float32(temperature))
    if greedy or not np.isfinite(_no_nan(logits).max()):
        best = np.empty(1, np.int32)
        argmax_rows(logits[None], best)
        return int(best[0])
    ids, probs = candidates(logits, temperature, top_k, top_p, min_p)
    cdf = np.cumsum(probs)
    beyond = np.flatnonzero(cdf > u * cdf[-1])
    return int(ids[beyond[0]] if beyond.size else ids[-1])


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """One block of Philox4x32-10: four counter words and two key words in, four words out."""
    c, k = [int(w) for w in counter], [int(w) for w in key]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0], c[1], c[2], c[3]


def philox_uniform(seed: int, seq: int, pos: int) -> float:
    """See ``_core.philox_uniform``."""
    words = []
    for value in (pos, seq, seed):
        if not 0 <= value < 2**64:
            raise OverflowError(f"seed, seq and pos must be in [0, 2**64), got {value}")
        words += [value & 0xFFFFFFFF, value >> 32]
    r = philox4x32(words[:4], words[4:])
    return ((r[0] >> 5) * 2**26 + (r[1] >> 6)) / 2**53
