"""``pyspec verify`` as a library: is the text with speculation the text without it, and if not, why?

Both generate greedily and are compared token by token. At the first difference the logits that decided it are
compared: the two passes had different numbers of rows, and kernels for one row and for several round differently. How
far that alone moves logits is measured on the same text, with the same sizes of passes and without any drafting. A gap
within that noise is a tie; a larger one means that the cache did not hold what it should have held: a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .bench import Mode, Setting, encode_prompt, load_for, make_modes
from .config import ContextParams, SamplingParams
from .errors import ConfigError, NativeError, UnsupportedError
from .llm import LLM
from .prompts import Prompt
from .runtime import ALL, Batch, Context, Model
from .types import F32Array

__all__ = ["Difference", "Mode", "Outcome", "Verify", "make_modes", "measure_noise", "verdict_of"]

#: Noise is looked at among this many of the best tokens of each row: ties are between these.
TOP = 32
#: Positions of text on which noise is measured, at least, where there are so many.
N_NOISE = 64
#: Rows of a pass that stands for a prompt's.
N_PROMPT_ROWS = 32
#: Most sizes of passes for which noise is measured.
N_SIZES = 4

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two outputs of one prompt, "left" and "right".

    Attributes:
        position: index into the outputs. left_token, right_token: ids; None where an output has ended.
        left_logits, right_logits: (logit of left_token, logit of right_token) in the pass of either side.
        left_rows, right_rows: rows of these passes.
        noise: how much rounding alone moves the gap between two likely tokens of this text.
        repeatable: the left side says the same when asked again.
    """

    position: int
    left_token: int | None
    right_token: int | None
    left_logits: tuple[float, float] | None = None
    right_logits: tuple[float, float] | None = None
    left_rows: int = 0
    right_rows: int = 0
    noise: float = 0.0
    repeatable: bool = True

    @property
    def gap(self) -> float | None:
        """By how much the two tokens moved against each other between the passes; None: an output had ended."""
        if self.left_logits is None or self.right_logits is None:
            return None
        return (self.left_logits[0] - self.left_logits[1]) + (self.right_logits[1] - self.right_logits[0])


def verdict_of(difference: Difference | None) -> str:
    """ "identical", "tie" or "FAULT"."""
    if difference is None:
        return "identical"
    gap = difference.gap
    if gap is None or not difference.repeatable:
        return "FAULT"
    # not a number is a fault, too
    return "tie" if gap <= difference.noise else "FAULT"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One comparison.

    Attributes:
        left, right: what was compared, in words. n_tokens: compared tokens that are the same.
        verdict: "identical", "tie", "FAULT"; "differs" where the two sides are not the same computation, as with
            caches of different types.
        acceptance: accepted / drafted on either side; None: nothing was drafted.
    """

    prompt: str
    left: str
    right: str
    n_tokens: int
    verdict: str
    difference: Difference | None
    acceptance: tuple[float | None, float | None]

    def to_dict(self) -> dict[str, Any]:
        d = self.difference
        return {
            "prompt": self.prompt,
            "left": self.left,
            "right": self.right,
            "n_tokens": self.n_tokens,
            "verdict": self.verdict,
            "acceptance": list(self.acceptance),
            "difference": None if d is None else {name: getattr(d, name) for name in (*d.__slots__, "gap")},
        }


class _Watch:
    """An observer: sizes of passes, and the row that decided a wanted or the first deviating position.

    Args:
        expected: what the other side has said. position: the one to capture whatever is said there.
    """

    def __init__(self, expected: Sequence[int] | None = None, position: int = -1) -> None:
        self._expected = expected
        self._position = position
        self._n = 0
        self.sizes: Counter[int] = Counter()
        self.row: F32Array | None = None
        self.n_rows = 0

    def __call__(self, seq: Any, logits: F32Array, row: int, n_draft: int, emitted: Sequence[int]) -> None:
        if self.row is not None:
            return
        # in exact mode passes have rows beyond the draft
        n_rows = len(logits)
        # not the pass that read the prompt and gave the first token
        if self._n or n_rows > 1:
            self.sizes[n_rows] += 1
        for i, token in enumerate(emitted):
            at = self._n + i
            deviates = self._expected is not None and at < len(self._expected) and token != self._expected[at]
            if at == self._position or deviates:
                self.row, self.n_rows = logits[row + i].copy(), n_rows
                return
        self._n += len(emitted)


@dataclass(slots=True)
class _Side:
    """One way to generate, and what it has said to the prompt at hand."""

    label: str
    llm: LLM
    tokens: list[int] = field(default_factory=list)
    acceptance: float | None = None

    def say(self, prompt: list[int], sampling: SamplingParams, watch: _Watch | None = None) -> list[int]:
        engine = self.llm._running().engine
        engine.observer = watch
        try:
            result = self.llm.generate(prompt, sampling)
        finally:
            engine.observer = None
        self.acceptance = result.stats.acceptance_rate
        return list(result.tokens)

    @property
    def params(self) -> ContextParams:
        return self.llm._running().target.params


class Verify:
    """A target, and settings whose output must be that of plain decoding. A context manager.

    Args:
        model, drafts: paths. settings: as :func:`pyspec.bench.make_settings` gives them, plain decoding first.
        prompts: what to answer. modes: ways to keep the cache.
        n_tokens: tokens to compare for each prompt.
        n_ctx: tokens of a sequence; 0: as many as needed. raw: without the model's chat template.
        exact: all in exact mode, so that not even rounding may differ.
        options: options of :class:`pyspec.LLM` for all.

    Raises:
        ConfigError: no prompt, a prompt that does not fit, or modes that the model does not have.
    """

    def __init__(
        self,
        model: str,
        drafts: Sequence[str],
        settings: Sequence[Setting],
        prompts: Sequence[Prompt],
        modes: Sequence[Mode] = (),
        *,
        n_tokens: int = 128,
        n_ctx: int = 0,
        raw: bool = False,
        exact: bool = False,
        progress: Progress | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not prompts:
            raise ConfigError("there is no prompt to verify with")
        if n_tokens < 1:
            raise ConfigError(f"n_tokens must be 1 or more, got {n_tokens}")
        self.settings, self.modes = list(settings), list(modes) or make_modes()
        self.sampling = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
        self.options: dict[str, Any] = {"n_seq_max": 1, **(options or {})}
        if exact:
            self.options["exact"] = True
        with ExitStack() as stack:
            self.model, self.drafts = load_for(stack, model, drafts, self.settings, self.options, progress)
            if any(m.options.get("swa_full") for m in self.modes) and not self.model.n_swa:
                raise ConfigError("this model has no sliding window: there is no swa_full to compare")
            self.prompts = [(p, encode_prompt(self.model, p.text, raw)) for p in prompts]
            longest, n_longest = max(((p.name, len(t)) for p, t in self.prompts), key=lambda x: x[1])
            if n_ctx and n_longest > n_ctx:
                raise ConfigError(f"prompt {longest!r} has {n_longest} tokens, the context n_ctx = {n_ctx}: raise it")
            self.n_ctx = n_ctx or -(-(n_longest + n_tokens + 64) // 64) * 64
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Free the models. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Verify:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, progress: Progress | None = None) -> list[Outcome]:
        """Compare every setting with plain decoding in each mode, and each mode with the first in plain decoding."""
        outcomes: list[Outcome] = []
        first: dict[str, list[int]] = {}
        n_all, n_done = len(self.modes) * len(self.prompts), 0
        for m, mode in enumerate(self.modes):
            with ExitStack() as stack:
                sides = [self._side(stack, s, mode) for s in self.settings]
                if m:
                    reference = self._side(stack, self.settings[0], self.modes[0])
                for prompt, tokens in self.prompts:
                    plain = sides[0]
                    plain.tokens = plain.say(tokens, self.sampling)
                    for side in sides[1:]:
                        outcomes.append(self._compare(prompt, tokens, plain, side))
                    if m:
                        reference.tokens = first[prompt.name]
                        outcomes.append(self._compare(prompt, tokens, reference, plain, self.modes[0], mode))
                    else:
                        first[prompt.name] = plain.tokens
                    n_done += 1
                    if progress is not None:
                        progress(n_done / n_all)
        return outcomes

    def _side(self, stack: ExitStack, setting: Setting, mode: Mode) -> _Side:
        draft = self.drafts[setting.draft] if setting.draft is not None else None
        speculation = setting.speculation[0] if len(setting.speculation) == 1 else setting.speculation
        options = {**self.options, **setting.options, **mode.options}
        if options.get("exact"):  # one shape for all
            options["n_max"] = max((int(s.options.get("n_max", 3)) for s in self.settings), default=3)
        llm = stack.enter_context(LLM(self.model, draft, speculation=speculation, n_ctx=self.n_ctx, **options))
        label = setting.label
        if setting.speculation == ("auto",):
            label = label.replace("auto", "+".join(llm.speculation), 1)
        if len(self.modes) > 1:
            label += f", {mode.label}"
        return _Side(label, llm)

    def _compare(
        self,
        prompt: Prompt,
        tokens: list[int],
        left: _Side,
        right: _Side,
        left_mode: Mode | None = None,
        right_mode: Mode | None = None,
    ) -> Outcome:
        watch = _Watch(left.tokens)
        right.tokens = right.say(tokens, self.sampling, watch)
        at = next((i for i, (a, b) in enumerate(zip(left.tokens, right.tokens, strict=False)) if a != b), -1)
        difference: Difference | None = None
        if at >= 0:
            difference = self._explain(tokens, left, right, at, watch, left_mode is not None)
        elif len(left.tokens) != len(right.tokens):
            at = min(len(left.tokens), len(right.tokens))
            ends = [t[at] if at < len(t) else None for t in (left.tokens, right.tokens)]
            difference = Difference(at, ends[0], ends[1])
        verdict = verdict_of(difference)
        if difference is not None and left_mode is not None and right_mode is not None:
            types = [m.options.get("cache_type_k") for m in (left_mode, right_mode)]
            if types[0] != types[1]:
                verdict = "differs"
        n_same = at if difference is not None else len(left.tokens)
        rates = (left.acceptance, right.acceptance)
        return Outcome(prompt.name, left.label, right.label, n_same, verdict, difference, rates)

    def _explain(
        self, tokens: list[int], left: _Side, right: _Side, at: int, watch: _Watch, cross_mode: bool
    ) -> Difference:
        again = _Watch(position=at)
        said = left.say(tokens, self.sampling.override(max_tokens=at + 1), again)
        assert again.row is not None
        assert watch.row is not None
        a, b = left.tokens[at], right.tokens[at]
        n = max(at + 1, min(N_NOISE, len(left.tokens)))
        text = [*tokens, *left.tokens[:n]]
        if cross_mode:
            noise = max(self._order_noise(side.params, text, n) for side in (left, right))
        else:
            if not at and watch.n_rows == 1:
                # decided by a prompt's pass, which has many rows
                sizes = [min(len(tokens), N_PROMPT_ROWS)]
            else:
                # the size that decided, the largest, and the most frequent ones
                sizes = [watch.n_rows, max(watch.sizes), *(s for s, _ in watch.sizes.most_common())]
            noise = max(
                measure_noise(self.model, (left.params, again.n_rows), (right.params, size), text, n)
                for size in list(dict.fromkeys(sizes))[:N_SIZES]
            )
        return Difference(
            position=at,
            left_token=a,
            right_token=b,
            left_logits=(float(again.row[a]), float(again.row[b])),
            right_logits=(float(watch.row[a]), float(watch.row[b])),
            left_rows=again.n_rows,
            right_rows=watch.n_rows,
            noise=noise,
            repeatable=said == left.tokens[: at + 1],
        )

    def _order_noise(self, params: ContextParams, text: list[int], n: int) -> float:
        """Noise of attention summed in another order: caches that keep cells in other places do that."""
        noise = measure_noise(self.model, (params, 1), (params, 4), text, n)
        try:
            on, off = (params.override(flash_attn=f) for f in (True, False))
            return max(noise, measure_noise(self.model, (on, 1), (off, 1), text, n))
        except (ConfigError, UnsupportedError, NativeError):
            return noise


def measure_noise(
    model: Model,
    left: tuple[ContextParams, int],
    right: tuple[ContextParams, int],
    text: Sequence[int],
    n: int,
) -> float:
    """How far the gap between two likely tokens moves when the same text is evaluated in passes of another size.

    Args:
        left, right: how a context is made, and the number of rows of its passes.
        text: token ids; the last ``n`` are compared (the token before them decides the first).

    Returns:
        The largest such movement over these positions, among the best tokens of each row.
    """
    noise = 0.0
    with ExitStack() as stack:
        rows = []
        for params, size in (left, right):
            own = params.override(
                n_outputs_max=max(size, params.n_outputs_max),
                n_batch=max(size, params.n_batch),
                n_ctx=params.n_ctx and params.n_ctx + size,  # the last pass is filled up
            )
            rows.append(_rows(stack.enter_context(Context(model, own)), text, n, size))
        for a, b in zip(*rows, strict=True):
            noise = max(noise, spread(a, b))
    return noise


def spread(a: F32Array, b: F32Array) -> float:
    """Largest movement between two rows of logits of the gap between two of their best tokens."""
    k = min(TOP, len(a))
    best = np.union1d(np.argpartition(-a, k - 1)[:k], np.argpartition(-b, k - 1)[:k])
    moved = b[best].astype(np.float64) - a[best]
    return float(moved.max() - moved.min())


def _rows(context: Context, text: Sequence[int], n: int, size: int) -> Iterator[F32Array]:
    """Logits that decide each of the last ``n`` tokens of ``text``, in passes of ``size`` rows. Copies."""
    begin = len(text) - n - 1
    batch = Batch(context.n_batch)
    chunk = min(context.n_ubatch, context.n_batch)
    for at in range(0, begin, chunk):
        batch.clear()
        batch.extend(text[at : min(at + chunk, begin)], at, 0)
        context.decode(batch)
    for at in range(begin, len(text) - 1, size):
        rows = text[at : min(at + size, len(text) - 1)]
        batch.clear()
        # fewer rows in the last pass would be another kernel
        batch.extend([*rows, *[rows[-1]] * (size - len(rows))], at, 0, ALL)
        context.decode(batch)
        for row in context.logits()[: len(rows)]:
            yield row.copy()
