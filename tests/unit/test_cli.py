"""The command line on a fake LLM: no native library."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyspec.config import SamplingParams
from pyspec.errors import ModelLoadError, NativeError

pytest.importorskip("typer")
pytest.importorskip("rich")

from fake_cli import TEXT, FakeLLM, run

from pyspec import __main__ as entry
from pyspec import cli
from pyspec.cli import report, terminal

# ---- what comes out -----------------------------------------------------------------------


def test_text_on_stdout_and_table_on_stderr(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "m.gguf", "-p", "Hi") == 0
    out, err = capsys.readouterr()
    assert out == TEXT + "\n", "piped text is exactly the model's, control characters and all"
    assert "\x1b" not in err
    assert not [line for line in err.splitlines() if line != line.rstrip()]
    rows = {line.split("  ")[0].strip(): line.split() for line in err.splitlines() if line.strip()}
    assert rows["prompt"] == ["prompt", "8", "tokens", "7000.0", "tokens/s"]
    assert rows["output"] == ["output", "5", "tokens", "5.0", "tokens/s"]
    assert rows["drafted"] == ["drafted", "4", "tokens", "draft-simple"]
    assert rows["accepted"] == ["accepted", "3", "tokens", "75.0%"]
    assert rows["by position"][2:] == ["1.00", "1.00", "0.00"]
    assert rows["a pass"][2:4] == ["2.50", "tokens"]
    assert fake.made[0].closed


def test_without_speculation(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "m.gguf", "-p", "Hi", "--spec-type", "off") == 0
    err = capsys.readouterr().err
    assert "speculation is off" in err
    assert "accepted" not in err


def test_quiet(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "m.gguf", "-p", "Hi", "-q") == 0
    assert capsys.readouterr() == (TEXT + "\n", "")


def test_json(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "m.gguf", "--draft", "d.gguf", "-p", "Hi", "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found["text"] == TEXT
    assert found["tokens"] == [0, 1, 2, 3, 4]
    assert found["drafted"] == [True, True, False, False, True]
    assert found["finish_reason"] == "stop"
    assert found["logprobs"] is None
    assert found["usage"] == {"prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 13}
    assert found["stats"]["acceptance_rate"] == 0.75
    assert (found["model"], found["draft"], found["speculation"]) == ("m.gguf", "d.gguf", ["draft-simple"])


def on_a_terminal(args: list[str], environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and everything a real pseudo-terminal shows of stdout and stderr."""
    pty = pytest.importorskip("pty")
    pid, fd = pty.fork()
    if pid == 0:
        code = 99
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            os.environ.update({"TERM": "xterm-256color"} | (environment or {}))
            os.environ.pop("NO_COLOR", None) if not (environment or {}).get("NO_COLOR") else None
            code = cli.main(args)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    shown = b""
    while True:
        try:
            part = os.read(fd, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    _, status = os.waitpid(pid, 0)
    os.close(fd)
    return os.waitstatus_to_exitcode(status), shown.decode().replace("\r\n", "\n")


def test_colour_on_a_terminal(fake: type[FakeLLM]) -> None:
    code, shown = on_a_terminal(["generate", "m.gguf", "-p", "Hi"])
    assert code == 0, shown
    assert "\x1b[32mThe\x1b[0m\x1b[32m sun\x1b[0m shines" in shown, "accepted tokens are green, the others plain"
    assert "\x1b[32m end\x1b[0m" in shown
    assert "\x1b[2J" not in shown, "the model's control characters do not reach the terminal"
    assert "\u241b[2J" in shown
    assert "75.0%" in shown


def test_no_color(fake: type[FakeLLM]) -> None:
    code, shown = on_a_terminal(["generate", "m.gguf", "-p", "Hi", "-q"], {"NO_COLOR": "1"})
    assert code == 0
    assert "[32m" not in shown
    assert "The sun shines" in shown


def test_no_prompt_on_a_terminal_is_wrong_usage(fake: type[FakeLLM]) -> None:
    code, shown = on_a_terminal(["generate", "m.gguf"])
    assert code == 2
    assert "no prompt" in shown


# ---- prompts and options -------------------------------------------------------------------


def set_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


@pytest.mark.parametrize("args", [[], ["-f", "-"]])
def test_prompt_from_stdin(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, args: list[str]) -> None:
    set_stdin(monkeypatch, "Grüße\n\n".encode())
    assert run("generate", "m.gguf", "-q", *args) == 0
    assert fake.made[0].prompt == "Grüße\n", "one newline is dropped"


def test_prompt_from_a_file(fake: type[FakeLLM], tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"two\r\nlines\r\n")
    assert run("generate", "m.gguf", "-q", "-f", str(file)) == 0
    assert fake.made[0].prompt == "two\nlines"


def test_prompt_that_is_not_utf8(
    fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_stdin(monkeypatch, b"ab\xff")
    assert run("generate", "m.gguf") == 1
    assert "stdin is not UTF-8" in capsys.readouterr().err


def test_options_arrive(fake: type[FakeLLM]) -> None:
    args = "--draft d.gguf --spec-type ngram-simple,draft-simple -n 5 --temp 0.7 --top-k 4 --top-p 0.9 --min-p 0.1"
    args += " --seed 3 --stop a --stop b --n-max 6 --n-min 1 --p-min 0.5 -c 99 -t 2 --n-gpu-layers 0 --ignore-eos"
    args += " --device CPU --cache-type-k q8_0 --cache-type-v f16"
    assert run("generate", "m.gguf", "-q", "-p", "", *args.split()) == 0
    llm = fake.made[0]
    assert (llm.path, llm.draft, llm.prompt) == ("m.gguf", "d.gguf", "")
    assert llm.options == {
        "speculation": ["ngram-simple", "draft-simple"],
        "n_max": 6,
        "n_min": 1,
        "p_min": 0.5,
        "n_ctx": 99,
        "n_threads": 2,
        "n_gpu_layers": 0,
        "n_seq_max": 1,
        "devices": ["CPU"],
        "cache_type_k": "q8_0",
        "cache_type_v": "f16",
    }
    assert llm.params == SamplingParams(
        max_tokens=5, temperature=0.7, top_k=4, top_p=0.9, min_p=0.1, seed=3, stop=("a", "b"), ignore_eos=True
    )


def test_sampling_options(fake: type[FakeLLM]) -> None:
    flags = (
        "--temp 0.9 --typical 0.9 --top-n-sigma 2 --xtc-probability 0.1 --xtc-threshold 0.2 --dynatemp-range 0.3 "
        "--dynatemp-exp 1.5 --repeat-penalty 1.1 --frequency-penalty 0.2 --presence-penalty 0.3 --repeat-last-n -1 "
        "--dry-multiplier 0.8 --dry-base 2 --dry-allowed-length 3 --dry-penalty-last-n 99 --min-keep 2 "
        "--verification block -l 5+1.5 -l 7-inf --samplers penalties;dry;top_n_sigma;typical_p;xtc;temperature"
    )
    breakers = ["--dry-sequence-breaker", "a b", "--dry-sequence-breaker", "."]
    assert run("generate", "m.gguf", "-q", "-p", "x", *flags.split(), *breakers) == 0
    assert fake.made[0].params == SamplingParams(
        max_tokens=256, temperature=0.9, typical_p=0.9, top_n_sigma=2, xtc_probability=0.1, xtc_threshold=0.2,
        dynatemp_range=0.3, dynatemp_exponent=1.5, penalty_repeat=1.1, penalty_freq=0.2, penalty_present=0.3,
        penalty_last_n=-1, dry_multiplier=0.8, dry_base=2, dry_allowed_length=3, dry_penalty_last_n=99, min_keep=2,
        dry_sequence_breakers=("a b", "."), verification="block", logit_bias={5: 1.5, 7: float("-inf")},
        samplers=("penalties", "dry", "top_n_sigma", "typical_p", "xtc", "temperature"),
    )  # fmt: skip
    assert (
        run("generate", "m.gguf", "-q", "-p", "x", "--mirostat", "2", "--mirostat-ent", "3", "--mirostat-lr", "1") == 0
    )
    assert fake.made[1].params == SamplingParams(max_tokens=256, mirostat=2, mirostat_tau=3, mirostat_eta=1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-l", "x+1"], "15043-1.5"),
        (["-l", "5"], "15043-1.5"),
        (["--samplers", "top_k;beam"], "unknown sampler"),
        (["--verification", "hope"], "verification"),
        (["--mirostat", "2", "--top-k", "3"], "replaces"),
    ],
)
def test_bad_sampling_options(
    flags: list[str], message: str, fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "m.gguf", "-q", "-p", "x", *flags) == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_what_is_not_given_is_left_to_the_library(fake: type[FakeLLM]) -> None:
    assert run("generate", "m.gguf", "-q", "-p", "x", "-n", "-1") == 0
    llm = fake.made[0]
    assert llm.options == {"speculation": "auto", "n_ctx": 0, "n_threads": None, "n_seq_max": 1}
    assert llm.params == SamplingParams(max_tokens=None)


def test_chat(fake: type[FakeLLM]) -> None:
    assert run("generate", "m.gguf", "-q", "-p", "Hi", "--chat", "--system", "Be brief.") == 0
    assert fake.made[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_verbose_logs_to_stderr(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("pyspec")
    before, level = list(logger.handlers), logger.level
    try:
        assert run("generate", "m.gguf", "-q", "-p", "x", "-v") == 0
        logger.info("loaded")
        logging.getLogger("pyspec.native").info("chatter")
        assert capsys.readouterr().err == "pyspec: loaded\n"
    finally:
        logger.handlers[:] = before
        logger.setLevel(level)
        logging.getLogger("pyspec.native").setLevel(logging.NOTSET)


# ---- exit codes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ("generate", "MODEL"),
        ("generate m.gguf -p a -f b", "not both"),
        ("generate m.gguf -p a --system b", "--system needs --chat"),
        ("generate m.gguf -p a -n x", "x"),
        ("generate m.gguf -p a -n -2", "max_tokens must be >= 0, got -2"),
        ("generate m.gguf -p a --temp -1", "temperature must be in"),
        ("generate m.gguf -p a --top-p 0", "top_p must be in"),
        ("generate m.gguf -p a --spec-type draft-simpel", "did you mean 'draft-simple'"),
        ("generate m.gguf -p a --spec-type off,draft-simple", "unknown speculation type 'off'"),
        ("generate m.gguf -p a --wrong", "--wrong"),
        ("nonsense", "nonsense"),
        ("quantize a b", "TYPE"),
    ],
)
def test_wrong_usage(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str], args: str, text: str) -> None:
    assert run(*args.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_failure_is_one_line(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "absent.gguf", "-p", "x") == 1
    assert capsys.readouterr() == ("", "pyspec: there is no file 'absent.gguf'\n")


def test_failure_while_generating(
    fake: type[FakeLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "fails", NativeError("decode failed", func="llama_decode", log=("line 1", "line 2")))
    assert run("generate", "m.gguf", "-p", "x") == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "pyspec: decode failed (PYSPEC_TRACEBACK=1 shows 3 more lines)\n")
    assert fake.made[0].closed


def test_a_fault_of_ours_is_called_so(
    fake: type[FakeLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "fails", KeyError("n"))
    assert run("generate", "m.gguf", "-p", "x") == 1
    assert re.fullmatch(r"pyspec: internal error: KeyError: 'n' \(.*report it\)\n", capsys.readouterr().err)


def test_traceback_on_request(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPEC_TRACEBACK", "1")
    with pytest.raises(ModelLoadError):
        run("generate", "absent.gguf", "-p", "x")


def test_missing_prompt_file(fake: type[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "m.gguf", "-f", str(tmp_path / "absent.txt")) == 1
    assert "absent.txt" in capsys.readouterr().err


def test_ctrl_c(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The generation is cancelled, what there is gets printed, the model is closed, the exit code is 130."""
    monkeypatch.setattr(fake, "endless", True)
    real, n = terminal.write, []

    def interrupt(text: str) -> None:
        real(text)
        n.append(text)
        if len(n) == 3:
            os.kill(os.getpid(), 2)

    monkeypatch.setattr(terminal, "write", interrupt)
    assert run("generate", "m.gguf", "-p", "x") == 130
    out, err = capsys.readouterr()
    assert out.startswith("TheTheThe")
    assert "stopped with Ctrl-C" in err
    assert err.endswith("pyspec: stopped\n")
    assert fake.made[0].closed
    assert not [t for t in threading.enumerate() if t.name == "pyspec-generate"]


def test_closed_pipe(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """`| head`: the generation ends, no complaint."""
    monkeypatch.setattr(fake, "endless", True)
    read, write = os.pipe()
    monkeypatch.setattr(sys, "stdout", open(write, "w"))  # noqa: SIM115
    os.close(read)
    assert run("generate", "m.gguf", "-p", "x") == 0
    assert fake.made[0].closed
    sys.stdout.close()


# ---- without the extras, and reports ---------------------------------------------------------


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] == package or m.startswith("pyspec.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("app", "generate", "inspection", "terminal"):
        monkeypatch.delattr(cli, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["devices"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"needs the package {package}: pip install 'pyspec-llm[cli]'" in err


def test_info_works_without_the_extra_and_with_a_broken_install(run_child: Callable[..., str]) -> None:
    out = run_child(
        """
        import sys
        for name in ("typer", "rich", "pyspec.backends"):
            sys.modules[name] = None
        from pyspec import __main__ as entry
        assert entry.run(["info"]) == 1
        """
    )
    assert re.search(r"^pyspec: \d", out)
    assert "python: 3." in out
    assert "errors: ImportError" in out or "errors: ModuleNotFoundError" in out


def test_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    device = SimpleNamespace(
        name="CPU",
        vendor="ACME",
        backend="CPU",
        kind="cpu",
        description="A CPU",
        id="",
        memory_free_bytes=1,
        memory_total_bytes=2,
        capabilities=("events", "mmap_support"),
    )
    backends = SimpleNamespace(
        load=lambda: None,
        build_info=lambda: {"ggml": "0.1", "features": ["AVX2", "FMA"]},
        available=lambda: ["cpu"],
        devices=lambda: [device],
    )
    monkeypatch.setitem(sys.modules, "pyspec.backends", backends)
    monkeypatch.setattr(sys.modules["pyspec"], "backends", backends, raising=False)
    monkeypatch.setitem(sys.modules, "pyspec._build_info", SimpleNamespace(BUILD_INFO={"compiler": "GNU 12"}))
    monkeypatch.setenv("PYSPEC_NO_DEEPBIND", "1")
    assert entry.run(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  PYSPEC_NO_DEEPBIND: 1" in lines
    assert "  features: AVX2, FMA" in lines
    assert "  compiler: GNU 12" in lines
    assert "backends: cpu" in lines
    assert any(line.startswith("  - name=CPU, vendor=ACME, backend=CPU, kind=cpu, description=A CPU") for line in lines)
    assert "errors: none" in lines
    assert entry.run(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["kind"] == "cpu"
    assert run("info") == 0
    assert "backends: cpu" in capsys.readouterr().out
    assert run("devices") == 0
    row = r"CPU +cpu +ACME +CPU +0 MiB +0 MiB +A CPU +events, mmap_support\n"
    assert re.search(row, capsys.readouterr().out)
    assert run("devices", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [report.device_dict(device)]


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert re.fullmatch(r"pyspec \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)
    assert run("--help") == 0
    assert "130 stopped with Ctrl-C" in " ".join(capsys.readouterr().out.split())
    assert run("generate", "-h") == 0
    assert "--spec-type" in capsys.readouterr().out


def test_columns_are_neither_cut_nor_wrapped() -> None:
    rows = [("a", "1", "x" * 200), ("日本", "22", "")]
    assert terminal.columns(rows, right={1}) == f"a      1  {'x' * 200}\n日本  22\n"


# ---- quantize: what it checks first -------------------------------------------------------------


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    calls: list[tuple[str, str, str]] = []

    def quantize(source: str, destination: str, file_type: str) -> None:
        calls.append((source, destination, file_type))
        Path(destination).write_bytes(b"new")

    monkeypatch.setattr(sys.modules["pyspec"], "quantize", quantize, raising=False)
    return calls


def test_quantize(quantized: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, destination = tmp_path / "a.gguf", tmp_path / "b.gguf"
    assert run("quantize", str(source), str(destination), "Q4_0") == 1
    assert "there is no file" in capsys.readouterr().err
    source.write_bytes(b"old model")
    assert run("quantize", str(source), str(source), "Q4_0", "--force") == 1
    assert "same file" in capsys.readouterr().err
    assert run("quantize", str(source), str(destination), "Q4_0") == 0
    assert run("quantize", str(source), str(destination), "Q8_0") == 1
    assert "--force overwrites it" in capsys.readouterr().err
    assert run("quantize", str(source), str(destination), "Q8_0", "--force") == 0
    assert quantized == [(str(source), str(destination), "Q4_0"), (str(source), str(destination), "Q8_0")]
    assert source.read_bytes() == b"old model"
