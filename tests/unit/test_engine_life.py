"""Requests come and go, passes and drafters fail, the user interrupts: the engine stays usable and the output right."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakes import N_VOCAB, FakeDrafter, FakeEvaluator, FakeVocab, Rule
from looptest import MEMORY, check, check_counters, prompt, run_all

from pyspec.config import SamplingParams, SpeculationParams
from pyspec.engine import Engine
from pyspec.errors import (
    ClosedError,
    ConfigError,
    DecodeAborted,
    DecodeFailed,
    NativeError,
    RollbackError,
)
from pyspec.runtime import Batch, TextStream
from pyspec.types import DraftRequest, RollbackKind

PROMPT = prompt(1, 20)


def make(n_seq: int = 1, quality: str = "half", **options: Any) -> tuple[FakeEvaluator, FakeDrafter, Engine]:
    target = FakeEvaluator(Rule(), n_seq=n_seq, **options)
    drafter = FakeDrafter(target, quality)
    return target, drafter, Engine(target, [drafter])


# ---- requests ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], ["no tokens"]),
        ([20] * 65, ["65", "64", "n_ctx"]),
        ([20, N_VOCAB], [str(N_VOCAB), "out of range"]),
        ([20, -1], ["-1", "out of range"]),
        ([2**40], [str(2**40)]),
    ],
)
def test_bad_prompts(tokens: list[int], words: list[str]) -> None:
    _, _, engine = make(n_ctx_seq=64)
    with pytest.raises(ConfigError) as caught:
        engine.submit(tokens)
    for word in words:
        assert word in str(caught.value)
    assert not engine.step()
    engine.submit([20] * 64)
    run_all(engine)


def test_prompt_is_copied() -> None:
    target, _, engine = make()
    tokens = list(PROMPT)
    seq = engine.submit(tokens, SamplingParams(max_tokens=10))
    tokens.clear()
    run_all(engine)
    check(engine, [seq], 10)
    assert not target.violations


def test_more_requests_than_slots_wait() -> None:
    _, _, engine = make(n_seq=2)
    sequences = [engine.submit(prompt(i, 5), SamplingParams(max_tokens=20)) for i in range(7)]
    assert all(s.id == -1 for s in sequences)
    engine.step()
    assert [s.id for s in sequences] == [0, 1, -1, -1, -1, -1, -1]
    run_all(engine)
    check(engine, sequences, 20)
    assert all(s.id == -1 for s in sequences)


def test_b04_slots_are_clean_when_used_again() -> None:
    """Sequences of different lengths, and a prompt that shares half of an earlier one's."""
    target, _, engine = make(n_seq=4)
    lengths = [1, 30, 9, 70]
    first = [engine.submit(prompt(i, n), SamplingParams(max_tokens=5 + 7 * i)) for i, n in enumerate(lengths)]
    run_all(engine)
    again = [
        engine.submit(prompt(i, n)[: n // 2 + 1] + prompt(90 + i, 10), SamplingParams(max_tokens=15))
        for i, n in enumerate(lengths)
    ]
    run_all(engine)
    check(engine, first + again, [5, 12, 19, 26, 15, 15, 15, 15])
    assert not target.violations


def test_a_new_request_does_not_stop_the_others() -> None:
    """While a long prompt is read in chunks, the running sequences go on."""
    _, _, engine = make(n_seq=2, quality="empty", n_ubatch=8)
    first = engine.submit(PROMPT, SamplingParams(max_tokens=100))
    while first.n_output < 5:
        engine.step()
    second = engine.submit(prompt(2, 81), SamplingParams(max_tokens=5))
    before, n_steps = first.n_output, 0
    while not second.n_output:
        engine.step()
        n_steps += 1
    assert n_steps >= 10
    assert first.n_output - before >= n_steps - 1
    run_all(engine)
    check(engine, [first, second], [100, 5])


def test_prompts_are_read_in_micro_batches() -> None:
    target, _, engine = make(n_batch=64, n_ubatch=16)
    engine.submit(prompt(1, 50), SamplingParams(max_tokens=1))
    run_all(engine)
    assert [len(rows[0][1]) for rows in target.passes] == [16, 16, 16, 2]
    # only the last row of a prompt is looked at
    assert [rows[0][2] for rows in target.passes] == [0, 0, 0, 1]


@pytest.mark.parametrize("n", [1, 2, 16, 17, 50])
def test_the_first_token_comes_with_the_prompt(n: int) -> None:
    """And is shown before anything else is evaluated. So the second is the first that a draft may give."""
    target, drafter, engine = make(n_seq=2, n_batch=64, n_ubatch=16)
    seq = engine.submit(prompt(1, n), SamplingParams(max_tokens=9))
    while not seq.pieces:
        assert engine.step()
    assert seq.output == list(seq.pieces[0].tokens) == target.rule.generate(prompt(1, n), 1)
    assert target.n_decode == -(-n // 16)
    assert (seq.stats.n_prompt, seq.stats.n_output, seq.stats.n_first, seq.stats.n_pass) == (n, 1, 1, 0)
    assert seq.stats.mean_accepted_length is None
    assert seq.stats.tokens_per_s is None
    # who runs goes on while another one is read
    other = engine.submit(prompt(2, 40), SamplingParams(max_tokens=1))
    run_all(engine)
    assert other.stats.n_pass == 0
    assert drafter.stats.n_gen_drafts > 0
    check(engine, [seq, other], [9, 1])


@pytest.mark.parametrize("n", [1, 2, 16, 17, 50])
def test_in_exact_mode_the_first_token_has_a_pass_like_all_others(n: int) -> None:
    target = FakeEvaluator(Rule(), n_batch=64, n_ubatch=16)
    engine = Engine(target, [FakeDrafter(target, "half", n_max=3)], speculation=SpeculationParams(n_max=3, exact=True))
    seq = engine.submit(prompt(1, n), SamplingParams(max_tokens=9))
    run_all(engine)
    check(engine, [seq], 9)
    assert seq.stats.n_first == 0
    assert {n_out for rows in target.passes for _, _, n_out in rows.values()} <= {0, 4}
    assert seq.stats.n_prompt == n - 1


def shapes(target: FakeEvaluator) -> list[dict[int, int]]:
    """Rows of every pass, by sequence."""
    return [{i: len(tokens) for i, (_, tokens, _) in rows.items()} for rows in target.passes]


def test_short_prompts_that_came_together_generate_together() -> None:
    """All are read in the first step, each in passes of its own."""
    target, _, engine = make(n_seq=4, quality="empty", n_batch=256, n_ubatch=128, n_ctx_seq=512)
    lengths = [5, 8, 30, 2]
    sequences = [engine.submit(prompt(i, n), SamplingParams(max_tokens=4)) for i, n in enumerate(lengths)]
    run_all(engine)
    check(engine, sequences, 4)
    # 5 + 32 + 8 + 32 rows, and 30 more would be 107 of 128; with 32 for that pass there is no room for two more
    assert shapes(target)[:6] == [{0: 5}, {1: 8}, {2: 30}, {3: 2}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1, 3: 1}]
    assert [s.stats.n_prompt for s in sequences] == lengths
    assert engine.stats.n_prompt == sum(lengths)
    assert not target.violations


def test_a_long_prompt_has_the_step_for_itself() -> None:
    """And the prompt that came first is read first, though its slot may have a higher number than a later one's."""
    target, _, engine = make(n_seq=2, quality="empty", n_batch=64, n_ubatch=8)
    short = engine.submit(prompt(0, 3), SamplingParams(max_tokens=2))
    first = engine.submit(prompt(1, 40), SamplingParams(max_tokens=2))
    later = engine.submit(prompt(2, 40), SamplingParams(max_tokens=2))
    run_all(engine)
    check(engine, [short, first, later], 2)
    reading = [rows for rows in shapes(target) if sum(rows.values()) > 2]
    assert reading == [{0: 3}] + [{1: 8}] * 5 + [{0: 8}] * 5


# ---- cancel, release, close --------------------------------------------------------------


@pytest.mark.parametrize("when", ["waiting", "prompt", "running", "done"])
def test_cancel(when: str) -> None:
    target, drafter, engine = make(n_ubatch=4)
    blocker = engine.submit(PROMPT, SamplingParams(max_tokens=8)) if when == "waiting" else None
    seq = engine.submit(PROMPT, SamplingParams(max_tokens=30), TextStream(FakeVocab()))
    n_steps = {"waiting": 1, "prompt": 2, "running": 9, "done": 200}[when]
    for _ in range(n_steps):
        engine.step()
    n_output = seq.n_output
    seq.cancelled = True
    engine.step()
    assert seq.done
    assert seq.finish_reason == ("length" if when == "done" else "cancelled")
    assert seq.n_output == n_output
    assert {"waiting": n_output == 0, "prompt": n_output == 0, "running": 0 < n_output < 30, "done": True}[when]
    check_counters(seq)
    if blocker:
        run_all(engine)
        assert blocker.finish_reason == "length"
    again = engine.submit([*PROMPT[:10], 77], SamplingParams(max_tokens=30))
    run_all(engine)
    assert again.output == target.rule.generate([*PROMPT[:10], 77], 30)
    assert not target.violations
    assert not drafter.violations


def test_cancelling_withdraws_the_abort() -> None:
    """An abort stops the pass that runs; once the sequence is gone, passes work again."""
    _, _, engine = make()
    other = FakeEvaluator(Rule())
    engine = Engine(engine.target, [], draft_evaluators=[other])
    seq = engine.submit(PROMPT)
    engine.step()
    seq.cancelled = True
    engine.step()
    assert engine.target.n_abort_clear >= 1  # type: ignore[attr-defined]
    assert other.n_abort_clear >= 1


def test_release_frees_the_slot_at_once() -> None:
    _, drafter, engine = make()
    first = engine.submit(PROMPT, SamplingParams(max_tokens=500))
    second = engine.submit(prompt(2, 5), SamplingParams(max_tokens=10))
    for _ in range(5):
        engine.step()
    engine.release(first)
    assert first.finish_reason == "cancelled"
    assert not engine.active
    assert drafter.n_end == 1
    engine.release(first)
    assert drafter.n_end == 1
    run_all(engine)
    assert second.finish_reason == "length"
    check_counters(first)
    check_counters(second)


def test_close() -> None:
    _, drafter, engine = make()
    running = engine.submit(PROMPT, SamplingParams(max_tokens=500))
    waiting = engine.submit(PROMPT, SamplingParams(max_tokens=500))
    for _ in range(4):
        engine.step()
    engine.close()
    engine.close()
    assert drafter.closed
    assert drafter.n_calls["close"] == 1
    for seq in (running, waiting):
        assert seq.finish_reason == "cancelled"
        assert isinstance(seq.error, ClosedError)
    with pytest.raises(ClosedError):
        engine.step()
    with pytest.raises(ClosedError):
        engine.submit(PROMPT)


# ---- passes that fail --------------------------------------------------------------------

ERRORS: dict[str, Callable[[], BaseException]] = {
    "native": lambda: NativeError("x", func="llama_decode", code=-3, state="partial"),
    "failed": lambda: DecodeFailed("x", func="llama_decode", code=-3, state="partial"),
    "memory": MemoryError,
    "ctrl-c": KeyboardInterrupt,
}


@pytest.mark.parametrize("memory", ["partial", "bounded", "full-hybrid", "window"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("at", [1, 2, 3, 4, 6, 9])
def test_failed_pass_is_told_and_can_be_repeated(at: int, error: str, memory: str) -> None:
    """In the prompt and in the loop, rows half-way in the cache: the next step goes on, output unchanged."""

    def fail(evaluator: FakeEvaluator, batch: Batch) -> None:
        if evaluator.n_decode == at:
            # some rows have been taken, as after a failure in the second micro-batch
            for seq, (begin, end) in batch.rows().items():
                evaluator.cells.begin_pass(seq, end - begin)
                for i in range(begin, (begin + end + 1) // 2):
                    evaluator.cells.append(seq, int(batch.tokens[i]))
            raise ERRORS[error]()

    target = FakeEvaluator(Rule(), n_seq=2, before_decode=fail, **{"n_ubatch": 16, **MEMORY[memory]})
    engine = Engine(target, [FakeDrafter(target, "half")])
    sequences = [engine.submit(prompt(i, 40), SamplingParams(max_tokens=25)) for i in range(2)]
    n_errors = 0
    for _ in range(1000):
        try:
            if not engine.step():
                break
        except type(ERRORS[error]()):
            n_errors += 1
    assert n_errors == 1
    check(engine, sequences, 25)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 6, 9])
def test_aborted_pass_of_a_sequence_nobody_cancelled(at: int) -> None:
    """An abort meant for a sequence that is gone hits the others' pass: they go on."""

    def fail(evaluator: FakeEvaluator, batch: Batch) -> None:
        if evaluator.n_decode == at:
            raise DecodeAborted("aborted", func="llama_decode", code=2, state="partial")

    target = FakeEvaluator(Rule(), n_seq=2, before_decode=fail)
    engine = Engine(target, [FakeDrafter(target, "half")])
    sequences = [engine.submit(prompt(i, 40), SamplingParams(max_tokens=25)) for i in range(2)]
    run_all(engine)
    check(engine, sequences, 25)
    assert target.n_abort_clear >= 1


def test_abort_and_cancel_in_the_prompt() -> None:
    """B07 on fakes: cancelled while a pass of the prompt runs; ends at once, the next request is right."""

    def abort(evaluator: FakeEvaluator, batch: Batch) -> None:
        if evaluator.n_decode == 3:
            first.cancelled = True
            raise DecodeAborted("aborted", func="llama_decode", code=2, state="partial")

    target = FakeEvaluator(Rule(), before_decode=abort, n_ubatch=8)
    engine = Engine(target, [FakeDrafter(target, "half")])
    first = engine.submit(prompt(1, 200), SamplingParams(max_tokens=25))
    run_all(engine)
    assert target.n_decode == 3
    assert (first.finish_reason, first.output) == ("cancelled", [])
    second = engine.submit(prompt(1, 200)[:50], SamplingParams(max_tokens=25))
    run_all(engine)
    assert second.output == target.rule.generate(prompt(1, 200)[:50], 25)


def test_lost_context_ends_every_sequence() -> None:
    """When not even emptying the cache works, the sequences end with the error; nothing hangs."""

    def lose(evaluator: FakeEvaluator, batch: Batch) -> None:
        if evaluator.n_decode >= 5:
            evaluator.cells.seq_rm = lambda *a: False  # type: ignore[method-assign]
            raise DecodeFailed("lost", func="llama_decode", code=-3, state="lost")

    target = FakeEvaluator(Rule(), n_seq=2, before_decode=lose)
    engine = Engine(target)
    sequences = [engine.submit(prompt(i, 10), SamplingParams(max_tokens=25)) for i in range(2)]
    with pytest.raises(DecodeFailed):
        run_all(engine)
    for seq in sequences:
        assert seq.done
        assert isinstance(seq.error, RollbackError)
    assert not engine.active


# ---- drafters that fail ------------------------------------------------------------------


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("verb", ["begin", "process", "draft", "accept", "end"])
def test_drafter_that_raises(verb: str, at: int, n_seq: int, caplog: pytest.LogCaptureFixture) -> None:
    """Drafting stops for the sequences concerned, output stays right, the failure is counted and logged."""
    target = FakeEvaluator(Rule(), n_seq=n_seq)
    drafter = FakeDrafter(target, "most", raise_in={verb: at})
    second = FakeDrafter(target, "half")
    engine = Engine(target, [drafter, second])
    with caplog.at_level(logging.WARNING, "pyspec"):
        sequences = [engine.submit(prompt(i, 20), SamplingParams(max_tokens=30)) for i in range(7)]
        run_all(engine)
    for s in sequences:
        assert s.output == target.rule.generate(s.tokens[: s.n_prompt], 30)
        check_counters(s)
    assert not target.violations
    assert not second.violations
    assert drafter.stats.n_failed == 1
    assert "drafter out of order" in caplog.text
    assert "fake" in caplog.text
    # it is off for the sequences concerned only, and until they end
    assert drafter.n_calls["draft"] > 5
    assert second.stats.n_gen_drafts > 0 or verb == "end"


@pytest.mark.parametrize("verb", ["begin", "process", "draft", "accept", "end"])
def test_ctrl_c_in_a_drafter_gets_through(verb: str) -> None:
    target = FakeEvaluator(Rule(), n_seq=2)
    drafter = FakeDrafter(target, "most", raise_in={verb: 1}, error=KeyboardInterrupt)
    engine = Engine(target, [drafter])
    sequences = [engine.submit(prompt(i, 20), SamplingParams(max_tokens=30)) for i in range(4)]
    with pytest.raises(KeyboardInterrupt):
        run_all(engine)
    run_all(engine)
    for s in sequences:
        assert s.output == target.rule.generate(s.tokens[: s.n_prompt], 30)
        assert s.done
    assert not target.violations
    assert drafter.stats.n_failed == 0


@pytest.mark.parametrize("returned", [None, "a", 1.5, float("nan"), [1], object(), True, 2**70], ids=repr)
def test_drafter_that_returns_no_token_ids(returned: Any) -> None:
    """What is not a token id ends the draft, or the drafter; never the text."""

    def choose(request: DraftRequest, right: list[int], rng: Any) -> list[Any]:
        return [right[0], returned, right[1]]

    target = FakeEvaluator(Rule())
    engine = Engine(target, [FakeDrafter(target, choose)])
    seq = engine.submit(PROMPT, SamplingParams(max_tokens=20))
    run_all(engine)
    assert seq.output == target.rule.generate(PROMPT, 20)
    assert all(type(t) is int for t in seq.tokens)
    assert not target.violations


@pytest.mark.parametrize("container", [tuple, np.array, iter, None], ids=["tuple", "array", "iterator", "none"])
def test_drafter_that_replaces_the_list(container: Any) -> None:
    """``request.draft = ...`` instead of filling the list: used or dropped, never an error in the loop."""

    class Replaces(FakeDrafter):
        def draft(self, requests: list[DraftRequest]) -> None:
            super().draft(requests)
            for r in requests:
                r.draft = None if container is None else container(r.draft)

    target = FakeEvaluator(Rule())
    engine = Engine(target, [Replaces(target, "most")])
    seq = engine.submit(PROMPT, SamplingParams(max_tokens=20))
    run_all(engine)
    assert seq.output == target.rule.generate(PROMPT, 20)
    assert all(type(t) is int for t in seq.tokens)


def test_drafter_that_changes_the_request() -> None:
    """The request's numbers are read before, not after; its draft is all that counts."""

    def choose(request: DraftRequest, right: list[int], rng: Any) -> list[int]:
        draft = right[: request.n_max + 3]
        request.n_max += 100
        return draft

    target = FakeEvaluator(Rule(), n_ctx_seq=40, n_batch=16)
    engine = Engine(target, [FakeDrafter(target, choose)])
    seq = engine.submit(PROMPT, SamplingParams(max_tokens=20))
    run_all(engine)
    assert seq.output == target.rule.generate(PROMPT, 20)
    assert not target.violations


def test_all_close_even_if_one_raises() -> None:
    target = FakeEvaluator(Rule())
    drafters = [FakeDrafter(target, raise_in={"close": 0}), FakeDrafter(target)]
    engine = Engine(target, drafters)
    with contextlib.suppress(RuntimeError):
        engine.close()
    assert [d.closed for d in drafters] == [True, True]
    assert engine.closed


# ---- rollback: cheap where it can be, right where it cannot --------------------------------


@pytest.mark.parametrize("memory", ["partial", "bounded", "bounded-hybrid", "window"])
def test_no_checkpoints_where_rows_can_be_removed(memory: str) -> None:
    target, _, engine = make(n_seq=2, **{"n_ubatch": 16, **MEMORY[memory]})
    sequences = [engine.submit(prompt(i, 20), SamplingParams(max_tokens=40)) for i in range(2)]
    run_all(engine)
    check(engine, sequences, 40)
    assert not [c for c in target.cells.calls if c[0].startswith("state")]
    # and no row is evaluated twice: prompt, and per pass 1 + draft
    n_rows = sum(len(t) for rows in target.passes for _, t, _ in rows.values())
    n_verified = sum(s.stats.n_pass + s.stats.n_draft for s in sequences)
    assert n_rows == 2 * 20 + n_verified


@pytest.mark.parametrize("hybrid", [False, True])
def test_full_memory_evaluates_the_accepted_rows_again(hybrid: bool) -> None:
    target, _, engine = make(kind=RollbackKind.FULL, hybrid=hybrid)
    seq = engine.submit(PROMPT, SamplingParams(max_tokens=40))
    run_all(engine)
    check(engine, [seq], 40)
    gets = [c for c in target.cells.calls if c[0] == "state_seq_get"]
    sets = [c for c in target.cells.calls if c[0] == "state_seq_set"]
    assert len(gets) <= seq.stats.n_pass
    assert 0 < len(sets) <= len(gets)
    # the recurrent part alone is copied where attention can remove rows
    assert {c[2] for c in gets} == {1 if hybrid else 0}
    n_rows = sum(len(t) for rows in target.passes for _, t, _ in rows.values())
    assert n_rows <= len(PROMPT) + seq.stats.n_pass + seq.stats.n_draft + seq.stats.n_output


def test_full_memory_copies_nothing_without_a_draft() -> None:
    """B03: an empty draft is no draft."""
    target, _, engine = make(quality="empty", kind=RollbackKind.FULL)
    seq = engine.submit(PROMPT, SamplingParams(max_tokens=300))
    run_all(engine)
    check(engine, [seq], 300)
    assert not [c for c in target.cells.calls if c[0].startswith("state")]


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("n_seq", [1, 3])
def test_b03_empty_drafts_then_repeats(memory: str, n_seq: int) -> None:
    """Many rounds without a draft, then drafts of every length, partly accepted."""

    def choose(request: DraftRequest, right: list[int], rng: Any) -> list[int]:
        if len(request.tokens) < 120:
            return []
        n = rng.randint(0, request.n_max)
        return [*right[: n // 2], *([40] * (n - n // 2))]

    target = FakeEvaluator(Rule(), n_seq=n_seq, **{"n_ubatch": 16, **MEMORY[memory]})
    engine = Engine(target, [FakeDrafter(target, choose)])
    sequences = [engine.submit(prompt(i, 20), SamplingParams(max_tokens=300)) for i in range(n_seq)]
    run_all(engine)
    check(engine, sequences, 300)
