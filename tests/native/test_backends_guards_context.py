"""As ``test_backends_guards``, for contexts and caches; the last tests take the guards away and show that the barrier
behind them holds where it can."""

from __future__ import annotations

import pytest
from backends_kit import guard_runner


@pytest.fixture
def guard(tiny, run_child):
    return guard_runner(tiny, run_child)


def test_mtp_contexts(guard):
    out = guard(
        """
        show(lambda: context(M("target-mtp"), ctx_type="mtp"))
        show(lambda: context(M("target-llama", load_mtp=True), ctx_type="mtp"))
        c = context(M("target-mtp-chain", load_mtp=True), ctx_type="mtp")
        for offset in (-1, 3, 100, 2):
            show(lambda: c.nextn_layer_offset(offset))
        show(lambda: decode(c, 2, embd=zeros(c, 2)))
        show(lambda: context(M("target-mtp-chain", load_mtp=True)).nextn_layer_offset(0))
        """,
        "target-mtp", "target-llama", "target-mtp-chain",
    )  # fmt: skip
    assert out == ["ConfigError", "UnsupportedError"] + ["ConfigError"] * 3 + ["none", "none", "ConfigError"]


def test_files_with_mtp_blocks_only(guard):
    out = guard(
        """
        show(lambda: context(M("draft-mtp-only")))
        m = M("draft-mtp-only", load_mtp=True)
        show(lambda: context(m))
        c = context(m, ctx_type="mtp")
        show(lambda: decode(c, 2, embd=zeros(c, 2)))
        """,
        "draft-mtp-only",
    )
    assert out == ["UnsupportedError", "UnsupportedError", "none"]


def test_gemma4_assistant(guard):
    """Wrong or missing target, wrong sizes, a target already in use, and what must not be done to the shared cache."""
    out = guard(
        """
        m = M("draft-gemma4-assistant")
        show(lambda: context(m, ctx_type="mtp"))
        show(lambda: context(m, context(M("target-llama")), ctx_type="mtp"))
        target = context(M("target-gemma4"))
        show(lambda: context(m, target))
        show(lambda: context(m, target, ctx_type="mtp", n_seq_max=2, n_ctx=512))
        c = context(m, target, ctx_type="mtp")
        decode(target, 4)
        print(target.seq_pos_max(0))
        show(lambda: decode(c, 1, 4, embd=zeros(c, 1)))
        for call in (c.memory_clear, lambda: c.state_seq_get(0), lambda: c.seq_cp(0, 0), lambda: c.seq_keep(0)):
            show(call)
        show(lambda: context(m, target, ctx_type="mtp"))
        print(target.seq_pos_max(0))
        target.close()
        print(c.closed)
        show(lambda: decode(c, 1, 5, embd=zeros(c, 1)))
        """,
        "draft-gemma4-assistant", "target-llama", "target-gemma4",
    )  # fmt: skip
    assert out == ["ConfigError"] * 4 + ["3", "none"] + ["UnsupportedError"] * 4 + [
        "ConfigError",
        "3",
        "True",
        "ClosedError",
    ]


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_drafts_without_embeddings_of_their_own(guard, name):
    out = guard(
        f"""
        m, t = M("{name}"), M("target-llama")
        show(lambda: context(m))
        target = context(t)
        c = context(m, target)
        if "{name}" == "dflash":
            c.causal_attn(False)
        use = lambda: decode(c, 2, c.seq_pos_max(0) + 1, embd=zeros(c, 2) if "{name}" == "eagle3" else None)
        show(use)
        t.close()
        print(target.closed, c.closed)
        show(use)
        c.close()
        """,
        name,
        "target-llama",
    )
    assert out == ["ConfigError", "none", "True True", "ClosedError"]


def test_recurrent_snapshots_need_room(guard):
    out = guard(
        """
        show(lambda: ContextParams(n_batch=64, n_ubatch=9, n_rs_seq=8))
        show(lambda: context(M("target-hybrid"), n_ctx=8, n_rs_seq=8))
        """,
        "target-hybrid",
    )
    assert out == ["ConfigError", "ConfigError"]


def test_recurrent_rollback_says_no_where_it_would_be_wrong(guard):
    """The answer is compared with a fresh evaluation: True must mean that the state is right."""
    out = guard(
        """
        m = M("target-hybrid")
        prompt = list(range(20, 40))
        def after(drop, last):
            with context(m, n_rs_seq=4) as c, context(m) as fresh:
                decode(c, prompt[:-last])
                decode(c, prompt[-last:], len(prompt) - last)
                if not c.seq_rm(0, len(prompt) - drop):
                    return "no"
                again = c.seq_rm(0, len(prompt) - drop - 1)
                decode(c, prompt[len(prompt) - drop:], len(prompt) - drop)
                decode(fresh, prompt)
                a, b = c.logits()[-1], fresh.logits()[-1]
                return f"{np.abs(a - b).max() < 1e-3} {again}"
        for last in (1, 3, 5):
            for drop in range(1, 6):
                print(last, drop, after(drop, last))
        """,
        "target-hybrid",
    )
    for line in out:
        last, drop, *answer = line.split()
        if int(drop) < int(last) and int(drop) <= 4:
            assert answer == ["True", "False"], line
        else:
            assert answer == ["no"], line


def test_mamba_never_rolls_back(guard):
    out = guard(
        """
        c = context(M("target-recurrent"), n_rs_seq=4)
        decode(c, 6)
        print(c.n_rs_seq, c.seq_rm(0, 5), c.seq_pos_max(0), c.seq_rm(0, 0), c.seq_pos_max(0))
        """,
        "target-recurrent",
    )
    assert out == ["0 False 5 True -1"]


def test_sliding_window_rollback_says_no_where_it_would_be_wrong(guard):
    out = guard(
        """
        m = M("target-swa")
        sizes = dict(n_ctx=1024, n_ubatch=16)  # the window's cache has 256 cells
        tokens = [20 + i % 200 for i in range(640)]
        def fill(c, n):
            for i in range(0, n, 16):
                decode(c, tokens[i:min(i + 16, n)], i)
        for keep in (639, 600, 500, 420, 400, 100):
            with context(m, **sizes) as c, context(m, **sizes) as fresh:
                fill(c, 640)
                if c.seq_rm(0, keep):
                    fill(fresh, keep)
                    decode(c, [77], keep); decode(fresh, [77], keep)
                    print("yes", np.abs(c.logits()[-1] - fresh.logits()[-1]).max() < 1e-3)
                else:
                    print("no", c.seq_pos_max(0))
        """,
        "target-swa",
    )
    answers = [line.split()[0] for line in out]
    assert answers[0] == "yes"
    assert answers[-1] == "no"
    assert answers == sorted(answers, reverse=True)
    assert all(line in ("yes True", "no 639") for line in out)


def test_context_sizes(guard):
    out = guard(
        """
        m = M("target-llama")
        show(lambda: ContextParams(cache_type_v="q8_0", flash_attn=False))
        show(lambda: context(m, flash_attn="auto", cache_type_v="q8_0").close())
        show(lambda: context(m, n_ctx=4, n_seq_max=8))
        show(lambda: context(m, n_seq_max=8, n_outputs_max=4))
        show(lambda: context(m, n_ctx=700, n_seq_max=3).close())
        show(lambda: context(M("target-llama", vocab_only=True)))
        """,
        "target-llama",
    )
    assert out == ["ConfigError", "none", "ConfigError", "ConfigError", "none", "UnsupportedError"]


def test_cache_larger_than_memory(guard):
    """Refused before it is allocated; if the check is out of the way, libllama's own failure is reported and undone."""
    pytest.importorskip("psutil")
    out = guard(
        """
        import psutil, time
        import pyspec.backends._context_base as base
        rss = lambda: psutil.Process().memory_info().rss
        m = M("target-llama")
        with context(m) as c:
            decode(c, 3)
        start = rss()
        show(lambda: context(m, n_ctx=2**31 - 1))
        show(lambda: context(m, n_ctx=2**30, n_seq_max=4))
        base.check_memory = lambda *args: None
        total = psutil.virtual_memory().total
        per_cell = 2 * 4 * 64 * 2  # K and V, 4 layers, at most 64 values, 2 bytes
        n_ctx = min(2**30, 4 * total // per_cell)
        print(rss() - start < 20e6)
        """,
        "target-llama",
    )
    assert out == ["NativeError:unchanged", "NativeError:unchanged", "True"]


def test_failed_allocation_is_undone(guard):
    """Address space is limited so that the KV cache cannot be had."""
    pytest.importorskip("resource")
    out = guard(
        """
        import resource, psutil
        import pyspec.backends._context_base as base
        base.check_memory = lambda *args: None
        m = M("target-llama")
        with context(m) as c:
            decode(c, 3)
        used = psutil.Process().memory_info().vms
        start = psutil.Process().memory_info().rss
        resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20, resource.getrlimit(resource.RLIMIT_AS)[1]))
        try:
            context(m, n_ctx=2**21)
        except Exception as exc:
            print(type(exc).__name__, exc.state, len(exc.log) > 0, "n_ctx=2097152" in str(exc))
        print(psutil.Process().memory_info().rss - start < 20e6)
        with context(m) as c:
            decode(c, 3)
            print(c.logits().shape)
        """,
        "target-llama",
    )
    assert out == ["NativeError unchanged True True", "True", "(3, 512)"]


def test_sequence_operations(guard):
    out = guard(
        """
        c = context(M("target-llama"), n_seq_max=2, n_ctx=512)
        decode(c, 4)
        for call in (
            lambda: c.seq_rm(-1, 0), lambda: c.seq_rm(2, 0), lambda: c.seq_keep(2), lambda: c.seq_pos_min(-1),
            lambda: c.seq_pos_max(9), lambda: c.seq_cp(0, 2), lambda: c.seq_cp(-1, 0), lambda: c.state_seq_get(2),
            lambda: c.state_seq_set(2, b""), lambda: c.set_backend_sampler(2, 5),
            lambda: c.set_backend_sampler(0, 0), lambda: c.set_backend_sampler(0, 513),
        ):
            show(call)
        show(lambda: c.seq_cp(0, 1, 1, 3))
        show(lambda: c.seq_rm(0, 3, 1))
        show(lambda: c.seq_rm(0, -2**31, -2**31 + 1))
        """,
        "target-llama",
    )
    assert out == ["ConfigError"] * 12 + ["UnsupportedError", "none", "none"]


def test_states_that_do_not_fit(guard):
    out = guard(
        """
        c = context(M("target-llama"), n_seq_max=2, n_ctx=512)
        other = context(M("target-recurrent"))
        decode(c, 20); decode(other, 5)
        good, foreign = c.state_seq_get(0), other.state_seq_get(0)
        for data in (good[:-1], good[:10], b"", b"x" * 500, foreign):
            show(lambda: c.state_seq_set(1, data))
        show(lambda: other.state_seq_set(0, good))
        rng = np.random.default_rng(0)
        kinds = set()
        for i in range(200):
            bad = good.copy()
            bad[rng.integers(0, min(len(bad), 400), 3)] = rng.integers(0, 256, 3)
            kinds.add(caught(lambda: c.state_seq_set(1, bad)))
            if c.lost:
                break
            c.seq_rm(1, 0)
        print(kinds <= {"none", "RollbackError"}, c.lost)
        on_device = c.state_seq_get(0, 2)
        show(lambda: c.state_seq_set(0, good, 2))
        show(lambda: c.state_seq_set(0, on_device, 2))
        newer = c.state_seq_get(0, 2)
        decode(c, 1, 20)
        show(lambda: c.state_seq_set(0, newer, 2))
        print(c.seq_pos_max(0))
        """,
        "target-llama", "target-recurrent",
    )  # fmt: skip
    assert out == ["RollbackError"] * 6 + ["True False", "RollbackError", "none", "none", "19"]


def test_the_barrier_without_the_guards(guard):
    """Straight into the shim: an assertion on the calling thread becomes an error, the context is lost, nobody dies."""
    out = guard(
        """
        import pyspec.backends._context_base as base
        m = M("target-llama")
        lib, ffi = _binding.lib, _binding.ffi
        print(lib.pyspec_test_abort(False), b"asked for by a test" in ffi.string(lib.pyspec_last_error()))
        c = context(m, n_seq_max=2, n_ctx=512)
        decode(c, 4)
        print(lib.pyspec_layer_input(c._ptr(), 3, ffi.new("float **")), lib.pyspec_seq_cp(c._ptr(), 0, 1, 1, 3))
        decode(c, 1, 4)
        print(c.logits().shape)

        # micro-batches too small for the snapshots: fails at the first decode
        base.check_context = lambda *args: None
        params = ContextParams(n_ctx=256, n_batch=64, n_ubatch=10, n_rs_seq=8, n_threads=1)
        object.__setattr__(params, "n_ubatch", 4)
        hybrid = ContextHandle(M("target-hybrid"), params)
        show(lambda: decode(hybrid, 6))
        print(hybrid.lost)
        show(lambda: decode(hybrid, 1))
        show(hybrid.logits)
        show(lambda: hybrid.seq_rm(0, 0))
        hybrid.close()
        show(hybrid.logits)

        # the MTP blocks were not loaded: fails while the context is made
        mtp = M("target-mtp")
        mtp.load_mtp = True
        show(lambda: context(mtp, ctx_type="mtp"))
        with context(mtp) as c:
            decode(c, 3)
            print(c.logits().shape)
        """,
        "target-llama", "target-hybrid", "target-mtp",
    )  # fmt: skip
    assert out == [
        "-1001 True", "-1001 -1001", "(1, 512)",
        "NativeAbortError:lost", "True", "NativeError:lost", "NativeError:lost", "NativeError:lost", "ClosedError",
        "NativeError:unchanged", "(3, 512)",
    ]  # fmt: skip


def test_an_assertion_of_another_thread_still_ends_the_process(guard, run_child):
    """What the barrier cannot do, and why the guards come first. The message goes to stderr, as without pyspec."""
    import signal

    code = """
        from pyspec.backends import _binding
        _binding.load()
        _binding.lib.pyspec_test_abort(True)
    """
    run_child(code, exit_code=-signal.SIGABRT, stderr=None, env={"PYTHONFAULTHANDLER": "0"})


def test_guards_agree_with_the_vendored_source():
    """Architectures that hand out nextn rows: the list of ``_model`` against upstream's graphs."""
    import re
    from pathlib import Path

    from pyspec.backends._model import NEXTN_ARCHITECTURES

    models = Path(__file__).parents[2] / "vendor" / "ggml" / "llama.cpp" / "src" / "models"
    if not models.is_dir():
        pytest.skip("the vendored tree is not here (vendor/ggml/sync.py gets it)")
    source = (models.parent / "llama-model.cpp").read_text()
    arch_names = dict(
        re.findall(r"\{\s*(LLM_ARCH_\w+),\s*\"([^\"]+)\"", (models.parent / "llama-arch.cpp").read_text())
    )
    classes: dict[str, str] = {}
    waiting: list[str] = []
    for match in re.finditer(r"case (LLM_ARCH_\w+):|return new (llama_model_\w+)\(", source):
        if match[1]:
            waiting.append(match[1])
        else:
            classes.update(dict.fromkeys(waiting, match[2]))
            waiting = []
    header = (models / "models.h").read_text()
    parents = dict(re.findall(r"struct (llama_model_\w+) : public (llama_model_\w+)", header))
    graph_of = dict(
        re.findall(
            r"struct (llama_model_\w+) : public [^{]*\{(?:(?!\nstruct ).)*?using graph = (llama_model_\w+)::graph",
            header,
            re.S,
        )
    )
    direct = set()
    for path in models.glob("*.cpp"):
        text = path.read_text()
        if re.search(r"t_h_nextn\s*=[^=]", text):
            direct |= set(re.findall(r"^(?:\w[\w<>:, *&]*\s)?(llama_model_\w+)::\w", text, re.M))

    def hands_out(cls: str) -> bool:
        return cls in direct or graph_of.get(cls) in direct or (cls in parents and hands_out(parents[cls]))

    found = {arch_names[arch] for arch, cls in classes.items() if arch in arch_names and hands_out(cls)}
    assert found == set(NEXTN_ARCHITECTURES)
