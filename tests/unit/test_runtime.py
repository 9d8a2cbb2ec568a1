"""Rollback of each kind of memory, batches, and text streams, one by one."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from fakes import FakeEvaluator, FakeVocab, Rule

from pyspec.errors import ConfigError, RollbackError
from pyspec.runtime import ALL, LAST, NONE, Batch, TextStream
from pyspec.types import RollbackKind

# ---- rollback ----------------------------------------------------------------------------


def evaluate(evaluator: FakeEvaluator, tokens: list[int], pos0: int = 0, seq: int = 0) -> list[int]:
    """Evaluate rows; gives the most likely token after each."""
    batch = Batch(max(1, len(tokens)))
    batch.extend(tokens, pos0, seq, ALL)
    evaluator.decode(batch)
    return [int(i) for i in evaluator.logits().argmax(1)]


def expected(rule: Rule, tokens: list[int]) -> int:
    return rule.next(rule.hash(tokens))


TEXT = [40 + i for i in range(30)]

BOUNDED: dict[str, Any] = {"kind": RollbackKind.BOUNDED, "n_rs_seq": 4}


@pytest.mark.parametrize("n_rows", [1, 2, 4, 5, 6])
@pytest.mark.parametrize("n_drop", range(1, 7))
def test_bounded(n_drop: int, n_rows: int) -> None:
    """At most n_rs_seq positions, and fewer than the last pass held; else the sequence is emptied."""
    evaluator = FakeEvaluator(Rule(), **BOUNDED)
    evaluate(evaluator, TEXT[:10])
    evaluate(evaluator, TEXT[10 : 10 + n_rows], 10)
    n_now = 10 + n_rows
    kept = evaluator.memory.rollback(0, n_now - n_drop, n_now)
    assert kept == (n_now - n_drop if n_drop <= 4 and n_drop < n_rows else 0)
    assert evaluate(evaluator, [*TEXT[kept : n_now - n_drop], 99], kept)[-1] == expected(
        evaluator.rule, [*TEXT[: n_now - n_drop], 99]
    )


def test_bounded_only_once_a_pass() -> None:
    evaluator = FakeEvaluator(Rule(), **BOUNDED)
    evaluate(evaluator, TEXT[:10])
    assert evaluator.memory.rollback(0, 9, 10) == 9
    assert evaluator.memory.rollback(0, 8, 9) == 0


def test_bounded_knows_the_last_pass_of_each_sequence() -> None:
    evaluator = FakeEvaluator(Rule(), n_seq=2, **BOUNDED)
    batch = Batch(16)
    batch.extend(TEXT[:5], 0, 0, ALL)
    batch.extend(TEXT[:2], 0, 1, ALL)
    evaluator.decode(batch)
    assert evaluator.memory.rollback(0, 2, 5) == 2
    assert evaluator.memory.rollback(1, 1, 2) == 1


@pytest.mark.parametrize("n_swa", [2, 4, 7])
@pytest.mark.parametrize("n_ubatch", [1, 3, 8])
def test_window(n_swa: int, n_ubatch: int) -> None:
    """Rows of one micro-batch can all be taken back; further back, the sequence is emptied when cells are missing."""
    for n_drop in range(1, 20):
        evaluator = FakeEvaluator(Rule(), n_swa=n_swa, n_ubatch=n_ubatch)
        assert evaluator.memory.n_rows_max == n_ubatch
        evaluate(evaluator, TEXT)
        n_keep = len(TEXT) - n_drop
        kept = evaluator.memory.rollback(0, n_keep, len(TEXT))
        assert kept in (0, n_keep)
        if n_drop <= n_ubatch:
            assert kept == n_keep
        assert evaluate(evaluator, [*TEXT[kept:n_keep], 99], kept)[-1] == expected(evaluator.rule, [*TEXT[:n_keep], 99])


@pytest.mark.parametrize("hybrid", [False, True])
def test_full(hybrid: bool) -> None:
    evaluator = FakeEvaluator(Rule(), kind=RollbackKind.FULL, hybrid=hybrid)
    evaluate(evaluator, TEXT[:10])
    evaluator.memory.checkpoint(0, 10)
    evaluate(evaluator, TEXT[10:15], 10)
    assert evaluator.memory.rollback(0, 12, 15) == 10
    evaluate(evaluator, TEXT[10:12], 10)
    assert evaluate(evaluator, [99], 12)[-1] == expected(evaluator.rule, [*TEXT[:12], 99])


def test_full_checkpoint_is_of_this_sequence_and_this_run() -> None:
    evaluator = FakeEvaluator(Rule(), kind=RollbackKind.FULL, n_seq=2)
    evaluate(evaluator, TEXT[:10])
    evaluate(evaluator, TEXT[5:15], 0, 1)
    evaluator.memory.checkpoint(0, 10)
    evaluate(evaluator, TEXT[15:18], 10, 1)
    # sequence 1 has no checkpoint: emptied, and sequence 0 is untouched
    assert evaluator.memory.rollback(1, 12, 13) == 0
    assert evaluate(evaluator, [99], 10)[-1] == expected(evaluator.rule, [*TEXT[:10], 99])
    # a checkpoint does not outlive its text
    evaluator.memory.clear(0)
    evaluate(evaluator, TEXT[10:25])
    assert evaluator.memory.rollback(0, 12, 15) == 0


def test_full_checkpoint_of_nothing() -> None:
    evaluator = FakeEvaluator(Rule(), kind=RollbackKind.FULL)
    evaluator.memory.checkpoint(0, 0)
    evaluate(evaluator, TEXT[:5])
    assert evaluator.memory.rollback(0, 3, 5) == 0
    assert evaluate(evaluator, [*TEXT[:3], 99])[-1] == expected(evaluator.rule, [*TEXT[:3], 99])


def test_same_checkpoint_is_not_copied_twice() -> None:
    evaluator = FakeEvaluator(Rule(), kind=RollbackKind.FULL)
    evaluate(evaluator, TEXT[:10])
    evaluator.memory.checkpoint(0, 10)
    evaluator.memory.checkpoint(0, 10)
    assert len([c for c in evaluator.cells.calls if c[0] == "state_seq_get"]) == 1


@pytest.mark.parametrize("kind", list(RollbackKind))
def test_nothing_to_forget(kind: RollbackKind) -> None:
    evaluator = FakeEvaluator(Rule(), kind=kind, n_rs_seq=4)
    evaluate(evaluator, TEXT[:10])
    assert evaluator.memory.rollback(0, 10, 10) == 10
    assert evaluator.memory.rollback(0, 12, 10) == 10
    assert evaluator.cells.calls == []


def test_limits() -> None:
    def limits(**options: Any) -> tuple[int, int]:
        memory = FakeEvaluator(Rule(), n_ubatch=16, **options).memory
        return memory.n_draft_max, memory.n_rows_max

    large = 1 << 20
    assert limits(kind=RollbackKind.NONE)[0] == 0
    assert limits(**BOUNDED)[0] == 4
    assert limits(n_swa=8)[1] == 16
    assert min(limits()) > large
    assert min(limits(kind=RollbackKind.FULL)) > large


def test_memory_that_refuses() -> None:
    evaluator = FakeEvaluator(Rule())
    evaluate(evaluator, TEXT[:10])
    evaluator.cells.seq_rm = lambda *a: False  # type: ignore[method-assign]
    with pytest.raises(RollbackError, match="sequence 0"):
        evaluator.memory.clear(0)
    with pytest.raises(RollbackError):
        evaluator.memory.rollback(0, 5, 10)


# ---- batches -----------------------------------------------------------------------------


def test_batch_rows() -> None:
    batch = Batch(10)
    assert batch.extend([5, 6, 7], 4, 2, LAST) == 0
    assert batch.extend(np.array([8, 9], np.int32), 0, 0, ALL) == 3
    assert batch.add(3, 2, 0, False) == 5
    assert batch.extend([1], 9, 1) == 6
    assert batch.extend([], 0, 7, ALL) == 7
    n = len(batch)
    assert n == 7
    assert batch.tokens[:n].tolist() == [5, 6, 7, 8, 9, 3, 1]
    assert batch.pos[:n].tolist() == [4, 5, 6, 0, 1, 2, 9]
    assert batch.seq[:n].tolist() == [2, 2, 2, 0, 0, 0, 1]
    assert batch.output[:n].tolist() == [0, 0, 1, 1, 1, 0, 0]
    assert batch.n_outputs == 3
    assert batch.rows() == {2: (0, 3), 0: (3, 6), 1: (6, 7)}
    arrays = [batch.tokens, batch.pos, batch.seq, batch.output]
    batch.clear()
    assert (batch.n, batch.n_outputs, batch.rows()) == (0, 0, {})
    batch.extend([1], 0, 0, NONE)
    assert all(a is b for a, b in zip(arrays, [batch.tokens, batch.pos, batch.seq, batch.output], strict=True))
    assert batch.output[0] == 0


def test_batch_that_is_full_is_left_as_it_was() -> None:
    batch = Batch(4)
    batch.extend([1, 2, 3], 0, 0, ALL)
    with pytest.raises(ConfigError, match="4"):
        batch.extend([1, 2], 0, 1)
    batch.add(4, 3, 0, True)
    with pytest.raises(ConfigError, match="full"):
        batch.add(4, 4, 0, True)
    assert batch.rows() == {0: (0, 4)}
    assert (batch.n, batch.n_outputs) == (4, 4)
    with pytest.raises(ConfigError, match="capacity"):
        Batch(0)


def test_rows_of_a_sequence_stay_together() -> None:
    batch = Batch(8)
    batch.extend([1, 2], 0, 0)
    batch.extend([1, 2], 0, 1)
    with pytest.raises(ConfigError, match="contiguous"):
        batch.extend([3], 2, 0)
    with pytest.raises(ConfigError, match="contiguous"):
        batch.add(3, 2, 0, True)
    assert batch.n == 4


def test_batch_with_embeddings() -> None:
    batch = Batch(3, 5)
    assert batch.embd is not None
    assert batch.embd.shape == (3, 5)
    assert batch.embd.dtype == np.float32
    assert Batch(3).embd is None
    assert Batch(3, 5, use_tokens=False).use_tokens is False


# ---- text --------------------------------------------------------------------------------


def streamed(data: bytes, stop: tuple[str, ...] = ()) -> str:
    stream = TextStream(FakeVocab(), stop)
    out = ""
    for token in FakeVocab.encode(data):
        out += stream.push(token)
        if stream.stopped:
            break
    return out + stream.flush()


@pytest.mark.parametrize("seed", range(30))
def test_any_bytes_give_the_text_decoded_at_once(seed: int) -> None:
    rng = random.Random(seed)
    data = b"".join(
        rng.choice([b"a", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x91\xa9", b"\xff", "東".encode()]) for _ in range(40)
    )
    assert streamed(data) == data.decode("utf-8", "replace")


@pytest.mark.parametrize("stop", [("ab",), ("aab", "ba"), ("abab",), ("b", "bb"), ("aaa", "abb")])
def test_all_short_texts_are_cut_at_the_first_stop_string(stop: tuple[str, ...]) -> None:
    """All texts of a and b up to 9 letters, against a plain search: the stop string completed first wins."""
    for n in range(10):
        for letters in itertools.product("ab", repeat=n):
            text = "".join(letters)
            end = next((i for i in range(n + 1) if any(text[:i].endswith(s) for s in stop)), None)
            at = n if end is None else min(end - len(s) for s in stop if text[:end].endswith(s))
            assert streamed(text.encode(), stop) == text[:at]


def test_nothing_comes_after_the_stop() -> None:
    stream = TextStream(FakeVocab(), ("b",))
    assert [stream.push(t) for t in FakeVocab.encode("abc")] == ["a", "", ""]
    assert stream.stopped
    assert stream.flush() == ""
