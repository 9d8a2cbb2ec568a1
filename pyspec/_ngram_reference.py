"""The look-ups of ``_ngram`` and ``_lookup`` in plain Python: same names, results and errors, the rules said slowly.

The oracle of the parity tests. Searches go through the whole history; nothing is indexed but what the rules name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["LookupCache", "NgramIndex", "NgramMap", "NgramPool", "draft"]

_I32 = npt.NDArray[np.int32]

_N_SLOTS = 262144
_N_VALUES = 4
_MAX_COUNT = 16380
_MAX_SIZE = 1024


def _limit(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")


class NgramIndex:
    """See ``_ngram.NgramIndex``."""

    def __init__(self, size_n: int) -> None:
        _limit("size_n", size_n, 1, _MAX_SIZE)
        self.size_n = size_n
        self._n = 0

    def clear(self) -> None:
        self._n = 0

    def find(self, tokens: list[int], n_times: int = 1) -> int:
        if len(tokens) < self._n:
            raise ValueError(f"the history has {len(tokens)} tokens and had {self._n}")
        self._n = len(tokens)
        n = self.size_n
        first, at = -1, len(tokens) - n
        for _ in range(n_times):
            at = next((j for j in range(at - 2, 0, -1) if tokens[j : j + n] == tokens[-n:]), -1)
            if at < 0:
                return -1
            first = at if first < 0 else first
        return first


class _Key:
    def __init__(self, tokens: list[int], size_m: int) -> None:
        self.tokens = tokens
        self.n_seen = 0
        self.counted = 0
        self.value = [0] * _N_VALUES
        self.n_value = [0] * _N_VALUES
        self.n_accepted = [size_m] * _N_VALUES


class NgramMap:
    """See ``_ngram.NgramMap``."""

    def __init__(self, size_n: int, size_m: int, key_only: bool, min_hits: int = 1) -> None:
        _limit("size_n", size_n, 1, _MAX_SIZE)
        _limit("size_m", size_m, 1, _MAX_SIZE)
        if min_hits < 1:
            raise ValueError(f"min_hits must be >= 1, got {min_hits}")
        self.size_n, self.size_m, self.key_only, self.min_hits = size_n, size_m, key_only, min_hits
        self.begin([])

    def begin(self, tokens: list[int]) -> None:
        self._n = self._n_begin = len(tokens)
        self._last_indexed = 0
        self._slots: dict[int, int] = {}
        self._keys: list[_Key] = []
        self._last: tuple[_Key, int] | None = None

    def draft(self, tokens: list[int], n_max: int) -> list[int]:
        n, m = self.size_n, self.size_m
        self._last = None
        if len(tokens) < self._n:
            raise ValueError(f"the history has {len(tokens)} tokens and had {self._n}")
        self._n = len(tokens)
        past = tokens[:-1]
        n_past = len(past)
        if n_past < 2 * n + m:
            return []
        wanted = tokens[-n:]
        start = self._slots.get(self._slot(wanted), 0)
        if not (start and start < n_past - n - m - 1 and past[start : start + n] == wanted):
            start = 0
        new = self._new(n_past)
        if not start:
            start = next((j for j in new if tokens[j : j + n] == wanted), 0)
        for j in new:
            self._slots.setdefault(self._slot(tokens[j : j + n]), j)
        self._last_indexed = max(self._last_indexed, n_past - n - m - 1)
        if not start:
            return []
        key = next((k for k in self._keys if k.tokens == wanted), None)
        if key is None:
            key = _Key(wanted, m)
            self._keys.append(key)
        key.n_seen = min(key.n_seen + 1, _MAX_COUNT)
        best = 0
        if not self.key_only:
            if key.n_seen < self.min_hits:
                return []
            self._count(key, past, start)
            best = max(range(_N_VALUES), key=lambda v: (key.n_value[v], -v))
            others = sum(key.n_value) - key.n_value[best]
            if others and key.n_value[best] < 2 * others:
                return []
        self._last = key, best
        n_draft = min(m, key.n_accepted[best], max(n_max, 0))
        return past[start + n :][:n_draft]

    def accept(self, n_accepted: int) -> None:
        if self._last:
            key, value = self._last
            key.n_accepted[value] = max(0, min(n_accepted, self.size_m))

    def _new(self, n_past: int) -> list[int]:
        """Positions to index, in order of precedence."""
        n, m, last = self.size_n, self.size_m, self._last_indexed
        top = n_past - n - m - 1
        prompt = range(min(self._n_begin - n - m - 1, top), last, -1) if self._n_begin > n + m + 1 else range(0)
        return [*prompt, *range(top, max(self._n_begin, last), -1)]

    @staticmethod
    def _slot(ngram: list[int]) -> int:
        h = 0
        for token in ngram:
            h = (h * 2654435761 + token) % 2**32
        return h % _N_SLOTS

    def _count(self, key: _Key, past: list[int], start: int) -> None:
        n, m = self.size_n, self.size_m
        for i in range(key.counted, start + 1):
            if past[i : i + n] != key.tokens:
                continue
            for v in range(_N_VALUES):
                if key.value[v] == 0:
                    key.value[v] = i + n
                if past[i + n : i + n + m] == past[key.value[v] : key.value[v] + m]:
                    key.n_value[v] = min(key.n_value[v] + 1, _MAX_COUNT)
                    break
        key.counted = start


class NgramPool:
    """See ``_ngram.NgramPool``."""

    def __init__(self, n_match: int, n_max: int, n_min: int, n_seq: int, n_entries: int = 1 << 22) -> None:
        _limit("n_match", n_match, 1, _MAX_SIZE)
        _limit("n_max", n_max, 1, _MAX_SIZE)
        if not 0 <= n_min <= n_max:
            raise ValueError(f"n_min must be in [0, n_max = {n_max}], got {n_min}")
        if n_seq < 1:
            raise ValueError(f"n_seq must be >= 1, got {n_seq}")
        if n_entries < 1 or n_entries & (n_entries - 1):
            raise ValueError(f"n_entries must be a power of two, got {n_entries}")
        self.n_match, self.n_max, self.n_min, self.n_entries = n_match, n_max, n_min, n_entries
        self.n_reset = 0
        self._entries: dict[int, int] = {}
        self._n, self._added, self._n_draft, self._n_low = ([0] * n_seq for _ in range(4))

    @property
    def n_used(self) -> int:
        return len(self._entries)

    @property
    def occupancy(self) -> float:
        return self.n_used / self.n_entries

    def reset(self) -> None:
        self._entries.clear()
        self.n_reset += 1

    def _index(self, ngram: Sequence[int]) -> int:
        h = 0
        for token in ngram:
            h = (h * 6364136223846793005 + token) % 2**64
        return h % self.n_entries

    def _add(self, tokens: list[int], first: int, end: int) -> None:
        for i in range(first, end):
            self._entries[self._index(tokens[i : i + self.n_match])] = tokens[i + self.n_match]

    def begin(self, seq: int, tokens: list[int]) -> bool:
        self._check(seq)
        self._n[seq] = len(tokens)
        self._added[seq] = self._n_draft[seq] = 0
        if len(tokens) < self.n_match:
            return False
        self._added[seq] = len(tokens) - self.n_match
        self._add(tokens, 0, self._added[seq])
        if self.occupancy > 0.25:
            self.reset()
            return True
        return False

    def draft(self, seq: int, tokens: list[int], n_max: int) -> list[int]:
        self._check(seq)
        self._n_draft[seq] = 0
        if len(tokens) < self._n[seq]:
            raise ValueError(f"the history has {len(tokens)} tokens and had {self._n[seq]}")
        self._n[seq] = len(tokens)
        n, n_past = self.n_match, len(tokens) - 1
        if n_past < n:
            return []
        if self._added[seq] + 32 < n_past:
            self._add(tokens, self._added[seq], n_past - n)
            self._added[seq] = n_past - n
        known = tokens[-n:]
        while len(known) < n + self.n_max:
            token = self._entries.get(self._index(known[-n:]))
            if token is None:
                break
            known.append(token)
        if len(known) - n < self.n_min:
            return []
        draft = known[n:][: max(n_max, 0)]
        self._n_draft[seq] = len(draft)
        return draft

    def accept(self, seq: int, n_accepted: int) -> bool:
        self._check(seq)
        if not self._n_draft[seq]:
            return False
        self._n_low[seq] = self._n_low[seq] + 1 if n_accepted / self._n_draft[seq] < 0.25 else 0
        if self._n_low[seq] < 5:
            return False
        self.reset()
        self._n_low[seq] = self._added[seq] = 0
        return True

    def end(self, seq: int) -> None:
        self._check(seq)
        self._n[seq] = self._added[seq] = self._n_draft[seq] = 0

    def _check(self, seq: int) -> None:
        if not 0 <= seq < len(self._n):
            raise IndexError(f"sequence {seq} of {len(self._n)}")


#: Of 1- to 4-grams: continuations that must have been counted, and the share of the most frequent one in percent.
_LAX = ((2, 66), (2, 50), (1, 50), (1, 50))
_STRICT = ((4, 75), (3, 66), (2, 66), (2, 66))


class LookupCache:
    """See ``_lookup.LookupCache``."""

    def __init__(self) -> None:
        self.parts: dict[tuple[int, ...], dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def n_continuations(self) -> int:
        return sum(map(len, self.parts.values()))

    def update(self, tokens: _I32, begin: int, end: int, n_min: int = 1, n_max: int = 4) -> None:
        if not 0 <= begin <= end <= len(tokens):
            raise ValueError(f"tokens[{begin}:{end}] of {len(tokens)}")
        if not 1 <= n_min <= n_max <= 4:
            raise ValueError(f"lengths of n-grams must be in [1, 4], got {n_min} to {n_max}")
        text = tokens.tolist()
        for i in range(max(0, begin - n_max), end):
            if text[i] < 0:
                raise ValueError(f"token {text[i]} at {i} is negative")
        for i in range(begin, end):
            for size in range(n_min, min(n_max, i) + 1):
                self._add(tuple(text[i - size : i]), text[i], 1)

    def _add(self, ngram: tuple[int, ...], token: int, count: int) -> None:
        part = self.parts.setdefault(ngram, {})
        part[token] = min(part.get(token, 0) + count, 2**31 - 1)

    def merge(self, other: LookupCache) -> None:
        if other is self:
            raise ValueError("a cache cannot be merged into itself")
        for ngram, part in other.parts.items():
            for token, count in part.items():
                self._add(ngram, token, count)

    @staticmethod
    def from_bytes(data: bytes, n_vocab: int = 2**31 - 1) -> LookupCache:
        cache = LookupCache()
        values = struct.unpack(f"={len(data) // 4}i", data[: len(data) // 4 * 4])
        at = 0
        while at < len(values):
            if len(values) - at < 5:
                raise ValueError(f"the file ends inside an n-gram, at byte {len(data)}")
            key, n = values[at : at + 4], values[at + 4]
            size = key.index(-1) if -1 in key else 4
            if not size or not all(0 <= t < n_vocab for t in key[:size]):
                raise ValueError(f"token id in {key} at byte {4 * at} is not in [0, {n_vocab})")
            if any(t != -1 for t in key[size:]):
                raise ValueError(f"an n-gram with a gap at byte {4 * at}")
            at += 5
            if n < 1:
                raise ValueError(f"an n-gram with {n} continuations at byte {4 * at - 4}")
            if 2 * n > len(values) - at:
                raise ValueError(f"the file ends inside the {n} continuations of an n-gram, at byte {len(data)}")
            part: dict[int, int] = {}
            for i in range(at, at + 2 * n, 2):
                if not 0 <= values[i] < n_vocab:
                    raise ValueError(f"token id {values[i]} at byte {4 * i} is not in [0, {n_vocab})")
                if values[i + 1] < 1:
                    raise ValueError(f"a count of {values[i + 1]} at byte {4 * i + 4}")
                part.setdefault(values[i], values[i + 1])
            cache.parts.setdefault(key[:size], part)
            at += 2 * n
        if len(data) % 4:
            raise ValueError(f"the file ends inside an n-gram, at byte {len(data)}")
        return cache

    def to_bytes(self) -> bytes:
        out = []
        for ngram, part in self.parts.items():
            out += [*ngram, *[-1] * (4 - len(ngram)), len(part)]
            for token, count in part.items():
                out += [token, count]
        return struct.pack(f"={len(out)}i", *out)

    def items(self) -> Iterator[tuple[tuple[int, ...], dict[int, int]]]:
        yield from self.parts.items()


def _choose(
    primary: LookupCache, text: list[int], fixed: dict[int, int], limits: tuple[tuple[int, int], ...]
) -> int | None:
    for size in range(min(4, len(text)), 0, -1):
        part = primary.parts.get(tuple(text[-size:]))
        if part is None:
            continue
        # of equals the one that came last
        best = max(reversed(part), key=lambda t: part[t] * 100 * fixed[t] if t in fixed else part[t])
        n_all = sum(part.values())
        if n_all >= limits[size - 1][0] and 100 * part[best] >= limits[size - 1][1] * n_all:
            return best
    return None


def draft(
    context: LookupCache, dynamic: LookupCache, fixed: LookupCache, tokens: _I32, n_tokens: int, n_draft: int
) -> list[int]:
    """See ``_lookup.draft``."""
    if not 0 <= n_tokens <= len(tokens):
        raise ValueError(f"n_tokens must be in [0, {len(tokens)}], got {n_tokens}")
    text: list[int] = tokens[:n_tokens].tolist()
    if len(text) < 2:
        return []
    while len(text) - n_tokens < min(n_draft, 64):
        part = fixed.parts.get(tuple(text[-2:]), {})
        token = _choose(context, text, part, _LAX)
        if token is None:
            token = _choose(dynamic, text, part, _STRICT)
        if token is None and part:
            best = max(reversed(part), key=part.__getitem__)
            if sum(part.values()) >= 2 and 100 * part[best] >= 50 * sum(part.values()):
                token = best
        if token is None:
            break
        text.append(token)
    return text[n_tokens:]
