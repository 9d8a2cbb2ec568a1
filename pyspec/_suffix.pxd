# cython: language_level=3
"""The automaton of ``_suffix.pyx``: states, edges, and the walks over them. No Python object, no lock."""

from libc.math cimport exp, log
from libc.stdint cimport INT32_MIN, int32_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

cdef enum:
    # tokens taken in between two checks of the room
    CHUNK = 256
    # suffix links followed to count an occurrence: only texts that repeat a few tokens over and over have more
    COUNT_DEPTH = 64
    # contexts tried for a draft, and children looked at for the most frequent one
    MAX_CONTEXTS = 4
    MAX_CHILDREN = 16
    # contexts that a confidence learns from at a token, the longest first
    LEARN_CONTEXTS = 2
    N_WEIGHTS = 4
    # longer matches are no surer than these
    MAX_LENGTH = 16
    MAX_DRAFT = 1024
    MAX_TOKENS = 1 << 28
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


cdef inline bint _reserve(Automaton *a, Py_ssize_t n_new) noexcept nogil:
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


cdef inline bint _grow_edges(Automaton *a, Py_ssize_t need) noexcept nogil:
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


cdef inline bint _push(Automaton *a, int32_t token) noexcept nogil:
    """Append one token; _reserve has made room for its states. False: no memory, nothing has changed."""
    cdef int32_t p = a.tail, q = -1, current, clone, i, v
    cdef int _depth
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
    for _depth in range(COUNT_DEPTH):
        if v <= 0:
            break
        a.states[v].count += 1
        a.states[v].last = a.n
        v = a.states[v].link
    return True


cdef inline Py_ssize_t _push_all(Automaton *a, const int32_t *tokens, Py_ssize_t n) noexcept nogil:
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


cdef struct Child:
    int32_t token
    int32_t to
    int32_t count      # times that it followed
    int32_t total      # times that anything did


cdef inline bint _likeliest(const Automaton *a, int32_t s, Child *best) noexcept nogil:
    """What followed state s most often, the latest of equals. False: nothing did."""
    cdef int32_t rest, i, c
    cdef int k = 0
    # the occurrence at the end of the text has nothing behind it
    best.total = a.states[s].count - (a.states[s].last == a.n)
    if s <= 0 or best.total <= 0 or a.states[s].token == INT32_MIN:
        return False
    best.to = a.states[s].to
    best.token = a.states[s].token
    best.count = a.states[best.to].count
    rest = best.total - best.count
    i = a.states[s].more
    while i >= 0 and best.count <= rest and k < MAX_CHILDREN:
        c = a.states[a.edges[i].to].count
        if c > best.count or (c == best.count and a.states[a.edges[i].to].last > a.states[best.to].last):
            best.to = a.edges[i].to
            best.token = a.edges[i].token
            best.count = c
        rest -= c
        i = a.edges[i].next
        k += 1
    # counts stop at COUNT_DEPTH, so a child may have more than its parent
    best.count = min(best.count, best.total)
    return True


cdef inline void _features(int32_t length, const Child *child, double *x) noexcept nogil:
    x[0] = 1.0
    x[1] = log(<double>min(length, MAX_LENGTH)) - 1.2
    x[2] = log((child.count + 0.4) / (child.total - child.count + 0.4))
    x[3] = log(<double>child.total)


cdef inline double _logistic(const double *w, const double *x) noexcept nogil:
    cdef double z = 0.0
    cdef int i
    for i in range(N_WEIGHTS):
        z += w[i] * x[i]
    return 1.0 / (1.0 + exp(-max(-12.0, min(12.0, z))))


cdef inline double _chance(const double *w, int32_t length, const Child *child) noexcept nogil:
    """How likely a continuation is; by its frequency alone where there are no weights."""
    cdef double x[N_WEIGHTS]
    if w == NULL:
        return <double>child.count / child.total
    _features(length, child, x)
    return _logistic(w, x)


cdef inline void _learn(const Automaton *a, int32_t s, int32_t length, int32_t token, double rate,
                        double *w) noexcept nogil:
    """One step of logistic regression for each of the contexts of a text that goes on with ``token``."""
    cdef double x[N_WEIGHTS]
    cdef double error
    cdef Child child
    cdef int _i, j
    for _i in range(LEARN_CONTEXTS):
        if s <= 0:
            break
        if _likeliest(a, s, &child) and child.token >= 0:
            _features(length, &child, x)
            error = (child.token == token) - _logistic(w, x)
            for j in range(N_WEIGHTS):
                w[j] += rate * error * x[j]
        s = a.states[s].link
        length = a.states[s].length if s > 0 else 0


cdef inline int _path(const Automaton *a, int32_t s, int32_t length, int budget, double p_min, const double *w,
                      int32_t *out, float *probs, double *score) noexcept nogil:
    """The most frequent continuation of state s, token by token, while its probability is at least p_min."""
    cdef double p = 1.0
    cdef int n = 0
    cdef bint found
    cdef Child child
    score[0] = 0.0
    while n < budget:
        found = _likeliest(a, s, &child)
        # where nothing has followed, a shorter context may have more to say
        while not found and child.total <= 0 and s > 0:
            s = a.states[s].link
            length = a.states[s].length
            found = _likeliest(a, s, &child)
        if not found or child.token < 0:
            break
        p *= _chance(w, length, &child)
        if p < p_min:
            break
        out[n] = child.token
        probs[n] = <float>p
        score[0] += p
        n += 1
        s = child.to
        length += 1
    return n


cdef struct Found:
    double score
    int n
    int32_t length
    int32_t tokens[MAX_DRAFT]
    float probs[MAX_DRAFT]


cdef inline void _best(const Automaton *a, int32_t state, int32_t length, int n_max, int min_match,
                       double factor, double offset, double p_min, const double *w, Found *best,
                       Found *trial) noexcept nogil:
    """The continuation with the highest expected length over the contexts of a state and its suffix links."""
    cdef int _i, j, budget
    cdef double limit
    best.score = 0.0
    best.n = 0
    best.length = length
    for _i in range(MAX_CONTEXTS):
        if state <= 0 or length < min_match:
            break
        limit = factor * length + offset
        budget = n_max if limit >= n_max else <int>limit
        # a shorter context has a lower limit, and the limit is the highest score there can be
        if budget < 1 or best.score >= budget:
            break
        trial.n = _path(a, state, length, budget, p_min, w, trial.tokens, trial.probs, &trial.score)
        if trial.score > best.score:
            best.score = trial.score
            best.n = trial.n
            best.length = length
            for j in range(trial.n):
                best.tokens[j] = trial.tokens[j]
                best.probs[j] = trial.probs[j]
        state = a.states[state].link
        length = a.states[state].length if state > 0 else 0


cdef inline void _advance(const Automaton *a, int32_t *state, int32_t *length, int32_t token) noexcept nogil:
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
