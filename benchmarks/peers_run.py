"""Running one peer on one job, for ``peers.py``: each class turns a job into a command and reads the figures back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers_setup import Tools

TIMEOUT_S = 300


class RunError(Exception):
    """A peer did not do its job."""


@dataclass(frozen=True)
class Job:
    """What is generated, and how. The same for pyspec and the peer.

    Attributes:
        target, draft: model files. drafter: a method's name (llama.cpp's and pyspec's are the same), or None.
        options: of the drafter, in pyspec's names.
        prompts: token ids; text: of the first one. n: tokens to generate for each.
        n_ctx: tokens of a sequence. n_seq: sequences at a time.
        flash_attn: whether a program of llama.cpp uses flash attention; None: as it likes. pyspec does as it likes.
    """

    target: Path
    draft: Path | None
    drafter: str | None
    options: Mapping[str, Any]
    prompts: Sequence[Sequence[int]]
    text: str
    n: int
    n_threads: int
    n_ctx: int
    n_seq: int = 1
    flash_attn: bool | None = None


@dataclass
class Result:
    """What came of a job.

    Attributes:
        speed: tokens a second while generating, prompt left out; None where the peer cannot tell.
        speed_whole: tokens a second from the request to the last token, prompt included; None likewise.
        tokens, texts: what was generated; what the peer does not tell is empty.
        drafted, accepted: what speculation did. phases_us: where pyspec's time went. None: not told.
    """

    speed: float | None
    speed_whole: float | None
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    drafted: int | None = None
    accepted: int | None = None
    phases_us: dict[str, int] | None = None


# ---- llama.cpp's tools ----------------------------------------------------------------------------------------------

# pyspec's option -> the tools' option, by drafter
_DRAFT_OPTIONS = {"n_max": "--spec-draft-n-max", "n_min": "--spec-draft-n-min", "p_min": "--spec-draft-p-min"}
_OPTIONS: dict[str, dict[str, str]] = {
    "draft-simple": _DRAFT_OPTIONS,
    "draft-eagle3": _DRAFT_OPTIONS,
    "draft-mtp": _DRAFT_OPTIONS,
    "ngram-cache": {"n_max": "--spec-draft-n-max"},
    "ngram-mod": {
        "n_match": "--spec-ngram-mod-n-match",
        "mod_n_max": "--spec-ngram-mod-n-max",
        "mod_n_min": "--spec-ngram-mod-n-min",
    },
    **{
        f"ngram-{kind}": {
            "size_n": f"--spec-ngram-{kind}-size-n",
            "size_m": f"--spec-ngram-{kind}-size-m",
            "min_hits": f"--spec-ngram-{kind}-min-hits",
        }
        for kind in ("simple", "map-k", "map-k4v")
    },
}


def common_arguments(job: Job) -> list[str]:
    """Options that ``llama-speculative-simple`` and ``llama-server`` share."""
    t = str(job.n_threads)
    out = ["-m", str(job.target), "-t", t, "-tb", t, "--seed", "1", "--fit", "off"]
    # greedy by the shortest way there is: the best of the row, no other sampler
    out += ["--temp", "0", "--samplers", "top_k", "--top-k", "1"]
    if job.flash_attn is not None:
        out += ["-fa", "on" if job.flash_attn else "off"]
    if job.drafter:
        out += ["--spec-type", job.drafter, "-td", t, "-tbd", t]
        if job.draft is not None:
            out += ["-md", str(job.draft)]
        for name, value in job.options.items():
            if name == "backend_sampling":
                out.append("--spec-draft-backend-sampling" if value else "--no-spec-draft-backend-sampling")
            elif name in _OPTIONS[job.drafter]:
                out += [_OPTIONS[job.drafter][name], str(value)]
    return out


def run_speculative_simple(tools: Tools, variant: str, job: Job) -> Result:
    """One run of ``llama-speculative-simple``; its own clock around its generating loop and its prompt."""
    with tempfile.TemporaryDirectory(prefix="pyspec-peers-") as tmp:
        prompt = Path(tmp) / "prompt.txt"
        prompt.write_text(job.text, encoding="utf-8")
        command = [str(tools.folder / "llama-speculative-simple"), *common_arguments(job), "-f", str(prompt)]
        # it stops after the pass that exceeds -n
        command += ["-n", str(job.n - 1), "-c", str(job.n_ctx), "--no-escape", "--log-colors", "off", "--ignore-eos"]
        done = _finish(command, tools.env(variant))
    parts = [_speed_line(word, done.stderr + done.stdout) for word in ("encoded", "decoded")]
    (_, t_prompt), (n, t_decode) = parts
    out = done.stderr + done.stdout
    drafted, accepted = (_number(rf"{name}\s*=\s*(\d+)", out) for name in ("n_drafted", "n_accept"))
    text = done.stdout
    at = text.find(job.text)
    return Result(
        n / t_decode,
        n / (t_prompt + t_decode),
        texts=[text[at + len(job.text) :].rstrip("\n")] if at >= 0 else [],
        drafted=drafted,
        accepted=accepted,
    )


def _speed_line(word: str, text: str) -> tuple[int, float]:
    found = re.search(rf"{word}\s+(\d+) tokens in\s+([\d.]+) seconds", text)
    if not found:
        raise RunError(f"no line '{word} ... tokens in ... seconds' in:\n{text[-2000:]}")
    return int(found[1]), float(found[2])


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text, re.MULTILINE)
    return int(found[1]) if found else None


def run_llama_bench(tools: Tools, variant: str, job: Job, n_prompt: int = 0) -> Result:
    """One run of ``llama-bench``: ``job.n`` passes of one row from an empty cache (or a prompt), after its warm-up."""
    command = [str(tools.folder / "llama-bench"), "-m", str(job.target), "-t", str(job.n_threads)]
    command += ["-p", str(n_prompt), "-n", "0" if n_prompt else str(job.n), "-r", "1", "-o", "json"]
    if job.flash_attn is not None:
        command += ["-fa", "1" if job.flash_attn else "0"]
    done = _finish(command, tools.env(variant))
    rows = json.loads(done.stdout)
    return Result(float(rows[0]["avg_ts"]), float(rows[0]["avg_ts"]))


def _finish(command: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RunError(f"{Path(command[0]).name} did not end in {TIMEOUT_S} s") from None
    if done.returncode:
        raise RunError(f"{Path(command[0]).name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done


class Server:
    """A running ``llama-server``. A context manager."""

    def __init__(self, tools: Tools, variant: str, job: Job) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{s.getsockname()[1]}"
        port = self._url.rpartition(":")[2]
        command = [str(tools.folder / "llama-server"), *common_arguments(job), "--host", "127.0.0.1", "--port", port]
        command += ["-np", str(job.n_seq), "-c", str(job.n_ctx * job.n_seq), "--cache-ram", "0", "--no-ui"]
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, env=tools.env(variant), stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/health", timeout=5) as reply:
                if reply.status == 200:
                    return
            time.sleep(0.1)
        self._log.seek(0)
        raise RunError(f"llama-server did not start:\n{self._log.read()[-2000:]}")

    def _ask(self, prompt: Sequence[int], n: int) -> dict[str, Any]:
        body = {
            "prompt": list(prompt), "n_predict": n, "temperature": 0.0, "top_k": 1, "samplers": ["top_k"],
            "ignore_eos": True, "cache_prompt": False, "return_tokens": True, "stream": False,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self._url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                return dict(json.load(reply))
        except (OSError, urllib.error.HTTPError) as e:
            detail = e.read().decode(errors="replace") if isinstance(e, urllib.error.HTTPError) else ""
            raise RunError(f"llama-server: {e} {detail}") from None

    def run(self, job: Job) -> Result:
        """All prompts of the job at once, each in a request of its own."""
        replies: list[dict[str, Any] | BaseException] = [{}] * len(job.prompts)

        def work(i: int) -> None:
            try:
                replies[i] = self._ask(job.prompts[i], job.n)
            except BaseException as e:
                replies[i] = e

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(job.prompts))]
        start = time.perf_counter()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        wall = time.perf_counter() - start
        good = []
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
            good.append(reply)
        n = sum(int(r["tokens_predicted"]) for r in good)
        timings = [r.get("timings", {}) for r in good]
        return Result(
            # its clock starts when the first token is there
            1000 * (n - 1) / float(timings[0]["predicted_ms"]) if len(good) == 1 else None,
            n / wall,
            tokens=[list(r.get("tokens", [])) for r in good],
            texts=[str(r["content"]) for r in good],
            drafted=sum(int(t.get("draft_n", 0)) for t in timings),
            accepted=sum(int(t.get("draft_n_accepted", 0)) for t in timings),
        )

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- Python engines, each in a process of its own ------------------------------------------------------------------


class Worker:
    """A running ``peers_worker.py``. A context manager.

    Args:
        engine: a name of peers_worker.ENGINES. python: the interpreter that has it.
        job: models and options; prompts and n come with :meth:`run`.
        env: additions to the environment.
    """

    def __init__(self, engine: str, python: Path | str, job: Job, env: Mapping[str, str] | None = None) -> None:
        config = {
            "target": str(job.target),
            "draft": None if job.draft is None else str(job.draft),
            "drafter": job.drafter,
            "options": dict(job.options),
            "n_threads": job.n_threads,
            "n_ctx": job.n_ctx,
            "n_seq": job.n_seq,
        }
        self._name = engine
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        script = Path(__file__).with_name("peers_worker.py")
        self._process = subprocess.Popen(
            [str(python), str(script), engine, json.dumps(config)],
            env=dict(os.environ, **(env or {})),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._lines: deque[str] = deque()
        self._more = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._more:
                self._lines.append(line)
                self._more.notify()
        with self._more:
            self._lines.append("")
            self._more.notify()

    def _answer(self) -> dict[str, Any]:
        with self._more:
            if not self._more.wait_for(lambda: self._lines, TIMEOUT_S):
                raise RunError(f"{self._name} did not answer in {TIMEOUT_S} s")
            line = self._lines.popleft()
        if not line:
            self._log.seek(0)
            raise RunError(f"{self._name} ended:\n{self._log.read()[-2000:]}")
        answer = dict(json.loads(line))
        if "error" in answer:
            raise RunError(f"{self._name}: {answer['error']}")
        return answer

    def run(self, job: Job) -> Result:
        """All prompts of the job in one call."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": [list(p) for p in job.prompts], "n": job.n}) + "\n")
        self._process.stdin.flush()
        a = self._answer()
        n = sum(map(len, a["tokens"])) if "tokens" in a else int(a["n_decode"]) + len(job.prompts)
        single = len(job.prompts) == 1
        return Result(
            a["n_decode"] / a["decode_s"] if single and a["decode_s"] else None,
            n / a["wall_s"],
            tokens=a.get("tokens", []),
            texts=a.get("texts", []),
            drafted=a.get("drafted"),
            accepted=a.get("accepted"),
            phases_us=a.get("phases_us"),
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def pyspec_worker(job: Job) -> Iterator[Worker]:
    """pyspec, warmed up by one short generation."""
    with Worker("pyspec", sys.executable, job) as worker:
        warm_up(worker, job)
        yield worker


def warm_up(engine: Worker | Server, job: Job) -> None:
    """A short generation that is not measured: graphs are reserved, pages are touched.

    Its prompt is the job's first token only, so no drafter sees the text that is measured.
    """
    engine.run(Job(**{**job.__dict__, "prompts": [[job.prompts[0][0]]] * len(job.prompts), "n": 4}))
