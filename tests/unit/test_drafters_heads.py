"""EAGLE-3, MTP and DFlash on fake heads that notice every wrong row.

A hidden row is the hash of the whole history up to its position, so a row of another sequence, of another position or
of a rejected token is a wrong number. A head checks each pair it is given against the cell before it, and a perfect
head proposes what the target will say: everything is accepted, or something is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fake_heads import RULE, WIDTH, BlockHead, PairHead, Target
from fakes import FakeDrafter

from pyspec.config import SamplingParams, SpeculationParams
from pyspec.control import Controller
from pyspec.drafters.base import Drafter, DraftSampler
from pyspec.drafters.carry import N_KEPT, N_STASH
from pyspec.drafters.chain import DrafterChain
from pyspec.drafters.draft_dflash import DraftDflash
from pyspec.drafters.draft_dspark import DraftDspark
from pyspec.drafters.draft_eagle3 import DraftEagle3
from pyspec.drafters.draft_mtp import DraftMtp
from pyspec.engine import Engine
from pyspec.errors import ConfigError
from pyspec.runtime.batch import NONE, Batch
from pyspec.types import DraftRequest, RollbackKind

PROMPT = [20, 30, 40, 50, 60]

Made = tuple[Drafter, Any, Target]


def eagle3(n_seq: int = 1, n_max: int = 3, target: dict[str, Any] | None = None, **options: Any) -> Made:
    t = Target(n_seq=n_seq, **target or {})
    spec = {k: options.pop(k) for k in ("p_min", "n_min") if k in options}
    head = PairHead(t, 0, **options)
    return DraftEagle3(t, head, SpeculationParams(n_max=n_max, **spec), n_seq), head, t  # type: ignore[arg-type]


def mtp(n_seq: int = 1, n_max: int = 3, target: dict[str, Any] | None = None, **options: Any) -> Made:
    t = Target(n_seq=n_seq, **target or {})
    spec = {k: options.pop(k) for k in ("p_min", "n_min") if k in options}
    head = PairHead(t, 1, **options)
    return DraftMtp(t, head, SpeculationParams(n_max=n_max, **spec), n_seq), head, t  # type: ignore[arg-type]


def block(cls: type[DraftDflash]) -> Callable[..., Made]:
    def make(n_seq: int = 1, n_max: int = 3, target: dict[str, Any] | None = None, **options: Any) -> Made:
        t = Target(n_seq=n_seq, **target or {})
        spec = {k: options.pop(k) for k in ("p_min", "n_min") if k in options}
        head = BlockHead(t, **{"metadata": {"dflash.block_size": "8"}, "anchor": cls is DraftDspark} | options)
        return cls(t, head, SpeculationParams(n_max=n_max, **spec), n_seq), head, t  # type: ignore[arg-type]

    return make


MAKERS: dict[str, Callable[..., Made]] = {
    "eagle3": eagle3,
    "eagle3-cheap-rows": lambda *a, **k: eagle3(*a, **{"skips_logits": True} | k),
    "mtp": lambda *a, **k: mtp(*a, **{"rowwise": True} | k),
    "mtp-all-rows": lambda *a, **k: mtp(*a, **{"architecture": "step35"} | k),
    "mtp-chain": lambda *a, **k: mtp(*a, **{"architecture": "step35", "n_layer_nextn": 3} | k),
    "mtp-shared": lambda *a, **k: mtp(*a, **{"kind": RollbackKind.NONE, "architecture": "gemma4-assistant"} | k),
    "dflash": block(DraftDflash),
    "dflash2": lambda *a, **k: block(DraftDflash)(*a, **{"dflash_selector_top_k": 3} | k),
    "dspark": block(DraftDspark),
    "dspark-bonus": lambda *a, **k: block(DraftDspark)(
        *a, **{"metadata": {"dflash.block_size": "8", "dflash.sample_from_anchor": "false"}, "anchor": False} | k
    ),
}

AGREE: dict[str, Callable[[int], bool]] = {
    "perfect": lambda h: True,
    "middling": lambda h: h % 4 != 0,
    "useless": lambda h: False,
}

TARGETS: dict[str, dict[str, Any]] = {
    "partial": {},
    "bounded": {"kind": RollbackKind.BOUNDED, "n_rs_seq": 8, "hybrid": True},
    "full": {"kind": RollbackKind.FULL, "hybrid": True},
    "window": {"n_swa": 6, "n_ubatch": 8},
}


def run(
    drafters: list[Drafter], target: Target, prompts: list[list[int]], n: int = 40, control: Controller | None = None
) -> Engine:
    """Generate, and check the output and everything the fakes have seen."""
    engine = Engine(target, drafters, control=control)
    seqs = [engine.submit(p, SamplingParams(max_tokens=n + i)) for i, p in enumerate(prompts)]
    while engine.step():
        pass
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert seq.output == RULE.generate(prompt, seq.params.max_tokens or 0)
    assert not target.violations
    return engine


@pytest.mark.parametrize("quality", AGREE)
@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("memory", TARGETS)
@pytest.mark.parametrize("name", MAKERS)
def test_every_row_is_where_it_belongs(
    name: str, memory: str, n_seq: int, quality: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts shorter and longer than a micro-batch, sequences that start and end at different times."""
    drafter, head, target = MAKERS[name](n_seq, target=TARGETS[memory], agree=AGREE[quality])
    rng = random.Random(1)
    prompts = [[rng.randrange(20, 99) for _ in range(n)] for n in (1, 2, 40, 17, 5, 33, 70)]
    run([drafter], target, prompts)
    assert not head.violations
    assert "no more drafts" not in caplog.text
    assert drafter.stats.n_failed == 0
    # every sequence drafts in every step but the last
    assert drafter.stats.n_gen_drafts >= 7 * 10
    rate = drafter.stats.acceptance_rate
    assert rate is not None
    if quality == "perfect":
        assert rate == 1.0
    elif quality == "useless":
        assert rate == 0.0
    else:
        assert 0.3 < rate < 0.8


@pytest.mark.parametrize("name", MAKERS)
def test_in_a_chain_with_a_drafter_of_longer_drafts(name: str) -> None:
    """Drafts of another drafter come between, longer than ours; the rows left over are caught up with."""
    drafter, head, target = MAKERS[name](2, agree=AGREE["middling"])
    other = FakeDrafter(target, "seldom", n_max=9, seed=3)
    run([other, drafter], target, [PROMPT, [*range(30, 66)], [44]], n=80)
    assert not head.violations
    assert not other.violations
    assert drafter.stats.n_failed == 0
    assert drafter.stats.n_gen_drafts > 5
    assert other.stats.n_gen_drafts > 5
    assert 0.3 < (drafter.stats.acceptance_rate or 0) < 0.8


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(4, 4), (8, 4), (5, 5)])
def test_small_batches(name: str, n_batch: int, n_ubatch: int) -> None:
    """B06: batches smaller than a verification."""
    sizes = {"n_batch": n_batch, "n_ubatch": n_ubatch}
    drafter, head, target = MAKERS[name](1, target=sizes, **sizes, n_outputs_max=4)
    run([drafter], target, [[*range(20, 51)], PROMPT])
    assert not head.violations
    assert drafter.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("name", MAKERS)
def test_draft_context_smaller_than_the_text(name: str) -> None:
    """B05: drafting ends cleanly, for the sequences concerned."""
    if name == "mtp-shared":
        pytest.skip("the assistant has the target's cache")
    drafter, head, target = MAKERS[name](2, n_ctx_seq=32)
    run([drafter], target, [PROMPT, [*range(20, 90)], [33, 34]], n=50)
    assert not head.violations
    assert drafter.stats.n_failed == 0
    assert drafter.stats.acceptance_rate == 1.0
    assert drafter.stats.n_gen_drafts > 5
    # texts of 55 and 54 tokens in all: drafting stopped at 32
    assert drafter.stats.n_gen_tokens < 2 * 32


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
def test_a_failing_draft_costs_nothing_but_speed(name: str, at: int, caplog: pytest.LogCaptureFixture) -> None:
    drafter, head, target = MAKERS[name](2)
    head.fail_at = at
    engine = run([drafter], target, [PROMPT, [70, 71, 72]], n=30)
    assert drafter.stats.n_failed == 1
    assert "broken" in caplog.text
    # the next generations draft again
    n_before = drafter.stats.n_gen_tokens
    seqs = [engine.submit(p, SamplingParams(max_tokens=20)) for p in (PROMPT, [99])]
    while engine.step():
        pass
    assert [s.output for s in seqs] == [RULE.generate(PROMPT, 20), RULE.generate([99], 20)]
    assert drafter.stats.n_gen_tokens > n_before
    assert not head.violations


@pytest.mark.parametrize("name", MAKERS)
def test_no_pass_more_than_needed(name: str) -> None:
    """Catching up shares the first pass of a draft; blocks need one pass and an injection."""
    drafter, head, target = MAKERS[name](1)
    engine = run([drafter], target, [[*PROMPT]], n=40)
    n_steps = engine.stats.n_pass
    n_drafts = drafter.stats.n_call_draft
    # prompts of 5 tokens: one pass before the first step, one for each block of a chain
    n_prompt = {"mtp-chain": 3, "mtp-shared": 0}.get(name, 1)
    if name.startswith("d"):
        assert head.n_decode <= n_prompt + n_steps + n_drafts
    elif name == "eagle3-cheap-rows":
        # the last pair is in a pass of its own
        assert head.n_decode <= n_prompt + 4 * n_drafts + 4
    else:
        assert head.n_decode <= n_prompt + 3 * n_drafts + 3


@pytest.mark.parametrize("n_seq", [1, 3])
def test_where_rows_without_outputs_are_cheap_the_others_are_alone(n_seq: int) -> None:
    """All pairs of a draft but the last of each sequence are evaluated without outputs, in one pass for all."""
    drafter, head, target = MAKERS["eagle3-cheap-rows"](n_seq, target={"n_batch": 512, "n_ubatch": 512})
    shapes: list[list[list[int]]] = []
    decode = head.decode

    def watched(batch: Batch) -> None:
        shapes.append([batch.output[b:e].tolist() for b, e in batch.rows().values()])
        decode(batch)

    head.decode = watched
    run([drafter], target, [[20 + i, *PROMPT] for i in range(n_seq)], n=9)
    assert not head.violations
    # the prompts, whose last pair waits; then drafts of three, verified with one token more
    assert shapes[:n_seq] == [[[0] * 5]] * n_seq
    assert shapes[n_seq : n_seq + 4] == [*[[[1]] * n_seq] * 3, [[0] * 3] * n_seq]


@pytest.mark.parametrize("name", MAKERS)
def test_p_min_and_n_min(name: str) -> None:
    options: dict[str, Any] = {"p_min": 0.99999}
    drafter, head, target = MAKERS[name](1, **options)
    if isinstance(drafter, DraftDspark):
        head.doubt = 2  # confidences fall below p_min at this row of a block
        drafter, head, target = MAKERS[name](1, p_min=0.5, doubt=2)
        run([drafter], target, [PROMPT])
        assert {n for n, c in enumerate(drafter.stats.n_gen_tokens_per_pos) if c} == set(range(2 - drafter._first_row))
    else:
        run([drafter], target, [PROMPT])
        assert drafter.stats.n_gen_tokens == 0
    assert not head.violations
    drafter, head, target = MAKERS[name](1, n_min=3)
    run([drafter], target, [PROMPT])
    assert drafter.stats.n_gen_tokens == 3 * drafter.stats.n_gen_drafts > 0


@pytest.mark.parametrize("name", [n for n in MAKERS if n != "mtp-shared"])
def test_saved_state_goes_on(name: str) -> None:
    """The deferred rows travel to another drafter; the cache is copied as the session's owner would."""
    drafter, head, target = MAKERS[name](1, agree=AGREE["middling"])
    engine = Engine(target, [drafter])
    first = engine.submit(PROMPT, SamplingParams(max_tokens=60))
    for _ in range(9):
        engine.step()
    state = drafter.state(0)
    assert state is not None
    other, other_head, _ = MAKERS[name](1, agree=AGREE["middling"])
    other.target = drafter.target
    other_head.target = target
    other_head.cells = head.cells
    other.restore(0, state)
    assert other.state(0) == state
    engine.chain.drafters = (other,)
    while engine.step():
        pass
    assert first.output == RULE.generate(PROMPT, 60)
    assert not other_head.violations
    assert other.stats.n_gen_drafts > 3
    assert 0.3 < (other.stats.acceptance_rate or 0) < 0.85
    other.restore(0, None)
    assert other.state(0) is None
    for bad in (b"", b"nonsense", state[:-4] if len(state) > 24 else state + b"x", b"x" + state[1:]):
        with pytest.raises(ConfigError, match="saved state"):
            other.restore(0, bad)


@pytest.mark.parametrize("name", MAKERS)
def test_a_pass_without_tokens_ends_drafting(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """An embeddings-only batch: nothing to pair the rows with. The next generation drafts again."""
    drafter, _, target = MAKERS[name](1)
    drafter.run_begin(0, PROMPT)
    images = Batch(4, WIDTH, use_tokens=False)
    images.extend([0, 0], 0, 0, NONE)
    if not name.startswith("d"):
        drafter.run_process(images)
        assert "without tokens" in caplog.text
    else:
        target.decode(_tokens(PROMPT[:2]))
        drafter.run_process(_tokens(PROMPT[:2], pos0=1))
        assert "no more drafts" in caplog.text
    request = DraftRequest(0, 2, 50, [0, 0, 50], 3)
    drafter.run_draft([request])
    assert request.draft == []
    target.memory.clear(0)
    run([drafter], target, [PROMPT])
    assert drafter.stats.acceptance_rate == 1.0


def _tokens(tokens: list[int], pos0: int = 0) -> Batch:
    batch = Batch(8)
    batch.extend(tokens, pos0, 0, NONE)
    return batch


@pytest.mark.parametrize("name", MAKERS)
def test_more_of_a_prompt_after_a_draft(name: str) -> None:
    """A draft that nobody verified, then rows without outputs: as in the next turn of a conversation."""
    drafter, head, target = MAKERS[name](1)
    text = [*PROMPT, 61, 62, 63, 64]
    drafter.run_begin(0, text)
    batch = _tokens(PROMPT)
    target.decode(batch)
    drafter.run_process(batch)
    for n in (5, 7, 8):
        request = DraftRequest(0, n, text[n], text[: n + 1], 3)
        drafter.run_draft([request])
        assert request.draft == RULE.generate(text[: n + 1], 3)
        batch = _tokens(text[n : 7 if n < 7 else n + 1], pos0=n)
        target.decode(batch)
        drafter.run_process(batch)
    assert not head.violations


class Seldom:
    """A controller that lets the first drafter rest, and asks it every so many steps, for some of the sequences."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.n = 0
        self.n_full = self.n_asked = 0

    def begin(self, seq: int) -> None:
        pass

    def prefilled(self, n_rows: int, ns: int) -> None:
        pass

    def draft(self, chain: DrafterChain, requests: Sequence[DraftRequest], n_seq: int) -> dict[int, Drafter]:
        self.n += 1
        asked = [r for r in requests if (self.n + 3 * r.seq) % self.every == 0]
        if asked:
            chain.ask(chain.drafters[0], asked)
        self.n_asked += sum(min(r.n_max, 3) for r in asked)
        return {r.seq: chain.drafters[0] for r in asked if r.draft}

    def accept(self, seq: int, n_draft: int, n_accepted: int, emitted: Sequence[int]) -> None:
        self.n_full += n_accepted

    def passed(self, n_rows: int, ns: int) -> None:
        pass


@pytest.mark.parametrize("every", [2, 7, 50, 150])
@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_a_drafter_that_rested_misses_nothing(name: str, n_seq: int, every: int) -> None:
    """Nobody asks it for longer than rows can wait, and then all it proposes is right."""
    drafter, head, target = MAKERS[name](n_seq, agree=AGREE["perfect"])
    control = Seldom(every)
    run([drafter], target, [PROMPT, [*range(20, 60)], [20, 21]], 330, control)
    assert control.n_full == control.n_asked > 0
    assert not head.violations


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_a_drafter_that_rests_evaluates_in_large_passes(name: str) -> None:
    drafter, head, target = MAKERS[name](1, agree=AGREE["perfect"])
    n = head.n_decode
    run([drafter], target, [PROMPT], 640, Seldom(10**6))
    assert head.n_decode - n <= 640 // (N_STASH - 1) * -(-N_STASH // head.n_batch) + 2


class Resting(Seldom):
    """Tells the drafter that it rests, and asks it all the same."""

    def __init__(self, every: int, drafter: Drafter) -> None:
        super().__init__(every)
        self.drafter = drafter

    def begin(self, seq: int) -> None:
        self.drafter.rest(seq, True)


@pytest.mark.parametrize("every", [2, 7, 50, 150])
@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_a_drafter_that_rests_goes_on_from_the_last_rows(name: str, n_seq: int, every: int) -> None:
    """The cache may begin in mid-text then, but what is in it is right."""
    drafter, head, target = MAKERS[name](n_seq, agree=AGREE["perfect"])
    head.may_begin_late = True
    control = Resting(every, drafter)
    run([drafter], target, [PROMPT, [*range(20, 60)] * 4, [20, 21]], 330, control)
    assert control.n_full == control.n_asked > 0
    assert not head.violations


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_a_drafter_that_rests_evaluates_nothing(name: str) -> None:
    drafter, head, target = MAKERS[name](1, agree=AGREE["perfect"])
    n = head.n_decode
    run([drafter], target, [[*range(20, 90)] * 4], 300, Resting(10**6, drafter))
    assert head.n_decode == n


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_a_drafter_that_has_rested_long_evaluates_its_last_rows_only(name: str) -> None:
    drafter, head, target = MAKERS[name](1, agree=AGREE["perfect"])
    head.may_begin_late = True
    run([drafter], target, [[*range(20, 90)] * 4], 250, Resting(200, drafter))
    rows = sum(sum(p.values()) for p in head.passes)
    assert N_KEPT <= rows <= N_STASH + 4


def test_memory_of_deferred_rows_does_not_grow_with_the_text() -> None:
    for make in (eagle3, mtp):
        drafter, _, target = make(2, rowwise=True) if make is mtp else make(2)
        run([drafter], target, [[*range(20, 90)] * 8, PROMPT], n=200)
        stash: Any = drafter
        n_seq, n_rows, width = stash._stash.shape
        assert (n_seq, width) == (2, (3 if make is eagle3 else 1) * WIDTH)
        assert n_rows <= N_STASH


@pytest.mark.parametrize("name", MAKERS)
def test_arrays_are_made_once(name: str) -> None:
    """No array of a drafter is replaced after its first steps, and none is left behind."""
    drafter, _, target = MAKERS[name](2, agree=AGREE["middling"])
    engine = Engine(target, [drafter])
    seqs = [engine.submit(p, SamplingParams(max_tokens=300)) for p in (PROMPT, [33, 34])]
    for _ in range(20):
        engine.step()

    def arrays() -> dict[str, tuple[int, int]]:
        owners = {"": drafter} | {k: v for k, v in vars(drafter).items() if isinstance(v, (Batch, DraftSampler))}
        found = {}
        for owner, value in owners.items():
            names = getattr(type(value), "__slots__", None) or vars(value)
            for key in names:
                array = getattr(value, key, None)
                if isinstance(array, np.ndarray):
                    found[f"{owner}.{key}"] = (id(array), array.nbytes)
        return found

    before = arrays()
    assert len(before) >= 5
    for _ in range(40):
        engine.step()
    assert arrays() == before
    assert not any(s.done for s in seqs)
    engine.close()


def test_a_chain_drafts_a_token_a_block(caplog: pytest.LogCaptureFixture) -> None:
    drafter, _, _ = MAKERS["mtp-chain"](1, n_max=7)
    assert drafter.n_max == 3
    assert "n_max=7" in caplog.text
    drafter, head, target = MAKERS["mtp-chain"](1, n_max=2)
    run([drafter], target, [PROMPT])
    assert drafter.stats.acceptance_rate == 1.0
    assert max(n for cells in head.cells for d in cells.data for n, v in enumerate(d) if v != -1) == 1


@pytest.mark.parametrize(("name", "n_max"), [("dflash", 7), ("dflash2", 7), ("dspark", 8), ("dspark-bonus", 7)])
def test_blocks_limit_the_draft(name: str, n_max: int, caplog: pytest.LogCaptureFixture) -> None:
    drafter, head, target = MAKERS[name](1, n_max=20)
    assert drafter.n_max == n_max
    assert "block size 8" in caplog.text
    run([drafter], target, [PROMPT])
    assert drafter.stats.acceptance_rate == 1.0
    assert len(drafter.stats.n_gen_tokens_per_pos) == n_max
    assert not head.violations


def test_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a block of 4 rows does not fit .* n_ubatch=3"):
        MAKERS["dflash"](1, n_ubatch=3)
    with pytest.raises(ConfigError, match="n_outputs_max=2"):
        MAKERS["dspark"](1, n_outputs_max=2)


def test_many_sequences_take_several_passes() -> None:
    drafter, head, target = MAKERS["dflash"](5, n_ubatch=8)
    run([drafter], target, [[20 + i] for i in range(5)])
    assert not head.violations
    assert drafter.stats.acceptance_rate == 1.0
    assert max(len(p) for p in head.passes if all(n == 4 for n in p.values())) == 2
