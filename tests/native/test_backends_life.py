"""Ownership: closing in any order, collection, forks, threads, interpreter exit, memory; and the native log."""

from __future__ import annotations

import gc
import logging
import os
import threading
import warnings

import numpy as np
import pytest
from backends_kit import caught, context, decode, greedy, load, rows

from pyspec import backends
from pyspec.backends import ContextHandle, ThreadPool
from pyspec.errors import ClosedError, ModelLoadError

PROMPT = [1, 80, 109, 296, 119, 330]


def test_close_is_idempotent_and_use_after_it_raises(tiny):
    m = load(tiny("target-llama"))
    c = context(m)
    decode(c, PROMPT)
    c.close()
    c.close()
    calls = [
        lambda: decode(c, PROMPT), c.logits, lambda: c.n_outputs, lambda: c.nextn(1), lambda: c.layer_input(0, 1),
        lambda: c.embeddings_nextn(False, False), lambda: c.layer_inputs_enable(0, True), lambda: c.causal_attn(True),
        lambda: c.seq_rm(0, 0), lambda: c.seq_cp(0, 0), lambda: c.seq_keep(0), c.memory_clear, lambda: c.seq_pos_max(0),
        lambda: c.state_seq_get(0), lambda: c.state_seq_set(0, b"x"), lambda: c.set_backend_sampler(0, 5),
        lambda: c.sampled_candidates(0), lambda: c.set_n_threads(1, 1), lambda: c.attach_threadpool(None),
        c.memory_bytes, c.__enter__, lambda: context(m, c),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ClosedError, match="is closed"):
            call()
    c.abort()
    c.abort_clear()
    assert "closed" in repr(c)
    m.close()
    with pytest.raises(ClosedError):
        context(m)


def test_closing_the_model_closes_its_contexts(tiny):
    with load(tiny("target-llama")) as m:
        contexts = [context(m) for _ in range(3)]
        decode(contexts[0], PROMPT)
    assert all(c.closed for c in contexts)
    for c in contexts:
        with pytest.raises(ClosedError):
            c.logits()
        c.close()


def test_closing_the_target_closes_the_draft(tiny):
    with load(tiny("target-llama")) as t, load(tiny("eagle3")) as m:
        target = context(t)
        draft = context(m, target)
        target.close()
        assert draft.closed
        assert not m.closed


def test_a_context_keeps_its_model(tiny):
    """Collected only after the context, whatever names are left."""
    c = context(load(tiny("target-llama")))
    gc.collect()
    decode(c, PROMPT)
    assert c.n_outputs == 6
    c.model.close()
    assert c.closed


@pytest.mark.parametrize("kind", ["model", "context", "pool"])
def test_collected_unclosed_warns_and_frees(tiny, kind):
    m = load(tiny("target-llama"))
    kinds = {"model": lambda: load(m.path), "context": lambda: context(m), "pool": lambda: ThreadPool(2)}
    made = [kinds[kind]()]
    native = made[0]._native
    with pytest.warns(ResourceWarning, match="unclosed <"):
        made.clear()
    assert native.ptr is None
    m.close()


def test_warnings_as_errors_still_free(tiny):
    m = load(tiny("target-llama"))
    native = m._native
    hooked = []
    import sys

    old, sys.unraisablehook = sys.unraisablehook, hooked.append
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del m
            gc.collect()
    finally:
        sys.unraisablehook = old
    assert native.ptr is None
    assert len(hooked) == 1
    hooked.clear()


def test_cycles_are_collected_in_any_order(tiny, run_child):
    run_child(
        """
        import gc, sys, warnings
        from backends_kit import load, context, decode
        warnings.simplefilter("ignore")
        for i in range(20):
            m = load(sys.argv[1]); t = context(m); c = context(m, t)
            decode(c, [1, 2, 3])
            cycle = [m, t, c]; cycle.append(cycle); m.cycle = t.cycle = c.cycle = cycle
            del m, t, c, cycle
            gc.collect()
        from pyspec.backends import _ownership
        assert not _ownership._live, _ownership._live
        """,
        tiny("target-llama"),
    )


def test_failed_constructors_leave_nothing(tiny):
    from pyspec.backends import _ownership

    before = len(_ownership._live)
    with load(tiny("target-llama")) as m:
        assert caught(lambda: context(m, ctx_type="mtp")) == "UnsupportedError"
        assert caught(lambda: load("/nonexistent")) == "ModelLoadError"
        assert caught(lambda: ThreadPool(0)) == "ConfigError"
        gc.collect()  # warnings are errors
    assert len(_ownership._live) == before


@pytest.mark.parametrize("how", ["end", "sys.exit(0)", "raise SystemExit"])
def test_exit_without_close(tiny, run_child, how):
    """Exit code 0 and an empty stderr, with everything left open and a computation under way in a daemon thread."""
    run_child(
        f"""
        import sys, threading, time
        from backends_kit import load, context, decode
        from pyspec.backends import ThreadPool
        m = load(sys.argv[1]); c = context(m); d = context(m, c)
        pool = ThreadPool(2); c.attach_threadpool(pool)
        decode(c, [1, 2, 3]); c.logits()
        busy = context(m, n_ctx=4096, n_batch=4096)
        work = lambda: [decode(busy, list(range(20, 500)), output=0), time.sleep(9)]
        threading.Thread(target=work, daemon=True).start()
        time.sleep(0.02)
        {how if how != "end" else "pass"}
        """,
        tiny("target-llama"),
    )


@pytest.mark.parametrize("work", ["decode", "rows", "load", "make", "tokenize"])
def test_exit_while_a_daemon_thread_works(tiny, run_child, work):
    """Again and again: the thread is caught at another place each time."""
    code = """
        import sys, threading, time
        from backends_kit import load, context, decode
        from pyspec.backends import ThreadPool
        m = load(sys.argv[1])
        c = context(m, n_ctx=4096, n_batch=4096, n_threads=2); pool = ThreadPool(2); c.attach_threadpool(pool)
        decode(c, 64)
        tokens = [20 + i % 300 for i in range(2000)]
        def go():
            while True:
                if sys.argv[2] == "decode":
                    c.memory_clear(); decode(c, tokens, output=0)
                elif sys.argv[2] == "rows":
                    c.logits().sum()
                elif sys.argv[2] == "load":
                    load(sys.argv[1]).close()
                elif sys.argv[2] == "make":
                    context(m).close()
                else:
                    m.tokenize(b"some text " * 1000, True, True)
        def quiet(args):
            pass
        threading.excepthook = quiet
        threading.Thread(target=go, daemon=True).start()
        time.sleep(float(sys.argv[3]))
    """
    for i in range(4):
        run_child(code, tiny("target-llama"), work, str(0.02 + 0.013 * i))


def test_exit_code_of_the_program_is_kept(tiny, run_child):
    run_child(
        "import sys; from backends_kit import load, context; c = context(load(sys.argv[1])); sys.exit(3)",
        tiny("target-llama"),
        exit_code=3,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_child(tiny, run_child):
    """Handles of the parent raise and free nothing, even at exit and collection; the child may make its own."""
    out = run_child(
        """
        import gc, os, sys, threading, warnings
        from backends_kit import load, context, decode, caught
        from pyspec.backends import ThreadPool
        from pyspec.errors import ClosedError
        m = load(sys.argv[1]); c = context(m); pool = ThreadPool(2)
        decode(c, [1, 2, 3])
        c._native.lock.acquire()  # held at the time of the fork
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
        if pid == 0:
            calls = [
                lambda: decode(c, [1]), c.logits, lambda: m.tokenize(b"a", True, True), lambda: c.seq_rm(0, 0),
                c.memory_clear, lambda: context(m), lambda: c.attach_threadpool(pool), lambda: c.n_outputs, m.__enter__,
            ]
            for call in calls:
                try:
                    call()
                except ClosedError as exc:
                    assert "belongs to process" in str(exc), exc
                else:
                    os._exit(7)
            assert c.closed and m.closed and pool.closed
            c.close(); m.close(); pool.close()
            with load(sys.argv[1]) as own, context(own) as mine:
                decode(mine, [1, 2, 3])
                assert mine.logits().shape == (3, 512)
            del c, m, pool
            gc.collect()
            sys.exit(5)
        c._native.lock.release()
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        decode(c, [4], 3)
        print(c.logits().shape, c.closed)
        """,
        tiny("target-llama"),
        env={"PYTHONWARNINGS": "error"},
    )
    assert out.split("\n")[:2] == ["5", "(1, 512) False"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_multiprocessing_fork(tiny, run_child):
    out = run_child(
        """
        import multiprocessing, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from backends_kit import load, context, greedy, caught
        m = load(sys.argv[1]); c = context(m)
        def work(path, results):
            results.put(caught(c.logits))
            with load(path) as own, context(own) as mine:
                results.put(greedy(mine, [1, 80, 109], 5))
        ctx = multiprocessing.get_context("fork")
        results = ctx.Queue()
        process = ctx.Process(target=work, args=(sys.argv[1], results))
        process.start()
        print(results.get(timeout=50), results.get(timeout=50) == greedy(c, [1, 80, 109], 5))
        process.join()
        print(process.exitcode)
        """,
        tiny("target-llama"),
    )
    assert out.split("\n")[:2] == ["ClosedError True", "0"]


# ---- threads ----


def test_threads_on_one_context_are_served_one_after_the_other(tiny):
    """Each has a sequence of its own; every result equals that of a single run."""
    with load(tiny("target-llama")) as m, context(m) as single, context(m, n_seq_max=8, n_ctx=2048) as c:
        prompts = [[1, 30 + i, 80 + 2 * i, 200 + i] for i in range(8)]
        expected = []
        for prompt in prompts:
            single.memory_clear()
            expected.append(greedy(single, prompt, 12))
        results: dict[int, list[int]] = {}
        turn = threading.Lock()

        def run(i: int) -> None:
            out: list[int] = []
            tokens, pos = prompts[i], 0
            for _ in range(12):
                ids, p, s, o = rows(tokens, pos, i)
                with turn:  # logits belong to the last decode of the context, whoever made it
                    c.decode(ids, p, s, o, None, len(ids))
                    out.append(int(c.logits()[-1].argmax()))
                pos += len(tokens)
                tokens = [out[-1]]
            results[i] = out

        threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [results[i] for i in range(8)] == expected


def test_many_threads_without_any_order(tiny):
    """No lock of ours around the calls: nothing crashes, the cache adds up."""
    with load(tiny("target-llama")) as m, context(m, n_seq_max=8, n_ctx=2048) as c, ThreadPool(2) as pool:
        c.attach_threadpool(pool)
        errors: list[BaseException] = []

        def run(i: int) -> None:
            try:
                for step in range(10):
                    decode(c, [30 + i], step, seq=i)
                    c.logits()
                    m.tokenize(b"some text", True, True)
                    assert c.seq_pos_max(i) == step
            except BaseException as exc:
                errors.append(exc)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []


def test_two_contexts_of_one_model_in_two_threads(tiny):
    """At the same time, with a shared pool and without."""
    with load(tiny("target-llama")) as m, ThreadPool(2) as pool, context(m) as single:
        expected = greedy(single, PROMPT, 10)
        for shared in (False, True):
            results: dict[int, list[int]] = {}

            def run(i: int, c: ContextHandle, results: dict[int, list[int]] = results) -> None:
                results[i] = greedy(c, PROMPT, 10)

            with context(m) as a, context(m) as b:
                if shared:
                    a.attach_threadpool(pool)
                    b.attach_threadpool(pool)
                threads = [threading.Thread(target=run, args=pair) for pair in ((0, a), (1, b))]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(120)
                assert results == {0: expected, 1: expected}


def test_close_waits_for_a_running_pass(tiny):
    with load(tiny("target-llama")) as m:
        c = context(m, n_ctx=4096, n_batch=4096)
        result: list[str] = []
        thread = threading.Thread(
            target=lambda: result.append(caught(lambda: decode(c, [20 + i % 300 for i in range(2000)], output=0)))
        )
        thread.start()
        while not c._native.lock.acquire(blocking=False) and thread.is_alive():
            break  # it is computing
        else:
            c._native.lock.release()
        m.close()
        thread.join(60)
        assert result[0] in ("none", "ClosedError")
        assert c.closed


# ---- memory ----


@pytest.mark.parametrize("name", ["target-llama", "target-hybrid"])
def test_two_hundred_rounds_of_load_and_close(tiny, run_child, name):
    """Resident memory grows by less than 2 %, and no file stays open."""
    pytest.importorskip("psutil")
    out = run_child(
        """
        import sys
        from backends_kit import load, context, decode, resident_growth, open_files
        def once():
            with load(sys.argv[1]) as m, context(m) as c:
                decode(c, list(m.tokenize(b"Hello there, how are you?", True, True)))
                c.logits().sum(); c.state_seq_get(0); m.metadata(); m.eog_tokens()
        once()
        files = open_files()
        print(resident_growth(once, 200), open_files() - files)
        """,
        tiny(name),
        timeout=180,
    )
    growth, files = out.split()
    assert float(growth) < 1.02
    assert int(files) == 0


def test_nothing_stays_allocated(tiny, run_child):
    """Bytes in use in the C heap after rounds that touch everything, device samplers too."""
    out = run_child(
        """
        import ctypes, gc, sys
        class Info(ctypes.Structure):
            _fields_ = [(n, ctypes.c_size_t) for n in
                        "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "mallinfo2"):
            print("no mallinfo2"); sys.exit()
        libc.mallinfo2.restype = Info
        from backends_kit import load, context, decode, caught
        from pyspec.backends import ThreadPool
        def used():
            gc.collect()
            info = libc.mallinfo2()
            return info.uordblks + info.hblkhd
        for i in range(60):
            with load(sys.argv[1]) as m, context(m) as c, ThreadPool(2, poll=0) as pool:
                c.attach_threadpool(pool)
                decode(c, 6)
                c.logits(); c.state_seq_set(0, c.state_seq_get(0)); c.set_backend_sampler(0, 5)
                decode(c, 1, 6)
                c.sampled_candidates(0); caught(lambda: context(m, ctx_type="mtp"))
                caught(lambda: c.layer_inputs_enable(4, True)); c.layer_inputs_enable(1, True)
                decode(c, 1, 7)
            if i == 9:
                start = used()
        print(used() - start)
        """,
        tiny("target-llama"),
        env={"MALLOC_ARENA_MAX": "1"},
    )
    if "no mallinfo2" in out:
        pytest.skip("not glibc 2.33 or later")
    assert int(out) < 20_000


def test_a_lost_context_is_freed(tiny, run_child):
    """Failed assertions leak next to nothing: 150 lost contexts. (What C frames held is lost with each: a few KB.)"""
    pytest.importorskip("psutil")
    run_child(
        """
        import sys
        import pyspec.backends._context_base as base
        from backends_kit import load, decode, caught, resident_growth
        from pyspec.backends import ContextHandle
        from pyspec.config import ContextParams
        base.check_context = lambda *args: None
        params = ContextParams(n_ctx=256, n_batch=64, n_ubatch=10, n_rs_seq=8, n_threads=1)
        object.__setattr__(params, "n_ubatch", 4)
        m = load(sys.argv[1])
        def once():
            with ContextHandle(m, params) as c:
                assert caught(lambda: decode(c, 6)) == "NativeAbortError:lost"
        growth = resident_growth(once, 150)
        assert growth < 1.06, growth
        """,
        tiny("target-hybrid"),
        timeout=120,
    )


def test_long_use_of_one_context_is_flat(tiny, run_child):
    pytest.importorskip("psutil")
    run_child(
        """
        import sys
        from backends_kit import load, context, greedy, resident_growth
        with load(sys.argv[1]) as m, context(m) as c:
            def once():
                c.memory_clear()
                greedy(c, [1, 80, 109, 296], 16)
            growth = resident_growth(once, 150)
        assert growth < 1.02, growth
        """,
        tiny("target-llama"),
        timeout=120,
    )


# ---- log ----


def test_silent_by_default(tiny, run_child):
    """Nothing on stderr: not while loading, not from a failed load, a full cache or an aborted pass."""
    run_child(
        """
        import sys
        from backends_kit import load, context, decode, caught
        m = load(sys.argv[1]); c = context(m)
        assert caught(lambda: load(sys.argv[0])) == "ModelLoadError"
        for i in range(4):
            decode(c, 64, 64 * i)
        assert caught(lambda: decode(c, 1, 256)).startswith("ContextFull")
        c.abort(); caught(lambda: decode(c, 1))
        assert caught(lambda: decode(c, 1, 900))
        """,
        tiny("target-llama"),
    )


def test_native_lines_reach_logging(tiny, caplog):
    backends.set_log_level("DEBUG")
    try:
        with caplog.at_level(logging.DEBUG, logger="pyspec.native"), load(tiny("target-llama")) as m, context(m):
            pass
        lines = [(r.name, r.levelno, r.getMessage()) for r in caplog.records]
        assert {name for name, *_ in lines} == {"pyspec.native"}
        assert any("loaded meta data" in text and level == logging.INFO for _, level, text in lines)
        assert any(level == logging.DEBUG for _, level, _ in lines)
        assert not any(text.endswith("\n") for *_, text in lines)
    finally:
        backends.set_log_level("WARNING")
    caplog.clear()
    load(tiny("target-llama")).close()
    assert not [r for r in caplog.records if r.levelno < logging.WARNING]


def test_log_level_of_the_application_is_respected(tiny, run_child):
    """Set before the first load, without calling set_log_level."""
    out = run_child(
        """
        import logging, sys
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s %(levelname)s")
        from backends_kit import load
        load(sys.argv[1]).close()
        """,
        tiny("target-llama"),
    )
    assert "pyspec.native INFO" in out
    assert "DEBUG" not in out


def test_unknown_log_level():
    with pytest.raises(ValueError, match="unknown log level"):
        backends.set_log_level("LOUD")


def test_errors_carry_the_log_of_their_own_call(tiny, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 16)
    with pytest.raises(ModelLoadError, match="number of tensors"):
        load(str(tmp_path / "bad.gguf"))
    with load(tiny("target-llama")) as m, context(m) as c:
        decode(c, 3)
        with pytest.raises(Exception, match="inconsistent sequence positions") as error:
            decode(c, 1, 50)
        assert "number of tensors" not in str(error.value)
        assert error.value.log
        assert error.value.func == "llama_decode"
        assert error.value.code == -1


def test_a_handler_that_uses_pyspec(tiny):
    """A log handler may call back into the library."""
    seen: list[int] = []
    with load(tiny("target-llama")) as m:

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                seen.append(len(m.tokenize(record.getMessage().encode(), False, False)))
                backends.devices()

        handler = Handler()
        logger = logging.getLogger("pyspec.native")
        logger.addHandler(handler)
        backends.set_log_level("DEBUG")
        try:
            with context(m) as c:
                assert isinstance(c, ContextHandle)
        finally:
            logger.removeHandler(handler)
            backends.set_log_level("WARNING")
    assert seen


def test_arrays_are_kept_while_their_addresses_are_remembered(tiny):
    with load(tiny("target-llama")) as m, context(m) as c:
        decode(c, PROMPT)
        gc.collect()
        filler = [np.zeros(6, np.int32) for _ in range(1000)]
        decode(c, PROMPT, 6)
        assert c.n_outputs == 6
        assert filler
