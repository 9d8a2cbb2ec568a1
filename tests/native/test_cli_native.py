"""The command line on tiny models, in processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

PROMPT = "The quick brown fox"


def pyspec(*args: str, stdin: bytes = b"", exit_code: int = 0, **environment: str) -> tuple[str, str]:
    """stdout and stderr of a command; checks its exit code."""
    child = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pyspec", *args],
        input=stdin,
        capture_output=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "utf-8", "GGML_NO_BACKTRACE": "1"} | environment,
    )
    out, err = child.stdout.decode(), child.stderr.decode()
    assert child.returncode == exit_code, f"exit code {child.returncode}\n{out[-2000:]}\n{err[-4000:]}"
    assert "\x1b" not in out + err, "no colours where there is no terminal"
    return out, err


def generate_json(model: str, *args: str, prompt: str = PROMPT, n: int = 48) -> dict[str, Any]:
    out, err = pyspec("generate", model, "-p", prompt, "-n", str(n), "-t", "1", "--json", *args)
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


def test_generate_speculates_and_says_the_same(tiny: Any) -> None:
    target, draft = tiny("target-llama"), tiny("draft-llama")
    plain = generate_json(target, "--spec-type", "off")
    spec = generate_json(target, "--draft", draft, "--spec-type", "draft-simple")
    assert plain["tokens"] == spec["tokens"]
    assert plain["text"] == spec["text"]
    assert len(plain["tokens"]) == plain["usage"]["completion_tokens"] == 48
    assert (plain["speculation"], spec["speculation"]) == ([], ["draft-simple"])
    assert not any(plain["drafted"])
    assert plain["stats"]["acceptance_rate"] is None
    assert sum(spec["drafted"]) == spec["stats"]["n_accepted"] > 24
    assert spec["stats"]["n_pass"] < 30
    assert (spec["model"], spec["draft"]) == (target, draft)


def test_generate_chains_drafters(tiny: Any) -> None:
    found = generate_json(
        tiny("target-llama"), "--draft", tiny("draft-llama"), "--spec-type", "ngram-simple,draft-simple"
    )
    assert found["speculation"] == ["ngram-simple", "draft-simple"]
    assert found["tokens"] == generate_json(tiny("target-llama"), "--spec-type", "off")["tokens"]


def test_generate_streams_text_and_prints_a_table(tiny: Any) -> None:
    args = ("generate", tiny("target-llama"), "--draft", tiny("draft-llama"), "-n", "32", "-t", "1")
    out, err = pyspec(*args, stdin=PROMPT.encode() + b"\n")
    assert out.rstrip("\n") == generate_json(tiny("target-llama"), n=32)["text"].rstrip("\n")
    assert re.search(r"output +32 tokens +[\d.]+ tokens/s", err)
    assert re.search(r"accepted +\d+ tokens +\d+\.\d%", err)
    out, err = pyspec(*args, "-q", "-p", PROMPT)
    assert err == ""


def test_generate_chat_uses_the_models_template(tiny: Any) -> None:
    found = generate_json(tiny("target-llama"), "--chat", "--system", "Be brief.", prompt="Hello")
    raw = generate_json(
        tiny("target-llama"),
        prompt="<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    )
    # the tiny models ask for a BOS and the template writes none
    assert found["prompt_tokens"] == raw["prompt_tokens"]
    assert found["tokens"] == raw["tokens"]


def test_generate_stop_and_seed(tiny: Any) -> None:
    whole = generate_json(tiny("target-llama"))["text"]
    stop = whole[10:13]
    cut = generate_json(tiny("target-llama"), "--stop", stop)
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"
    hot = [generate_json(tiny("target-llama"), "--temp", "1.5", "--seed", s)["tokens"] for s in ("1", "1", "2")]
    assert hot[0] == hot[1] != hot[2]


# ---- failures: one line, exit code 1, no traceback ---------------------------------------------


@pytest.mark.parametrize("kind", ["missing", "directory", "text", "empty", "cut"])
@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_model_that_cannot_be_loaded(tiny: Any, tmp_path: Path, kind: str, command: str) -> None:
    path = tmp_path / "bad model.gguf"
    if kind == "directory":
        path.mkdir()
    elif kind != "missing":
        whole = Path(tiny("target-llama")).read_bytes()
        path.write_bytes({"text": b"not a model\n" * 99, "empty": b"", "cut": whole[: len(whole) // 2]}[kind])
    out, err = pyspec(command, str(path), *(["-p", "x"] if command == "generate" else []), exit_code=1)
    assert out == ""
    assert err.startswith("pyspec: ")
    assert err.count("\n") == 1
    assert "bad model.gguf" in err
    assert "internal error" not in err


def test_draft_that_does_not_fit(tiny: Any) -> None:
    out, err = pyspec("generate", tiny("target-llama"), "--draft", tiny("draft-badvocab-text"), "-p", "x", exit_code=1)
    assert (out, err.count("\n")) == ("", 1)
    assert "differs: target" in err


def test_traceback_on_request() -> None:
    _, err = pyspec("inspect", "absent.gguf", exit_code=1, PYSPEC_TRACEBACK="1")
    assert "Traceback" in err
    assert "ModelLoadError" in err


def test_prompt_longer_than_the_context(tiny: Any) -> None:
    _, err = pyspec("generate", tiny("target-llama"), "-p", "fox " * 200, "-c", "64", exit_code=1)
    assert "n_ctx" in err
    assert err.count("\n") == 1


# ---- Ctrl-C and closed pipes ----------------------------------------------------------------------


def start(*args: str, stdin: bytes | None = None) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-m", "pyspec", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "GGML_NO_BACKTRACE": "1"},
    )
    assert child.stdin is not None
    if stdin is not None:
        child.stdin.write(stdin)
    child.stdin.close()
    child.stdin = None
    return child


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_while_generating(tiny: Any) -> None:
    args = ["generate", tiny("target-llama"), "-p", PROMPT, "-n", "-1", "--ignore-eos", "-c", "4096", "-t", "1"]
    child = start(*args, "--draft", tiny("draft-llama"))
    assert child.stdout is not None
    first = child.stdout.read(20)
    child.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, err = child.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert child.returncode == 130, err.decode()
    assert len(first) == 20
    assert "stopped with Ctrl-C" in err.decode()
    assert err.decode().endswith("pyspec: stopped\n")
    assert "Traceback" not in err.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_while_the_prompt_is_read(tiny: Any) -> None:
    """A long prompt on a model of many layers takes seconds; the stop takes a fraction of one."""
    args = ["generate", tiny("target-llama", layers=48), "-f", "-", "-n", "4", "-c", "30000", "-t", "1", "-v"]
    child = start(*args, stdin=b"The quick brown fox jumps over the lazy dog. " * 1000)
    assert child.stderr is not None
    assert b"pyspec" in child.stderr.readline()  # loaded: what the log says about the drafter
    time.sleep(1.0)
    assert child.poll() is None, "the prompt was read too soon for this test to mean anything"
    child.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, err = child.communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert child.returncode == 130, err.decode()
    assert re.search(r"output +0 tokens", err.decode())


@pytest.mark.skipif(sys.platform == "win32", reason="pipes")
def test_reader_that_goes_away(tiny: Any) -> None:
    with start("generate", tiny("target-llama"), "-p", PROMPT, "-n", "-1", "--ignore-eos", "-t", "1") as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert len(child.stdout.read(10)) == 10
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(timeout=60) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_bar_and_colour_on_a_terminal(tiny: Any) -> None:
    import pty

    args = ["generate", tiny("target-llama"), "--draft", tiny("draft-llama"), "-p", PROMPT, "-n", "24", "-t", "1"]
    master, slave = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm-256color"}
    child = subprocess.Popen([sys.executable, "-m", "pyspec", *args], stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(master)
    assert child.wait(timeout=60) == 0
    assert b"loading target-llama.gguf" in shown
    assert b"\x1b[32m" in shown
    plain = re.sub(rb"\x1b\[[0-9;]*m", b"", shown).replace(b"\r\n", b"\n").decode()
    text = generate_json(tiny("target-llama"), n=24)["text"]
    assert text.strip().splitlines()[0] in plain


# ---- the other commands -----------------------------------------------------------------------------


def test_inspect(tiny: Any) -> None:
    found = json.loads(pyspec("inspect", tiny("target-llama"), "--json")[0])
    assert found["architecture"] == "llama"
    assert found["vocab"]["n_tokens"] == 512
    assert found["vocab"]["bos"] == 1
    assert found["has_chat_template"]
    assert found["n_layer"] == 4
    assert found["target"]["draft-simple"] is None
    assert found["target"]["ngram-simple"] is None
    assert "llama" in found["target"]["draft-mtp"]
    assert found["draft_type"] == "draft-simple"
    out, _ = pyspec("inspect", tiny("target-llama"))
    assert re.search(r"architecture +llama", out)
    assert re.search(r"vocabulary +512 tokens, BPE, bos 1, eos 2", out)
    assert re.search(r"draft-mtp +no: ", out)
    assert "as draft: draft-simple" in out


@pytest.mark.parametrize(
    ("target", "draft", "kind", "problem"),
    [
        ("target-llama", "draft-llama", "draft-simple", None),
        ("target-llama", "draft-badvocab-text", "draft-simple", "differs: target"),
        ("target-llama", "draft-badvocab-size", "draft-simple", "sizes differ by 129"),
        ("target-llama", "eagle3", "draft-eagle3", None),
        ("target-swa", "eagle3", "draft-eagle3", "gemma3"),
        ("target-llama", "dflash", "draft-dflash", None),
        ("target-llama", "dspark", "draft-dspark", None),
    ],
)
def test_inspect_a_pair(tiny: Any, target: str, draft: str, kind: str, problem: str | None) -> None:
    pair = json.loads(pyspec("inspect", tiny(target), "--draft", tiny(draft), "--json")[0])["pair"]
    assert pair["type"] == kind
    assert (pair["problem"] is None) == (problem is None), pair["problem"]
    assert (problem or "") in (pair["problem"] or "")


def test_inspect_names_what_a_draft_is_for(tiny: Any) -> None:
    for model, kind in [("eagle3", "draft-eagle3"), ("dspark", "draft-dspark"), ("draft-mtp-only", "draft-mtp")]:
        assert json.loads(pyspec("inspect", tiny(model), "--json")[0])["draft_type"] == kind


def test_inspect_memory_kinds(tiny: Any) -> None:
    swa = json.loads(pyspec("inspect", tiny("target-swa"), "--json")[0])
    assert swa["n_swa"] == 32
    assert "sliding window of 32" in pyspec("inspect", tiny("target-swa"))[0]
    hybrid = json.loads(pyspec("inspect", tiny("target-hybrid"), "--json")[0])
    assert hybrid["is_hybrid"]
    mtp = json.loads(pyspec("inspect", tiny("target-mtp"), "--json")[0])
    assert mtp["n_layer_nextn"] == 1
    assert mtp["target"]["draft-mtp"] is None


def test_devices() -> None:
    found = json.loads(pyspec("devices", "--json")[0])
    cpu = next(d for d in found if d["kind"] == "cpu")
    assert cpu["memory_total_bytes"] > 2**27
    assert re.search(rf"^{cpu['name']} +cpu ", pyspec("devices")[0], re.MULTILINE)


def test_info() -> None:
    out, _ = pyspec("info")
    for line in (r"pyspec: \d", r"python: 3\.", r"backends: .*cpu", "errors: none", r"  ggml_version: \d"):
        assert re.search(f"^{line}", out, re.MULTILINE | re.IGNORECASE), f"{line!r} not in\n{out}"
    assert json.loads(pyspec("info", "--json")[0])["errors"] == []


def test_quantize(tiny: Any, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    _, err = pyspec("quantize", tiny("target-llama"), str(copy), "Q8_0")
    assert copy.stat().st_size < Path(tiny("target-llama")).stat().st_size
    assert str(copy) in err
    found = generate_json(tiny("target-llama"), "--draft", str(copy))
    assert found["stats"]["acceptance_rate"] > 0.5, "a copy in another precision is a good draft"
    _, err = pyspec("quantize", tiny("target-llama"), str(tmp_path / "x.gguf"), "Q9_9", exit_code=1)
    assert "Q9_9" in err
    assert not (tmp_path / "x.gguf").exists()
