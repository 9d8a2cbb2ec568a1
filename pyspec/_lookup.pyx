"""Counts of what followed n-grams of 1 to 4 tokens: the caches of ``ngram-cache``, and their file format.

Rules, limits and file format are llama.cpp's (``common/ngram-cache``). An update costs the same however much is held,
and so does a look-up: the most frequent continuation of an n-gram is kept up to date, not searched.
"""

cimport cython
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint32_t, uint64_t, uint8_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy

cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
    #define PYSPEC_PREFETCH(p) __builtin_prefetch(p)
    #else
    #define PYSPEC_PREFETCH(p) ((void) (p))
    #endif
    """
    void PREFETCH "PYSPEC_PREFETCH"(const void *) noexcept nogil

cdef enum:
    N_MAX = 4        # longest n-gram (LLAMA_NGRAM_MAX)
    N_STATIC = 2     # n-gram of the static level (LLAMA_NGRAM_STATIC)
    PAD = -1         # fills an n-gram up to N_MAX (LLAMA_TOKEN_NULL)
    MAX_NODES = 1 << 29   # the upper half of a hash tells the places
    MAX_DRAFT = 64

#: By n-gram length: continuations that must have been counted, and the share of the most frequent one in percent.
cdef int[N_MAX] LAX_SIZE = [2, 2, 1, 1]
cdef int[N_MAX] LAX_PERCENT = [66, 50, 50, 50]
cdef int[N_MAX] STRICT_SIZE = [4, 3, 2, 2]
cdef int[N_MAX] STRICT_PERCENT = [75, 66, 66, 66]


cdef struct Node:
    int32_t key[N_MAX]
    int32_t token         # the continuation that came first; most n-grams have no other
    int32_t count
    int32_t best_count
    uint32_t best         # 0: the first continuation, else number of the entry
    uint32_t first, last  # list of the other continuations, 0: none
    uint32_t n            # continuations
    int64_t total


cdef struct Entry:
    uint32_t node
    uint32_t next
    int32_t token
    int32_t count


cdef inline uint64_t _hash(int32_t a, int32_t b, int32_t c, int32_t d) noexcept nogil:
    cdef uint64_t h = (<uint64_t> <uint32_t> a << 32 | <uint32_t> b) * <uint64_t> 0x9E3779B97F4A7C15u
    h ^= h >> 32
    h = (h ^ (<uint64_t> <uint32_t> c << 32 | <uint32_t> d)) * <uint64_t> 0xD6E8FEB86659FD93u
    return h ^ (h >> 32)


@cython.final
cdef class LookupCache:
    """From n-gram to the tokens that followed it, with counts.

    Of continuations that were counted equally often the one that came last is proposed (in llama.cpp the order is that
    of the C++ library's hash table: the same for two of them).
    """

    cdef Node *nodes
    cdef Entry *entries         # from 1
    cdef uint64_t *node_table   # upper half of the hash, number + 1; a place is given by the hash's first bits
    cdef int shift              # of a hash, to its place
    cdef uint32_t *entry_table
    cdef Py_ssize_t n_nodes, node_capacity, n_entries, entry_capacity

    def __dealloc__(self):
        free(self.nodes)
        free(self.entries)
        free(self.node_table)
        free(self.entry_table)

    def __len__(self):
        """N-grams held."""
        return self.n_nodes

    @property
    def n_continuations(self):
        """Pairs of n-gram and continuation held."""
        return self.n_nodes + self.n_entries

    @property
    def n_bytes(self):
        """Memory held, in bytes."""
        return (
            self.node_capacity * (sizeof(Node) + 2 * sizeof(uint64_t))
            + self.entry_capacity * (sizeof(Entry) + 2 * sizeof(uint32_t))
        )

    def update(
        self, const int32_t[::1] tokens not None, Py_ssize_t begin, Py_ssize_t end, int n_min=1, int n_max=N_MAX
    ):
        """Count ``tokens[begin:end]`` as continuations of the n-grams before them.

        Args:
            tokens: int32 [>= end], borrowed. Tokens before ``begin`` are read as parts of n-grams.
            n_min, n_max: lengths of n-grams, 1 to 4.

        Raises:
            ValueError: a range is out of bounds, or a token is negative; nothing was counted.
        """
        cdef Py_ssize_t i
        cdef int done
        if not 0 <= begin <= end <= tokens.shape[0]:
            raise ValueError(f"tokens[{begin}:{end}] of {tokens.shape[0]}")
        if not 1 <= n_min <= n_max <= N_MAX:
            raise ValueError(f"lengths of n-grams must be in [1, {N_MAX}], got {n_min} to {n_max}")
        for i in range(max(0, begin - n_max), end):
            if tokens[i] < 0:
                raise ValueError(f"token {tokens[i]} at {i} is negative")
        if begin == end:
            return
        with nogil:
            done = self.count_all(&tokens[0], begin, end, n_min, n_max)
        if done < 0:
            raise MemoryError()

    cdef int count_all(
        self, const int32_t *t, Py_ssize_t begin, Py_ssize_t end, int n_min, int n_max
    ) noexcept nogil:
        cdef int32_t[2][N_MAX][N_MAX] keys
        cdef uint64_t[2][N_MAX] hashes
        cdef Py_ssize_t i
        cdef int size, j, at
        for i in range(begin, end + 1):
            if self.reserve(N_MAX, N_MAX) < 0:
                return -1
            # the places of one token come into the cache while those of the token before it are worked on
            at = i & 1
            if i < end:
                for size in range(n_min, <int> min(<Py_ssize_t> n_max, i) + 1):
                    for j in range(N_MAX):
                        keys[at][size - 1][j] = t[i - size + j] if j < size else PAD
                    hashes[at][size - 1] = _hash(
                        keys[at][size - 1][0], keys[at][size - 1][1], keys[at][size - 1][2], keys[at][size - 1][3]
                    )
                    PREFETCH(&self.node_table[hashes[at][size - 1] >> self.shift])
            if i > begin:
                for size in range(n_min, <int> min(<Py_ssize_t> n_max, i - 1) + 1):
                    self.add(keys[1 - at][size - 1], hashes[1 - at][size - 1], t[i - 1], 1)
        return 0

    cdef int reserve(self, Py_ssize_t n_nodes, Py_ssize_t n_entries) noexcept nogil:
        """Room for so many more; -1: no memory, nothing has changed."""
        cdef Py_ssize_t capacity, i, j, mask
        cdef void *grown
        cdef uint64_t h
        cdef int shift
        cdef uint64_t *node_table
        cdef uint32_t *entry_table
        if self.n_nodes + n_nodes > self.node_capacity:
            capacity = max(<Py_ssize_t> 1024, self.node_capacity)
            while capacity < self.n_nodes + n_nodes:
                capacity *= 2
            if capacity > MAX_NODES:
                return -1
            grown = realloc(self.nodes, capacity * sizeof(Node))
            if grown is NULL:
                return -1
            self.nodes = <Node *> grown
            node_table = <uint64_t *> calloc(2 * capacity, sizeof(uint64_t))
            if node_table is NULL:
                return -1
            mask = 2 * capacity - 1
            shift = 64
            while (<Py_ssize_t> 1 << (64 - shift)) < 2 * capacity:
                shift -= 1
            # in the order of places, so old and new table are gone through from front to back
            for i in range(2 * self.node_capacity):
                h = self.node_table[i]
                if h:
                    j = h >> shift
                    while node_table[j]:
                        j = (j + 1) & mask
                    node_table[j] = h
            free(self.node_table)
            self.node_table, self.node_capacity, self.shift = node_table, capacity, shift
        if self.n_entries + 1 + n_entries > self.entry_capacity:
            capacity = max(<Py_ssize_t> 1024, self.entry_capacity)
            while capacity < self.n_entries + 1 + n_entries:
                capacity *= 2
            if capacity > MAX_NODES:
                return -1
            grown = realloc(self.entries, capacity * sizeof(Entry))
            if grown is NULL:
                return -1
            self.entries = <Entry *> grown
            entry_table = <uint32_t *> calloc(2 * capacity, sizeof(uint32_t))
            if entry_table is NULL:
                return -1
            mask = 2 * capacity - 1
            for i in range(1, self.n_entries + 1):
                j = _hash(<int32_t> self.entries[i].node, self.entries[i].token, 0, 0) & mask
                while entry_table[j]:
                    j = (j + 1) & mask
                entry_table[j] = <uint32_t> i
            free(self.entry_table)
            self.entry_table, self.entry_capacity = entry_table, capacity
        return 0

    cdef Py_ssize_t place_of(self, const int32_t *key, uint64_t h) noexcept nogil:
        """Place of an n-gram in the table, or the free place where it belongs."""
        cdef Py_ssize_t mask = 2 * self.node_capacity - 1, j = h >> self.shift
        cdef const Node *node
        while self.node_table[j]:
            if (self.node_table[j] ^ h) >> 32 == 0:
                node = &self.nodes[(self.node_table[j] & 0xFFFFFFFFu) - 1]
                if (
                    node.key[0] == key[0] and node.key[1] == key[1]
                    and node.key[2] == key[2] and node.key[3] == key[3]
                ):
                    break
            j = (j + 1) & mask
        return j

    cdef const Node *find(self, const int32_t *key) noexcept nogil:
        """The node of an n-gram, or NULL."""
        if self.n_nodes == 0:
            return NULL
        cdef Py_ssize_t j = self.place_of(key, _hash(key[0], key[1], key[2], key[3]))
        return &self.nodes[(self.node_table[j] & 0xFFFFFFFFu) - 1] if self.node_table[j] else NULL

    cdef int add(self, const int32_t *key, uint64_t h, int32_t token, int32_t count) noexcept nogil:
        """Count a continuation; there must be room. Returns 1 if it is new."""
        cdef Py_ssize_t place = self.place_of(key, h), e
        cdef uint32_t number
        cdef Node *node
        cdef int32_t *counter
        if self.node_table[place] == 0:
            node = &self.nodes[self.n_nodes]
            memcpy(node.key, key, N_MAX * sizeof(int32_t))
            node.token, node.count, node.best_count, node.total = token, count, count, count
            node.best = node.first = node.last = 0
            node.n = 1
            self.n_nodes += 1
            self.node_table[place] = (h & <uint64_t> 0xFFFFFFFF00000000u) | <uint64_t> self.n_nodes
            return 1
        number = <uint32_t> (self.node_table[place] & 0xFFFFFFFFu) - 1
        node = &self.nodes[number]
        cdef int is_new = 0
        if node.token == token:
            e, counter = 0, &node.count
        else:
            place = self.entry_place(number, token)
            e = self.entry_table[place]
            if e == 0:
                self.n_entries += 1
                e = self.n_entries
                self.entry_table[place] = <uint32_t> e
                self.entries[e].node, self.entries[e].token = number, token
                self.entries[e].next = 0
                self.entries[e].count = 0
                if node.last:
                    self.entries[node.last].next = <uint32_t> e
                else:
                    node.first = <uint32_t> e
                node.last = <uint32_t> e
                node.n += 1
                is_new = 1
            counter = &self.entries[e].count
        count = min(count, <int32_t> INT32_MAX - counter[0])
        counter[0] += count
        node.total += count
        if counter[0] > node.best_count or (counter[0] == node.best_count and <uint32_t> e >= node.best):
            node.best_count, node.best = counter[0], <uint32_t> e
        return is_new

    cdef Py_ssize_t entry_place(self, uint32_t node, int32_t token) noexcept nogil:
        cdef Py_ssize_t mask = 2 * self.entry_capacity - 1, j = _hash(<int32_t> node, token, 0, 0) & mask
        cdef uint32_t e = self.entry_table[j]
        while e and not (self.entries[e].node == node and self.entries[e].token == token):
            j = (j + 1) & mask
            e = self.entry_table[j]
        return j

    cdef int32_t count_of(self, const Node *node, int32_t token, uint32_t *order) noexcept nogil:
        """How often a continuation was counted, and its place in the order of coming; 0: never."""
        order[0] = 0
        if node.token == token:
            return node.count
        if node.first == 0:
            return 0
        order[0] = self.entry_table[self.entry_place(<uint32_t> (node - self.nodes), token)]
        return self.entries[order[0]].count if order[0] else 0

    cdef int32_t best_token(self, const Node *node) noexcept nogil:
        return node.token if node.best == 0 else self.entries[node.best].token

    def merge(self, LookupCache other not None):
        """Add all counts of another cache; ``other`` is not changed.

        Raises:
            ValueError: a cache cannot be merged into itself. MemoryError: nothing was added.
        """
        cdef Py_ssize_t i
        cdef uint32_t e
        cdef const Node *node
        cdef uint64_t h
        cdef int done
        if other is self:
            raise ValueError("a cache cannot be merged into itself")
        with nogil:
            done = self.reserve(other.n_nodes, other.n_nodes + other.n_entries)
            if done == 0:
                for i in range(other.n_nodes):
                    node = &other.nodes[i]
                    h = _hash(node.key[0], node.key[1], node.key[2], node.key[3])
                    self.add(node.key, h, node.token, node.count)
                    e = node.first
                    while e:
                        self.add(node.key, h, other.entries[e].token, other.entries[e].count)
                        e = other.entries[e].next
        if done < 0:
            raise MemoryError()

    @staticmethod
    def from_bytes(const uint8_t[::1] data not None, int64_t n_vocab=INT32_MAX):
        """The cache that a file holds.

        For each n-gram: four int32 tokens (-1 fills up), int32 number of continuations, and for each its token and
        count; in the machine's byte order. An empty file is an empty cache.

        Args:
            data: uint8 [n], the file. n_vocab: ids must be smaller.

        Raises:
            ValueError: damaged, or ids out of range; says where.
        """
        cdef LookupCache cache = LookupCache()
        cdef Py_ssize_t n = data.shape[0], at = 0, i, _i
        cdef bint known
        cdef int32_t[N_MAX + 1] head
        cdef int32_t[2] pair
        cdef uint64_t h
        cdef int size
        while at < n:
            if n - at < <Py_ssize_t> sizeof(head):
                raise ValueError(f"the file ends inside an n-gram, at byte {n}")
            memcpy(head, &data[at], sizeof(head))
            size = 0
            while size < N_MAX and head[size] != PAD:
                size += 1
            for i in range(N_MAX):
                if i < max(size, 1) and not 0 <= head[i] < n_vocab:
                    raise ValueError(f"token id {head[i]} at byte {at + 4 * i} is not in [0, {n_vocab})")
                if i > size and head[i] != PAD:
                    raise ValueError(f"an n-gram with a gap at byte {at + 4 * i}")
            at += sizeof(head)
            if head[N_MAX] < 1:
                raise ValueError(f"an n-gram with {head[N_MAX]} continuations at byte {at - 4}")
            if head[N_MAX] > (n - at) // <Py_ssize_t> sizeof(pair):
                raise ValueError(f"the file ends inside the {head[N_MAX]} continuations of an n-gram, at byte {n}")
            if cache.reserve(1, head[N_MAX]) < 0:
                raise MemoryError()
            h = _hash(head[0], head[1], head[2], head[3])
            # of an n-gram or a continuation that is there twice llama.cpp takes the first
            known = cache.find(head) is not NULL
            for _i in range(head[N_MAX]):
                memcpy(pair, &data[at], sizeof(pair))
                if not 0 <= pair[0] < n_vocab:
                    raise ValueError(f"token id {pair[0]} at byte {at} is not in [0, {n_vocab})")
                if pair[1] < 1:
                    raise ValueError(f"a count of {pair[1]} at byte {at + 4}")
                at += sizeof(pair)
                if not known and not cache.has(head, pair[0]):
                    cache.add(head, h, pair[0], pair[1])
        return cache

    cdef bint has(self, const int32_t *key, int32_t token) noexcept nogil:
        cdef const Node *node = self.find(key)
        cdef uint32_t order
        return node is not NULL and self.count_of(node, token, &order) > 0

    def to_bytes(self):
        """The file that holds this cache; see :meth:`from_bytes`."""
        cdef Py_ssize_t size = 4 * ((N_MAX + 1) * self.n_nodes + 2 * (self.n_nodes + self.n_entries)), i
        cdef bytearray out = bytearray(size)
        cdef uint8_t *at = <uint8_t *> <char *> out
        cdef uint32_t e
        cdef const Node *node
        for i in range(self.n_nodes):
            node = &self.nodes[i]
            memcpy(at, node.key, sizeof(node.key))
            memcpy(at + sizeof(node.key), &node.n, 4)
            at += sizeof(node.key) + 4
            memcpy(at, &node.token, 4)
            memcpy(at + 4, &node.count, 4)
            at += 8
            e = node.first
            while e:
                memcpy(at, &self.entries[e].token, 4)
                memcpy(at + 4, &self.entries[e].count, 4)
                at += 8
                e = self.entries[e].next
        return bytes(out)

    def items(self):
        """Yield (n-gram, {continuation: count}), in the order in which they came."""
        cdef Py_ssize_t i
        cdef uint32_t e
        for i in range(self.n_nodes):
            counts = {self.nodes[i].token: self.nodes[i].count}
            e = self.nodes[i].first
            while e:
                counts[self.entries[e].token] = self.entries[e].count
                e = self.entries[e].next
            yield tuple([self.nodes[i].key[k] for k in range(N_MAX) if self.nodes[i].key[k] != PAD]), counts


cdef int32_t _choose(
    LookupCache primary, LookupCache fixed, const int32_t *end, Py_ssize_t n_known, const Node *part,
    const int *min_size, const int *min_percent,
) noexcept nogil:
    """The next token by one level, from the longest n-gram down; -1: none is sure enough.

    Args:
        end: behind the last known token; ``n_known`` tokens before it can be read.
        part: what the static level ``fixed`` knows, or NULL: its counts weigh a hundredfold.
    """
    cdef int32_t[N_MAX] key
    cdef const Node *node
    cdef int size, j
    cdef int64_t product, most
    cdef int32_t token, n_most, n
    cdef uint32_t e, order, latest
    for size in range(<int> min(<Py_ssize_t> N_MAX, n_known), 0, -1):
        for j in range(N_MAX):
            key[j] = end[j - size] if j < size else PAD
        node = primary.find(key)
        if node is NULL:
            continue
        token, n_most = primary.best_token(node), node.best_count
        if part is not NULL and node.n > 1:
            # the most frequent one counts singly, unless the static level knows it
            n = fixed.count_of(part, token, &order)
            most = <int64_t> n_most * (100 * <int64_t> n if n else 1)
            latest = node.best
            if node.n <= part.n:
                e = 0
                while True:
                    n = fixed.count_of(part, primary.entries[e].token if e else node.token, &order)
                    if n:
                        j = primary.entries[e].count if e else node.count
                        product = 100 * <int64_t> n * j
                        if product > most or (product == most and e >= latest):
                            token, n_most, most, latest = primary.entries[e].token if e else node.token, j, product, e
                    e = primary.entries[e].next if e else node.first
                    if e == 0:
                        break
            else:
                e = 0
                while True:
                    n = primary.count_of(node, fixed.entries[e].token if e else part.token, &order)
                    if n:
                        product = 100 * <int64_t> (fixed.entries[e].count if e else part.count) * n
                        if product > most or (product == most and order >= latest):
                            token, n_most, most = fixed.entries[e].token if e else part.token, n, product
                            latest = order
                    e = fixed.entries[e].next if e else part.first
                    if e == 0:
                        break
        if node.total < min_size[size - 1] or 100 * <int64_t> n_most < min_percent[size - 1] * node.total:
            continue
        return token
    return -1


def draft(
    LookupCache context not None, LookupCache dynamic not None, LookupCache fixed not None,
    const int32_t[::1] tokens not None, Py_ssize_t n_tokens, Py_ssize_t n_draft,
):
    """What may follow, from three levels in this order.

    Args:
        context: counts of this text. dynamic: of earlier texts; has to be surer. fixed: the static level, of n-grams of
            two tokens: decides between continuations that the others know, and proposes where they know none.
        tokens: int32 [>= n_tokens], borrowed.
        n_draft: most tokens wanted, at most 64 are proposed.

    Returns:
        list of tokens.
    """
    cdef int32_t[N_MAX + MAX_DRAFT] text
    cdef Py_ssize_t n_known, n_first, i
    cdef int32_t token
    cdef int32_t[N_MAX] key
    cdef const Node *part
    if not 0 <= n_tokens <= tokens.shape[0]:
        raise ValueError(f"n_tokens must be in [0, {tokens.shape[0]}], got {n_tokens}")
    if n_tokens < N_STATIC:
        return []
    n_draft = min(n_draft, MAX_DRAFT)
    n_first = n_known = min(n_tokens, N_MAX)
    for i in range(n_known):
        text[i] = tokens[n_tokens - n_known + i]
    while n_known - n_first < n_draft:
        key[0], key[1], key[2], key[3] = text[n_known - 2], text[n_known - 1], PAD, PAD
        part = fixed.find(key)
        token = _choose(context, fixed, text + n_known, n_known, part, LAX_SIZE, LAX_PERCENT)
        if token < 0:
            token = _choose(dynamic, fixed, text + n_known, n_known, part, STRICT_SIZE, STRICT_PERCENT)
        if token < 0 and part is not NULL and part.total >= LAX_SIZE[N_STATIC - 1]:
            if 100 * <int64_t> part.best_count >= LAX_PERCENT[N_STATIC - 1] * part.total:
                token = fixed.best_token(part)
        if token < 0:
            break
        text[n_known] = token
        n_known += 1
    return [text[i] for i in range(n_first, n_known)]
