"""A fake LLM in the place of ``pyspec.llm.LLM``, for tests of the command line without the native library."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from pyspec import cli
from pyspec.config import SamplingParams
from pyspec.errors import ModelLoadError
from pyspec.stats import DrafterStats, PhaseTimes, SpecStats


@dataclass
class Usage:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass
class Result:
    text: str
    tokens: list[int]
    drafted: list[bool]
    finish_reason: str
    usage: Usage
    stats: SpecStats
    prompt_tokens: list[int]
    logprobs: None = None


@dataclass
class Piece:
    text: str
    tokens: list[int]
    drafted: list[bool]
    finish_reason: str | None = None
    result: Result | None = None


class FakeVocab:
    """Token i is the i-th word of WORDS."""

    WORDS = ("The", " sun", " shines", " \x1b[2J", " end")

    def token_bytes(self, token: int, special: bool = False) -> bytes:
        return self.WORDS[token].encode()


@dataclass
class FakeLLM:
    """Says WORDS, three tokens in the first step, of which two were drafted."""

    path: str
    draft: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    closed: bool = False

    stats: ClassVar[SpecStats] = SpecStats()
    made: ClassVar[list[FakeLLM]]
    endless: ClassVar[bool] = False
    fails: ClassVar[Exception | None] = None

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    @property
    def model(self) -> Any:
        return SimpleNamespace(vocab=FakeVocab(), path=Path(self.path))

    @property
    def draft_model(self) -> Any:
        return SimpleNamespace(path=Path(self.draft)) if self.draft else None

    @property
    def speculation(self) -> tuple[str, ...]:
        given = self.options["speculation"]
        return tuple(given) if isinstance(given, list) else () if given == "off" else ("draft-simple",)

    def cancel(self) -> None:
        self.cancelled.set()

    def chat(
        self, messages: list[dict[str, str]], params: SamplingParams, stream: bool, prediction: str | None = None
    ) -> Iterator[Piece]:
        assert stream
        self.messages, self.prediction = messages, prediction
        return self._answer(params)

    def stream(self, prompt: str, params: SamplingParams, prediction: str | None = None) -> Iterator[Piece]:
        self.prompt, self.prediction = prompt, prediction
        return self._answer(params)

    def _answer(self, params: SamplingParams) -> Iterator[Piece]:
        self.params = params
        if self.fails is not None:
            raise self.fails
        if self.endless:
            while not self.cancelled.is_set():
                yield Piece("The", [0], [False])
                time.sleep(0.01)
            yield Piece("", [], [], "cancelled", self._result("cancelled"))
            return
        words = FakeVocab.WORDS
        yield Piece("".join(words[:3]), [0, 1, 2], [True, True, False])
        yield Piece("".join(words[3:]), [3, 4], [False, True], "stop", self._result("stop"))

    def _result(self, reason: str) -> Result:
        stats = SpecStats(n_prompt=7, n_output=5, times=PhaseTimes(prefill_us=1000, decode_us=1_000_000))
        if self.speculation:
            stats.count(3, 2)
            stats.count(1, 1)
            stats.drafters = [DrafterStats(self.speculation[-1])]
            stats.drafters[0].count(3, 2)
            stats.drafters[0].count(1, 1)
        flags = [True, True, False, False, True]
        return Result("".join(FakeVocab.WORDS), [0, 1, 2, 3, 4], flags, reason, Usage(8, 5, 13), stats, [9] * 8)


TEXT = "".join(FakeVocab.WORDS)


def run(*args: str) -> int:
    return cli.main(args)


def put_fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """Puts a FakeLLM in the place of pyspec.llm.LLM; ``fake.made`` has the objects."""

    class LLM(FakeLLM):
        made: ClassVar[list[FakeLLM]] = []

        def __init__(self, model: str, draft: str | None = None, *, progress: Callable[[float], None], **options: Any):
            super().__init__(model, draft, options)
            if "absent" in model:
                raise ModelLoadError(f"there is no file {model!r}")
            self.cancelled = threading.Event()
            progress(0.5)
            progress(1.0)
            self.made.append(self)

    module = SimpleNamespace(LLM=LLM)
    monkeypatch.setitem(sys.modules, "pyspec.llm", module)
    monkeypatch.setattr(sys.modules["pyspec"], "llm", module, raising=False)
    return LLM
