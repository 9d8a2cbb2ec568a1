"""What passes and drafts cost, learned from their times while text is generated.

All costs are in units of a pass of one row *now*: a machine that gets slower altogether changes the unit, not the
decisions. :class:`Curve` holds cost by size (rows of a pass, tokens of a draft), :class:`PassCost` the unit and one
curve for each range of context lengths and number of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

__all__ = ["Curve", "PassCost"]

#: Samples of one size that the median is taken over.
_N_SAMPLES = 7
#: A size that was not seen in so many samples of others is forgotten: it may have been measured in a bad moment, and a
#: size that looks expensive is not chosen again.
_N_FORGET = 384
#: How much a new sample moves the unit.
_ALPHA = 0.15
#: A pass that takes so many times longer or shorter than expected is an outlier, unless the next ones are, too.
_OUTLIER = 1.8
_N_OUTLIERS = 3
#: A first measurement counts for no more than so many times what was expected.
_TRUST = 1.1
#: Passes without one that nothing was drafted for, after which other passes only follow the machine's speed.
_N_ANCHOR = 48
#: Sizes that were not measured, between two that were and are no farther apart, are taken for cheap.
_GAP = 4
#: How steep costs are taken to be beyond the largest size that was measured, compared with below it.
_HOPE = 0.5
#: A row's share of a prompt's pass is what one more row costs, before anything else is known: of passes of so many rows
#: and more; and no more than so many passes of one row, because a first pass holds work that is done once.
_N_PROMPT = 16
_SLOPE_MAX = 1.0
#: Largest size with a place of its own.
_N_MAX = 512


class Curve:
    """Cost by size: medians where it was measured, something between them elsewhere, never falling.

    Args:
        first, at_first: the smallest size, and its cost, which is known.
        slope: cost of one more, until something larger was measured.

    Attributes:
        values: cost by size; grown by :meth:`need`.
    """

    def __init__(self, first: int, at_first: float, slope: float) -> None:
        self.first = first
        self.slope = slope
        self.values = [at_first] * (first + 1)
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._last: dict[int, int] = {}
        self._n = 0
        self.need(first + 8)

    def copy(self) -> Curve:
        """The same costs, which the next measurements outweigh."""
        other = Curve(self.first, self.values[self.first], self.slope)
        for size, median in self._medians.items():
            other._samples[size] = deque([median], _N_SAMPLES)
            other._medians[size] = median
            other._last[size] = 0
        other.need(len(self.values) - 1)
        other._draw()
        return other

    def start(self, slope: float) -> None:
        """Another cost of one more, for as long as nothing was measured."""
        self.slope = slope
        self._draw()

    def need(self, size: int) -> None:
        """Have values up to ``size``."""
        if size >= len(self.values):
            self.values.extend([0.0] * (min(size, _N_MAX) + 1 - len(self.values)))
            self._draw()

    def at(self, size: int) -> float:
        """Cost of any size."""
        values = self.values
        if size < len(values):
            return values[size]
        if size <= _N_MAX:
            self.need(size)
            return values[size]
        return values[-1] * size / (len(values) - 1)

    def count(self, size: int) -> int:
        """Samples of this size that are remembered."""
        return len(self._samples.get(size, ()))

    @property
    def measured(self) -> dict[int, float]:
        """Cost of the sizes that were measured."""
        return dict(sorted(self._medians.items()))

    def add(self, size: int, cost: float) -> None:
        """One measurement."""
        if not self.first < size <= _N_MAX:
            return
        self._n += 1
        self._last[size] = self._n
        samples = self._samples.get(size)
        if samples is None:
            samples = self._samples[size] = deque(maxlen=_N_SAMPLES)
        samples.append(cost)
        if len(samples) > 2:
            median = sorted(samples)[len(samples) // 2]
        else:
            # A single bad moment must not make a size look dear for ever: it would not be measured again. And the first
            # pass of a size holds work that is done once; passes of two rows were seen to take twice as long then.
            median = min(samples)
            if len(samples) == 1:
                median = min(median, _TRUST * self.at(size))
        before = self._medians.get(size)
        if before is None or abs(median - before) > 0.02 * before:
            self._medians[size] = median
            if size >= len(self.values):
                self.need(size)
            else:
                self._draw()
        if self._n % _N_FORGET == 0:
            self._forget()

    def _forget(self) -> None:
        old = [s for s, last in self._last.items() if self._n - last >= _N_FORGET]
        for size in old:
            del self._samples[size], self._medians[size], self._last[size]
        if old:
            self._draw()

    def _draw(self) -> None:
        values = self.values
        x0, y0 = self.first, values[self.first]
        # a larger size that was cheaper is the better witness: what disturbs a measurement only adds to it
        least = float("inf")
        points: list[tuple[int, float]] = []
        for x1, y1 in sorted(self._medians.items(), reverse=True):
            least = max(min(least, y1), y0)
            points.append((x1, least))
        slope = self.slope
        for x1, y1 in reversed(points):
            slope = (y1 - y0) / (x1 - x0)
            if x1 - x0 <= _GAP:
                # kernels work on rows in blocks, so cost may rise in a step: hope that it does so late, and measure
                slope *= 0.25
            for x in range(x0 + 1, min(x1, len(values))):
                values[x] = y0 + slope * (x - x0)
            if x1 < len(values):
                values[x1] = y1
            x0, y0 = x1, y1
        if self._medians:
            # beyond the largest one: less steep than on the way there. A guess too high would never be put right,
            # because what looks dear is not tried; one too low is, by the first pass of that size.
            slope = max(_HOPE * (y0 - values[self.first]) / (x0 - self.first), 1e-3)
        for x in range(x0 + 1, len(values)):
            values[x] = y0 + slope * (x - x0)


class PassCost:
    """Time of the target's passes by rows.

    Attributes:
        unit_ns: a pass of one row now; 0 before the first pass.
        curve: relative cost by rows for the present key.
    """

    #: Cost of one more row where not even a prompt has told: between a GPU, where rows are nearly free, and a CPU.
    SLOPE = 0.15

    def __init__(self) -> None:
        self.unit_ns = 0.0
        self.curve = Curve(1, 1.0, self.SLOPE)
        self._kinds: dict[Hashable, tuple[Curve, float]] = {}
        self._key: Hashable = None
        self._outliers: list[float] = []
        self._n_since = 0
        # of a prompt's row, the least that was seen
        self._row_ns = 0.0

    def prefilled(self, n_rows: int, ns: float) -> None:
        """A pass over a prompt, whose rows are cheaper than those of a smaller pass, if anything."""
        if n_rows >= _N_PROMPT:
            row_ns = ns / n_rows
            self._row_ns = min(self._row_ns, row_ns) if self._row_ns else row_ns

    def select(self, key: Hashable) -> None:
        """Passes are of this kind from now on (length of the context, threads); a new kind starts like the last."""
        if key != self._key:
            self._kinds[self._key] = self.curve, self.unit_ns
            known = self._kinds.get(key)
            if known is not None:
                self.curve, self.unit_ns = known
            elif self._key is not None:
                self.curve = self.curve.copy()
            self._key = key

    def known(self, n_rows: int) -> bool:
        """Whether passes of this size can be compared with others."""
        return bool(self.unit_ns) and (n_rows == 1 or self.curve.count(n_rows) > 1)

    def add(self, n_rows: int, ns: float, is_plain: bool) -> float:
        """One pass; returns its time in units.

        Args:
            is_plain: nothing was drafted. Other passes are measured against these: if they are too far back, sizes
                that are known already say how fast the machine is, and are not measured by it.
        """
        curve = self.curve
        expected = curve.at(n_rows)
        if not self.unit_ns:
            self.unit_ns = ns / expected
            if self._row_ns:
                self.curve.start(min(_SLOPE_MAX, self._row_ns / self.unit_ns))
            return expected
        self._n_since = 0 if is_plain else self._n_since + 1
        ratio = ns / (expected * self.unit_ns)
        count = curve.count(n_rows)
        if n_rows == 1 or count > 2:
            if not 1 / _OUTLIER < ratio < _OUTLIER:
                self._outliers.append(ratio)
                if len(self._outliers) < _N_OUTLIERS:
                    return expected
                self.unit_ns *= sorted(self._outliers)[_N_OUTLIERS // 2]
                ratio = 1.0
            else:
                self.unit_ns *= 1 + _ALPHA * (ratio - 1)
            self._outliers.clear()
        if count < _N_SAMPLES or self._n_since < _N_ANCHOR:
            curve.add(n_rows, ns / self.unit_ns)
        return expected * ratio
