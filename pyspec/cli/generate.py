"""``pyspec generate``: stream an answer, then say how it came about."""

from __future__ import annotations

import itertools
import json
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..runtime import TextStream
from ..stats import DrafterStats
from . import structured, terminal

if TYPE_CHECKING:
    from ..config import SamplingParams
    from ..llm import LLM, GenerationResult, Piece
    from ..stats import ControlStats

__all__ = ["read_prompt", "run"]

_ACCEPTED = "green"


def read_prompt(prompt: str | None, file: str | None) -> str | None:
    """The prompt from the option, the file (``-``: stdin) or a piped stdin; None if there is none.

    One newline at the end of a file or of stdin is dropped.

    Raises:
        ConfigError: it is not UTF-8. OSError: the file cannot be read.
    """
    if prompt is not None:
        return prompt
    if file is None:
        if sys.stdin is None or sys.stdin.isatty():
            return None
        file = "-"
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        source = "stdin" if file == "-" else repr(file)
        raise ConfigError(f"the prompt in {source} is not UTF-8: {e.reason} at byte {e.start}") from None
    text = text.replace("\r\n", "\n")
    return text[:-1] if text.endswith("\n") else text


def run(
    model: str,
    options: dict[str, Any],
    prompt: str,
    params: SamplingParams,
    *,
    prediction: str | None,
    chat: bool,
    system: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Load, generate, print.

    Args:
        options: keyword options of :class:`pyspec.LLM`.
        prediction: what the answer will mostly repeat.
        chat: put the prompt into the model's chat template, as the user's message.

    Raises:
        KeyboardInterrupt: after a first Ctrl-C has ended the generation and what there is has been printed.
    """
    from ..llm import LLM

    with terminal.progress(f"loading {terminal.printable(Path(model).name)}") as step:
        llm = LLM(model, progress=step, **options)
    with llm:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": prompt})

        def start() -> Iterator[Piece]:
            more: dict[str, Any] = {} if prediction is None else {"prediction": prediction}
            if not chat:
                return llm.stream(prompt, params, **more)
            pieces: Iterator[Piece] = llm.chat(messages, params, stream=True, **more)
            return pieces

        show = _nothing if as_json else _writer(llm, params)
        result: GenerationResult | None = None
        with _Worker(start, llm.cancel) as pieces:
            for piece in pieces:
                show(piece)
                result = piece.result or result
        assert result is not None, "the last piece carries the result"
        if as_json:
            print(json.dumps(_to_dict(llm, result), ensure_ascii=False))
        else:
            if not result.text.endswith("\n"):
                terminal.write("\n")
            if not quiet:
                _print_stats(llm, result)
    if result.finish_reason == "cancelled":
        raise KeyboardInterrupt


class _Worker:
    """Generates on a thread of its own, so that Ctrl-C is seen at once however long a native call takes.

    The first Ctrl-C cancels the generation, which still ends in order; the second raises.

    Args:
        start: begins the generation. cancel: ends it, from any thread; calling it again does no harm.
    """

    def __init__(self, start: Callable[[], Iterator[Piece]], cancel: Callable[[], None]) -> None:
        self._start = start
        self._cancel = cancel
        self._queue: queue.SimpleQueue[Piece | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="pyspec-generate", daemon=True)
        self._cancelled = False
        self._old_handler: Any = None

    def __enter__(self) -> Iterator[Piece]:
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGINT, self._interrupt)
        self._thread.start()
        return self._pieces()

    def __exit__(self, *_: object) -> None:
        # leaving early (a closed pipe, a second Ctrl-C): the model must not be closed under the worker
        self._thread.join(0.05)
        while self._thread.is_alive():
            self._cancel()
            self._thread.join(0.05)
        if self._old_handler is not None:
            signal.signal(signal.SIGINT, self._old_handler)

    def _interrupt(self, *_: object) -> None:
        if self._cancelled:
            raise KeyboardInterrupt
        self._cancelled = True
        self._cancel()

    def _work(self) -> None:
        try:
            for piece in self._start():
                self._queue.put(piece)
            self._queue.put(None)
        except BaseException as e:  # handed to the waiting thread, which raises it
            self._queue.put(e)

    def _pieces(self) -> Iterator[Piece]:
        while True:
            try:
                item = self._queue.get(timeout=0.1)
            except queue.Empty:
                if self._cancelled:  # again, in case the first time was before the request had been submitted
                    self._cancel()
                continue
            if isinstance(item, BaseException):
                raise item
            if item is None:
                return
            yield item


def _nothing(piece: Piece) -> None:
    pass


def _writer(llm: LLM, params: SamplingParams) -> Callable[[Piece], None]:
    """Writes pieces to stdout: as they are, or on a terminal with accepted draft tokens coloured."""
    console = terminal.stdout()
    if not console.is_terminal:
        return lambda piece: terminal.write(piece.text)
    stream = TextStream(llm.model.vocab, params.stop, params.skip_special)

    def write(piece: Piece) -> None:
        for text, drafted in _spans(stream, piece):
            console.out(terminal.printable(text), style=_ACCEPTED if drafted else None, highlight=False, end="")

    return write


def _spans(stream: TextStream, piece: Piece) -> list[tuple[str, bool]]:
    """The text of a piece by token; True: accepted draft token. Text held back counts for the token that frees it."""
    spans: list[tuple[str, bool]] = []
    rest = piece.text
    for token, drafted in zip(piece.tokens, piece.drafted, strict=True):
        text = stream.push(token)
        if not rest.startswith(text):
            break
        rest = rest[len(text) :]
        if text:
            spans.append((text, drafted))
    if rest:
        spans.append((rest, False))
    return spans


def _print_stats(llm: LLM, result: GenerationResult) -> None:
    stats, usage = result.stats, result.usage
    rows = [
        ("prompt", f"{usage.prompt_tokens} tokens", _speed(stats.prompt_tokens_per_s)),
        ("output", f"{usage.completion_tokens} tokens", _speed(stats.tokens_per_s)),
        ("end", result.finish_reason, _FINISH[result.finish_reason]),
    ]
    # a prediction has a drafter of its own
    names = [*(d.name for d in stats.drafters if d.name not in llm.speculation), *llm.speculation]
    if not names:
        rows.append(("drafted", "nothing", "speculation is off"))
    else:
        rows.append(("drafted", f"{stats.n_draft} tokens", ", ".join(names)))
        if stats.acceptance_rate is not None:
            rows.append(("accepted", f"{stats.n_accepted} tokens", f"{stats.acceptance_rate:.1%}"))
            pairs = itertools.zip_longest(stats.accepted_per_pos, stats.drafted_per_pos, fillvalue=0)
            rows.append(("by position", "", " ".join(f"{a / d:.2f}" for a, d in pairs)))
        if len(names) > 1:
            used = {d.name: d for d in stats.drafters}
            for name in names:
                d = used.get(name, DrafterStats(name))
                rows.append(
                    (name, f"{d.n_acc_tokens} tokens", f"accepted, of {d.n_gen_tokens} in {d.n_gen_drafts} drafts")
                )
        if stats.mean_accepted_length is not None:
            rows.append(("a pass", f"{stats.mean_accepted_length:.2f} tokens", f"{stats.n_pass} passes of the target"))
        rows += _control_rows(llm.stats.control)
    console = terminal.stderr()
    console.out("\n" + terminal.columns(rows, right={1}), style="dim", end="", highlight=False)


def _control_rows(control: ControlStats | None) -> list[tuple[str, str, str]]:
    """What "auto" chose, and why."""
    if control is None:
        return []
    chosen = [f"{name} {n}" for name, n in sorted(control.chosen.items(), key=lambda x: -x[1])]
    chosen.append(f"not worth it {control.n_not_worth}")
    chosen.append(f"nothing proposed {control.n_nothing}")
    rows = [("auto", f"{control.n_steps} steps", ", ".join(chosen))]
    if control.row_us:
        costs = [f"{n}: {us / control.row_us:.2f}" for n, us in list(control.pass_us.items())[:8]]
        rows.append(("pass by rows", f"{control.row_us / 1000:.2f} ms", " ".join(costs)))
    for name, known in control.drafters.items():
        if known["asked"]:
            parked = ", parked" if known["parked"] else ""
            rows.append((name, f"{known['asked']} asked", f"gains {known['value']:+.2f} passes each time{parked}"))
    return rows


_FINISH = {
    "stop": "ended by the model or a stop string",
    "length": "token limit or context full",
    "cancelled": "stopped with Ctrl-C",
}


def _speed(tokens_per_s: float | None) -> str:
    return f"{tokens_per_s:.1f} tokens/s" if tokens_per_s is not None else ""


def _to_dict(llm: LLM, result: GenerationResult) -> dict[str, Any]:
    return {
        "text": result.text,
        "tokens": result.tokens,
        "drafted": result.drafted,
        "finish_reason": result.finish_reason,
        "logprobs": structured.logprobs_dict(result.logprobs),
        "prompt_tokens": result.prompt_tokens,
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
            "total_tokens": result.usage.total_tokens,
        },
        "stats": result.stats.to_dict(),
        "model": str(llm.model.path),
        "draft": str(llm.draft_model.path) if llm.draft_model is not None else None,
        "speculation": list(llm.speculation),
    }
