# cython: language_level=3, freethreading_compatible=True
# distutils: include_dirs = pyspec
# distutils: depends = pyspec/_kernels.h pyspec/_sample.h
"""The sampler chain: from a row of logits and what was said before to the tokens that may be next, and their
probabilities.

:class:`Sampler` holds one request's options and what they remember (penalties, DRY, mirostat). ``apply`` looks at a
row, ``accept`` remembers a token; nothing else changes what is remembered. The big scratch arrays belong to a
:class:`Scratch` that the samplers of an engine share, so what ``apply`` found is gone once another sampler has used it.
After that the loops neither allocate nor touch a Python object, and release the GIL.

The same in plain NumPy is in ``pyspec/_sample_reference.py``. No llama.cpp type is known here.
"""

from libc.math cimport INFINITY, isfinite, log2
from libc.stdint cimport INT32_MAX, int32_t, uint32_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy

import numpy as np

__all__ = [
    "DRY", "DYNATEMP", "MIN_P", "MIROSTAT", "MIROSTAT2", "OK", "PENALTIES", "TEMPERATURE", "TOP_K", "TOP_N_SIGMA",
    "TOP_P", "TYPICAL_P", "XTC", "NOTHING_LEFT", "NOT_FINITE", "Sampler", "Scratch", "draft_row", "greedy_tokens",
]

cdef enum:
    MAX_STEPS = 16
    MIROSTAT_M = 100

#: What ``Sampler.apply`` gives: candidates were found; the row holds NaN or +inf; no logit is above -inf.
OK, NOT_FINITE, NOTHING_LEFT = 0, 1, 2

#: Steps of a chain, with up to three numbers each.
cdef enum Step:
    _PENALTIES, _DRY, _TOP_N_SIGMA, _TOP_K, _TYPICAL_P, _TOP_P, _MIN_P, _XTC, _TEMPERATURE, _DYNATEMP, _MIROSTAT, \
        _MIROSTAT2, _N_STEPS

PENALTIES, DRY, TOP_N_SIGMA, TOP_K, TYPICAL_P, TOP_P, MIN_P, XTC, TEMPERATURE, DYNATEMP, MIROSTAT, MIROSTAT2 = range(12)


cdef class Scratch:
    """Arrays of the vocabulary's size, for one thread at a time. Untouched ones cost no memory.

    Args:
        n_vocab: width of a logits row, >= 1.
    """

    cdef readonly Py_ssize_t n_vocab
    cdef float *row
    cdef float *val
    cdef float *aux
    cdef float *aux2
    cdef int32_t *ids
    cdef int32_t *longest
    cdef const void *owner

    def __cinit__(self, Py_ssize_t n_vocab):
        if n_vocab < 1 or n_vocab > INT32_MAX:
            raise ValueError(f"n_vocab must be in [1, {INT32_MAX}], got {n_vocab}")
        self.n_vocab = n_vocab
        self.row = <float *>calloc(n_vocab, sizeof(float))
        self.val = <float *>calloc(n_vocab, sizeof(float))
        self.aux = <float *>calloc(n_vocab, sizeof(float))
        self.aux2 = <float *>calloc(n_vocab, sizeof(float))
        self.ids = <int32_t *>calloc(n_vocab, sizeof(int32_t))
        self.longest = <int32_t *>calloc(n_vocab, sizeof(int32_t))
        self.owner = NULL
        if self.row == NULL or self.val == NULL or self.aux == NULL or self.aux2 == NULL or self.ids == NULL \
                or self.longest == NULL:
            raise MemoryError(f"no memory for the scratch arrays of a sampler over {n_vocab} tokens")

    def __dealloc__(self):
        free(self.row)
        free(self.val)
        free(self.aux)
        free(self.aux2)
        free(self.ids)
        free(self.longest)


cdef class Sampler:
    """One request's chain. See the module's text.

    Args:
        scratch: shared arrays.
        steps: (step, number, number, number) in order; numbers that a step does not need are ignored.
            PENALTIES: repeat, frequency, presence. DRY: multiplier, base, allowed length. TOP_N_SIGMA: n. TOP_K: k.
            TYPICAL_P, TOP_P, MIN_P: p, min_keep. XTC: probability, threshold, min_keep. TEMPERATURE: t, 0 is greedy.
            DYNATEMP: temperature, range, exponent. MIROSTAT, MIROSTAT2: tau, eta.
        prompt: IN int32 [n], remembered like accepted tokens.
        bias_ids, bias: IN int32 [b], float32 [b]: added to these logits.
        penalty_last_n, dry_last_n: tokens looked at; < 0: all.
        breakers: DRY's, as (first int32 [n_vocab + 1], start int32 [m + 1], tails int32): tails of head token t are
            number first[t] to first[t + 1] - 1, tail i is tails[start[i]:start[i + 1]]. None: none.

    Raises:
        ValueError: an id out of range, an unknown step, arrays that do not fit.
    """

    cdef readonly Scratch scratch
    cdef ps_cand c
    cdef Py_ssize_t v
    cdef float *row
    cdef int32_t *longest
    cdef int n_steps
    cdef int code[MAX_STEPS]
    cdef double arg[MAX_STEPS][3]
    cdef bint writes, remembers, wants_counts, wants_probs
    cdef int32_t *history
    cdef double *mus
    cdef Py_ssize_t n_prompt, n_history, capacity
    cdef int32_t *counts
    cdef Py_ssize_t penalty_last_n, dry_last_n
    cdef int32_t *z
    cdef Py_ssize_t z_capacity
    cdef double mu
    cdef const int32_t[::1] bias_ids
    cdef const float[::1] bias
    cdef const int32_t[::1] first
    cdef const int32_t[::1] start
    cdef const int32_t[::1] tails
    cdef ps_dry_options dry

    def __cinit__(self, Scratch scratch not None, steps, const int32_t[::1] prompt not None,
                  const int32_t[::1] bias_ids not None, const float[::1] bias not None, Py_ssize_t penalty_last_n=-1,
                  Py_ssize_t dry_last_n=-1, breakers=None):
        cdef Py_ssize_t i, v = scratch.n_vocab
        self.scratch = scratch
        self.v = v
        self.row, self.longest = scratch.row, scratch.longest
        self.c.val, self.c.aux, self.c.aux2, self.c.ids = scratch.val, scratch.aux, scratch.aux2, scratch.ids
        if len(steps) > MAX_STEPS:
            raise ValueError(f"a chain has at most {MAX_STEPS} steps, got {len(steps)}")
        if bias.shape[0] != bias_ids.shape[0]:
            raise ValueError(f"bias must hold one number for each of {bias_ids.shape[0]} ids, got {bias.shape[0]}")
        for i in range(bias_ids.shape[0]):
            if bias_ids[i] < 0 or bias_ids[i] >= v:
                raise ValueError(f"bias_ids[{i}] must be in [0, {v - 1}], got {bias_ids[i]}")
        self.bias_ids = bias_ids
        self.bias = bias
        self.writes = bias_ids.shape[0] > 0
        self.penalty_last_n = penalty_last_n
        self.dry_last_n = dry_last_n
        for step, *numbers in steps:
            if not 0 <= step < _N_STEPS:
                raise ValueError(f"there is no step {step!r}")
            self.code[self.n_steps] = step
            for i in range(3):
                self.arg[self.n_steps][i] = numbers[i] if i < len(numbers) else 0.0
            if step == _PENALTIES:
                self.writes = self.remembers = self.wants_counts = True
            elif step == _DRY:
                self.writes = self.remembers = True
                self.dry.multiplier = <float>self.arg[self.n_steps][0]
                self.dry.base = <float>self.arg[self.n_steps][1]
                self.dry.allowed = <Py_ssize_t>self.arg[self.n_steps][2]
            elif step == _MIROSTAT or step == _MIROSTAT2:
                self.remembers = self.wants_probs = True
                self.mu = 2.0 * self.arg[self.n_steps][0]
            self.n_steps += 1
        if breakers is not None:
            self._set_breakers(breakers)
        if self.wants_counts:
            self.counts = <int32_t *>calloc(v, sizeof(int32_t))
            if self.counts == NULL:
                raise MemoryError(f"no memory to count {v} tokens")
        for i in range(prompt.shape[0]):
            if prompt[i] < 0 or prompt[i] >= v:
                raise ValueError(f"prompt[{i}] must be in [0, {v - 1}], got {prompt[i]}")
        if self.remembers:
            self._reserve(prompt.shape[0])
            for i in range(prompt.shape[0]):
                self._remember(prompt[i])
        self.n_prompt = self.n_history = prompt.shape[0]

    def __dealloc__(self):
        # the next sampler may lie at the same address
        if self.scratch is not None and self.scratch.owner == <const void *>self:
            self.scratch.owner = NULL
        free(self.history)
        free(self.mus)
        free(self.counts)
        free(self.z)

    cdef int _set_breakers(self, breakers) except -1:
        cdef Py_ssize_t i, v = self.scratch.n_vocab
        self.first, self.start, self.tails = breakers
        cdef Py_ssize_t m = self.start.shape[0] - 1
        if self.first.shape[0] != v + 1 or m < 0 or self.first[0] != 0 or self.first[v] != m or self.start[0] != 0 \
                or self.start[m] != self.tails.shape[0]:
            raise ValueError("breakers must be (first [n_vocab + 1], start [m + 1], tails) that index one another")
        for i in range(v):
            if self.first[i] > self.first[i + 1]:
                raise ValueError("the numbers in breakers must ascend")
        for i in range(m):
            if self.start[i] > self.start[i + 1]:
                raise ValueError("the numbers in breakers must ascend")
        if m > 0:
            self.dry.first = &self.first[0]
            self.dry.start = &self.start[0]
            # only breakers of more than a token have a tail
            self.dry.tails = &self.tails[0] if self.tails.shape[0] else &self.start[0]
        return 0

    cdef int _reserve(self, Py_ssize_t n) except -1:
        cdef Py_ssize_t capacity = self.capacity, w
        cdef void *p
        if n > capacity:
            capacity = max(2 * capacity, n, 256)
            p = realloc(self.history, capacity * sizeof(int32_t))
            if p == NULL:
                raise MemoryError(f"no memory to remember {capacity} tokens")
            self.history = <int32_t *>p
            p = realloc(self.mus, capacity * sizeof(double))
            if p == NULL:
                raise MemoryError(f"no memory to remember {capacity} tokens")
            self.mus = <double *>p
            self.capacity = capacity
        if self.dry.multiplier > 0:
            w = capacity if self.dry_last_n < 0 else min(capacity, self.dry_last_n)
            if w > self.z_capacity:
                p = realloc(self.z, w * sizeof(int32_t))
                if p == NULL:
                    raise MemoryError(f"no memory to look for repetitions among {w} tokens")
                self.z = <int32_t *>p
                self.z_capacity = w
        return 0

    cdef inline Py_ssize_t _window(self, Py_ssize_t last_n) noexcept nogil:
        return self.n_history if last_n < 0 or last_n > self.n_history else last_n

    cdef inline void _remember(self, int32_t token) noexcept nogil:
        cdef Py_ssize_t n = self.n_history
        self.history[n] = token
        self.mus[n] = self.mu
        self.n_history = n + 1
        if self.wants_counts:
            self.counts[token] += 1
            if 0 <= self.penalty_last_n <= n:
                self.counts[self.history[n - self.penalty_last_n]] -= 1

    @property
    def n(self):
        """Accepted tokens."""
        return self.n_history - self.n_prompt

    @property
    def stateful(self):
        """Whether accepted tokens change what comes next."""
        return self.remembers

    @property
    def mirostat_mu(self):
        """mirostat's upper limit of surprise at present, in bits."""
        return self.mu

    def accept(self, int32_t token):
        """Remember a token; after ``apply`` on the row that decided it.

        Raises:
            ValueError: the id is out of range.
        """
        cdef double p
        cdef int i
        if token < 0 or token >= self.scratch.n_vocab:
            raise ValueError(f"token must be in [0, {self.scratch.n_vocab - 1}], got {token}")
        if not self.remembers:
            self.n_history += 1
            return
        self._reserve(self.n_history + 1)
        self._remember(token)
        if self.wants_probs and self.scratch.owner == <const void *>self:
            p = ps_cand_prob(&self.c, token)
            if p > 0.0:
                for i in range(self.n_steps):
                    if self.code[i] == _MIROSTAT or self.code[i] == _MIROSTAT2:
                        self.mu -= self.arg[i][1] * (-log2(p) - self.arg[i][0])

    def rewind(self, Py_ssize_t n):
        """Forget all but the first ``n`` accepted tokens.

        Raises:
            ValueError: there are not that many.
        """
        cdef Py_ssize_t i, keep = self.n_prompt + n
        if n < 0 or keep > self.n_history:
            raise ValueError(f"n must be in [0, {self.n_history - self.n_prompt}], got {n}")
        if not self.remembers or keep == self.n_history:
            self.n_history = keep
            return
        with nogil:
            if self.wants_counts:
                for i in range(self.n_history - self._window(self.penalty_last_n), self.n_history):
                    self.counts[self.history[i]] -= 1
            self.mu = self.mus[keep]
            self.n_history = keep
            if self.wants_counts:
                for i in range(self.n_history - self._window(self.penalty_last_n), self.n_history):
                    self.counts[self.history[i]] += 1

    cdef int _apply(self, const float *x, const uint32_t *mask, double u) noexcept nogil:
        cdef ps_cand *c = &self.c
        cdef const double *a
        cdef float *y = self.row
        cdef Py_ssize_t i, v = self.v, keep, first = 0
        cdef int bad = 0, code
        cdef float top
        if self.writes or mask != NULL:
            top = ps_scan(x, v, &bad)
            if bad or top == INFINITY:
                return 1
            memcpy(y, x, v * sizeof(float))
            for i in range(self.bias_ids.shape[0]):
                y[self.bias_ids[i]] += self.bias[i]
            if mask != NULL:
                ps_mask(y, v, mask)
            x = y
        if self.n_steps > 0 and self.code[0] == _TOP_K and 0 < self.arg[0][0] < v and self.arg[0][0] <= PS_HEAP_MAX_K:
            # the row is read once
            ps_cand_begin_top_k(c, x, v, <Py_ssize_t>self.arg[0][0], &bad)
            first = 1
        else:
            ps_cand_begin(c, x, v, ps_scan(x, v, &bad))
        if bad or c.top == INFINITY:
            return 1
        if c.top == -INFINITY:
            return 2
        for i in range(first, self.n_steps):
            a = self.arg[i]
            code = self.code[i]
            keep = <Py_ssize_t>a[1]
            if code == _PENALTIES:
                ps_penalize(y, self.history, self.n_history, self._window(self.penalty_last_n), self.counts,
                            <float>a[0], <float>a[1], <float>a[2], c.scale)
                ps_cand_reread(c)
            elif code == _DRY:
                ps_dry(y, self.history, self.n_history, self._window(self.dry_last_n), &self.dry, self.z,
                       self.longest, c.scale)
                ps_cand_reread(c)
            elif code == _TOP_N_SIGMA:
                ps_cand_sigma(c, <float>a[0])
            elif code == _TOP_K:
                ps_cand_top_k(c, <Py_ssize_t>a[0])
            elif code == _TYPICAL_P:
                ps_cand_typical(c, a[0], keep)
            elif code == _TOP_P:
                ps_cand_top_p(c, a[0], keep)
            elif code == _MIN_P:
                ps_cand_min_p(c, <float>a[0], keep)
            elif code == _XTC:
                if u <= a[0]:
                    ps_cand_xtc(c, <float>a[1], <Py_ssize_t>a[2])
            elif code == _TEMPERATURE:
                ps_cand_temperature(c, a[0])
            elif code == _DYNATEMP:
                ps_cand_dynatemp(c, a[0], a[1], a[2])
            elif code == _MIROSTAT:
                ps_cand_mirostat(c, <double>v, self.mu, MIROSTAT_M)
            else:
                ps_cand_mirostat2(c, self.mu)
            if c.top == INFINITY or c.top != c.top:
                return 1
            if c.top == -INFINITY:
                return 2
        ps_cand_end(c)
        return 0 if isfinite(c.total) and c.total > 0.0 else 1

    def apply(self, const float[:, ::1] logits not None, Py_ssize_t row, const uint32_t[::1] mask=None,
              double u=1.0):
        """Find the candidates of a row.

        Args:
            logits: IN float32 [n, n_vocab], borrowed until the next ``apply``.
            row: which one.
            mask: IN uint32 [ceil(n_vocab / 32)], bit set: the token is allowed. None: all are.
            u: in [0, 1), decides whether XTC acts.

        Returns:
            OK, NOT_FINITE or NOTHING_LEFT; the other methods may be called after OK only.

        Raises:
            ValueError: shapes that do not fit.
        """
        cdef Py_ssize_t v = self.scratch.n_vocab
        cdef const uint32_t *bits = NULL
        cdef int status
        if logits.shape[1] != v or row < 0 or row >= logits.shape[0]:
            raise ValueError(
                f"row {row} of {v} logits is wanted, there are {logits.shape[0]} of {logits.shape[1]}")
        if mask is not None:
            if mask.shape[0] * 32 < v:
                raise ValueError(f"mask must hold {(v + 31) // 32} words, got {mask.shape[0]}")
            bits = &mask[0]
        cdef const float *x = &logits[row, 0]
        self.scratch.owner = <const void *>self
        with nogil:
            status = self._apply(x, bits, u)
        if status != 0:
            self.scratch.owner = NULL
        return status

    cdef int _check(self) except -1:
        if self.scratch.owner != <const void *>self:
            raise ValueError("there are no candidates: apply() comes first, and the scratch arrays are shared")
        return 0

    def draw(self, double u):
        """A token, by probability.

        Args:
            u: in [0, 1), uniform.
        """
        cdef int32_t token
        self._check()
        if not 0.0 <= u < 1.0:
            raise ValueError(f"u must be in [0, 1), got {u}")
        with nogil:
            token = ps_cand_draw(&self.c, u)
        return token

    def prob(self, int32_t token):
        """Probability of a token; 0 for what is no candidate."""
        self._check()
        return ps_cand_prob(&self.c, token)

    def overlap(self, double a, const int32_t[::1] ids not None, const float[::1] q not None):
        """Sum of ``min(a * p, q)``.

        Args:
            a: >= 0.
            ids, q: IN int32 [n], float32 [n]: tokens of another distribution, each once, and their probabilities.
        """
        cdef Py_ssize_t n = ids.shape[0]
        self._check()
        if q.shape[0] != n:
            raise ValueError(f"ids and q must have one length, got {n} and {q.shape[0]}")
        return ps_cand_overlap(&self.c, a, &ids[0], &q[0], n) if n > 0 else 0.0

    def residual(self, double a, const int32_t[::1] ids not None, const float[::1] q not None, double u):
        """A token drawn from ``max(0, a * p - q)``, normalised. Afterwards only ``accept`` may be called.

        Args:
            a: > 0. ids, q: see ``overlap``.
            u: in [0, 1), uniform.
        """
        cdef Py_ssize_t n = ids.shape[0]
        cdef int32_t token
        self._check()
        if q.shape[0] != n:
            raise ValueError(f"ids and q must have one length, got {n} and {q.shape[0]}")
        if not 0.0 <= u < 1.0 or not a > 0.0:
            raise ValueError(f"u must be in [0, 1) and a above 0, got {u} and {a}")
        cdef const int32_t *tokens = &ids[0] if n > 0 else NULL
        cdef const float *weights = &q[0] if n > 0 else NULL
        with nogil:
            token = ps_cand_residual(&self.c, a, tokens, weights, n, u)
        return token

    def candidates(self):
        """The candidates, as copies: int32 [n] ids and float32 [n] probabilities, in no order."""
        self._check()
        ps_cand_probs(&self.c)
        cdef Py_ssize_t n = self.c.n
        ids, probs = np.empty(n, np.int32), np.empty(n, np.float32)
        cdef int32_t[::1] to_ids = ids
        cdef float[::1] to_probs = probs
        if n > 0:
            memcpy(&to_ids[0], self.c.ids, n * sizeof(int32_t))
            memcpy(&to_probs[0], self.c.val, n * sizeof(float))
        return ids, probs


def greedy_tokens(const float[:, ::1] logits not None, Py_ssize_t row0, list draft not None):
    """Like ``_core.verify_greedy``, for rows that may be unfit, and on lists.

    Args:
        logits: IN float32 [n_rows, v]. row0: first row. draft: k token ids.

    Returns:
        The accepted tokens and the one after them, a list of 1 to k + 1; or, as a number, ``-1 - i`` where row
        ``row0 + i`` holds NaN or +inf, or no logit above -inf. Rows that do not matter are not looked at.

    Raises:
        ValueError: rows too short.
    """
    cdef Py_ssize_t n = logits.shape[0], v = logits.shape[1], k = len(draft), i = 0, best
    if v < 1 or row0 < 0 or row0 > n or k + 1 > n - row0:
        raise ValueError(f"{k + 1} rows from row {row0} are needed, logits has {n}")
    cdef const float *x = &logits[row0, 0]
    cdef list out = []
    while True:
        with nogil:
            best = ps_argmax_checked(x + i * v, v)
        if best < 0:
            return -1 - i
        out.append(best)
        if i == k or out[i] != draft[i]:
            return out
        i += 1


def draft_row(const float[:, ::1] logits not None, Py_ssize_t row, Py_ssize_t n_vocab, double temperature,
              double top_p, double min_p, double u, int32_t[::1] ids not None, float[::1] probs not None):
    """Draw a draft token from the first ``n_vocab`` logits of a row: the ``len(ids)`` most likely, top_p, min_p, then
    temperature.

    Args:
        logits: IN float32 [n_rows, >= n_vocab]. row: which one.
        temperature: >= 0; 0 is greedy. top_p, min_p: as in ``_core.sample_row``. u: in [0, 1).
        ids, probs: OUT int32 [k], float32 [k]: what was drawn from, best first.

    Returns:
        (token, number of candidates, softmax of the best of the ten best). Token -1: no logit is finite.

    Raises:
        ValueError: shapes or values that do not fit.
    """
    cdef Py_ssize_t k = ids.shape[0], n = 0
    cdef double confidence = 0.0
    cdef int32_t token
    if row < 0 or row >= logits.shape[0] or n_vocab < 1 or n_vocab > logits.shape[1]:
        raise ValueError(
            f"row {row} of {n_vocab} logits is wanted, there are {logits.shape[0]} of {logits.shape[1]}")
    if k < 1 or probs.shape[0] != k:
        raise ValueError(f"ids and probs must have one length, at least 1, got {k} and {probs.shape[0]}")
    if not 0.0 <= u < 1.0 or not temperature >= 0.0 or top_p != top_p or min_p != min_p:
        raise ValueError(f"u must be in [0, 1) and the options numbers, got {u}, {temperature}, {top_p}, {min_p}")
    cdef const float *x = &logits[row, 0]
    # 1 / 0 is +inf here, which stands for greedy
    cdef float scale = <float>1.0 / <float>temperature
    with nogil:
        token = ps_draft(x, n_vocab, scale, min(k, n_vocab), top_p, <float>min_p, u, &ids[0], &probs[0], &n,
                         &confidence)
    return token, n, confidence
