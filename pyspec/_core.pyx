# cython: language_level=3, freethreading_compatible=True
# distutils: include_dirs = pyspec
# distutils: depends = pyspec/_kernels.h
"""Array kernels of the speculation loop.

Every function checks its arguments first, then runs a loop that neither allocates nor touches a Python object.
Outputs (OUT) belong to the caller and are passed in, so that they can be used again in the next step; inputs (IN) may
be read-only. Arrays are C-contiguous; an output may be longer than needed, the rest is left alone. A wrong dtype,
shape or value raises ValueError and nothing is written. No llama.cpp type is known here. Functions over float rows
release the GIL. The same functions in plain NumPy, with the same signatures, are in ``pyspec/_reference.py``.

The build sets the directives (boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False) so that a
debug build can turn the checks on.

NaN logits count as -inf everywhere.
"""

from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyObject_GetBuffer, PyBuffer_Release,
)
from libc.math cimport INFINITY, log
from libc.stdint cimport INT32_MAX, int8_t, int32_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

cdef enum:
    MAX_SOURCES = 64
    CARRY_CHUNK = 512


cdef inline bint _overlap(const void *a, Py_ssize_t a_bytes, const void *b, Py_ssize_t b_bytes) noexcept nogil:
    return a_bytes > 0 and b_bytes > 0 and <const char *>a < <const char *>b + b_bytes \
        and <const char *>b < <const char *>a + a_bytes


# ---- batches ------------------------------------------------------------------------------------------------------

cdef inline int _check_batch(Py_ssize_t cap, Py_ssize_t n_pos, Py_ssize_t n_seq, Py_ssize_t n_output) except -1:
    if n_pos != cap or n_seq != cap or n_output != cap:
        raise ValueError(
            f"tokens, pos, seq and output must have one length, got {cap}, {n_pos}, {n_seq} and {n_output}")
    return 0


cdef void _fill(int32_t *tokens, int32_t *pos, int32_t *seq, int8_t *output, const int32_t *src, Py_ssize_t n,
                int32_t pos0, int32_t seq_id, int8_t flag) noexcept nogil:
    cdef Py_ssize_t i
    memcpy(tokens, src, n * sizeof(int32_t))
    for i in range(n):
        pos[i] = pos0 + <int32_t>i
    for i in range(n):
        seq[i] = seq_id
    memset(output, flag, n)


def fill_batch(int32_t[::1] tokens not None, int32_t[::1] pos not None, int32_t[::1] seq not None,
               int8_t[::1] output not None, Py_ssize_t start, const int32_t[::1] new_tokens not None,
               long long pos0, long long seq_id, int output_mode):
    """Append consecutive rows of one sequence to a batch.

    Args:
        tokens: OUT int32 [cap], token ids.
        pos: OUT int32 [cap], positions.
        seq: OUT int32 [cap], sequence ids.
        output: OUT int8 [cap], 1 where logits are wanted.
        start: first row to write, 0 <= start <= cap.
        new_tokens: IN int32 [n]; n may be 0. Must not share memory with the outputs.
        pos0: position of new_tokens[0], >= 0; the last position must fit int32.
        seq_id: sequence id, >= 0.
        output_mode: 0 no row, 1 all rows, 2 only the last row has output.

    Returns:
        The new row count, start + n.

    Raises:
        ValueError: the rows do not fit, or an argument is out of range. Nothing was written.
    """
    cdef Py_ssize_t cap = tokens.shape[0], n = new_tokens.shape[0]
    _check_batch(cap, pos.shape[0], seq.shape[0], output.shape[0])
    if start < 0 or start > cap or n > cap - start:
        raise ValueError(f"{n} rows from row {start} do not fit a batch of {cap} rows")
    if pos0 < 0 or pos0 > INT32_MAX or pos0 + n > <long long>INT32_MAX + 1:
        raise ValueError(f"positions {pos0} to {pos0 + n - 1} are not all in [0, {INT32_MAX}]")
    if seq_id < 0 or seq_id > INT32_MAX:
        raise ValueError(f"seq_id must be in [0, {INT32_MAX}], got {seq_id}")
    if output_mode < 0 or output_mode > 2:
        raise ValueError(f"output_mode must be 0 (none), 1 (all) or 2 (last), got {output_mode}")
    if n > 0:
        _fill(&tokens[start], &pos[start], &seq[start], &output[start], &new_tokens[0], n, <int32_t>pos0,
              <int32_t>seq_id, output_mode == 1)
        if output_mode == 2:
            output[start + n - 1] = 1
    return start + n


def fill_rows(int32_t[::1] tokens not None, int32_t[::1] pos not None, int32_t[::1] seq not None,
              int8_t[::1] output not None, const int32_t[::1] last_tokens not None,
              const int32_t[:, ::1] drafts not None, const int32_t[::1] n_draft not None,
              const int32_t[::1] pos0 not None, const int32_t[::1] seq_ids not None):
    """Fill a batch with the verification rows of m sequences, from row 0.

    For sequence i: one row with last_tokens[i] at pos0[i], then n_draft[i] rows with its drafted tokens. Every row
    has output.

    Args:
        tokens: OUT int32 [cap].
        pos: OUT int32 [cap].
        seq: OUT int32 [cap].
        output: OUT int8 [cap].
        last_tokens: IN int32 [m], the last committed token of each sequence.
        drafts: IN int32 [m, kmax]; row i holds n_draft[i] tokens, the rest is not read.
        n_draft: IN int32 [m], 0 <= n_draft[i] <= kmax.
        pos0: IN int32 [m], position of last_tokens[i], >= 0.
        seq_ids: IN int32 [m], >= 0.

    Returns:
        The row count, m + sum(n_draft).

    Raises:
        ValueError: the rows do not fit, or a value is out of range. Nothing was written.
    """
    cdef Py_ssize_t cap = tokens.shape[0], m = last_tokens.shape[0], k_max = drafts.shape[1]
    cdef Py_ssize_t i, j, k, row = 0
    _check_batch(cap, pos.shape[0], seq.shape[0], output.shape[0])
    if drafts.shape[0] != m or n_draft.shape[0] != m or pos0.shape[0] != m or seq_ids.shape[0] != m:
        raise ValueError(
            f"last_tokens, drafts, n_draft, pos0 and seq_ids must have one length, got {m}, {drafts.shape[0]}, "
            f"{n_draft.shape[0]}, {pos0.shape[0]} and {seq_ids.shape[0]}")
    for i in range(m):
        k = n_draft[i]
        if k < 0 or k > k_max:
            raise ValueError(f"n_draft[{i}] must be in [0, {k_max}], got {k}")
        if pos0[i] < 0 or pos0[i] > INT32_MAX - k:
            raise ValueError(f"pos0[{i}] must be in [0, {INT32_MAX - k}], got {pos0[i]}")
        if seq_ids[i] < 0:
            raise ValueError(f"seq_ids[{i}] must be >= 0, got {seq_ids[i]}")
        row += 1 + k
    if row > cap:
        raise ValueError(f"{row} rows do not fit a batch of {cap} rows")
    row = 0
    for i in range(m):
        k = n_draft[i]
        tokens[row] = last_tokens[i]
        if k > 0:
            memcpy(&tokens[row + 1], &drafts[i, 0], k * sizeof(int32_t))
        for j in range(k + 1):
            pos[row + j] = pos0[i] + <int32_t>j
            seq[row + j] = seq_ids[i]
            output[row + j] = 1
        row += k + 1
    return row


# ---- rows of hidden states ----------------------------------------------------------------------------------------

def interleave_rows(float[:, ::1] dst not None, src not None, Py_ssize_t n):
    """Put k blocks of rows side by side: ``dst[i, j*d:(j+1)*d] = src[j][i]`` for i < n.

    Args:
        dst: OUT float32 [>= n, k * d].
        src: IN sequence of k float32 [>= n, d] arrays, 1 <= k <= 64, none sharing memory with dst.
        n: rows to copy, >= 0.

    Raises:
        ValueError: shapes or dtypes that do not fit. Nothing was written.
    """
    cdef Py_buffer bufs[MAX_SOURCES]
    cdef const char *ptrs[MAX_SOURCES]
    cdef Py_ssize_t k = len(src), j, opened = 0, d = 0, dst_bytes
    if k < 1 or k > MAX_SOURCES:
        raise ValueError(f"src must hold 1 to {MAX_SOURCES} arrays, got {k}")
    if n < 0 or n > dst.shape[0]:
        raise ValueError(f"n must be in [0, {dst.shape[0]}], the rows of dst, got {n}")
    dst_bytes = dst.shape[0] * dst.shape[1] * <Py_ssize_t>sizeof(float)
    cdef float *to = &dst[0, 0] if dst_bytes > 0 else NULL
    try:
        for j in range(k):
            PyObject_GetBuffer(src[j], &bufs[j], PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
            opened += 1
            if bufs[j].ndim != 2 or bufs[j].itemsize != sizeof(float) or bufs[j].format == NULL \
                    or bufs[j].format[0] != c"f" or bufs[j].format[1] != 0:
                raise ValueError(f"src[{j}] must be a 2-d float32 array")
            if j == 0:
                d = bufs[0].shape[1]
                if dst.shape[1] != k * d:
                    raise ValueError(f"dst must have {k} * {d} columns, got {dst.shape[1]}")
            if bufs[j].shape[1] != d or bufs[j].shape[0] < n:
                raise ValueError(
                    f"src[{j}] must have at least {n} rows of {d}, got {bufs[j].shape[0]} rows of {bufs[j].shape[1]}")
            if _overlap(to, dst_bytes, bufs[j].buf, bufs[j].len):
                raise ValueError(f"src[{j}] shares memory with dst")
            ptrs[j] = <const char *>bufs[j].buf
        with nogil:
            if to != NULL:
                ps_interleave(<char *>to, ptrs, k, n, d * sizeof(float))
    finally:
        for j in range(opened):
            PyBuffer_Release(&bufs[j])


cdef void _shift_in_place(float *rows, float *carry, Py_ssize_t n, Py_ssize_t d) noexcept nogil:
    cdef float last[CARRY_CHUNK]
    cdef Py_ssize_t c = 0, i, w
    while c < d:
        w = min(d - c, <Py_ssize_t>CARRY_CHUNK)
        memcpy(last, rows + (n - 1) * d + c, w * sizeof(float))
        for i in range(n - 1, 0, -1):
            memcpy(rows + i * d + c, rows + (i - 1) * d + c, w * sizeof(float))
        memcpy(rows + c, carry + c, w * sizeof(float))
        memcpy(carry + c, last, w * sizeof(float))
        c += w


def shift_rows(float[:, ::1] dst not None, const float[:, ::1] src not None, float[::1] carry not None, Py_ssize_t n):
    """Shift rows down by one across calls: ``dst[0] = carry; dst[i] = src[i - 1]; carry = src[n - 1]``.

    So the row of one token is paired with the hidden state of the token before it (MTP). n = 0 changes nothing.

    Args:
        dst: OUT float32 [>= n, d]; may be src itself.
        src: IN float32 [>= n, d].
        carry: IN/OUT float32 [d], the last row of the call before; shares no memory with dst or src.
        n: rows, >= 0.

    Raises:
        ValueError: shapes that do not fit, or arrays that overlap in another way. Nothing was written.
    """
    cdef Py_ssize_t d = dst.shape[1], row_bytes = d * <Py_ssize_t>sizeof(float)
    if src.shape[1] != d or carry.shape[0] != d:
        raise ValueError(f"dst, src and carry must have one width, got {d}, {src.shape[1]} and {carry.shape[0]}")
    if n < 0 or n > dst.shape[0] or n > src.shape[0]:
        raise ValueError(f"n must be in [0, {min(dst.shape[0], src.shape[0])}], got {n}")
    if n == 0 or d == 0:
        return
    cdef float *to = &dst[0, 0]
    cdef const float *rows = &src[0, 0]
    cdef float *kept = &carry[0]
    if _overlap(kept, row_bytes, to, n * row_bytes) or _overlap(kept, row_bytes, rows, n * row_bytes):
        raise ValueError("carry shares memory with dst or src")
    if to != rows and _overlap(to, n * row_bytes, rows, n * row_bytes):
        raise ValueError("dst and src overlap without being the same rows")
    with nogil:
        if to == rows:
            _shift_in_place(to, kept, n, d)
        else:
            memcpy(to, kept, row_bytes)
            memcpy(to + d, rows, (n - 1) * row_bytes)
            memcpy(kept, rows + (n - 1) * d, row_bytes)


cdef inline int _check_ids(const int32_t *ids, Py_ssize_t n, Py_ssize_t limit, str name) except -1:
    cdef Py_ssize_t i
    for i in range(n):
        if ids[i] < 0 or ids[i] >= limit:
            raise ValueError(f"{name}[{i}] must be in [0, {limit - 1}], got {ids[i]}")
    return 0


def gather_rows(float[:, ::1] dst not None, const float[:, ::1] src not None, const int32_t[::1] idx not None):
    """Copy chosen rows: ``dst[i] = src[idx[i]]``.

    Args:
        dst: OUT float32 [>= m, d], shares no memory with src.
        src: IN float32 [n, d].
        idx: IN int32 [m], 0 <= idx[i] < n; repeats are allowed.

    Raises:
        ValueError: shapes that do not fit, or an index out of range. Nothing was written.
    """
    cdef Py_ssize_t m = idx.shape[0], d = dst.shape[1], i, row_bytes = d * <Py_ssize_t>sizeof(float)
    if src.shape[1] != d:
        raise ValueError(f"dst and src must have one width, got {d} and {src.shape[1]}")
    if m > dst.shape[0]:
        raise ValueError(f"{m} rows do not fit dst of {dst.shape[0]} rows")
    if m == 0:
        return
    _check_ids(&idx[0], m, src.shape[0], "idx")
    if d == 0:
        return
    if _overlap(&dst[0, 0], dst.shape[0] * row_bytes, &src[0, 0], src.shape[0] * row_bytes):
        raise ValueError("dst shares memory with src")
    cdef float *to = &dst[0, 0]
    cdef const float *rows = &src[0, 0]
    cdef const int32_t *ids = &idx[0]
    with nogil:
        for i in range(m):
            memcpy(to + i * d, rows + ids[i] * d, row_bytes)


# ---- rows of logits -----------------------------------------------------------------------------------------------

cdef inline int _check_logits(Py_ssize_t n, Py_ssize_t v, Py_ssize_t n_out) except -1:
    if v < 1 or v > INT32_MAX:
        raise ValueError(f"logits must have 1 to {INT32_MAX} columns, got {v}")
    if n_out < n:
        raise ValueError(f"out must hold {n} values, got room for {n_out}")
    return 0


def argmax_rows(const float[:, ::1] logits not None, int32_t[::1] out not None):
    """First index of the largest logit of each row. NaN never wins; a row of NaN only gives 0.

    Args:
        logits: IN float32 [n, v], v >= 1.
        out: OUT int32 [>= n].
    """
    cdef Py_ssize_t n = logits.shape[0], v = logits.shape[1], i
    _check_logits(n, v, out.shape[0])
    if n == 0:
        return
    cdef const float *x = &logits[0, 0]
    cdef int32_t *to = &out[0]
    with nogil:
        for i in range(n):
            to[i] = <int32_t>ps_argmax(x + i * v, v)


cdef void _topk_softmax(const float *x, Py_ssize_t v, Py_ssize_t k, int32_t *ids, float *probs) noexcept nogil:
    cdef Py_ssize_t found = ps_top_k(x, v, k, probs, ids), i, m = found
    cdef float top
    cdef double total = 0.0
    if found > 0:
        top = probs[0]
        for i in range(found):
            # an infinite logit takes all the mass; several share it
            probs[i] = (1.0 if probs[i] == top else 0.0) if top == INFINITY else ps_exp(probs[i] - top)
            total += probs[i]
        for i in range(found):
            probs[i] = <float>(probs[i] / total)
    i = 0
    while m < k:  # fewer than k logits above -inf: the rest in order of id, without probability
        if not x[i] > -INFINITY:
            ids[m] = <int32_t>i
            probs[m] = 0.0
            m += 1
        i += 1


def topk_softmax_rows(const float[:, ::1] logits not None, int32_t[:, ::1] ids not None,
                      float[:, ::1] probs not None):
    """The k largest logits of each row, in descending order, and the softmax over these k only.

    That is llama.cpp's draft sampler (top_k, then softmax). Ties: lower id first. -inf and NaN get probability 0; so a
    row without any finite logit has probabilities 0.

    Args:
        logits: IN float32 [n, v].
        ids: OUT int32 [>= n, k], 1 <= k <= v.
        probs: OUT float32 [>= n, k].

    Raises:
        ValueError: shapes that do not fit. Nothing was written.
    """
    cdef Py_ssize_t n = logits.shape[0], v = logits.shape[1], k = ids.shape[1], i
    _check_logits(n, v, min(ids.shape[0], probs.shape[0]))
    if probs.shape[1] != k or k < 1 or k > v:
        raise ValueError(f"ids and probs must both have 1 to {v} columns, got {k} and {probs.shape[1]}")
    if n == 0:
        return
    cdef const float *x = &logits[0, 0]
    cdef int32_t *to_ids = &ids[0, 0]
    cdef float *to_probs = &probs[0, 0]
    with nogil:
        for i in range(n):
            _topk_softmax(x + i * v, v, k, to_ids + i * k, to_probs + i * k)


def verify_greedy(const float[:, ::1] logits not None, Py_ssize_t row0, const int32_t[::1] draft not None,
                  int32_t[::1] out not None):
    """Compare a draft with the target's greedy choice and collect the tokens to emit.

    Row row0 + i predicts the token at draft[i]. Stops at the first mismatch, rows after it are not read.

    Args:
        logits: IN float32 [n_rows, v]; rows row0 to row0 + k belong to this sequence.
        row0: first row.
        draft: IN int32 [k]; k may be 0.
        out: OUT int32 [>= k + 1]; out[0..n_accepted] are the emitted tokens: the accepted ones, then the target's own
            token (instead of the rejected one, or the bonus token after a fully accepted draft).

    Returns:
        How many drafted tokens were accepted, 0 to k.

    Raises:
        ValueError: rows or out too short. Nothing was written.
    """
    cdef Py_ssize_t n = logits.shape[0], v = logits.shape[1], k = draft.shape[0], i = 0
    _check_logits(k + 1, v, out.shape[0])
    if row0 < 0 or row0 > n or k + 1 > n - row0:
        raise ValueError(f"{k + 1} rows from row {row0} are needed, logits has {n}")
    cdef const float *x = &logits[row0, 0]
    cdef const int32_t *want = &draft[0] if k > 0 else NULL
    cdef int32_t *to = &out[0]
    with nogil:
        while True:
            to[i] = <int32_t>ps_argmax(x + i * v, v)
            if i == k or to[i] != want[i]:
                break
            i += 1
    return i


def logsumexp_rows(const float[:, ::1] logits not None, double[::1] out not None):
    """log(sum(exp(row))) of each row, stable. -inf for a row of -inf and NaN only, +inf if +inf is in it.

    Args:
        logits: IN float32 [n, v], v >= 1.
        out: OUT float64 [>= n]; absolute error below 1e-6.
    """
    cdef Py_ssize_t n = logits.shape[0], v = logits.shape[1], i
    _check_logits(n, v, out.shape[0])
    if n == 0:
        return
    cdef const float *x = &logits[0, 0]
    cdef double *to = &out[0]
    with nogil:
        for i in range(n):
            to[i] = ps_logsumexp(x + i * v, v)


cdef double _logprob(const float *x, Py_ssize_t v, int32_t token) noexcept nogil:
    cdef double lse
    if not x[token] > -INFINITY:
        return -INFINITY
    lse = ps_logsumexp(x, v)
    if lse == INFINITY:
        return 0.0 if x[token] == INFINITY else -INFINITY
    return x[token] - lse


def logprob_rows(const float[:, ::1] logits not None, const int32_t[::1] ids not None, double[::1] out not None):
    """log softmax of one chosen token of each row: ``logits[i, ids[i]] - logsumexp(logits[i])``.

    -inf where that logit is -inf or NaN. In a row with +inf: 0 for a token with +inf, else -inf.

    Args:
        logits: IN float32 [n, v].
        ids: IN int32 [n], 0 <= ids[i] < v.
        out: OUT float64 [>= n].

    Raises:
        ValueError: shapes that do not fit, or an id out of range. Nothing was written.
    """
    cdef Py_ssize_t n = logits.shape[0], v = logits.shape[1], i
    _check_logits(n, v, out.shape[0])
    if ids.shape[0] != n:
        raise ValueError(f"ids must hold one token for each of {n} rows, got {ids.shape[0]}")
    if n == 0:
        return
    cdef const float *x = &logits[0, 0]
    cdef const int32_t *tokens = &ids[0]
    cdef double *to = &out[0]
    _check_ids(tokens, n, v, "ids")
    with nogil:
        for i in range(n):
            to[i] = _logprob(x + i * v, v, tokens[i])


def top_logprob_rows(const float[:, ::1] logits not None, const int32_t[::1] ids not None, double[::1] out not None,
                     int32_t[:, ::1] top_ids not None, double[:, ::1] top not None):
    """``logprob_rows``, and the k most likely tokens of each row with theirs. Nothing is sorted but these.

    Args:
        logits: IN float32 [n, v].
        ids: IN int32 [n], 0 <= ids[i] < v.
        out: OUT float64 [>= n].
        top_ids: OUT int32 [>= n, k], 1 <= k <= 64; best first, ties: lower id first. -1 where nothing is left.
        top: OUT float64 [>= n, k], their log-probabilities.

    Raises:
        ValueError: shapes that do not fit, or an id out of range. Nothing was written.
    """
    cdef Py_ssize_t n = logits.shape[0], v = logits.shape[1], k = top_ids.shape[1], i, j, found
    cdef float best[64]
    cdef double lse
    cdef float x
    _check_logits(n, v, out.shape[0])
    if ids.shape[0] != n:
        raise ValueError(f"ids must hold one token for each of {n} rows, got {ids.shape[0]}")
    if k < 1 or k > 64 or top.shape[1] != k or top_ids.shape[0] < n or top.shape[0] < n:
        raise ValueError(
            f"top_ids and top must hold {n} rows of 1 to 64 values, got [{top_ids.shape[0]}, {k}] and "
            f"[{top.shape[0]}, {top.shape[1]}]")
    if n == 0:
        return
    cdef const float *row = &logits[0, 0]
    cdef const int32_t *tokens = &ids[0]
    _check_ids(tokens, n, v, "ids")
    with nogil:
        for i in range(n):
            found = ps_top_k(row, v, k, best, &top_ids[i, 0])
            if found == 0 or best[0] == INFINITY:
                lse = INFINITY
            else:
                lse = best[0] + log(ps_sum_exp(row, v, best[0], 1.0))
            for j in range(k):
                if j >= found:
                    top_ids[i, j] = -1
                    top[i, j] = -INFINITY
                elif lse == INFINITY:
                    top[i, j] = 0.0 if best[j] == INFINITY else -INFINITY
                else:
                    top[i, j] = best[j] - lse
            x = row[tokens[i]]
            if not x > -INFINITY:
                out[i] = -INFINITY
            elif lse == INFINITY:
                out[i] = 0.0 if x == INFINITY else -INFINITY
            else:
                out[i] = x - lse
            row += v


# ---- sampling -----------------------------------------------------------------------------------------------------

def sample_row(const float[::1] logits not None, double temperature, Py_ssize_t top_k, double top_p, double min_p,
               double u, int32_t[::1] scratch_ids not None, float[::1] scratch_p not None):
    """Draw one token: top_k, top_p, min_p, then temperature, then the inverse CDF at u in descending order.

    The order is llama.cpp's default chain, so top_p and min_p see the softmax before the temperature. Ties: lower id
    first. Nothing is sorted but a top_k set of at most 1024. A +inf logit wins (the lowest id of several).

    Args:
        logits: IN float32 [v], v >= 1.
        temperature: >= 0; 0 is greedy.
        top_k: candidates kept, <= 0 for all.
        top_p: smallest set with at least this mass, >= 1 for all.
        min_p: least probability relative to the most likely token, <= 0 for all.
        u: in [0, 1), a uniform number.
        scratch_ids: OUT int32 [>= v], overwritten.
        scratch_p: OUT float32 [>= v], overwritten.

    Returns:
        A token id.

    Raises:
        ValueError: scratch too small, u or temperature out of range, a NaN option.
    """
    cdef Py_ssize_t v = logits.shape[0]
    cdef int32_t token
    _check_logits(1, v, 1)
    if scratch_ids.shape[0] < v or scratch_p.shape[0] < v:
        raise ValueError(
            f"scratch_ids and scratch_p must hold {v} values, got {scratch_ids.shape[0]} and {scratch_p.shape[0]}")
    if not 0.0 <= u < 1.0:
        raise ValueError(f"u must be in [0, 1), got {u}")
    if not temperature >= 0.0:
        raise ValueError(f"temperature must be >= 0, got {temperature}")
    if top_p != top_p or min_p != min_p:
        raise ValueError(f"top_p and min_p must be numbers, got {top_p} and {min_p}")
    cdef const float *x = &logits[0]
    cdef int32_t *ids = &scratch_ids[0]
    cdef float *val = &scratch_p[0]
    if _overlap(x, v * sizeof(float), val, v * sizeof(float)) \
            or _overlap(x, v * sizeof(float), ids, v * sizeof(int32_t)):
        raise ValueError("scratch shares memory with logits")
    # 1 / 0 is +inf here, which stands for greedy, as does any temperature too small for a float32
    cdef float scale = <float>1.0 / <float>temperature
    with nogil:
        token = ps_sample(x, v, scale, top_k, top_p, <float>min_p, u, ids, val)
    return token


def philox_uniform(uint64_t seed, uint64_t seq, uint64_t pos):
    """A uniform number in [0, 1) that depends on its three arguments only, the same on every machine.

    One block of Philox4x32-10 (Salmon et al., SC11): key = seed, counter = (pos, seq), each as two 32-bit words, low
    word first. The first two output words give the 53 bits.

    Args:
        seed: 0 to 2**64 - 1.
        seq: 0 to 2**64 - 1; the upper half is free to number several draws at one position.
        pos: 0 to 2**64 - 1.

    Raises:
        OverflowError: an argument is negative or too large.
    """
    cdef uint32_t c0 = <uint32_t>pos, c1 = <uint32_t>(pos >> 32), c2 = <uint32_t>seq, c3 = <uint32_t>(seq >> 32)
    cdef uint32_t k0 = <uint32_t>seed, k1 = <uint32_t>(seed >> 32)
    cdef uint64_t p0, p1
    cdef int _round
    for _round in range(10):
        p0 = <uint64_t>c0 * 0xD2511F53u
        p1 = <uint64_t>c2 * 0xCD9E8D57u
        c0 = <uint32_t>(p1 >> 32) ^ c1 ^ k0
        c2 = <uint32_t>(p0 >> 32) ^ c3 ^ k1
        c1 = <uint32_t>p1
        c3 = <uint32_t>p0
        k0 += 0x9E3779B9u
        k1 += 0xBB67AE85u
    return <double>((<uint64_t>(c0 >> 5) << 26) | (c1 >> 6)) * (1.0 / 9007199254740992.0)
