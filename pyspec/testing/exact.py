"""``assert_exact``: whatever a drafter does, the output is that of plain decoding; and it keeps its contract."""

from __future__ import annotations

import operator
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import SamplingParams, SpeculationParams
from ..drafters.base import Drafter
from ..engine import Engine
from ..types import DraftRequest
from .fakes import MEMORY, N_SPECIAL, FakeEvaluator, Rule

__all__ = ["ExactReport", "assert_exact"]

_STEPS_MAX = 100_000
_VERBS = ("begin", "process", "draft", "accept", "end", "close")


@dataclass(slots=True)
class ExactReport:
    """What was run, summed over all runs.

    Attributes:
        n_runs: engines run. n_output: tokens generated. n_pass: target passes. n_draft, n_accepted: tokens.
        draft_us_max: the longest call of ``draft``, microseconds.
        problems: breaches of the contract, one line each; empty unless ``strict=False``.
    """

    n_runs: int = 0
    n_output: int = 0
    n_pass: int = 0
    n_draft: int = 0
    n_accepted: int = 0
    draft_us_max: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens; None when nothing was drafted."""
        return self.n_accepted / self.n_draft if self.n_draft else None


def assert_exact(
    drafter_factory: Callable[..., Drafter] | type[Drafter],
    *,
    params: SpeculationParams | None = None,
    n_seq: Iterable[int] = (1, 3),
    memory: Iterable[str] = tuple(MEMORY),
    temperatures: Iterable[float] = (0.0, 1.0),
    texts: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
    extras: Sequence[Mapping[str, Any]] = (),
    n_tokens: int = 48,
    strict: bool = True,
    seed: int = 0,
) -> ExactReport:
    """Check a drafter on a fake target whose every token depends on all tokens before it.

    The same requests run without a drafter and with it, alone and several at a time, on every kind of memory. A wrong
    rollback or position anywhere would change the output. The drafter is watched while it runs.

    Args:
        drafter_factory: a drafter class, made as :class:`pyspec.LLM` makes it; or a function without arguments that
            gives a drafter instance, which is attached to the target. Called for each run.
        params: options for the drafter.
        n_seq: numbers of sequences that share a pass. memory: names of :data:`MEMORY`.
        temperatures: 0 is greedy.
        texts: (prompt, what the target answers) as token ids from 48 to 142, which are ASCII characters + 16; where the
            answer ends, and at temperatures above 0, the target says something pseudo-random. None: some that repeat
            themselves and some that do not.
        extras: ``DraftRequest.extra`` of the requests, in the order of ``texts``, such as ``{"prediction": ids}``.
        n_tokens: tokens to generate for each text.
        strict: fail when the drafter breaks its contract too: it raises, proposes too many tokens or unknown ids,
            changes what it was given, or gives probabilities that do not fit. None of that can harm the output.
        seed: for everything random.

    Returns:
        What was run.

    Raises:
        AssertionError: the output is another one, or, if ``strict``, the contract was broken.
    """
    params = params or SpeculationParams()
    texts = texts if texts is not None else _texts(seed, n_tokens)
    rule = Rule(seed)
    for prompt, answer in texts:
        rule.script(prompt, answer)
    prompts = [list(prompt) for prompt, _ in texts]
    report = ExactReport()
    for temperature in temperatures:
        sampling = SamplingParams(max_tokens=n_tokens, temperature=temperature, seed=seed, ignore_eos=True)
        n_ctx = max(map(len, prompts)) + n_tokens + 8
        wanted, _ = _run(FakeEvaluator(rule, n_ctx_seq=n_ctx, keep_log=False), [], prompts, sampling, ())
        for name in memory:
            for n in n_seq:
                where = f"memory {name!r}, {n} sequence(s), temperature {temperature:g}"
                target = FakeEvaluator(rule, n_seq=n, n_ctx_seq=n_ctx, keep_log=False, **MEMORY[name])
                drafter = _make(drafter_factory, target, params, n)
                watch = _Watch(drafter, target.n_vocab, where)
                try:
                    outputs, engine = _run(target, [drafter], prompts, sampling, extras)
                finally:
                    watch.remove()
                _compare(outputs, wanted, where)
                assert not target.violations, f"{where}: {target.violations[0]}"
                report.n_runs += 1
                report.n_output += engine.stats.n_output
                report.n_pass += engine.stats.n_pass
                report.n_draft += engine.stats.n_draft
                report.n_accepted += engine.stats.n_accepted
                report.draft_us_max = max(report.draft_us_max, watch.draft_us_max)
                report.problems += watch.problems
    if strict and report.problems:
        more = f"\n... and {len(report.problems) - 10} more" if len(report.problems) > 10 else ""
        raise AssertionError("the drafter breaks its contract:\n" + "\n".join(report.problems[:10]) + more)
    return report


def _texts(seed: int, n: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers: three that repeat themselves or their prompt with small changes, three that do not."""
    rng = random.Random(seed)

    def words(k: int) -> list[int]:
        return [rng.randrange(N_SPECIAL + 32, N_SPECIAL + 127) for _ in range(k)]

    texts: list[tuple[list[int], list[int]]] = []
    for i in range(3):
        prompt = words(30 + 20 * i)
        answer: list[int] = []
        while len(answer) < n:
            answer += [*prompt[5:25], *words(1), *prompt[10:30], *answer[-4:] * 2]
        texts.append((prompt, answer[:n]))
    return texts + [(words(k), []) for k in (1, 17, 40)]


def _make(
    factory: Callable[..., Drafter] | type[Drafter], target: FakeEvaluator, params: SpeculationParams, n_seq: int
) -> Drafter:
    if isinstance(factory, type):
        cls: type[Drafter] = factory
        return cls(target, None, params, n_seq)
    drafter: Any = factory()
    if not isinstance(drafter, Drafter):
        raise TypeError(f"drafter_factory gave {drafter!r}, not a pyspec.Drafter")
    drafter.attach(target, None, params, n_seq)
    made: Drafter = drafter
    return made


def _run(
    target: FakeEvaluator,
    drafters: list[Drafter],
    prompts: list[list[int]],
    sampling: SamplingParams,
    extras: Sequence[Mapping[str, Any]],
) -> tuple[list[list[int]], Engine]:
    engine = Engine(target, drafters)
    try:
        sequences = [
            engine.submit(p, sampling, None, extras[i] if i < len(extras) else None) for i, p in enumerate(prompts)
        ]
        for _ in range(_STEPS_MAX):
            if not engine.step():
                break
        else:
            raise AssertionError("the loop does not come to an end")
        for sequence in sequences:
            if sequence.error is not None:
                raise AssertionError("a sequence ended with an error") from sequence.error
        return [s.output for s in sequences], engine
    finally:
        engine.close()


def _compare(outputs: list[list[int]], wanted: list[list[int]], where: str) -> None:
    for i, (got, right) in enumerate(zip(outputs, wanted, strict=True)):
        if got != right:
            same = [a == b for a, b in zip(got, right, strict=False)]
            at = same.index(False) if False in same else len(same)
            raise AssertionError(
                f"{where}: the output of text {i} differs from token {at} on: "
                f"{got[at : at + 8]}, plain decoding says {right[at : at + 8]}"
            )


class _Watch:
    """Stands between engine and drafter and writes down what goes wrong."""

    def __init__(self, drafter: Drafter, n_vocab: int, where: str) -> None:
        self.problems: list[str] = []
        self.draft_us_max = 0.0
        self._n_vocab = n_vocab
        self._where = where
        self._drafter = drafter
        self._draft = drafter.draft
        self._before = dict(vars(drafter))
        for verb in _VERBS:
            method = self._drafted if verb == "draft" else getattr(drafter, verb)
            # an instance attribute, so that it is used instead of the method
            setattr(drafter, verb, self._guarded(verb, method))

    def remove(self) -> None:
        """Leave the drafter as it was: the factory may give the same one again."""
        for verb in _VERBS:
            if verb in self._before:
                setattr(self._drafter, verb, self._before[verb])
            else:
                delattr(self._drafter, verb)

    def _problem(self, text: str) -> None:
        self.problems.append(f"{self._where}: {text}")

    def _guarded(self, verb: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            try:
                return method(*args)
            except Exception as e:
                self._problem(f"{verb} raised {type(e).__name__}: {e}")
                raise

        return call

    def _drafted(self, requests: list[DraftRequest]) -> None:
        before = [(r.seq, r.n_past, r.id_last, list(r.tokens), r.n_max, dict(r.extra)) for r in requests]
        start = time.perf_counter()
        self._draft(requests)
        self.draft_us_max = max(self.draft_us_max, 1e6 * (time.perf_counter() - start))
        after = [(r.seq, r.n_past, r.id_last, list(r.tokens), r.n_max, dict(r.extra)) for r in requests]
        if len(before) != len(after) or any(not _same(a, b) for a, b in zip(before, after, strict=False)):
            self._problem("draft changed what it was given")
        for r in requests:
            draft = list(r.draft)
            if len(draft) > r.n_max:
                self._problem(f"draft proposed {len(draft)} tokens, n_max is {r.n_max}")
            try:
                wrong = [t for t in map(operator.index, draft) if not 0 <= t < self._n_vocab]
            except TypeError as e:
                self._problem(f"draft proposed what is no token id: {e}")
                continue
            if wrong:
                self._problem(f"draft proposed token id {wrong[0]}, the vocabulary has {self._n_vocab}")
            if r.probs and (len(r.probs) != len(draft) or not all(0 <= p <= 1.0001 for p in r.probs)):
                self._problem(f"draft gave probabilities {list(r.probs)[:8]} for {len(draft)} tokens")


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    # values of `extra` are compared by identity: they may be arrays
    *x, x_extra = a
    *y, y_extra = b
    return x == y and x_extra.keys() == y_extra.keys() and all(x_extra[k] is y_extra[k] for k in x_extra)
