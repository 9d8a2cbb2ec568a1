"""The controller behind ``speculation="auto"``: who drafts, how much of it is verified, or nothing. See docs/auto.md.

A token more costs what a larger pass takes longer, and what drafting it takes; it gains, with the probability that it
is right, the time of a token. Everything is measured while generating: :mod:`.cost` has the times, :mod:`.belief` the
probabilities. Look-ups cost next to nothing, so they are asked at every step, and what they propose is compared with
the text even when it is not verified: that they turn good is seen without paying. A drafter that costs something is
asked while asking it pays, is parked when it does not, and is tried again now and then, at a bounded price.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING

from ..stats import ControlStats
from .belief import Belief, Mood, Trust
from .cost import Curve, PassCost

if TYPE_CHECKING:
    from ..drafters.base import Drafter
    from ..drafters.chain import DrafterChain
    from ..types import DraftRequest, F32Array, I32Array

__all__ = ["AutoController"]

#: Share of the time that trying drafters may lose, and how many passes of it can be saved up.
_PRICE = 0.005
_PRICE_SAVED = 2.0
#: Tokens until a parked drafter is tried again: at first, and at most.
_WAIT, _WAIT_MAX = 6, 32
#: How fast the value of asking follows: of a sequence, and of a drafter over all sequences.
_ALPHA_SEQ, _ALPHA_ALL = 0.2, 0.04
#: Value of asking a drafter that nobody asked yet, in passes.
_HOPE = 0.1
#: Asked at least so often before it is parked.
_N_TRIES = 3
#: Nothing longer is drafted, or verified, than twice what was measured already; at first:
_REACH = 8
#: Tokens that the decision to draft another one looks ahead.
_AHEAD = 5
#: The rate of the last few steps, with so much left of it after each.
_RATE_DECAY = 0.85
#: After so many tokens without being asked, a draft's time holds a lot of catching up: not its price.
_N_GAP = 12


class _Track:
    """A drafter, and what is known of it over all sequences."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name = drafter.name
        joint = drafter.joint_probs
        self.belief: Belief | Trust = Trust(joint) if drafter.calibrated else Belief(drafter.cheap, joint)
        self.cost = Curve(0, 0.0, 0.1)
        self.value = _HOPE
        self.n_asked = 0
        # longest draft to ask for: what it costs is learned from shorter ones
        self.reach = _REACH
        # rate at which a further token is right, given those before it: what the next one may bring
        self.next_right, self.next_all = 1.5, 3.0


class _View:
    """A drafter, as one sequence sees it."""

    __slots__ = ("at", "classes", "draft", "gap", "hopeful", "mood", "n_asked", "parked", "pause", "value", "wait")

    def __init__(self, track: _Track) -> None:
        self.mood = Mood()
        # a proposal on its way to be compared with the text
        self.draft: Sequence[int] = ()
        self.classes: Sequence[int] = ()
        self.at = 0
        self.value = track.value
        self.n_asked = 0
        self.parked = track.n_asked >= _N_TRIES and track.value < 0
        self.pause = _WAIT
        self.wait = _WAIT // 2
        self.gap = 0
        self.hopeful = False

    def propose(self, draft: Sequence[int], classes: Sequence[int]) -> None:
        self.draft, self.classes, self.at = draft, classes, 0


class _Offer:
    """The best proposal for a request so far."""

    __slots__ = ("chances", "classes", "draft", "net", "q", "track", "view")

    def __init__(self) -> None:
        self.track: _Track | None = None
        self.view: _View | None = None
        self.draft: list[int] = []
        # what tokens that were drawn were drawn from: to choose among them would change the distribution of the text
        self.q: list[tuple[I32Array, F32Array]] = []
        self.classes: list[int] = []
        self.chances: list[float] = []
        self.net = 0.0


class _More:
    """Whether one more token is worth drafting: called by the drafter with each token's probability."""

    __slots__ = ("_chance", "_controller", "_mood", "_n", "_track", "stopped")

    def __init__(self, controller: AutoController, track: _Track, mood: Mood) -> None:
        self._controller, self._track, self._mood = controller, track, mood
        self._chance = 1.0
        self._n = 0
        self.stopped = False

    def __call__(self, prob: float) -> bool:
        track, c = self._track, self._controller
        n = self._n
        self._chance *= track.belief.chance_at(n, prob, self._mood)
        self._n = n = n + 1
        # the cost of rows may rise in steps: look a few tokens ahead
        rate = track.next_right / track.next_all
        likely, gain = self._chance, 0.0
        drafts, rows = track.cost, c.cost.curve
        base, worth = c.n_seq + n, c.worth
        price = drafts.at(n) + (0.0 if c.padded else rows.at(base))
        self.stopped = True
        for k in range(1, _AHEAD + 1):
            likely *= rate
            gain += likely
            if gain * worth > drafts.at(n + k) + (0.0 if c.padded else rows.at(base + k)) - price:
                self.stopped = False
                break
        return not self.stopped


class AutoController:
    """See the module. Implements ``Controller``; deterministic given the times.

    Args:
        padded: every pass has the same number of rows whatever is drafted (exact mode), so that rows cost nothing.
        clock: nanoseconds.

    Attributes:
        stats: what was chosen and why; :meth:`publish` brings its estimates up to date.
        cost: time of passes. worth: time of a token now, in passes of one row. n_seq: sequences of this step.
        n_threads: threads of the target; passes with another number have costs of their own.
    """

    def __init__(self, *, padded: bool = False, clock: Callable[[], int] = perf_counter_ns) -> None:
        self.padded = padded
        self.stats = ControlStats()
        self.cost = PassCost()
        self.worth = self._floor = 1.0
        self.n_seq = 1
        self.n_threads = 0
        self._clock = clock
        self._tracks: list[_Track] = []
        self._known: dict[str, _Track] = {}
        self._cheap: list[tuple[int, _Track]] = []
        self._costly: list[tuple[int, _Track]] = []
        self._views: dict[int, list[_View]] = {}
        self._allowance = _PRICE_SAVED / 2
        self._reach = _REACH
        self._spent = 0.0
        self._kind = -1
        self._n_emitted = self._n_drafted = 0
        self._chain: DrafterChain | None = None
        self._recent_tokens = self._recent_time = 0.0

    # -- the engine's calls --

    def begin(self, seq: int) -> None:
        """See :class:`Controller`."""
        views = self._views[seq] = [_View(t) for t in self._tracks]
        for i, track in self._costly:
            self._rest(seq, track, views[i])

    def prefilled(self, n_rows: int, ns: int) -> None:
        """See :class:`Controller`."""
        self.cost.prefilled(n_rows, ns)

    def draft(self, chain: DrafterChain, requests: Sequence[DraftRequest], n_seq: int) -> dict[int, Drafter]:
        """See :class:`Controller`."""
        if not self._tracks:
            self._meet(chain)
        self.n_seq = n_seq
        self._spent = 0.0
        self._n_emitted = self._n_drafted = 0
        if not requests:
            self.stats.n_nothing += 1
            return {}
        kind = (requests[0].n_past * n_seq >> 9).bit_length() + 64 * self.n_threads
        if kind != self._kind:
            self._kind = kind
            self.cost.select(kind)
        if not self.padded and not self.cost.known(n_seq):
            # what drafts are compared with
            self.stats.n_measuring += 1
            return {}
        floor = self.cost.curve.at(n_seq) / n_seq
        rate = self._recent_time / self._recent_tokens if self._recent_tokens else floor
        self._floor, self.worth = floor, min(floor, rate)
        views = self._views
        rows = [views.get(r.seq) or self._new(r.seq) for r in requests]
        offers: list[_Offer | None] = [None] * len(requests)
        for i, track in self._cheap:
            chain.ask(track.drafter, requests)
            for j, request in enumerate(requests):
                if request.draft:
                    offers[j] = self._offer(request, track, rows[j][i], offers[j])
        for i, track in self._costly:
            self._ask(chain, track, i, requests, rows, offers)
        found = [(r, o) for r, o in zip(requests, offers, strict=True) if o is not None and o.chances]
        if not found:
            self.stats.n_nothing += 1
            return {}
        return self._choose(found)

    def accept(self, seq: int, n_draft: int, n_accepted: int, emitted: Sequence[int]) -> None:
        """See :class:`Controller`. Every proposal on its way is compared with what was written."""
        n = len(emitted)
        self._n_emitted += n
        self._n_drafted += n_draft
        tracks = self._tracks
        for i, view in enumerate(self._views.get(seq, ())):
            view.wait -= n
            view.gap += n
            draft = view.draft
            if draft:
                track = tracks[i]
                # what is so unlikely that it was not weighed is not compared
                at, end = view.at, len(view.classes)
                for token in emitted:
                    right = draft[at] == token
                    track.belief.add(view.classes[at], right, view.mood)
                    if at:
                        track.next_right = track.next_right * 0.98 + right
                        track.next_all = track.next_all * 0.98 + 1.0
                    at += 1
                    if not right or at == end:
                        view.draft = ()
                        break
                view.at = at

    def passed(self, n_rows: int, ns: int) -> None:
        """See :class:`Controller`."""
        units = self.cost.add(n_rows, ns, self._n_drafted == 0) + self._spent
        self._reach = max(self._reach, 2 * (n_rows - self.n_seq))
        self._recent_tokens = self._recent_tokens * _RATE_DECAY + self._n_emitted
        self._recent_time = self._recent_time * _RATE_DECAY + units
        self._allowance = min(_PRICE_SAVED, self._allowance + _PRICE * units)
        self.stats.n_steps += 1

    def inherit(self, previous: AutoController) -> None:
        """Take over what another controller has learned of drafters of the same names; costs are measured anew."""
        self._known = {t.name: t for t in previous._tracks} or previous._known

    def publish(self) -> ControlStats:
        """The counts, with the present estimates."""
        stats, unit = self.stats, self.cost.unit_ns / 1000
        stats.row_us = unit
        stats.pass_us = {1: unit, **{n: c * unit for n, c in self.cost.curve.measured.items()}}
        stats.drafters = {
            t.name: {
                "asked": t.n_asked,
                "value": t.value,
                "draft_us": {n: c * unit for n, c in t.cost.measured.items()},
                "right_by_confidence": t.belief.rates(),
                "parked": sum(views[i].parked for views in list(self._views.values())),
            }
            for i, t in enumerate(self._tracks)
        }
        return stats

    # -- inside --

    def _meet(self, chain: DrafterChain) -> None:
        self._chain = chain
        self._tracks = [_Track(d) for d in chain.drafters]
        for track in self._tracks:
            known = self._known.get(track.name)
            drafter = track.drafter
            if known is not None and (known.drafter.cheap, known.drafter.calibrated) == (
                drafter.cheap,
                drafter.calibrated,
            ):
                track.belief, track.value, track.n_asked = known.belief, known.value, known.n_asked
                track.next_right, track.next_all = known.next_right, known.next_all
        pairs = list(enumerate(self._tracks))
        self._cheap = [p for p in pairs if p[1].drafter.cheap]
        self._costly = [p for p in pairs if not p[1].drafter.cheap]
        for seq in self._views:
            self._views[seq] = [_View(t) for t in self._tracks]

    def _new(self, seq: int) -> list[_View]:
        views = self._views[seq] = [_View(t) for t in self._tracks]
        return views

    def _offer(self, request: DraftRequest, track: _Track, view: _View, best: _Offer | None) -> _Offer:
        """Take a proposal out of the request; returns the better one of it and ``best``."""
        draft, probs = request.draft, request.probs
        offer = _Offer()
        offer.track, offer.view, offer.draft, offer.q = track, view, draft, request.q
        request.draft, request.probs, request.q = [], [], []
        offer.classes, offer.chances = track.belief.weigh(len(draft), probs, view.mood)
        if offer.q:
            if not offer.chances:
                offer.chances = [0.0]
            n, values = len(draft), self.cost.curve
            offer.net = sum(offer.chances) * self._floor
            if not self.padded:
                offer.net -= values.at(self.n_seq + n) - values.at(self.n_seq)
            return offer
        if not view.draft:
            # compared with the text even if it is not verified
            view.propose(draft, offer.classes)
        offer.net = self._cut(offer.chances, self.n_seq)[1]
        return best if best is not None and best.net >= offer.net else offer

    def _cut(self, chances: Sequence[float], base: int) -> tuple[int, float]:
        """How many tokens to verify in a pass that has ``base`` rows already, and what that gains, in passes.

        How many: as long as a token brings more than the row costs, at what a token is worth at the present speed. What
        that gains is compared with drafting nothing at all, where tokens come slower and are worth more.
        """
        if self.padded:
            return len(chances), sum(chances) * self._floor
        worth = self.worth
        chances = chances[: self._reach]
        curve = self.cost.curve
        curve.need(base + len(chances))
        values = curve.values
        if base + len(chances) >= len(values):
            chances = chances[: max(0, len(values) - 1 - base)]
        start = values[base] if chances else 0.0
        gain = best = best_gain = 0.0
        n = 0
        for k, chance in enumerate(chances, 1):
            gain += chance
            net = gain * worth - values[base + k] + start
            if net > best:
                best, best_gain, n = net, gain, k
        return n, best_gain * self._floor - values[base + n] + start if n else 0.0

    def _ask(
        self,
        chain: DrafterChain,
        track: _Track,
        i: int,
        requests: Sequence[DraftRequest],
        rows: Sequence[list[_View]],
        offers: list[_Offer | None],
    ) -> None:
        """Ask a drafter that costs something, for the sequences for which that pays or is due for a try."""
        asked: list[tuple[int, DraftRequest, _View, _More]] = []
        room: list[int] = []
        for j, request in enumerate(requests):
            view = rows[j][i]
            offer = offers[j]
            chosen = request.drafters is None or track.name in request.drafters
            if not chosen or (offer is not None and offer.q):
                continue
            if view.parked:
                if view.wait > 0 or (offer is not None and offer.net > 0):
                    continue
                # after a success the next try is no gamble
                if not view.hopeful and self._allowance < track.cost.at(1):
                    continue
                self.stats.n_tried += 1
            elif (offer is not None and offer.net > max(view.value, 0.0)) or (
                track.n_asked < _N_TRIES and self._allowance < track.cost.at(1)
            ):
                continue
            request.more = more = _More(self, track, view.mood)
            room.append(request.n_max)
            request.n_max = min(request.n_max, track.reach)
            asked.append((j, request, view, more))
        if not asked:
            return
        # later drafters find their requests empty
        start = self._clock()
        chain.ask(track.drafter, [r for _, r, _, _ in asked])
        ns = self._clock() - start
        unit = self.cost.unit_ns or float(ns or 1)
        units = ns / unit
        self._spent += units
        price = units / len(asked)
        n_passes = max(len(r.draft) + (not m.stopped and len(r.draft) < r.n_max) for _, r, _, m in asked)
        if self.cost.unit_ns and all(v.gap <= _N_GAP for _, _, v, _ in asked):
            track.cost.add(max(1, n_passes), price)
        track.reach = max(track.reach, 2 * n_passes)
        for (j, request, view, _), n_max in zip(asked, room, strict=True):
            request.more, request.n_max = None, n_max
            before = offers[j]
            net_before = before.net if before is not None else 0.0
            net = net_before
            if request.draft:
                view.draft = ()
                best = offers[j] = self._offer(request, track, view, before)
                net = best.net if best.q else max(net, best.net)
            parked = view.parked
            self._learn(track, view, net - net_before - price)
            if view.parked != parked:
                self._rest(request.seq, track, view)

    def _learn(self, track: _Track, view: _View, net: float) -> None:
        """Asking gained so much, in passes."""
        track.n_asked += 1
        view.n_asked += 1
        view.gap = 0
        track.value += max(_ALPHA_ALL, 1 / (track.n_asked + 2)) * (net - track.value)
        view.value += _ALPHA_SEQ * (net - view.value)
        if net < 0:
            self._allowance = max(self._allowance + net, -_PRICE_SAVED)
        view.hopeful = net > 0
        if view.parked:
            if net > 0:
                view.wait, view.pause = 0, _WAIT
                view.parked = view.value <= 0
            else:
                view.pause = min(2 * view.pause, _WAIT_MAX)
                view.wait = view.pause
        elif view.value < 0 and view.n_asked >= _N_TRIES:
            view.parked = True
            view.wait = view.pause = _WAIT

    def _rest(self, seq: int, track: _Track, view: _View) -> None:
        assert self._chain is not None
        self._chain.rest(track.drafter, seq, view.parked)

    def _choose(self, found: list[tuple[DraftRequest, _Offer]]) -> dict[int, Drafter]:
        """Which of the proposals are verified, and how much of each: all share the rows of one pass."""
        # what was drawn is verified as it is; the others compete for the rows besides
        counts = [len(o.draft) if o.q else 0 for _, o in found]
        base = self.n_seq + sum(counts)
        free = [(j, o) for j, (_, o) in enumerate(found) if not o.q]
        if len(free) == 1:
            counts[free[0][0]] = self._cut(free[0][1].chances, base)[0]
        elif free:
            # within a sequence chances fall, so every head of this list can be verified
            order = sorted((-c, j) for j, o in free for c in o.chances)
            n, _ = self._cut([-c for c, _ in order], base)
            for _, j in order[:n]:
                counts[j] += 1
        winners: dict[int, Drafter] = {}
        stats = self.stats
        for (request, offer), n in zip(found, counts, strict=True):
            if self.padded:
                n = len(offer.draft)
            if n:
                track, view = offer.track, offer.view
                assert track is not None
                assert view is not None
                request.draft = offer.draft[:n]
                request.q = offer.q
                winners[request.seq] = track.drafter
                view.propose(offer.draft, offer.classes)
                stats.chosen[track.name] = stats.chosen.get(track.name, 0) + 1
        if not winners:
            stats.n_not_worth += 1
        return winners
