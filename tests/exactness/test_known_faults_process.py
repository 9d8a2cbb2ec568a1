"""Known faults of other engines, B17 to B26: loading and pairing, in-process use, threads, memory, prompt edges.

Ids are those of the project's list of public reports. What may end the process runs in a child process.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import rss_bytes
from pairs import PROMPTS, SMALL

import pyspec
from pyspec.errors import ClosedError, ConfigError, PyspecError

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc or sets limits of Linux")

# ---- B17: a draft that cannot be had ---------------------------------------------------------


@LINUX
def test_b17_draft_that_cannot_be_had(tiny: Any, run_child: Any) -> None:
    """Typed error that names the draft; process alive, target usable, memory back."""
    code = """
        import gc, resource, sys
        import pyspec
        from conftest import rss_bytes
        from pairs import SMALL, PROMPTS
        target_path, draft_path = sys.argv[1:3]
        cases = {
            "missing": (draft_path + ".missing", {}, OSError, "missing"),
            "cache": (draft_path, {"draft_n_ctx": 1 << 28}, pyspec.NativeError, "draft"),
            "v-cache": (draft_path, {"draft_cache_type_v": "q8_0"}, pyspec.ConfigError, "flash"),
        }
        target = pyspec.Model(target_path)
        with pyspec.LLM(target, speculation="off", **SMALL) as llm:
            wanted = llm.generate(PROMPTS[0], max_tokens=20).tokens
        # What does not fit fails here at once, whatever this machine promises to everybody: there is half a gigabyte
        # more, too little for what would be touched first.
        in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (512 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
        for i in range(16):
            for name, (path, options, error, word) in cases.items():
                try:
                    pyspec.LLM(target, path, **(SMALL | options))
                except error as e:
                    assert isinstance(e, pyspec.PyspecError), name
                    assert word in str(e), (name, str(e))
                else:
                    raise AssertionError(name)
                # by path the target is loaded too, and freed with the error
                try:
                    pyspec.LLM(target_path, path, **(SMALL | options))
                except error:
                    pass
                else:
                    raise AssertionError(name)
            gc.collect()
            if i == 2:
                before = rss_bytes()
        # 78 failures; the system gives and takes huge pages of 2 MiB
        assert rss_bytes() < before + (8 << 20), (before, rss_bytes())
        with pyspec.LLM(target, draft_path, **SMALL) as llm:
            assert llm.generate(PROMPTS[0], max_tokens=20).tokens == wanted
        target.close()
    """
    run_child(code, tiny("target-llama"), tiny("draft-llama"))


def test_b17_the_draft_that_is_really_held(tiny: Any, make_llm: Any) -> None:
    draft = tiny("draft-llama-half")
    llm = make_llm(tiny("target-llama"), draft)
    info = llm.describe()
    assert info["draft"]["path"] == draft
    assert info["target"]["path"] != draft
    assert 0 < info["draft"]["size_bytes"] < os.path.getsize(draft)
    assert llm.draft_model is not None
    assert str(llm.draft_model.path) == draft
    assert make_llm(tiny("target-llama"), speculation="off").describe()["draft"] is None


# ---- B18: files that are no models --------------------------------------------------------------


def bad_files(good: bytes, folder: Path) -> dict[str, Path]:
    """Every way a model file may be bad, by name."""
    n = len(good)
    head = good[:24]
    empty_key = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    files = {
        "empty": b"",
        "text": b"Once upon a time there was no model.\n" * 50,
        "magic only": b"GGUF",
        "magic and noise": b"GGUF" + bytes((i * 37 + 11) % 256 for i in range(5000)),
        "cut in the header": good[:20],
        "cut at 1 KB": good[:1024],
        "cut in the tensor list": good[: n // 60],
        "cut in half": good[: n // 2],
        "last byte missing": good[:-1],
        "zero-length key": empty_key + (0).to_bytes(8, "little") + (4).to_bytes(4, "little") + b"\0\0\0\0",
        "huge key": empty_key + (2**62).to_bytes(8, "little") + b"x",
        "version 99": b"GGUF" + (99).to_bytes(4, "little") + good[8:],
        "version 0": b"GGUF" + (0).to_bytes(4, "little") + good[8:],
        "huge counts": b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16 + good[24:],
        "no tensors": head[:8] + (0).to_bytes(8, "little") + good[16:],
        "foreign architecture": good.replace(b"llama", b"lxama"),
        "key of another name": good.replace(b"llama.block_count", b"llama.block_cxunt"),
        "zero blocks": good,
        "tensor of another name": good.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"),
    }
    at = good.index(b"llama.block_count") + len(b"llama.block_count") + 4
    files["zero blocks"] = good[:at] + (0).to_bytes(4, "little") + good[at + 4 :]
    files["too many blocks"] = good[:at] + (9).to_bytes(4, "little") + good[at + 4 :]
    files["absurdly many blocks"] = good[:at] + (2**31 - 1).to_bytes(4, "little") + good[at + 4 :]
    at = good.index(b"llama.attention.head_count") + len(b"llama.attention.head_count") + 4
    files["zero heads"] = good[:at] + (0).to_bytes(4, "little") + good[at + 4 :]
    at = good.index(b"llama.embedding_length") + len(b"llama.embedding_length") + 4
    files["other width"] = good[:at] + (96).to_bytes(4, "little") + good[at + 4 :]
    out = {}
    for name, data in files.items():
        out[name] = folder / f"{name}.gguf"
        out[name].write_bytes(data)
    (folder / "directory.gguf").mkdir()
    out["directory"] = folder / "directory.gguf"
    out["missing"] = folder / "missing.gguf"
    if hasattr(os, "geteuid") and os.geteuid():
        out["not readable"] = folder / "not readable.gguf"
        out["not readable"].write_bytes(good)
        out["not readable"].chmod(0)
    return out


def test_b18_bad_model_files(tiny: Any, run_child: Any, tmp_path: Path) -> None:
    """Each ends in a typed error, as target and as draft; never in a signal. The good target is let go."""
    files = bad_files(Path(tiny("target-llama")).read_bytes(), tmp_path)
    code = """
        import os, sys, pyspec
        from pairs import SMALL, PROMPTS
        good, *bad = sys.argv[1:]
        for path in bad:
            print(path, flush=True)
            for make in (
                lambda: pyspec.Model(path),
                lambda: pyspec.LLM(path, **SMALL),
                lambda: pyspec.LLM(good, path, **SMALL),
            ):
                try:
                    made = make()
                except pyspec.PyspecError as e:
                    assert isinstance(e, (OSError, pyspec.ConfigError, pyspec.UnsupportedError)), repr(e)
                    assert os.path.basename(path) in str(e), (path, str(e))
                else:
                    made.close()
                    raise AssertionError(f"{path} was loaded")
            if os.path.exists("/proc/self/maps"):
                assert good not in open("/proc/self/maps").read(), path
        with pyspec.LLM(good, speculation="off", **SMALL) as llm:
            assert len(llm.generate(PROMPTS[0], max_tokens=5).tokens) == 5
    """
    try:
        run_child(code, tiny("draft-llama"), *map(str, files.values()), timeout=120)
    finally:
        if "not readable" in files:
            files["not readable"].chmod(0o600)


@pytest.mark.parametrize("kind", ["eagle3", "dspark", "dflash2", "target-mtp", "draft-gemma4-assistant", "target-swa"])
def test_b18_cut_files_of_other_kinds(kind: str, tiny: Any, run_child: Any, tmp_path: Path) -> None:
    good = Path(tiny(kind)).read_bytes()
    paths = []
    for n in (30, 500, 5000, len(good) // 3, len(good) - 40):
        paths.append(tmp_path / f"{n}.gguf")
        paths[-1].write_bytes(good[:n])
    code = """
        import sys, pyspec
        from pairs import SMALL
        for path in sys.argv[2:]:
            for make in (lambda: pyspec.Model(path), lambda: pyspec.LLM(sys.argv[1], path, **SMALL)):
                try:
                    make()
                except pyspec.PyspecError:
                    continue
                raise AssertionError(path)
    """
    run_child(code, tiny("target-llama"), *map(str, paths))


# ---- B19: quantised draft caches ------------------------------------------------------------------

CACHES: dict[str, tuple[str, str | None]] = {
    "draft-simple": ("target-llama", "target-llama"),
    "draft-simple-swa": ("target-swa", "target-swa"),
    "draft-eagle3": ("target-llama", "eagle3"),
    "draft-dflash": ("target-llama-calm", "dflash-calm"),
    "draft-dspark": ("target-llama-calm", "dspark-calm"),
    "draft-mtp": ("target-mtp", None),
    "draft-mtp-chain": ("target-mtp-chain", None),
}


@pytest.mark.parametrize("way", CACHES)
def test_b19_quantised_draft_cache(way: str, tiny: Any, make_llm: Any) -> None:
    """Same text whatever the draft's cache holds; with q8_0 nearly the acceptance of f16. Or a typed error."""
    target, draft = CACHES[way]
    fixed = {"flash_attn": True, "n_seq_max": 3}
    off = make_llm(tiny(target), speculation="off", **fixed)
    wanted = [r.tokens for r in off.generate(PROMPTS, max_tokens=64, ignore_eos=True)]
    rates: dict[str, float] = {}
    refused: dict[str, str] = {}
    for cache in ("f16", "q8_0", "q4_0"):
        options = {"draft_cache_type_k": cache, "draft_cache_type_v": cache}
        try:
            llm = make_llm(tiny(target), tiny(draft) if draft else None, **(fixed | options))
        except (ConfigError, pyspec.UnsupportedError) as e:
            refused[cache] = str(e)
            continue
        assert [r.tokens for r in llm.generate(PROMPTS, max_tokens=64, ignore_eos=True)] == wanted
        assert llm.stats.drafters[0].n_failed == 0
        rates[cache] = llm.stats.acceptance_rate
    assert all(cache in message for cache, message in refused.items())
    assert rates["f16"] > 0.8
    if "q8_0" in rates:
        assert rates["q8_0"] > rates["f16"] - 0.1


@pytest.mark.parametrize("cache", ["q8_0", "q4_0"])
@pytest.mark.parametrize("way", ["draft-simple", "draft-eagle3", "draft-mtp-chain"])
def test_b19_quantised_target_cache(way: str, cache: str, tiny: Any, make_llm: Any) -> None:
    """Plain and drafted with the same quantised target cache."""
    target, draft = CACHES[way]
    fixed = {"flash_attn": True, "n_seq_max": 2, "cache_type_k": cache, "cache_type_v": cache}
    off = make_llm(tiny(target), speculation="off", **fixed)
    llm = make_llm(tiny(target), tiny(draft) if draft else None, **fixed)
    for r, wanted in zip(
        llm.generate(PROMPTS[:3], max_tokens=48, ignore_eos=True),
        off.generate(PROMPTS[:3], max_tokens=48, ignore_eos=True),
        strict=True,
    ):
        assert r.tokens == wanted.tokens
    assert llm.stats.acceptance_rate > 0.6


# ---- B21: threads --------------------------------------------------------------------------------


@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_b21_many_threads_on_one_object(n_seq_max: int, tiny: Any, make_llm: Any) -> None:
    off = make_llm(tiny("target-llama"), speculation="off")
    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"), n_seq_max=n_seq_max)
    wanted = [off.generate(p, max_tokens=20, ignore_eos=True).tokens for p in PROMPTS]
    wrong: list[Any] = []

    def work(k: int) -> None:
        for i in range(5):
            j = (k + i) % len(PROMPTS)
            try:
                if (k + i) % 3:
                    found = llm.generate(PROMPTS[j], max_tokens=20, ignore_eos=True).tokens
                else:
                    found = [t for p in llm.stream(PROMPTS[j], max_tokens=20, ignore_eos=True) for t in p.tokens]
            except Exception as e:
                wrong.append(e)
                return
            if found != wanted[j]:
                wrong.append((j, found))

    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads), "deadlock"
    assert not wrong


@pytest.mark.parametrize("n_seq_max", [None, 1, 2])
def test_b21_two_open_streams(n_seq_max: int | None, tiny: Any, make_llm: Any) -> None:
    """Pulled in turn; where only one sequence fits, the second waits for the first."""
    off = make_llm(tiny("target-llama"), speculation="off")
    wanted = [off.generate(p, max_tokens=25, ignore_eos=True).tokens for p in PROMPTS[:2]]
    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"), n_seq_max=n_seq_max)
    streams = [llm.stream(p, max_tokens=25, ignore_eos=True) for p in PROMPTS[:2]]
    found: list[list[int]] = [[], []]
    open_ = [0, 1]
    while open_:
        for i in list(open_):
            piece = next(streams[i], None)
            if piece is None:
                open_.remove(i)
            else:
                found[i] += piece.tokens
    assert found == wanted


def test_b21_two_objects_on_one_model(tiny: Any, make_llm: Any) -> None:
    with pyspec.Model(tiny("target-llama")) as model, pyspec.Model(tiny("draft-llama-half")) as draft:
        llms = [make_llm(model, draft), make_llm(model, draft, n_seq_max=2)]
        wanted = [[r.tokens for r in llm.generate(PROMPTS, max_tokens=30, ignore_eos=True)] for llm in llms]
        assert wanted[0] == wanted[1]
        found: dict[int, list[list[int]]] = {}

        def work(k: int) -> None:
            found[k] = [llms[k].generate(p, max_tokens=30, ignore_eos=True).tokens for p in PROMPTS]

        threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert found == {0: wanted[0], 1: wanted[0]}
        llms[0].close()
        assert llms[1].generate(PROMPTS[0], max_tokens=30, ignore_eos=True).tokens == wanted[0][0]
        for llm in llms:
            llm.close()
        assert not model.closed


# ---- B22: unloading ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "draft", "n"),
    [
        ("target-llama", "draft-llama", 50),
        ("target-llama", "eagle3", 25),
        ("target-mtp", None, 25),
        ("target-gemma4", "draft-gemma4-assistant", 25),
    ],
)
def test_b22_load_and_close(target: str, draft: str | None, n: int, tiny: Any, no_leaks: None) -> None:
    pytest.importorskip("psutil")
    sizes = []
    for _ in range(n):
        with pyspec.LLM(tiny(target), tiny(draft) if draft else None, **SMALL) as llm:
            llm.generate(PROMPTS[0], max_tokens=16)
        sizes.append(rss_bytes())
    assert sizes[-1] - sizes[9] < 3 << 20, [s >> 10 for s in sizes[::5]]


def test_b22_200_rounds(tiny: Any, no_leaks: None) -> None:
    """Loading and closing a tiny model 200 times: resident memory grows by less than 2 %."""
    pytest.importorskip("psutil")
    sizes = []
    for _ in range(200):
        with (
            pyspec.Model(tiny("draft-llama")) as model,
            pyspec.Context(model, pyspec.ContextParams(n_ctx=256, n_threads=1)),
        ):
            pass
        sizes.append(rss_bytes())
    assert sizes[-1] < sizes[9] * 1.02, [s >> 10 for s in sizes[::10]]


def test_b22_many_generations(tiny: Any, make_llm: Any) -> None:
    pytest.importorskip("psutil")
    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"), n_seq_max=2)
    sizes = []
    for i in range(500):
        llm.generate(PROMPTS[i % 6], max_tokens=4)
        sizes.append(rss_bytes())
    assert sizes[-1] - sizes[100] < 2 << 20, [s >> 10 for s in sizes[::50]]


def test_b22_close(tiny: Any, no_leaks: None) -> None:
    """Twice, with a stream open, from another thread while generating; then every use is a typed error."""
    llm = pyspec.LLM(tiny("target-llama"), tiny("draft-llama"), **SMALL)
    stream = llm.stream(PROMPTS[0], max_tokens=100, ignore_eos=True)
    next(stream)
    llm.close()
    llm.close()
    assert llm.closed
    with pytest.raises(ClosedError):
        list(stream)
    uses: list[Any] = [
        lambda: llm.generate("x"),
        lambda: llm.generate(["x", "y"]),
        lambda: llm.stream("x"),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.tokenize("x"),
        lambda: llm.detokenize([5]),
        lambda: llm.stats,
        lambda: llm.n_ctx,
        lambda: llm.speculation,
        lambda: llm.describe(),
    ]
    for use in uses:
        with pytest.raises(ClosedError):
            use()
    llm.cancel()
    assert "closed" in repr(llm)

    for _ in range(5):
        llm = pyspec.LLM(tiny("target-llama"), tiny("draft-llama"), **(SMALL | {"n_ctx": 4096}))
        ends: list[Any] = []

        def work(llm: Any = llm, ends: list[Any] = ends) -> None:
            try:
                ends.append(llm.generate(PROMPTS[5] * 20, max_tokens=2000, ignore_eos=True).finish_reason)
            except PyspecError as e:
                ends.append(e)

        thread = threading.Thread(target=work)
        thread.start()
        threading.Event().wait(0.03)
        llm.close()
        thread.join(60)
        assert not thread.is_alive()
        assert isinstance(ends[0], ClosedError) or ends[0] == "cancelled"


@pytest.mark.parametrize("how", ["never", "generator", "exception", "thread"])
def test_b22_script_that_never_closes(how: str, tiny: Any, run_child: Any) -> None:
    code = """
        import sys, threading, pyspec
        from pairs import SMALL, PROMPTS
        llm = pyspec.LLM(sys.argv[1], sys.argv[2], **(SMALL | {"n_threads": 2, "n_ctx": 4096}))
        llm.generate(PROMPTS[0], max_tokens=8)
        if sys.argv[3] == "generator":
            stream = llm.stream(PROMPTS[0], max_tokens=100)
            next(stream)
        elif sys.argv[3] == "exception":
            sys.excepthook = lambda *a: None
            raise RuntimeError("the script fails")
        elif sys.argv[3] == "thread":
            work = lambda: llm.generate(PROMPTS[5] * 20, max_tokens=3000, ignore_eos=True)
            threading.Thread(target=work, daemon=True).start()
            threading.Event().wait(0.2)
    """
    exit_code = 1 if how == "exception" else 0
    run_child(code, tiny("target-llama"), tiny("draft-llama"), how, exit_code=exit_code)


# ---- B23: threads --------------------------------------------------------------------------------------


@LINUX
def test_b23_default_threads_follow_the_affinity(tiny: Any, run_child: Any) -> None:
    code = """
        import os, sys, pyspec
        from pairs import PROMPTS
        cpus = sorted(os.sched_getaffinity(0))
        for n in {1, min(2, len(cpus))}:
            os.sched_setaffinity(0, cpus[:n])
            with pyspec.LLM(sys.argv[1], sys.argv[2], n_ctx=256) as llm:
                assert llm.describe()["n_threads"] == n
                llm.generate(PROMPTS[0], max_tokens=8)
                # workers and this thread: target and draft take turns on one pool
                assert len(os.listdir("/proc/self/task")) <= n
            assert len(os.listdir("/proc/self/task")) == 1
    """
    run_child(
        code, tiny("target-llama"), tiny("draft-llama"), env={"OMP_NUM_THREADS": "7", "OPENBLAS_NUM_THREADS": "1"}
    )


def test_b23_far_too_many_threads(tiny: Any, run_child: Any) -> None:
    code = """
        import sys, pyspec
        from pairs import SMALL, PROMPTS
        with pyspec.LLM(sys.argv[1], **(SMALL | {"n_threads": 64})) as llm:
            print(len(llm.generate(PROMPTS[0], max_tokens=4).tokens))
    """
    assert run_child(code, tiny("draft-llama"), timeout=120) == "4\n"


@pytest.mark.parametrize("n", [0, -1, 100_000, 2.5, "two"])
def test_b23_impossible_thread_counts(n: Any, tiny: Any) -> None:
    with pytest.raises(ConfigError, match="n_threads"):
        pyspec.LLM(tiny("draft-llama"), n_threads=n)


# ---- B24: what is installed is found ------------------------------------------------------------------------


@LINUX
def test_b24_libraries_are_the_package_s_own(tiny: Any, run_child: Any, tmp_path: Path) -> None:
    """From another folder, without LD_LIBRARY_PATH: every native library comes from the package."""
    code = """
        import os, sys, pyspec
        from pairs import SMALL, PROMPTS
        with pyspec.LLM(sys.argv[1], **SMALL) as llm:
            assert llm.generate(PROMPTS[0], max_tokens=4).tokens
        maps = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
        native = sorted(p for p in maps if "ggml" in os.path.basename(p) or "llama" in os.path.basename(p))
        package = os.path.realpath(os.path.dirname(pyspec.__file__))
        libraries = [p for p in native if not p.endswith(".gguf")]
        assert len(libraries) >= 4, libraries
        assert all(os.path.realpath(p).startswith(package + os.sep) for p in libraries), libraries
        info = pyspec.build_info()
        assert "cpu" in info["backends"], info
    """
    run_child(code, tiny("draft-llama"), cwd=tmp_path, env={"LD_LIBRARY_PATH": ""})


@LINUX
@pytest.mark.parametrize("name", ["libpyspec-ggml.so", "libpyspec-ggml-base.so", "libpyspec-llama.so"])
def test_b24_missing_library_is_named(name: str, tiny: Any, run_child: Any, tmp_path: Path) -> None:
    package = Path(pyspec.__file__).parent
    shutil.copytree(package, tmp_path / "pyspec", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pyspec" / "backends" / "lib" / name).rename(tmp_path / "pyspec" / "backends" / "lib" / (name + ".x"))
    code = """
        import sys
        sys.path.insert(0, sys.argv[2])
        import pyspec
        assert pyspec.__file__.startswith(sys.argv[2])
        try:
            pyspec.Model(sys.argv[1])
        except pyspec.BackendError as e:
            assert sys.argv[3] in str(e), str(e)
            assert "install" in str(e), str(e)
        else:
            raise AssertionError("loaded")
    """
    run_child(code, tiny("draft-llama"), str(tmp_path), name, cwd=tmp_path, env={"PYTHONPATH": ""})


# ---- B26: prompt edges -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bos", "draft"),
    [
        (True, "draft-llama-half"),
        (True, "eagle3-half"),
        (True, "dflash"),
        (True, None),
        (False, "draft-badvocab-addbos"),
        (False, None),
    ],
)
def test_b26_prompt_edges(bos: bool, draft: str | None, tiny: Any, run_child: Any) -> None:
    """Every prompt twice, on an object that goes on living, against a fresh plain one."""
    code = """
        import sys, numpy as np, pyspec
        from pairs import SMALL
        target, draft = sys.argv[1], sys.argv[2] or None
        n_ctx = 64
        options = SMALL | {"n_ctx": n_ctx}
        off = lambda: pyspec.LLM(target, speculation="off", **options)
        with pyspec.LLM(target, draft, **options) as llm, off() as shared:
            vocab = llm.model.vocab
            bos = vocab.bos
            letters = [vocab.encode(c, add_special=False)[0] for c in "abcdefgh"]
            full = (letters * 20)[:n_ctx]
            prompts = ["", " ", "a", [bos], letters[:1], full[:-1], full, full[:-2], [bos, bos], "\\x00"]
            for prompt in prompts:
                with off() as fresh:
                    try:
                        wanted = fresh.generate(prompt, max_tokens=10, ignore_eos=True)
                    except pyspec.ConfigError as e:
                        wanted = e
                for _ in range(2):
                    for one in (llm, shared):
                        try:
                            found = one.generate(prompt, max_tokens=10, ignore_eos=True)
                        except pyspec.ConfigError as e:
                            assert isinstance(wanted, pyspec.ConfigError), (prompt, e)
                            assert prompt == "" and not vocab.add_bos and "token" in str(e), e
                        else:
                            assert found.tokens == wanted.tokens, prompt
                            assert found.finish_reason == wanted.finish_reason == "length"
                            n_prompt = found.usage.prompt_tokens
                            assert len(found.tokens) == min(10, n_ctx - n_prompt + 1)
                if prompt == "":
                    assert isinstance(wanted, pyspec.ConfigError) != vocab.add_bos
            too_long = [*full, letters[0]]
            bad = [too_long, full * 50, np.array([], np.int32), [[]], [full, too_long], [full, []]]
            for prompt in bad:
                for one in (llm, shared):
                    try:
                        one.generate(prompt, max_tokens=10)
                    except pyspec.ConfigError as e:
                        assert "token" in str(e), e
                        assert str(n_ctx) in str(e) or len(prompt) <= 2, e
                    else:
                        raise AssertionError(len(prompt))
            assert llm.generate([], max_tokens=10) == []
    """
    # the "addbos" draft is an ordinary llama model whose metadata says: no BOS
    target = "target-llama" if bos else "draft-badvocab-addbos"
    run_child(code, tiny(target), tiny(draft) if draft else "")
