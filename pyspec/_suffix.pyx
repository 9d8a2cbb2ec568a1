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
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

cdef enum:
    # tokens taken in between two checks of the room
    CHUNK = 256
    # suffix links followed to count an occurrence: only texts that repeat a few tokens over and over have more
    COUNT_DEPTH = 64
    # contexts tried for a draft, and children looked at for the most frequent one
    MAX_CONTEXTS = 16
    MAX_CHILDREN = 64
    MAX_DRAFT = 1024
    MAX_TOKENS = 1 << 29
    SEPARATOR = -1


cdef struct State:
    int32_t length     # of its longest context
    int32_t link       # state of the longest context that ends at more places; -1 for the root
    int32_t count      # places it ends at
    int32_t last       # the latest of them: tokens before and at it
    int32_t token      # first edge; INT32_MIN: none
    int32_t to
    int32_t more       # slot of the next edge; -1: none


cdef struct Edge:
    int32_t state      # -1: a free slot
    int32_t token
    int32_t to
    int32_t next


cdef struct Automaton:
    State *states
    Edge *edges
    int32_t n_states
    int32_t cap_states
    int32_t n_edges
    uint32_t cap_edges
    int32_t tail       # state of the whole text
    int32_t n          # tokens, separators included
    int32_t start      # where the last document begins


cdef inline uint32_t _home(int32_t state, int32_t token, uint32_t cap) noexcept nogil:
    cdef uint64_t x = (<uint64_t><uint32_t>state << 32 | <uint32_t>token) * 0x9E3779B97F4A7C15ULL
    x ^= x >> 32
    x *= 0xD6E8FEB86659FD93ULL
    return <uint32_t>(((x >> 32) * cap) >> 32)


cdef inline uint32_t _slot(const Edge *edges, uint32_t cap, int32_t state, int32_t token) noexcept nogil:
    """Slot of an edge, or the free one where it belongs."""
    cdef uint32_t i = _home(state, token, cap)
    while edges[i].state >= 0 and (edges[i].state != state or edges[i].token != token):
        i += 1
        if i == cap:
            i = 0
    return i


cdef inline int32_t _get(const Automaton *a, int32_t state, int32_t token) noexcept nogil:
    cdef const State *s = &a.states[state]
    if s.token == token:
        return s.to
    if s.more < 0:
        return -1
    cdef const Edge *e = &a.edges[_slot(a.edges, a.cap_edges, state, token)]
    return e.to if e.state >= 0 else -1


cdef inline void _add(Automaton *a, int32_t state, int32_t token, int32_t to) noexcept nogil:
    """Add an edge that is not there yet."""
    cdef State *s = &a.states[state]
    cdef uint32_t i
    if s.token == INT32_MIN:
        s.token = token
        s.to = to
        return
    i = _slot(a.edges, a.cap_edges, state, token)
    a.edges[i].state = state
    a.edges[i].token = token
    a.edges[i].to = to
    a.edges[i].next = s.more
    s.more = <int32_t>i
    a.n_edges += 1


cdef inline void _redirect(Automaton *a, int32_t state, int32_t token, int32_t to) noexcept nogil:
    cdef State *s = &a.states[state]
    if s.token == token:
        s.to = to
    else:
        a.edges[_slot(a.edges, a.cap_edges, state, token)].to = to


cdef inline int32_t _new_state(Automaton *a, int32_t length) noexcept nogil:
    cdef State *s = &a.states[a.n_states]
    s.length = length
    s.link = -1
    s.count = 0
    s.last = 0
    s.token = INT32_MIN
    s.to = -1
    s.more = -1
    a.n_states += 1
    return a.n_states - 1


cdef bint _reserve(Automaton *a, Py_ssize_t n_new) noexcept nogil:
    """Room for the states of n_new more tokens. False: no memory, nothing has changed."""
    cdef Py_ssize_t need = a.n_states + 2 * n_new + 1, cap
    cdef State *states
    if need > a.cap_states:
        cap = max(need, a.cap_states + a.cap_states // 4)
        states = <State *>realloc(a.states, cap * sizeof(State))
        if states == NULL:
            return False
        a.states = states
        a.cap_states = <int32_t>cap
    return True


cdef bint _grow_edges(Automaton *a, Py_ssize_t need) noexcept nogil:
    """A table for ``need`` edges and more. False: no memory, nothing has changed."""
    cdef Py_ssize_t cap = max(need * 10 // 7 + 8, <Py_ssize_t>a.cap_edges * 14 // 10), j
    cdef int32_t s, i, previous
    cdef Edge *e
    cdef Edge *edges = <Edge *>malloc(cap * sizeof(Edge))
    if edges == NULL:
        return False
    memset(edges, 0xFF, cap * sizeof(Edge))
    for s in range(a.n_states):
        i = a.states[s].more
        previous = -1
        while i >= 0:
            e = &a.edges[i]
            j = _slot(edges, <uint32_t>cap, s, e.token)
            edges[j].state = s
            edges[j].token = e.token
            edges[j].to = e.to
            if previous < 0:
                a.states[s].more = <int32_t>j
            else:
                edges[previous].next = <int32_t>j
            previous = <int32_t>j
            i = e.next
    free(a.edges)
    a.edges = edges
    a.cap_edges = <uint32_t>cap
    return True


cdef bint _push(Automaton *a, int32_t token) noexcept nogil:
    """Append one token; _reserve has made room for its states. False: no memory, nothing has changed."""
    cdef int32_t p = a.tail, q = -1, current, clone, i, v
    cdef int depth
    cdef Py_ssize_t n_new = 0
    while p >= 0:
        q = _get(a, p, token)
        if q >= 0:
            break
        n_new += 1
        p = a.states[p].link
    if p >= 0 and a.states[q].length != a.states[p].length + 1:
        i = a.states[q].more
        while i >= 0:
            n_new += 1
            i = a.edges[i].next
    if (a.n_edges + n_new) * 10 > <Py_ssize_t>a.cap_edges * 7 and not _grow_edges(a, a.n_edges + n_new):
        return False
    current = _new_state(a, a.states[a.tail].length + 1)
    v = a.tail
    while v != p:
        _add(a, v, token, current)
        v = a.states[v].link
    if p < 0:
        a.states[current].link = 0
    elif a.states[q].length == a.states[p].length + 1:
        a.states[current].link = q
    else:
        clone = _new_state(a, a.states[p].length + 1)
        a.states[clone].link = a.states[q].link
        a.states[clone].count = a.states[q].count
        a.states[clone].last = a.states[q].last
        a.states[clone].token = a.states[q].token
        a.states[clone].to = a.states[q].to
        i = a.states[q].more
        while i >= 0:
            _add(a, clone, a.edges[i].token, a.edges[i].to)
            i = a.edges[i].next
        a.states[q].link = clone
        a.states[current].link = clone
        while p >= 0 and _get(a, p, token) == q:
            _redirect(a, p, token, clone)
            p = a.states[p].link
    a.tail = current
    a.n += 1
    v = current
    for depth in range(COUNT_DEPTH):
        if v <= 0:
            break
        a.states[v].count += 1
        a.states[v].last = a.n
        v = a.states[v].link
    return True


cdef Py_ssize_t _push_all(Automaton *a, const int32_t *tokens, Py_ssize_t n) noexcept nogil:
    """Append tokens; returns how many were taken, fewer than n where memory ran out."""
    cdef Py_ssize_t i = 0, j, end, need
    if n > CHUNK:
        # what text usually needs, so that nothing is moved; more is made where this is not enough
        need = a.n_edges + n * 2 // 5
        if not _reserve(a, n * 7 // 10) or (need * 10 > <Py_ssize_t>a.cap_edges * 7 and not _grow_edges(a, need)):
            return 0
    while i < n:
        end = min(n, i + CHUNK)
        if not _reserve(a, end - i):
            return i
        for j in range(i, end):
            if not _push(a, tokens[j]):
                return j
        i = end
    return n


cdef int _path(const Automaton *a, int32_t s, int budget, double p_min, int32_t *out, float *probs,
               double *score) noexcept nogil:
    """The most frequent continuation of state s, token by token, while its probability is at least p_min."""
    cdef double p = 1.0
    cdef int n = 0, k
    cdef int32_t total, best, best_count, best_token, rest, i, c
    score[0] = 0.0
    while n < budget:
        # the occurrence at the end of the text has nothing behind it; where there is no other, a shorter context has
        total = a.states[s].count - (a.states[s].last == a.n)
        while total <= 0 and s > 0:
            s = a.states[s].link
            total = a.states[s].count - (a.states[s].last == a.n)
        if s <= 0 or a.states[s].token == INT32_MIN:
            break
        best = a.states[s].to
        best_token = a.states[s].token
        best_count = a.states[best].count
        rest = total - best_count
        i = a.states[s].more
        k = 0
        while i >= 0 and best_count <= rest and k < MAX_CHILDREN:
            c = a.states[a.edges[i].to].count
            if c > best_count or (c == best_count and a.states[a.edges[i].to].last > a.states[best].last):
                best = a.edges[i].to
                best_token = a.edges[i].token
                best_count = c
            rest -= c
            i = a.edges[i].next
            k += 1
        if best_count < total:
            p *= <double>best_count / total
        if p < p_min or best_token < 0:
            break
        out[n] = best_token
        probs[n] = <float>p
        score[0] += p
        n += 1
        s = best
    return n


cdef struct Found:
    double score
    int n
    int32_t length
    int32_t tokens[MAX_DRAFT]
    float probs[MAX_DRAFT]


cdef void _best(const Automaton *a, int32_t state, int32_t length, int n_max, int min_match, double factor,
                double offset, double p_min, Found *best, Found *trial) noexcept nogil:
    """The continuation with the highest expected length over the contexts of a state and its suffix links."""
    cdef int i, j, budget
    cdef double limit
    best.score = 0.0
    best.n = 0
    best.length = length
    for i in range(MAX_CONTEXTS):
        if state <= 0 or length < min_match:
            break
        limit = factor * length + offset
        budget = n_max if limit >= n_max else <int>limit
        # a shorter context has a lower limit, and the limit is the highest score there can be
        if budget < 1 or best.score >= budget:
            break
        trial.n = _path(a, state, budget, p_min, trial.tokens, trial.probs, &trial.score)
        if trial.score > best.score:
            best.score = trial.score
            best.n = trial.n
            best.length = length
            for j in range(trial.n):
                best.tokens[j] = trial.tokens[j]
                best.probs[j] = trial.probs[j]
        state = a.states[state].link
        length = a.states[state].length if state > 0 else 0


cdef void _advance(const Automaton *a, int32_t *state, int32_t *length, int32_t token) noexcept nogil:
    cdef int32_t to
    while True:
        to = _get(a, state[0], token)
        if to >= 0:
            state[0] = to
            length[0] += 1
            return
        if state[0] == 0:
            length[0] = 0
            return
        state[0] = a.states[state[0]].link
        length[0] = a.states[state[0]].length


cdef inline int32_t _part(const Automaton *a, int32_t state, int32_t length) noexcept nogil:
    """The state that holds the last ``length`` tokens of the contexts of ``state``."""
    while state > 0 and length <= a.states[a.states[state].link].length:
        state = a.states[state].link
    return state


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

    def extend(self, tokens not None, Py_ssize_t begin=0):
        """Append tokens[begin:] to the text.

        Args:
            tokens: IN list of int, or int32 [n] C-contiguous; ids >= 0. Copied.
            begin: first one to take.

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
        if n > CHUNK:
            with nogil:
                done = _push_all(&self.a, copy, n)
        else:
            done = _push_all(&self.a, copy, n)
        PyThread_release_lock(self.lock)
        free(copy)
        if done < n:
            raise MemoryError

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

    def draft(self, int n_max, int min_match=1, double factor=1.0, double offset=0.0, double p_min=0.1):
        """What is likely to follow the text, by what followed earlier occurrences of its end.

        For each end of the text that occurs elsewhere in it, the longest first: the most frequent next token, again
        and again, while the product of the frequencies is at least p_min, for at most ``factor * length + offset``
        tokens. The one with the highest sum of these products (the number of tokens expected to be right) is given.

        Args:
            n_max: most tokens, <= 1024.
            min_match: length of the shortest end to look at.
            factor, offset: how the limit grows with the length of the end.
            p_min: in (0, 1].

        Returns:
            tokens, their probabilities (of being right up to there), the sum of these, and the length of the end that
            they follow (of the longest one when there are no tokens).
        """
        _check(n_max, min_match, factor, offset, p_min)
        self._acquire()
        cdef int32_t state = self.a.states[self.a.tail].link
        # an end does not reach back into the document before
        cdef int32_t length = min(self.a.states[state].length if state > 0 else 0, self.a.n - self.a.start)
        state = _part(&self.a, state, length)
        _best(&self.a, state, length, n_max, min_match, factor, offset, p_min, self.best, self.trial)
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

    def extend(self, tokens not None, Py_ssize_t begin=0):
        """Go on with tokens[begin:]; args and errors as of ``SuffixIndex.extend``."""
        cdef Py_ssize_t n = 0, i
        cdef int32_t *copy = _take(tokens, begin, &n)
        self.index._acquire()
        self._settle()
        for i in range(n):
            _advance(&self.index.a, &self.state, &self.length, copy[i])
        PyThread_release_lock(self.index.lock)
        free(copy)

    def draft(self, int n_max, int min_match=1, double factor=1.0, double offset=0.0, double p_min=0.1):
        """As ``SuffixIndex.draft``, for the ends of the followed text."""
        _check(n_max, min_match, factor, offset, p_min)
        cdef SuffixIndex index = self.index
        index._acquire()
        self._settle()
        _best(&index.a, self.state, self.length, n_max, min_match, factor, offset, p_min, index.best, index.trial)
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
