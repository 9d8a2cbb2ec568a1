"""Evaluation through ContextHandle: rows, order, caches, states, samplers, threads, memory."""

from __future__ import annotations

import time
import timeit

import numpy as np
import pytest
from backends_kit import context, decode, greedy, load, rows, zeros

from pyspec.backends import ThreadPool
from pyspec.errors import ConfigError, DecodeAborted, UnsupportedError

PROMPT = [1, 80, 109, 296, 119, 330]


@pytest.fixture(scope="module")
def llama(tiny):
    with load(tiny("target-llama")) as model:
        yield model


def test_many_rows_equal_single_rows(llama):
    with context(llama) as a, context(llama) as b:
        decode(a, PROMPT)
        at_once = np.array(a.logits())
        assert at_once.shape == (6, 512)
        assert at_once.dtype == np.float32
        for i, token in enumerate(PROMPT):
            decode(b, [token], i)
            assert np.abs(b.logits()[0] - at_once[i]).max() < 1e-4


def test_output_rows_come_in_batch_order(llama):
    """Also when libllama computes several sequences in another order."""
    with context(llama, n_seq_max=3, n_ctx=768) as c, context(llama) as single:
        tokens = np.array([5, 6, 7, 50, 51, 52, 90, 91, 92], np.int32)
        seq = np.array([2, 0, 1, 2, 0, 1, 2, 0, 1], np.int32)
        pos = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2], np.int32)
        output = np.array([0, 0, 0, 1, 0, 1, 1, 1, 1], np.int8)
        c.decode(tokens, pos, seq, output, None, 9)
        got = np.array(c.logits())
        assert c.n_outputs == 5
        at = 0
        for row in range(9):
            if output[row]:
                single.memory_clear()
                decode(single, tokens[seq == seq[row]][: pos[row] + 1])
                assert np.abs(single.logits()[-1] - got[at]).max() < 1e-3, row
                at += 1


def test_recurrent_rows_come_in_batch_order(tiny):
    with load(tiny("target-recurrent")) as m, context(m, n_seq_max=2, n_ctx=512) as c, context(m) as single:
        tokens = np.array([5, 6, 50, 60, 70], np.int32)
        seq = np.array([1, 1, 1, 0, 0], np.int32)
        pos = np.array([0, 1, 2, 0, 1], np.int32)
        c.decode(tokens, pos, seq, np.ones(5, np.int8), None, 5)
        got = np.array(c.logits())
        for s in (0, 1):
            single.memory_clear()
            decode(single, tokens[seq == s])
            assert np.abs(single.logits() - got[seq == s]).max() < 1e-3


def test_no_outputs(llama):
    with context(llama) as c:
        decode(c, PROMPT, output=0)
        assert c.n_outputs == 0
        assert c.logits().shape == (0, 512)


def test_views_are_borrowed_and_read_only(llama):
    with context(llama) as c:
        decode(c, PROMPT)
        view = c.logits()
        assert c.logits() is view, "no second look at native memory"
        assert not view.flags.owndata
        assert view.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            view[0, 0] = 1
        first = c.logits()[0, :5].copy()
        decode(c, [9], 6)
        assert c.logits() is not view
        assert c.logits().shape == (1, 512)
        assert not np.array_equal(first, c.logits()[0, :5])


def test_same_arrays_with_new_contents(llama):
    """The addresses of the arrays are remembered, not what is in them."""
    with context(llama) as c:
        t, p, s, o = rows(PROMPT)
        c.decode(t, p, s, o, None, 6)
        expected = np.array(c.logits())
        c.memory_clear()
        t[:] = 77
        c.decode(t, p, s, o, None, 6)
        other = np.array(c.logits())
        assert np.abs(other - expected)[1:].max() > 0.1
        c.memory_clear()
        t[:] = PROMPT
        c.decode(t, p, s, o, None, 6)
        assert np.array_equal(c.logits(), expected)


def test_read_only_arrays_are_fine(llama):
    with context(llama) as c:
        arrays = rows(PROMPT)
        for array in arrays:
            array.flags.writeable = False
        c.decode(*arrays, None, 6)
        assert c.n_outputs == 6


def test_prompt_longer_than_a_micro_batch(llama):
    with (
        context(llama, n_ctx=512, n_batch=200, n_ubatch=16) as c,
        context(llama, n_ctx=512, n_batch=200, n_ubatch=200) as d,
    ):
        tokens = [20 + i % 300 for i in range(200)]
        flags = [i % 7 == 0 for i in range(200)]
        decode(c, tokens, output=flags)
        decode(d, tokens, output=flags)
        assert np.abs(c.logits() - d.logits()).max() < 1e-3


def test_partial_removal(llama):
    with context(llama) as c:
        expected = greedy(c, PROMPT, 12)
        assert c.seq_pos_max(0) == len(PROMPT) + 10
        assert c.seq_rm(0, len(PROMPT))
        assert (c.seq_pos_min(0), c.seq_pos_max(0)) == (0, 5)
        decode(c, [expected[0]], 6)
        assert int(c.logits()[0].argmax()) == expected[1]


def test_sequences_share_a_prefix(llama):
    for unified in (True, False):
        with context(llama, n_seq_max=2, n_ctx=512, kv_unified=unified) as c:
            decode(c, PROMPT)
            expected = int(c.logits()[-1].argmax())
            if unified:
                c.seq_cp(0, 1, 0, 5)
            else:
                c.seq_cp(0, 1)
                decode(c, [40], 6)  # the copy happens at the next pass
                assert c.seq_rm(1, 5)
            decode(c, PROMPT[5:], 5, seq=1)
            assert int(c.logits()[0].argmax()) == expected
            c.seq_rm(0, 0)
            assert c.seq_pos_max(0) == -1
            assert c.seq_pos_max(1) == 5


@pytest.mark.parametrize("name", ["target-llama", "target-recurrent", "target-hybrid", "target-swa"])
@pytest.mark.parametrize("flags", [0, 1, 2, 3])
def test_saved_states(tiny, name, flags):
    """Flag 1 saves only what cannot be taken back otherwise; the rest is rolled back by removal."""
    with load(tiny(name)) as m, context(m) as c:
        decode(c, PROMPT)
        state = c.state_seq_get(0, flags)
        assert state.dtype == np.uint8
        assert state.flags.owndata or state.base is not None
        expected = []
        for i, token in enumerate((30, 31, 32)):
            decode(c, [token], 6 + i)
            expected.append(np.array(c.logits()[0]))
        if not flags & 1:
            c.seq_rm(0, 0)
        c.state_seq_set(0, state, flags)
        if flags & 1:
            assert c.seq_rm(0, 6), "after the rest was put back, the attention cells can go"
        assert c.seq_pos_max(0) == 5
        for i, token in enumerate((30, 31, 32)):
            decode(c, [token], 6 + i)
            assert np.abs(c.logits()[0] - expected[i]).max() < 1e-3


def test_state_moves_to_another_sequence_and_context(llama):
    with context(llama, n_seq_max=2, n_ctx=512) as a, context(llama, n_seq_max=2, n_ctx=512) as b:
        decode(a, PROMPT)
        expected = int(a.logits()[-1].argmax())
        b.state_seq_set(1, bytes(a.state_seq_get(0)))
        assert b.seq_pos_max(1) == 5
        assert b.seq_rm(1, 5)
        decode(b, PROMPT[5:], 5, seq=1)
        assert int(b.logits()[0].argmax()) == expected


def test_layer_inputs(llama):
    with context(llama) as c:
        c.layer_inputs_enable(0, True)
        c.layer_inputs_enable(2, True)
        decode(c, PROMPT, output=[0, 0, 0, 0, 0, 1])
        first, third = np.array(c.layer_input(0, 6)), np.array(c.layer_input(2, 6))
        assert first.shape == (6, llama.n_embd)
        assert c.layer_input(2, 3).shape == (3, llama.n_embd)
        assert np.abs(first - third).max() > 1e-3
        assert np.abs(first[0] - first[1]).max() > 1e-3
        again = context(llama)
        again.layer_inputs_enable(0, True)
        for i, token in enumerate(PROMPT):
            decode(again, [token], i)
            assert np.abs(again.layer_input(0, 1)[0] - first[i]).max() < 1e-4
        again.close()
        logits = np.array(c.logits())
        c.layer_inputs_enable(0, False)
        decode(c, [9], 6)
        assert c.layer_input(2, 1).shape == (1, llama.n_embd)
        assert logits.shape == (1, 512)


def test_probe_does_not_disturb(tiny):
    """A refused layer leaves results as they were."""
    with load(tiny("target-swa")) as m, context(m) as c, context(m) as d:
        expected = greedy(c, PROMPT, 10)
        decode(d, PROMPT)
        with pytest.raises(UnsupportedError):
            d.layer_inputs_enable(1, True)
        assert int(d.logits()[-1].argmax()) == expected[0]
        decode(d, [expected[0]], 6)
        assert int(d.logits()[0].argmax()) == expected[1]


def test_nextn_masked_and_not(tiny):
    with load(tiny("target-mtp")) as m, context(m) as c:
        c.embeddings_nextn(True, False)
        decode(c, PROMPT, output=[0, 0, 1, 0, 0, 1])
        unmasked = np.array(c.nextn(6))
        assert unmasked.shape == (6, m.n_embd_out)
        assert np.abs(unmasked).min(axis=1).max() > 0
        c.memory_clear()
        c.embeddings_nextn(True, True)
        decode(c, PROMPT, output=[0, 0, 1, 0, 0, 1])
        masked = np.array(c.nextn(2))
        assert np.abs(masked - unmasked[[2, 5]]).max() < 1e-4
        with pytest.raises(ConfigError):
            c.nextn(3)


def test_encoder_and_draft_pass(tiny):
    """EAGLE-3: features in, rows out, draft rows from token and feature."""
    with load(tiny("target-llama")) as t, load(tiny("eagle3")) as m, context(t) as target, context(m, target) as c:
        for layer in m.target_layer_ids:
            target.layer_inputs_enable(layer, True)
        decode(target, PROMPT)
        features = np.concatenate([target.layer_input(layer, 6) for layer in m.target_layer_ids], axis=1)
        assert features.shape == (6, c.n_embd_encode)
        c.embeddings_nextn(True, True)
        c.encode(np.ascontiguousarray(features), 6)
        hidden = np.array(c.nextn(6))
        assert hidden.shape == (6, c.n_embd_decode)
        assert np.abs(hidden).sum() > 0
        decode(c, PROMPT[1:], embd=np.ascontiguousarray(hidden[:5]))
        assert c.logits().shape == (5, 512)


def test_backend_sampler(llama):
    with context(llama, n_seq_max=2, n_ctx=512, n_outputs_max=8) as c:
        decode(c, PROMPT)
        logits = np.array(c.logits())
        assert c.sampled_candidates(5) is None
        c.memory_clear()
        assert c.set_backend_sampler(0, 10)
        decode(c, PROMPT, output=[0, 0, 0, 0, 1, 1])
        with pytest.raises(UnsupportedError, match="sampled_candidates"):
            c.logits()
        for row in (4, 5):
            ids, values = c.sampled_candidates(row)
            assert len(ids) == len(values) == 10
            assert set(ids) == set(np.argsort(logits[row])[-10:])
            assert np.abs(values - logits[row][ids]).max() < 1e-3
            assert not ids.flags.writeable
        decode(c, PROMPT, seq=1, output=[0, 0, 0, 0, 0, 1])
        assert np.abs(c.logits()[0] - logits[5]).max() < 1e-3
        assert c.sampled_candidates(5) is None
        assert not c.set_backend_sampler(0, None)
        decode(c, [9], 6)
        assert c.logits().shape == (1, 512)


def test_thread_pool(llama):
    with context(llama, n_threads=2) as a, context(llama, n_threads=2) as b:
        decode(a, PROMPT)
        expected = np.array(a.logits())
        a.memory_clear()
        with ThreadPool(2) as pool:
            a.attach_threadpool(pool)
            b.attach_threadpool(pool)
            for c in (a, b):
                decode(c, PROMPT)
                assert np.array_equal(c.logits(), expected)
        assert pool.closed
        for c in (a, b):  # detached by closing the pool
            c.memory_clear()
            decode(c, PROMPT)
            assert np.array_equal(c.logits(), expected)


def test_thread_pools_in_turn(llama):
    """A context that changes pools never touches one that is gone (libllama keeps the pool of its last pass)."""
    with context(llama, n_threads=2) as c:
        for _ in range(8):
            pool = ThreadPool(2)
            c.attach_threadpool(pool)
            decode(c, PROMPT)
            pool.close()
            with ThreadPool(1) as other:
                c.attach_threadpool(other)
            c.memory_clear()
        decode(c, PROMPT)


def test_more_threads_than_the_pool_has(llama, caplog):
    with context(llama) as c, ThreadPool(1) as pool:
        c.attach_threadpool(pool)
        c.set_n_threads(8, 8)
        decode(c, PROMPT)
        assert not caplog.records, "ggml warns on every pass if it has to cap the number"


def test_no_more_threads_than_cpus(llama, run_child):
    """64 threads on a small machine finish, and do not wait for each other."""
    out = run_child(
        """
        import os, sys
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        from backends_kit import load, context, decode
        from pyspec.backends import ThreadPool
        with load(sys.argv[1]) as m, context(m, n_threads=64) as c, ThreadPool(64) as pool:
            for i in range(20):
                decode(c, 1, i)
            print(len(os.listdir("/proc/self/task")) <= 2, pool.n_threads)
        """
        if hasattr(__import__("os"), "sched_setaffinity")
        else "print('True 1')",
        llama.path,
        env={"OPENBLAS_NUM_THREADS": "1"},
    )
    assert out.split() == ["True", "1"]


def test_bad_numbers_of_threads(llama):
    with context(llama) as c:
        for n in (0, -1, 513):
            with pytest.raises(ConfigError):
                c.set_n_threads(n, 1)
            with pytest.raises(ConfigError):
                ThreadPool(n)
        with pytest.raises(ConfigError):
            ThreadPool(1, poll=101)


def test_abort(llama):
    with context(llama) as c:
        c.abort()
        with pytest.raises(DecodeAborted) as error:
            decode(c, PROMPT)
        assert error.value.state == "partial"
        assert c.seq_pos_max(0) == -1
        c.abort_clear()
        decode(c, PROMPT)
        assert c.n_outputs == 6


def test_abort_stops_a_long_prompt_within_a_micro_batch(llama):
    """From another thread, in the middle of one call; what was finished stays."""
    import threading

    with context(llama, n_ctx=4096, n_batch=4096, n_ubatch=8) as c:
        tokens = [20 + i % 300 for i in range(4000)]
        start = time.perf_counter()
        timer = threading.Timer(0.05, c.abort)
        timer.start()
        with pytest.raises(DecodeAborted):
            decode(c, tokens, output=0)
        took = time.perf_counter() - start
        timer.join()
        c.abort_clear()
        kept = c.seq_pos_max(0) + 1
        assert kept % 8 == 0
        assert kept < 4000
        assert took < 2
        decode(c, tokens[kept : kept + 8], kept)
        decode_fresh = context(llama, n_ctx=4096, n_batch=4096, n_ubatch=8)
        decode(decode_fresh, tokens[: kept + 8], output=[0] * kept + [1] * 8)
        assert np.abs(decode_fresh.logits() - c.logits()).max() < 1e-3
        decode_fresh.close()


def test_memory_bytes(llama):
    with context(llama) as small, context(llama, n_ctx=2048) as large:
        a, b = small.memory_bytes(), large.memory_bytes()
        assert a["model"] == b["model"] > 0
        assert b["context"] == 8 * a["context"] > 0
        assert a["compute"] > 0


def test_actual_sizes(llama):
    with context(llama, n_ctx=100, n_batch=64, n_seq_max=2) as c:
        assert (c.n_ctx, c.n_ctx_seq, c.n_batch, c.n_ubatch, c.n_seq_max) == (512, 256, 64, 32, 2)
        assert c.n_outputs_max == 64
        assert c.model is llama
        assert c.other is None


def test_embeddings_context(llama):
    from pyspec.backends import ContextHandle
    from pyspec.config import ContextParams

    params = ContextParams(n_ctx=256, n_batch=64, n_ubatch=32, n_threads=1, flash_attn=False)
    with ContextHandle(llama, params, embeddings=True) as c:
        decode(c, PROMPT)
        assert c.n_outputs == 6


def test_all_zero_embedding_rows(tiny):
    """M-RoPE models take four positions an embedding row; they are made from the one given."""
    with load(tiny("target-hybrid")) as m, context(m) as c:
        decode(c, 5, embd=zeros(c, 5), with_tokens=False)
        assert c.seq_pos_max(0) == 4


def test_overhead_of_a_pass(llama):
    """Python's own part of decode() + logits(), the native call taken out: a few microseconds."""
    with context(llama) as c:
        arrays = rows([5])
        c.decode(*arrays, None, 1)
        native, c._c_decode = c._c_decode, lambda *args: 0
        try:
            once = lambda: (c.decode(*arrays, None, 1), c.logits())  # noqa: E731
            best = min(timeit.repeat(once, number=2000, repeat=7)) / 2000
        finally:
            c._c_decode = native
        assert best < 10e-6


@pytest.mark.parametrize("name", ["target-llama", "target-swa", "target-hybrid", "target-recurrent"])
def test_size_of_a_context_is_known_before(tiny, name, monkeypatch):
    """With less memory than it takes the context is refused, with that much it is made."""
    from pyspec.backends import _context_checks
    from pyspec.errors import NativeError

    with load(tiny(name)) as m:
        with context(m, n_ctx=20480, n_seq_max=2) as c:
            sizes = c.memory_bytes()
        taken = sizes["context"] + sizes["compute"]
        monkeypatch.setattr(_context_checks, "available_bytes", lambda: taken - 1)
        if name != "target-recurrent":  # there the length costs nothing, so nothing is asked
            with pytest.raises(NativeError, match="MiB are free") as error:
                context(m, n_ctx=20480, n_seq_max=2)
            assert error.value.state == "unchanged"
        monkeypatch.setattr(_context_checks, "available_bytes", lambda: taken)
        context(m, n_ctx=20480, n_seq_max=2).close()
