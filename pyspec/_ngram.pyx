"""Look-ups of n-grams in token histories that only grow; what a drafter calls once a step.

``NgramIndex`` is one sequence's index for ``ngram-simple``, ``NgramMap`` for ``ngram-map-k`` and ``ngram-map-k4v``;
``NgramPool`` is the pool that the sequences of ``ngram-mod`` share. Sizes, limits and rules are llama.cpp's
(``common/ngram-map``, ``common/ngram-mod``), so drafts are the same; only the time is not: a call costs what is new
since the last one, however long the history is.

A history is given as a list of all tokens, of which the last has not been evaluated; it is converted once.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memset

cdef extern from *:
    """
    /* llama.cpp's hashes: equal collisions are part of equal drafts */
    #define PYSPEC_MAP_FACTOR 2654435761u
    #define PYSPEC_POOL_FACTOR 6364136223846793005ull
    """
    const uint32_t MAP_FACTOR "PYSPEC_MAP_FACTOR"
    const uint64_t POOL_FACTOR "PYSPEC_POOL_FACTOR"

cdef enum:
    N_SLOTS = 262144     # table from n-gram hash to position (COMMON_NGRAM_HASH_MAP_SIZE)
    N_VALUES = 4         # continuations told apart for each n-gram (COMMON_NGRAM_MAX_VALUES)
    MAX_COUNT = 16380    # counts stop here (COMMON_NGRAM_MAX_VALUE_COUNT)
    MAX_PROBES = 64      # places tried before an n-gram is left out: bad hashes must not cost time
    MAX_SIZE = 1024      # longest n-gram and draft
    MAX_TOKENS = 2147483647


cdef class History:
    """Tokens of one sequence as a C array that grows."""

    cdef int32_t *t
    cdef Py_ssize_t n
    cdef Py_ssize_t capacity

    def __dealloc__(self):
        free(self.t)

    cdef int follow(self, list tokens) except -1:
        """Take over ``tokens[n:]``; the part before is known to be the same."""
        cdef Py_ssize_t n = len(tokens), i, capacity
        cdef int32_t *grown
        if n > MAX_TOKENS:
            raise ValueError(f"a history of {n} tokens is too long")
        if n > self.capacity:
            capacity = max(n, 2 * self.capacity, 1024)
            grown = <int32_t *> realloc(self.t, capacity * sizeof(int32_t))
            if grown is NULL:
                raise MemoryError()
            self.t, self.capacity = grown, capacity
        for i in range(self.n, n):
            self.t[i] = tokens[i]
        self.n = n
        return 0


cdef inline int _same(const int32_t *a, const int32_t *b, Py_ssize_t n) noexcept nogil:
    return a[0] == b[0] and memcmp(a, b, n * sizeof(int32_t)) == 0


cdef inline uint32_t _map_hash(const int32_t *t, Py_ssize_t n) noexcept nogil:
    cdef uint32_t h = 0
    cdef Py_ssize_t i
    for i in range(n):
        h = h * MAP_FACTOR + <uint32_t> t[i]
    return h


cdef inline uint32_t _mixed(uint32_t h) noexcept nogil:
    """The polynomial's low bits say little; these say more."""
    h ^= h >> 16
    h *= <uint32_t> 0x85EBCA6B
    h ^= h >> 13
    h *= <uint32_t> 0xC2B2AE35
    return h ^ (h >> 16)


cdef struct Place:
    uint32_t hash
    uint32_t start         # of the latest occurrence, + 1; 0: free


cdef class _Chained(History):
    """Links every position to the one before it that has the same n-gram."""

    cdef readonly Py_ssize_t size_n
    cdef uint32_t power         # of the hash's factor, for the token that leaves
    cdef Place *places
    cdef uint32_t *previous     # start + 1, 0: none
    cdef Py_ssize_t n_places, place_capacity, n_chained, previous_capacity

    def __dealloc__(self):
        free(self.places)
        free(self.previous)

    cdef int set_size(self, Py_ssize_t size_n) except -1:
        cdef Py_ssize_t _i
        if not 1 <= size_n <= MAX_SIZE:
            raise ValueError(f"size_n must be in [1, {MAX_SIZE}], got {size_n}")
        self.size_n = size_n
        self.power = 1
        for _i in range(size_n - 1):
            self.power *= MAP_FACTOR
        return 0

    cdef void forget(self) noexcept nogil:
        self.n = self.n_places = self.n_chained = 0
        if self.places is not NULL:
            memset(self.places, 0, self.place_capacity * sizeof(Place))

    cdef Py_ssize_t chain_bytes(self) noexcept nogil:
        return (
            self.capacity * sizeof(int32_t) + self.place_capacity * sizeof(Place)
            + self.previous_capacity * sizeof(uint32_t)
        )

    cdef int grow(self, list tokens) except -1:
        """Follow a history that may not become shorter."""
        if len(tokens) < self.n:
            raise ValueError(f"the history has {len(tokens)} tokens and had {self.n}")
        return self.follow(tokens)

    cdef int chain(self, Py_ssize_t end) except -1:
        """Link every position below ``end`` to the one before it that has the same n-gram."""
        cdef Py_ssize_t n = self.size_n, i, place, mask, _probe, capacity
        cdef uint32_t h
        cdef void *grown
        if end <= self.n_chained:
            return 0
        if end > self.previous_capacity:
            capacity = max(end, 2 * self.previous_capacity, 1024)
            grown = realloc(self.previous, capacity * sizeof(uint32_t))
            if grown is NULL:
                raise MemoryError()
            self.previous, self.previous_capacity = <uint32_t *> grown, capacity
        # room for all that are new, should they be different
        if 2 * (self.n_places + end - self.n_chained) > self.place_capacity:
            self.grow_places(self.n_places + end - self.n_chained)
        mask = self.place_capacity - 1
        h = _map_hash(self.t + self.n_chained, n)
        for i in range(self.n_chained, end):
            self.previous[i] = 0
            place = _mixed(h) & mask
            for _probe in range(MAX_PROBES):
                if self.places[place].start == 0:
                    self.places[place].hash = h
                    self.places[place].start = <uint32_t> (i + 1)
                    self.n_places += 1
                    break
                if self.places[place].hash == h and _same(self.t + self.places[place].start - 1, self.t + i, n):
                    self.previous[i] = self.places[place].start
                    self.places[place].start = <uint32_t> (i + 1)
                    break
                place = (place + 1) & mask
            if i + n < self.n:
                h = (h - <uint32_t> self.t[i] * self.power) * MAP_FACTOR + <uint32_t> self.t[i + n]
        self.n_chained = end
        return 0

    cdef int grow_places(self, Py_ssize_t wanted) except -1:
        cdef Py_ssize_t capacity = max(1024, self.place_capacity), i, place, mask
        while capacity < 3 * wanted:
            capacity *= 2
        cdef Place *grown = <Place *> calloc(capacity, sizeof(Place))
        if grown is NULL:
            raise MemoryError()
        mask = capacity - 1
        for i in range(self.place_capacity):
            if self.places[i].start:
                place = _mixed(self.places[i].hash) & mask
                while grown[place].start:
                    place = (place + 1) & mask
                grown[place] = self.places[i]
        free(self.places)
        self.places, self.place_capacity = grown, capacity
        return 0


@cython.final
cdef class NgramIndex(_Chained):
    """Finds the last tokens of a history earlier in it; for ``ngram-simple``.

    Args:
        size_n: length of the n-gram, 1 to 1024.
    """

    def __cinit__(self, Py_ssize_t size_n):
        self.set_size(size_n)

    @property
    def n_bytes(self):
        """Memory held, in bytes."""
        return self.chain_bytes()

    def clear(self):
        """Forget the history."""
        self.forget()

    def find(self, list tokens not None, Py_ssize_t n_times=1):
        """Start of the most recent earlier occurrence of the last ``size_n`` tokens.

        The places are llama.cpp's: two tokens follow at least, and start 0 is never found. The occurrence and the
        tokens looked up may overlap.

        Args:
            tokens: the whole history, not shorter than in the call before.
            n_times: so many occurrences must be there, each two tokens before the next at least.

        Returns:
            The start, or -1.

        Raises:
            OverflowError, TypeError: a token is no int32. ValueError: the history has become shorter.
        """
        cdef Py_ssize_t at, start, first = -1, _i
        self.grow(tokens)
        at = self.n - self.size_n
        if at < 0:
            return -1
        self.chain(at + 1)
        for _i in range(n_times):
            start = <Py_ssize_t> self.previous[at] - 1
            if start >= 0 and start == at - 1:
                start = <Py_ssize_t> self.previous[start] - 1
            if start < 1:
                return -1
            if first < 0:
                first = start
            at = start
        return first


cdef struct Key:
    uint32_t hash
    int32_t n_seen
    int32_t start          # of an occurrence
    int32_t counted        # continuations are counted up to the occurrence at this start
    int32_t value[N_VALUES]       # start of a continuation, 0: unused
    int32_t n_value[N_VALUES]
    int32_t n_accepted[N_VALUES]  # of its last draft


@cython.final
cdef class NgramMap(_Chained):
    """Where n-grams occurred, what followed them, and how much of it was accepted when it was proposed.

    A position enters the index only when ``size_n + size_m`` tokens follow it.

    Args:
        size_n: length of the n-gram looked up, 1 to 1024.
        size_m: most tokens proposed, 1 to 1024.
        key_only: True proposes what followed the occurrence found (``ngram-map-k``); ``min_hits`` has no meaning then.
            False counts up to four different continuations and proposes only if one is at least twice as frequent as
            the others together (``ngram-map-k4v``).
        min_hits: how often an n-gram must have been asked for with success, this time included.
    """

    cdef readonly Py_ssize_t size_m
    cdef readonly bint key_only
    cdef readonly int64_t min_hits
    cdef uint32_t *slots
    cdef Py_ssize_t n_begin, last_indexed
    cdef Key *keys
    cdef uint32_t *key_table
    cdef Py_ssize_t n_keys, key_capacity
    cdef uint32_t *found
    cdef Py_ssize_t found_capacity
    cdef Py_ssize_t last_key
    cdef int last_value

    def __cinit__(self, Py_ssize_t size_n, Py_ssize_t size_m, bint key_only, int64_t min_hits=1):
        self.set_size(size_n)
        if not 1 <= size_m <= MAX_SIZE:
            raise ValueError(f"size_m must be in [1, {MAX_SIZE}], got {size_m}")
        if min_hits < 1:
            raise ValueError(f"min_hits must be >= 1, got {min_hits}")
        self.size_m, self.key_only, self.min_hits = size_m, key_only, min_hits
        self.slots = <uint32_t *> calloc(N_SLOTS, sizeof(uint32_t))
        if self.slots is NULL:
            raise MemoryError()
        self.last_key = -1

    def __dealloc__(self):
        free(self.slots)
        free(self.keys)
        free(self.key_table)
        free(self.found)

    @property
    def n_bytes(self):
        """Memory held, in bytes."""
        return (
            N_SLOTS * sizeof(uint32_t) + self.chain_bytes()
            + self.key_capacity * (sizeof(Key) + 2 * sizeof(uint32_t)) + self.found_capacity * sizeof(uint32_t)
        )

    def begin(self, list tokens not None):
        """Start over with a prompt. Nothing is indexed yet."""
        self.forget()
        self.last_indexed = self.n_keys = 0
        self.last_key = -1
        memset(self.slots, 0, N_SLOTS * sizeof(uint32_t))
        if self.key_table is not NULL:
            memset(self.key_table, 0, 2 * self.key_capacity * sizeof(uint32_t))
        self.n_begin = 0
        self.follow(tokens)
        self.n_begin = self.n

    def draft(self, list tokens not None, Py_ssize_t n_max):
        """What may follow.

        Args:
            tokens: the whole history, not shorter than in the call before.
            n_max: most tokens wanted.

        Returns:
            list of at most min(n_max, size_m) tokens.

        Raises:
            OverflowError, TypeError: a token is no int32. ValueError: the history has become shorter.
        """
        cdef Py_ssize_t n = self.size_n, m = self.size_m, i
        cdef Py_ssize_t n_past, start = 0, found
        self.last_key = -1
        self.grow(tokens)
        n_past = self.n - 1
        if n_past < 2 * n + m:
            return []
        cdef int32_t *key = self.t + self.n - n
        cdef uint32_t h = _map_hash(key, n)
        cdef Py_ssize_t slot = self.slots[h & (N_SLOTS - 1)]
        if slot and slot < n_past - n - m - 1 and _same(self.t + slot, key, n):
            start = slot
        found = self.index(n_past, h, key)
        if not start:
            start = found
        if not start:
            return []
        cdef Py_ssize_t k = self.key_of(h, key, start)
        cdef int v = 0
        self.keys[k].n_seen = min(self.keys[k].n_seen + 1, MAX_COUNT)
        if not self.key_only:
            if self.keys[k].n_seen < self.min_hits:
                return []
            self.count(&self.keys[k], start)
            v = self.choose(&self.keys[k])
            if v < 0:
                return []
        self.last_key, self.last_value = k, v
        cdef Py_ssize_t n_draft = min(m, self.keys[k].n_accepted[v], max(n_max, 0))
        return [self.t[start + n + i] for i in range(n_draft)]

    def accept(self, Py_ssize_t n_accepted):
        """So many tokens of the last draft hold; the next draft for the same n-gram is not longer."""
        if self.last_key >= 0:
            self.keys[self.last_key].n_accepted[self.last_value] = <int32_t> max(0, min(n_accepted, self.size_m))

    cdef Py_ssize_t index(self, Py_ssize_t n_past, uint32_t h, const int32_t *key) except -1:
        """Index the positions that have become complete; returns where the key is among them, or 0.

        Those of the prompt come first, then those behind it; within each the latest wins, and an n-gram whose slot is
        taken does not get it. The positions between the two ranges are never indexed.
        """
        cdef Py_ssize_t n = self.size_n, m = self.size_m
        cdef Py_ssize_t end = n_past - n - m
        cdef Py_ssize_t prompt_end = min(self.n_begin - n - m, end) if self.n_begin > n + m + 1 else 0
        cdef Py_ssize_t last = self.last_indexed
        if not self.key_only:
            self.chain(end)
        cdef Py_ssize_t found = self.scan(last + 1, prompt_end, h, key)
        cdef Py_ssize_t behind = self.scan(max(self.n_begin, last) + 1, end, h, key)
        self.last_indexed = max(last, end - 1)
        return found or behind

    cdef Py_ssize_t scan(self, Py_ssize_t first, Py_ssize_t end, uint32_t h, const int32_t *key) noexcept nogil:
        cdef Py_ssize_t n = self.size_n, i, found = 0
        cdef uint32_t hash_
        cdef uint32_t *slot
        if first >= end:
            return 0
        hash_ = _map_hash(self.t + first, n)
        for i in range(first, end):
            slot = &self.slots[hash_ & (N_SLOTS - 1)]
            if slot[0] == 0 or slot[0] >= first:
                slot[0] = <uint32_t> i
            if hash_ == h and _same(self.t + i, key, n):
                found = i
            hash_ = (hash_ - <uint32_t> self.t[i] * self.power) * MAP_FACTOR + <uint32_t> self.t[i + n]
        return found

    cdef Py_ssize_t key_of(self, uint32_t h, const int32_t *key, Py_ssize_t start) except -1:
        """Number of the n-gram's entry; made if there is none."""
        cdef Py_ssize_t i, capacity, mask
        cdef void *grown
        cdef Key *k
        cdef int v
        if self.n_keys == self.key_capacity:
            capacity = max(64, 2 * self.key_capacity)
            grown = realloc(self.keys, capacity * sizeof(Key))
            if grown is NULL:
                raise MemoryError()
            self.keys = <Key *> grown
            grown = calloc(2 * capacity, sizeof(uint32_t))
            if grown is NULL:
                raise MemoryError()
            free(self.key_table)
            self.key_table, self.key_capacity = <uint32_t *> grown, capacity
            for i in range(self.n_keys):
                self.key_table[self.free_key_place(self.keys[i].hash)] = <uint32_t> (i + 1)
        mask = 2 * self.key_capacity - 1
        i = _mixed(h) & mask
        while self.key_table[i]:
            k = &self.keys[self.key_table[i] - 1]
            if k.hash == h and _same(self.t + k.start, key, self.size_n):
                return self.key_table[i] - 1
            i = (i + 1) & mask
        k = &self.keys[self.n_keys]
        memset(k, 0, sizeof(Key))
        k.hash, k.start = h, <int32_t> start
        for v in range(N_VALUES):
            k.n_accepted[v] = <int32_t> self.size_m
        self.n_keys += 1
        self.key_table[i] = <uint32_t> self.n_keys
        return self.n_keys - 1

    cdef Py_ssize_t free_key_place(self, uint32_t h) noexcept nogil:
        cdef Py_ssize_t mask = 2 * self.key_capacity - 1, i = _mixed(h) & mask
        while self.key_table[i]:
            i = (i + 1) & mask
        return i

    cdef int count(self, Key *k, Py_ssize_t start) except -1:
        """Count what followed the n-gram at its occurrences from the last one counted up to ``start``.

        The last one counted is counted again, as llama.cpp does.
        """
        cdef Py_ssize_t n = self.size_n, n_found = 0, at = start, capacity, i
        cdef void *grown
        cdef int32_t follow
        cdef int v
        while at >= k.counted:
            if n_found == self.found_capacity:
                capacity = max(64, 2 * self.found_capacity)
                grown = realloc(self.found, capacity * sizeof(uint32_t))
                if grown is NULL:
                    raise MemoryError()
                self.found, self.found_capacity = <uint32_t *> grown, capacity
            self.found[n_found] = <uint32_t> at
            n_found += 1
            at = <Py_ssize_t> self.previous[at] - 1
            if at < 0:
                break
        for i in range(n_found - 1, -1, -1):
            follow = <int32_t> (self.found[i] + n)
            for v in range(N_VALUES):
                if k.value[v] == 0:
                    k.value[v] = follow
                elif not _same(self.t + follow, self.t + k.value[v], self.size_m):
                    continue
                k.n_value[v] = min(k.n_value[v] + 1, MAX_COUNT)
                break
        k.counted = <int32_t> start
        return 0

    cdef int choose(self, const Key *k) noexcept nogil:
        """The most frequent continuation, the first of equals; -1: the others together are too frequent."""
        cdef int best = 0, v
        cdef int64_t others = 0
        for v in range(1, N_VALUES):
            if k.n_value[v] > k.n_value[best]:
                best = v
        for v in range(N_VALUES):
            if v != best:
                others += k.n_value[v]
        return -1 if others and k.n_value[best] < 2 * others else best


cdef class _Member(History):
    """One sequence's part in a pool."""

    cdef Py_ssize_t n_added     # position up to which its n-grams were added
    cdef Py_ssize_t n_draft     # length of its last draft
    cdef int n_low              # drafts in a row of which less than a quarter held


@cython.final
cdef class NgramPool:
    """For every hash of ``n_match`` tokens the token that followed last; one for all sequences.

    Hashes are not verified: a draft is a guess. When a quarter of the pool is used as a sequence begins, and after five
    drafts of a sequence in a row of which less than a quarter held, it is emptied.

    Args:
        n_match: tokens that are hashed, 1 to 1024.
        n_max: most tokens proposed, 1 to 1024.
        n_min: shorter proposals are not made, 0 to n_max.
        n_seq: sequences, numbered from 0.
        n_entries: size of the pool, a power of two; 4 bytes each.
    """

    cdef readonly Py_ssize_t n_match
    cdef readonly Py_ssize_t n_max
    cdef readonly Py_ssize_t n_min
    cdef readonly Py_ssize_t n_entries
    cdef readonly Py_ssize_t n_used
    cdef readonly Py_ssize_t n_reset
    cdef int32_t *entries
    cdef int32_t *scratch
    cdef uint64_t power
    cdef list members

    def __cinit__(
        self, Py_ssize_t n_match, Py_ssize_t n_max, Py_ssize_t n_min, Py_ssize_t n_seq, Py_ssize_t n_entries=1 << 22
    ):
        if not 1 <= n_match <= MAX_SIZE:
            raise ValueError(f"n_match must be in [1, {MAX_SIZE}], got {n_match}")
        if not 1 <= n_max <= MAX_SIZE:
            raise ValueError(f"n_max must be in [1, {MAX_SIZE}], got {n_max}")
        if not 0 <= n_min <= n_max:
            raise ValueError(f"n_min must be in [0, n_max = {n_max}], got {n_min}")
        if n_seq < 1:
            raise ValueError(f"n_seq must be >= 1, got {n_seq}")
        if n_entries < 1 or n_entries & (n_entries - 1):
            raise ValueError(f"n_entries must be a power of two, got {n_entries}")
        self.n_match, self.n_max, self.n_min, self.n_entries = n_match, n_max, n_min, n_entries
        self.entries = <int32_t *> malloc(n_entries * sizeof(int32_t))
        self.scratch = <int32_t *> malloc((n_match + n_max) * sizeof(int32_t))
        if self.entries is NULL or self.scratch is NULL:
            raise MemoryError()
        cdef Py_ssize_t _i
        self.power = 1
        for _i in range(n_match - 1):
            self.power *= POOL_FACTOR
        self.members = [_Member() for _ in range(n_seq)]
        self.reset()
        self.n_reset = 0

    def __dealloc__(self):
        free(self.entries)
        free(self.scratch)

    @property
    def occupancy(self):
        """Share of the entries in use."""
        return self.n_used / <double> self.n_entries

    def reset(self):
        """Empty the pool."""
        memset(self.entries, 0xFF, self.n_entries * sizeof(int32_t))
        self.n_used = 0
        self.n_reset += 1

    def begin(self, Py_ssize_t seq, list tokens not None):
        """A sequence starts over with a prompt, which is added to the pool. True if that was then emptied."""
        cdef _Member s = self.member(seq)
        s.n = s.n_added = s.n_draft = 0
        s.follow(tokens)
        if s.n < self.n_match:
            return False
        s.n_added = s.n - self.n_match
        self.add(s.t, 0, s.n_added)
        if self.occupancy > 0.25:
            self.reset()
            return True
        return False

    def draft(self, Py_ssize_t seq, list tokens not None, Py_ssize_t n_max):
        """What may follow.

        Args:
            seq: the sequence.
            tokens: its whole history.
            n_max: most tokens wanted; a longer proposal is cut, and must have ``n_min`` tokens before that.

        Returns:
            list of tokens.
        """
        cdef _Member s = self.member(seq)
        cdef Py_ssize_t n = self.n_match, n_past, i
        cdef uint64_t h = 0, mask = self.n_entries - 1
        cdef int32_t token
        s.n_draft = 0
        if len(tokens) < s.n:
            raise ValueError(f"the history has {len(tokens)} tokens and had {s.n}")
        s.follow(tokens)
        n_past = s.n - 1
        if n_past < n:
            return []
        if s.n_added + 32 < n_past:
            self.add(s.t, s.n_added, n_past - n)
            s.n_added = n_past - n
        for i in range(n):
            self.scratch[i] = s.t[s.n - n + i]
            h = h * POOL_FACTOR + <uint64_t> self.scratch[i]
        # more than n_min need not be looked up if less is wanted
        cdef Py_ssize_t n_draft = 0, n_end = min(self.n_max, max(n_max, self.n_min))
        while n_draft < n_end:
            token = self.entries[h & mask]
            if token < 0:
                break
            self.scratch[n + n_draft] = token
            h = (h - <uint64_t> self.scratch[n_draft] * self.power) * POOL_FACTOR + <uint64_t> token
            n_draft += 1
        if n_draft < min(self.n_min, self.n_max):
            return []
        s.n_draft = min(n_draft, max(n_max, 0))
        return [self.scratch[n + i] for i in range(s.n_draft)]

    def accept(self, Py_ssize_t seq, Py_ssize_t n_accepted):
        """So many tokens of the sequence's last draft hold. True if the pool was emptied."""
        cdef _Member s = self.member(seq)
        if s.n_draft == 0:
            return False
        if 4 * n_accepted >= s.n_draft:
            s.n_low = 0
            return False
        s.n_low += 1
        if s.n_low < 5:
            return False
        self.reset()
        s.n_low = 0
        s.n_added = 0
        return True

    def end(self, Py_ssize_t seq):
        """Free a sequence's history; what it has added stays."""
        cdef _Member old = self.member(seq), new = _Member()
        new.n_low = old.n_low
        self.members[seq] = new

    cdef _Member member(self, Py_ssize_t seq):
        if not 0 <= seq < len(self.members):
            raise IndexError(f"sequence {seq} of {len(self.members)}")
        return <_Member> self.members[seq]

    cdef void add(self, const int32_t *t, Py_ssize_t first, Py_ssize_t end) noexcept nogil:
        """Add the n-grams that start at ``first`` to ``end`` - 1, each with the token behind it."""
        cdef Py_ssize_t n = self.n_match, i
        cdef uint64_t h = 0, mask = self.n_entries - 1
        cdef int32_t *entry
        if first >= end:
            return
        for i in range(first, first + n):
            h = h * POOL_FACTOR + <uint64_t> t[i]
        for i in range(first, end):
            entry = &self.entries[h & mask]
            if entry[0] < 0:
                self.n_used += 1
            entry[0] = t[i + n]
            h = (h - <uint64_t> t[i] * self.power) * POOL_FACTOR + <uint64_t> t[i + n]
