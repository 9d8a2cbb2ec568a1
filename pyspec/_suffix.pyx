# cython: language_level=3, freethreading_compatible=True
"""Suffix automaton over tokens: what has followed this context before, and how often.

The automaton is the online one of Blumer et al. (1985): at most two states and three edges a token, whatever the text.
A state stands for contexts that end at the same places, and knows how many and the latest; so one walk along suffix
links gives every context that the text ends with, the longest first, each with exact frequencies of what followed.

The first edge of a state lies in the state; most states have no other. The others are in one hash table, whose slots
are also linked to a list for each state.

Every call holds the object's own lock, so any thread may call. Long inputs are taken in without the GIL. The same in
plain Python, by search of the whole text, is ``pyspec/_suffix_reference.py``.
"""

from cpython.long cimport PyLong_CheckExact
from cpython.number cimport PyNumber_Index
from cpython.pythread cimport (
    NOWAIT_LOCK, WAIT_LOCK, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock, PyThread_release_lock,
    PyThread_type_lock,
)
from libc.stdint cimport INT32_MAX, int32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset


cdef int _check(int n_max, int min_match, double factor, double offset, double p_min) except -1:
    if n_max < 0 or n_max > MAX_DRAFT:
        raise ValueError(f"n_max must be in [0, {MAX_DRAFT}], got {n_max}")
    if min_match < 1:
        raise ValueError(f"min_match must be >= 1, got {min_match}")
    # negated, so that NaN fails too
    if not (0.0 <= factor <= 1e6 and -1e6 <= offset <= 1e6):
        raise ValueError(f"factor must be in [0, 1e6] and offset in [-1e6, 1e6], got {factor} and {offset}")
    if not 0.0 < p_min <= 1.0:
        raise ValueError(f"p_min must be in (0, 1], got {p_min}")
    return 0


cdef int32_t *_take(object tokens, Py_ssize_t begin, Py_ssize_t *n) except? NULL:
    """A copy of tokens[begin:], to be freed by the caller."""
    cdef Py_ssize_t i
    cdef long long value
    cdef int32_t *out
    cdef const int32_t[::1] view
    cdef list given
    cdef object item
    cdef Py_ssize_t end
    if isinstance(tokens, list):
        given = <list>tokens
        end = len(given)
    else:
        given = None
        view = tokens
        end = view.shape[0]
    if begin < 0 or begin > end:
        raise ValueError(f"begin must be in [0, {end}], got {begin}")
    n[0] = end - begin
    out = <int32_t *>malloc(max(n[0], 1) * sizeof(int32_t))
    if out == NULL:
        raise MemoryError
    try:
        for i in range(n[0]):
            if given is not None:
                # the list may have become shorter in another thread
                if begin + i >= len(given):
                    raise ValueError("the list changed while it was read")
                item = given[begin + i]
                value = item if PyLong_CheckExact(item) else PyNumber_Index(item)
            else:
                value = view[begin + i]
            if value < 0 or value > INT32_MAX:
                raise ValueError(f"token ids must be in [0, {INT32_MAX}], got {value}")
            out[i] = <int32_t>value
    except:  # noqa: E722
        free(out)
        raise
    return out


cdef tuple _answer(Found *found):
    cdef int i
    return (
        [found.tokens[i] for i in range(found.n)], [found.probs[i] for i in range(found.n)], found.score, found.length,
    )


cdef class Confidence:
    """How likely what followed a context is to follow it again, learned from what did.

    Logistic regression over the length of the context (its logarithm), the odds by frequency (theirs), and how often
    anything followed it (its logarithm), with one step of gradient ascent for each new token and context. Belongs to
    one thread at a time.

    Args:
        weights: to start from: of 1 and the three above.
        rate: how fast it learns; 0: not at all.
    """

    cdef double w[N_WEIGHTS]
    cdef readonly double rate

    def __init__(self, weights not None, double rate):
        if len(weights) != N_WEIGHTS:
            raise ValueError(f"{N_WEIGHTS} weights are needed, got {len(weights)}")
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"rate must be in [0, 1], got {rate}")
        cdef int i
        for i in range(N_WEIGHTS):
            if not -100.0 <= weights[i] <= 100.0:
                raise ValueError(f"weights must be in [-100, 100], got {weights[i]}")
            self.w[i] = weights[i]
        self.rate = rate

    @property
    def weights(self):
        """As they are now."""
        return tuple([self.w[i] for i in range(N_WEIGHTS)])

    def chance(self, int length, int count, int total):
        """How likely a continuation is that followed a context of ``length`` tokens ``count`` times of ``total``."""
        if not (length >= 1 and 0 <= count <= total and total >= 1):
            raise ValueError(f"no such counts: length {length}, {count} of {total}")
        cdef Child child
        child.count, child.total = count, total
        return _chance(self.w, length, &child)


cdef inline const double *_weights(Confidence confidence) noexcept:
    return NULL if confidence is None else confidence.w


cdef class SuffixIndex:
    """Suffix automaton over one text, or over documents of one corpus.

    Memory grows with the text, by 128 bytes a token at most; a part of the text cannot be taken out.
    """

    cdef Automaton a
    cdef PyThread_type_lock lock
    cdef Found *best
    cdef Found *trial
    cdef unsigned long long epoch

    def __cinit__(self):
        memset(&self.a, 0, sizeof(Automaton))
        self.best = NULL
        self.trial = NULL
        self.epoch = 0
        self.lock = PyThread_allocate_lock()
        self.best = <Found *>malloc(sizeof(Found))
        self.trial = <Found *>malloc(sizeof(Found))
        if self.lock == NULL or self.best == NULL or self.trial == NULL or not self._reset():
            raise MemoryError

    def __dealloc__(self):
        free(self.a.states)
        free(self.a.edges)
        free(self.best)
        free(self.trial)
        if self.lock != NULL:
            PyThread_free_lock(self.lock)

    cdef bint _reset(self) noexcept:
        free(self.a.states)
        free(self.a.edges)
        memset(&self.a, 0, sizeof(Automaton))
        if not _reserve(&self.a, 8):
            return False
        _new_state(&self.a, 0)
        return True

    cdef void _acquire(self) noexcept:
        if not PyThread_acquire_lock(self.lock, NOWAIT_LOCK):
            with nogil:
                PyThread_acquire_lock(self.lock, WAIT_LOCK)

    def extend(self, tokens not None, Py_ssize_t begin=0, Confidence learner=None):
        """Append tokens[begin:] to the text.

        Args:
            tokens: IN list of int, or int32 [n] C-contiguous; ids >= 0. Copied.
            begin: first one to take.
            learner: INOUT learns from each token whether the text so far would have told it.

        Raises:
            ValueError: an id or begin is out of range; nothing was added. TypeError: not integers.
            MemoryError: some of the tokens may have been added.
        """
        cdef Py_ssize_t n = 0, done
        cdef int32_t *copy = _take(tokens, begin, &n)
        self._acquire()
        if n > MAX_TOKENS - self.a.n:
            PyThread_release_lock(self.lock)
            free(copy)
            raise ValueError(f"an index holds {MAX_TOKENS} tokens at most")
        if learner is not None:
            done = 0
            while done < n:
                self._learn(copy[done], learner)
                if _push_all(&self.a, copy + done, 1) == 0:
                    break
                done += 1
        elif n > CHUNK:
            with nogil:
                done = _push_all(&self.a, copy, n)
        else:
            done = _push_all(&self.a, copy, n)
        PyThread_release_lock(self.lock)
        free(copy)
        if done < n:
            raise MemoryError

    cdef int32_t _end(self, int32_t *length) noexcept:
        """State of the longest end of the text that occurs elsewhere in it."""
        cdef int32_t state = self.a.states[self.a.tail].link
        # an end does not reach back into the document before
        length[0] = min(self.a.states[state].length if state > 0 else 0, self.a.n - self.a.start)
        return _part(&self.a, state, length[0])

    cdef void _learn(self, int32_t token, Confidence learner) noexcept:
        cdef int32_t length, state = self._end(&length)
        _learn(&self.a, state, length, token, learner.rate, learner.w)

    def end_document(self):
        """What is appended from now on does not continue what is there."""
        cdef int32_t separator = SEPARATOR
        self._acquire()
        cdef bint ok = self.a.n < MAX_TOKENS and _push_all(&self.a, &separator, 1) == 1
        self.a.start = self.a.n
        PyThread_release_lock(self.lock)
        if not ok:
            raise MemoryError

    def clear(self):
        """Forget everything and free the memory. Matches start over."""
        self._acquire()
        cdef bint ok = self._reset()
        self.epoch += 1
        PyThread_release_lock(self.lock)
        if not ok:
            raise MemoryError

    def draft(
        self, int n_max, int min_match=1, double factor=1.0, double offset=0.0, double p_min=0.1,
        Confidence confidence=None,
    ):
        """What is likely to follow the text, by what followed earlier occurrences of its end.

        For each end of the text that occurs elsewhere in it, the longest first: the most frequent next token, again
        and again, while the product of their probabilities is at least p_min, for at most ``factor * length + offset``
        tokens. The one with the highest sum of these products (the number of tokens expected to be right) is given.

        Args:
            n_max: most tokens, <= 1024.
            min_match: length of the shortest end to look at.
            factor, offset: how the limit grows with the length of the end.
            p_min: in (0, 1].
            confidence: gives the probabilities; without one they are the frequencies.

        Returns:
            tokens, their probabilities (of being right up to there), the sum of these, and the length of the end that
            they follow (of the longest one when there are no tokens).
        """
        _check(n_max, min_match, factor, offset, p_min)
        self._acquire()
        cdef int32_t length, state = self._end(&length)
        _best(
            &self.a, state, length, n_max, min_match, factor, offset, p_min, _weights(confidence), self.best, self.trial
        )
        try:
            return _answer(self.best)
        finally:
            PyThread_release_lock(self.lock)

    @property
    def n_tokens(self):
        """Tokens held, one more for each end of a document."""
        return self.a.n

    @property
    def n_states(self):
        """States of the automaton."""
        return self.a.n_states

    @property
    def n_bytes(self):
        """Memory in use, bytes."""
        return self.a.cap_states * sizeof(State) + self.a.cap_edges * sizeof(Edge) + 2 * sizeof(Found)


cdef class SuffixMatch:
    """Follows a text that is not part of an index: always at the longest end of it that occurs in the index.

    The index may grow meanwhile. After its ``clear`` the match starts over: see ``stale``.
    """

    cdef readonly SuffixIndex index
    cdef int32_t state
    cdef int32_t length
    cdef unsigned long long epoch

    def __init__(self, SuffixIndex index not None):
        self.index = index
        self.state = 0
        self.length = 0
        self.epoch = index.epoch

    cdef void _settle(self) noexcept:
        """Where the index was cleared, start over; where it has split this state since, find the right part."""
        cdef const Automaton *a = &self.index.a
        if self.epoch != self.index.epoch:
            self.state = 0
            self.length = 0
            self.epoch = self.index.epoch
        self.state = _part(a, self.state, self.length)

    @property
    def stale(self):
        """The index was cleared since the last ``extend``: extend with the last tokens of the text again."""
        return self.epoch != self.index.epoch

    @property
    def match_length(self):
        """Length of the longest end of the text that occurs in the index."""
        self.index._acquire()
        self._settle()
        PyThread_release_lock(self.index.lock)
        return self.length

    def extend(self, tokens not None, Py_ssize_t begin=0, Confidence learner=None):
        """Go on with tokens[begin:]; args and errors as of ``SuffixIndex.extend``."""
        cdef Py_ssize_t n = 0, i
        cdef int32_t *copy = _take(tokens, begin, &n)
        self.index._acquire()
        self._settle()
        for i in range(n):
            if learner is not None:
                _learn(&self.index.a, self.state, self.length, copy[i], learner.rate, learner.w)
            _advance(&self.index.a, &self.state, &self.length, copy[i])
        PyThread_release_lock(self.index.lock)
        free(copy)

    def draft(
        self, int n_max, int min_match=1, double factor=1.0, double offset=0.0, double p_min=0.1,
        Confidence confidence=None,
    ):
        """As ``SuffixIndex.draft``, for the ends of the followed text."""
        _check(n_max, min_match, factor, offset, p_min)
        cdef SuffixIndex index = self.index
        index._acquire()
        self._settle()
        _best(
            &index.a, self.state, self.length, n_max, min_match, factor, offset, p_min, _weights(confidence),
            index.best, index.trial,
        )
        try:
            return _answer(index.best)
        finally:
            PyThread_release_lock(index.lock)


# ---- predicted text -----------------------------------------------------------------------------------------------

def resync(const int32_t[::1] text not None, const int32_t[::1] tail not None, Py_ssize_t at):
    """Where in a text the end of another one occurs.

    Args:
        text: IN int32 [n].
        tail: IN int32 [m], the last tokens of the other text.
        at: the place to be near to; in [0, n].

    Returns:
        (position behind the occurrence, its length); the longest wins, then the nearest to ``at``, then the later one.
        (at, 0): not even the last token of ``tail`` occurs.

    Raises:
        ValueError: ``at`` is out of range.
    """
    cdef Py_ssize_t n = text.shape[0], m = tail.shape[0], i, k, distance, best_distance = 0
    cdef Py_ssize_t best = at, best_length = 0
    if at < 0 or at > n:
        raise ValueError(f"at must be in [0, {n}], got {at}")
    if n == 0 or m == 0:
        return at, 0
    cdef const int32_t *t = &text[0]
    cdef const int32_t *w = &tail[0]
    with nogil:
        for i in range(n):
            if t[i] != w[m - 1]:
                continue
            k = 1
            while k < m and k <= i and t[i - k] == w[m - 1 - k]:
                k += 1
            distance = i + 1 - at if i + 1 >= at else at - i - 1
            if k > best_length or (k == best_length and distance <= best_distance):
                best, best_length, best_distance = i + 1, k, distance
    return best, best_length
