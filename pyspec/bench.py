"""``pyspec bench`` as a library: plain decoding and settings of speculation, side by side on the same prompts.

Settings are interleaved: each prompt is answered by all of them, in turns, before the next prompt, so that a machine
that slows down or speeds up meanwhile does so for all. Every repeat has new contexts, so that methods which remember
past outputs do not find the answers of the repeat before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import Any

from . import assemble
from .config import ContextParams, SamplingParams, SpeculationParams, usable_n_threads
from .drafters import registry
from .errors import ConfigError
from .llm import LLM
from .prompts import Prompt
from .runtime import Context, Model
from .sampling import Logprobs
from .summary import Run, summarise

__all__ = [
    "PLAIN",
    "Bench",
    "Mode",
    "Run",
    "Setting",
    "encode_prompt",
    "load_for",
    "make_modes",
    "make_settings",
    "summarise",
]

#: Label of plain decoding.
PLAIN = "plain"

#: Options that limit a method's drafts, where that is not ``n_max`` alone.
_LIMITS: Mapping[str, tuple[str, ...]] = {
    "ngram-simple": ("size_m",),
    "ngram-map-k": ("size_m",),
    "ngram-map-k4v": ("size_m",),
    "ngram-mod": ("mod_n_max",),
    "suffix": ("suffix_n_max",),
    "grammar": ("grammar_n_max",),
    "prediction": ("prediction_n_max",),
}

_WARM_UP = 4

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Mode:
    """How the cache is kept: a label, and options of :class:`pyspec.LLM`."""

    label: str
    options: Mapping[str, Any] = field(default_factory=dict)


def make_modes(swa_full: str = "off", kv: str | None = None) -> list[Mode]:
    """The modes to compare.

    Args:
        swa_full: "off", "on" or "both". kv: types of the K and V cache, with commas between them; "both": f16 and
            q8_0; None: the default.

    Raises:
        ConfigError: another value.
    """
    windows = {"off": [False], "on": [True], "both": [False, True]}.get(swa_full)
    if windows is None:
        raise ConfigError(f"swa_full must be 'off', 'on' or 'both', got {swa_full!r}")
    types = ["f16", "q8_0"] if kv == "both" else [None] if kv is None else [t.strip() for t in kv.split(",")]
    if len(set(types)) != len(types):
        raise ConfigError(f"kv names a type twice: {kv}")
    modes = []
    for window in windows:
        for t in types:
            options: dict[str, Any] = {"swa_full": window}
            if t is not None:
                options |= {"cache_type_k": t, "cache_type_v": t}
                ContextParams(**options)
            parts = [*(["swa_full"] if window else []), *([t] if t is not None else [])]
            modes.append(Mode(" ".join(parts) or "default", options))
    return modes


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to generate.

    Attributes:
        label: its name in reports.
        speculation: "off", "auto", or names of methods in order of priority.
        draft: index into the bench's drafts, or None.
        options: options of :class:`pyspec.LLM` that only this setting has.
        base: label of the setting it is compared with; None: the first.
    """

    label: str
    speculation: tuple[str, ...]
    draft: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None


def limit_options(names: Iterable[str], k: int) -> dict[str, Any]:
    """Options for drafts of at most ``k`` tokens with these methods."""
    options: dict[str, Any] = {"n_max": k}
    for name in names:
        options.update(dict.fromkeys(_LIMITS.get(name, ()), k))
        if name == "ngram-mod":
            options["mod_n_min"] = min(k, SpeculationParams().mod_n_min)
    return options


def _n_max(k: int | None) -> dict[str, Any]:
    return {} if k is None else {"n_max": k}


def make_settings(
    types: Sequence[str],
    ks: Sequence[int] = (),
    drafts: Sequence[str] = (),
    *,
    exact: bool = False,
    modes: Sequence[Mode] = (),
) -> list[Setting]:
    """Plain decoding, and every combination of method, draft and k.

    Args:
        types: "auto" or a method; several joined with "+" are a chain.
        ks: draft lengths; empty: each method's default.
        drafts: labels of the draft models, for "auto" and the methods named ``draft-*``; others are run without.
        exact: each setting a second time in exact mode, after the others.
        modes: all of it in each of these modes, compared with plain decoding in the same mode; empty: the default.

    Raises:
        ConfigError: an unknown method, the same setting twice, or a draft that no method uses.
    """
    settings = [Setting(PLAIN, ("off",))]
    lengths: Sequence[int | None] = ks or (None,)
    for text in types:
        names = tuple(part.strip() for part in text.split("+"))
        if "off" in names:
            raise ConfigError("plain decoding ('off') is always measured: leave it out of the types")
        if names != ("auto",):
            for name in names:
                registry.get(name)
        wants = names == ("auto",) or any(name.startswith("draft-") for name in names)
        which: Sequence[int | None] = range(len(drafts)) if wants and drafts else (None,)
        for draft in which:
            label = text if draft is None or len(drafts) == 1 else f"{text} {drafts[draft]}"
            for k in lengths:
                options = {} if k is None else limit_options(names, k)
                settings.append(Setting(label if k is None else f"{label} k={k}", names, draft, options))
    if drafts and all(s.draft is None for s in settings):
        raise ConfigError(f"a draft model was given but {', '.join(types)} does not use one: leave it out")
    if exact:
        # the shape of exact passes follows from n_max, so plain decoding has one exact form for each k
        plain = [Setting(PLAIN if k is None else f"{PLAIN} k={k}", ("off",), None, _n_max(k)) for k in lengths]
        settings += [
            Setting(f"{s.label} exact", s.speculation, s.draft, {**s.options, "exact": True})
            for s in [*plain, *settings[1:]]
        ]
    if len(modes) > 1:
        settings = [
            replace(s, label=f"{s.label}, {m.label}", options={**s.options, **m.options}, base=f"{PLAIN}, {m.label}")
            for m in modes
            for s in settings
        ]
    elif modes:
        settings = [replace(s, options={**s.options, **modes[0].options}) for s in settings]
    labels = [s.label for s in settings]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ConfigError(f"the setting {twice!r} is given twice")
    return settings


class _TimedLogprobs:
    """Log-probabilities of one generation at a time, and how long taking them took."""

    def __init__(self) -> None:
        self._logprobs = Logprobs()
        self._ns: list[int] = []

    def __call__(self, *args: Any) -> None:
        t = perf_counter_ns()
        self._logprobs(*args)
        self._ns.append(perf_counter_ns() - t)

    def take(self, n: int, n_first: int) -> tuple[float, int, int]:
        """Sum over the first ``n`` tokens; microseconds for the ``n_first`` that came with the prompt, and for others.

        Starts anew.
        """
        values = next(iter(self._logprobs.values.values()), [])[:n]
        self._logprobs.values.clear()
        ns, self._ns = self._ns, []
        return math.fsum(values), sum(ns[:n_first]) // 1000, sum(ns[n_first:]) // 1000


def encode_prompt(model: Model, text: str, raw: bool = False) -> list[int]:
    """Token ids of a prompt: in the model's chat template if it has one, unless ``raw``."""
    if raw or not model.metadata.get("tokenizer.chat_template"):
        return model.vocab.encode(text)
    from . import chat

    return chat.encode(model, [{"role": "user", "content": text}])


class Bench:
    """Models and settings to measure. A context manager.

    Args:
        model: path of the target. drafts: paths of draft models.
        settings: as :func:`make_settings` gives them; the first is what the others are compared with.
        prompts: what to answer. raw: without the model's chat template.
        sampling: how; ``max_tokens`` is needed.
        n_ctx: tokens of a sequence; 0: as many as the longest prompt and its answer need.
        progress: called with 0.0 to 1.0 while models load.
        options: options of :class:`pyspec.LLM` for all settings.

    Raises:
        ConfigError: no prompt, or a prompt that does not fit into ``n_ctx``; and what :class:`pyspec.LLM` raises.
    """

    def __init__(
        self,
        model: str,
        drafts: Sequence[str] = (),
        settings: Sequence[Setting] = (),
        prompts: Sequence[Prompt] = (),
        sampling: SamplingParams | None = None,
        *,
        raw: bool = False,
        n_ctx: int = 0,
        progress: Progress | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = list(settings) or make_settings(["auto"], (), [str(d) for d in drafts])
        self.sampling = sampling or SamplingParams(max_tokens=128)
        if not prompts:
            raise ConfigError("there is no prompt to measure with")
        if not self.sampling.max_tokens:
            raise ConfigError(f"max_tokens must be 1 or more, got {self.sampling.max_tokens!r}")
        self.options = dict(options or {})
        self._stack = ExitStack()
        with ExitStack() as stack:
            self.model, self.drafts = load_for(stack, model, drafts, self.settings, self.options, progress)
            if any(s.options.get("swa_full") for s in self.settings) and not self.model.n_swa:
                raise ConfigError("this model has no sliding window: there is no swa_full to compare")
            self.prompts = [(p, encode_prompt(self.model, p.text, raw)) for p in prompts]
            longest, n_longest = max(((p.name, len(t)) for p, t in self.prompts), key=lambda x: x[1])
            if n_ctx and n_longest > n_ctx:
                raise ConfigError(f"prompt {longest!r} has {n_longest} tokens, the context n_ctx = {n_ctx}: raise it")
            self.n_ctx = n_ctx or self._room(n_longest)
            self._stack = stack.pop_all()

    def _room(self, n_prompt: int) -> int:
        """Context for a prompt of so many tokens and its answer."""
        # drafts may reach beyond the last token by their own length
        n = n_prompt + (self.sampling.max_tokens or 0) + max(self._longest_draft(), 16)
        return -(-n // 64) * 64

    def _longest_draft(self) -> int:
        return max((int(s.options.get("n_max", 0)) for s in self.settings), default=0)

    @property
    def n_threads(self) -> int:
        """CPU threads that are used."""
        return usable_n_threads(self.options.get("n_threads"))

    def close(self) -> None:
        """Free the models. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _base(self, setting: Setting) -> str:
        return setting.base or self.settings[0].label

    def llm(self, setting: Setting, n_ctx: int = 0) -> LLM:
        """An LLM on the loaded models in one setting; the caller closes it."""
        draft = self.drafts[setting.draft] if setting.draft is not None else None
        speculation = setting.speculation[0] if len(setting.speculation) == 1 else setting.speculation
        options: dict[str, Any] = {"n_seq_max": 1, **self.options, **setting.options}
        return LLM(self.model, draft, speculation=speculation, n_ctx=n_ctx or self.n_ctx, **options)

    def run(self, repeat: int = 1, progress: Progress | None = None) -> dict[str, Any]:
        """Measure.

        Args:
            repeat: how often, with new contexts each time.
            progress: called with 0.0 to 1.0.

        Returns:
            "settings": for each setting its label, what is really in use, and :func:`summarise`; "runs": every
            generation by itself.
        """
        runs: list[Run] = []
        used: dict[str, dict[str, Any]] = {}
        n_all = repeat * len(self.prompts) * len(self.settings)
        for r in range(repeat):
            with ExitStack() as stack:
                llms = [(s, stack.enter_context(self.llm(s))) for s in self.settings]
                for setting, llm in llms:
                    _warm_up(llm)
                    used[setting.label] = _in_use(llm)
                for p, (prompt, tokens) in enumerate(self.prompts):
                    done: dict[str, Run] = {}
                    turn = (r * len(self.prompts) + p) % len(llms)
                    for setting, llm in llms[turn:] + llms[:turn]:
                        done[setting.label] = self._measure(llm, setting.label, prompt, tokens, r)
                        if progress is not None:
                            progress((len(runs) + len(done)) / n_all)
                    for s in self.settings:
                        run = done[s.label]
                        run.first_difference = _first_difference(done[self._base(s)].tokens, run.tokens)
                    runs += [done[s.label] for s in self.settings]

        def of(label: str) -> list[Run]:
            return [r for r in runs if r.setting == label]

        return {
            "settings": [
                {
                    "label": s.label,
                    "base": self._base(s),
                    **used[s.label],
                    **summarise(of(s.label), of(self._base(s))),
                }
                for s in self.settings
            ],
            "runs": [r.to_dict() for r in runs],
        }

    def ctx_sweep(self, lengths: Sequence[int], progress: Progress | None = None) -> list[dict[str, Any]]:
        """How speed and acceptance change with the length of what is in the context.

        Args:
            lengths: prompt lengths in tokens; the prompts' texts, one after the other and again, fill them.

        Returns:
            For each length and setting: "n_ctx_used", "label" and :func:`summarise`.
        """
        text = [t for _, tokens in self.prompts for t in tokens]
        out: list[dict[str, Any]] = []
        with ExitStack() as stack:
            n_ctx = self._room(max(lengths))
            llms = [(s, stack.enter_context(self.llm(s, n_ctx))) for s in self.settings]
            for _, llm in llms:
                _warm_up(llm)
            for i, length in enumerate(lengths):
                tokens = (text * (length // len(text) + 1))[:length]
                done: list[Run] = []
                for setting, llm in llms:
                    done.append(self._measure(llm, setting.label, Prompt(str(length), ""), tokens, 0))
                    if progress is not None:
                        progress((i * len(llms) + len(done)) / (len(lengths) * len(llms)))
                by_label = {run.setting: run for run in done}
                for s, run in zip(self.settings, done, strict=True):
                    base = by_label[self._base(s)]
                    run.first_difference = _first_difference(base.tokens, run.tokens)
                    out.append({"n_ctx_used": length, "label": run.setting, **summarise([run], [base])})
        return out

    def batch_cost(self, rows: Sequence[int], progress: Progress | None = None) -> list[dict[str, Any]]:
        """:func:`pyspec.measure.batch_cost` of the target, behind as many tokens as the longest prompt has."""
        from .measure import batch_cost

        n_past = max(len(tokens) for _, tokens in self.prompts)
        n_rows = max(rows)
        with self.llm(self.settings[0]) as llm:
            params = llm._running().target.params
        if n_rows > params.n_batch:
            raise ConfigError(f"passes of {n_rows} rows: this context allows 1 to {params.n_batch} (n_batch)")
        params = params.override(n_outputs_max=n_rows, n_ctx=n_past + max(n_rows, 64))
        with Context(self.model, params) as context:
            return batch_cost(context, rows, n_past=n_past, progress=progress)

    def _measure(self, llm: LLM, label: str, prompt: Prompt, tokens: list[int], repeat: int) -> Run:
        logprobs = _TimedLogprobs()
        engine = llm._running().engine
        engine.observer = logprobs
        prediction = prompt.prediction if "prediction" in llm.speculation else None
        t0 = perf_counter_ns()
        result = llm.generate(tokens, self.sampling, prediction=prediction)
        wall_us = (perf_counter_ns() - t0) // 1000
        engine.observer = None
        stats, times = result.stats, result.stats.times
        n_output = len(result.tokens)
        logprob, first_us, later_us = logprobs.take(n_output, stats.n_first)
        return Run(
            setting=label,
            prompt=prompt.name,
            repeat=repeat,
            n_prompt=len(tokens),
            n_prefill=stats.n_prompt,
            n_output=n_output,
            n_first=stats.n_first,
            n_pass=stats.n_pass,
            n_draft=stats.n_draft,
            n_accepted=stats.n_accepted,
            drafted_per_pos=stats.drafted_per_pos,
            accepted_per_pos=stats.accepted_per_pos,
            finish_reason=result.finish_reason,
            wall_us=wall_us,
            prefill_us=max(0, times.prefill_us - first_us),
            draft_us=times.draft_us,
            decode_us=times.decode_us,
            process_us=times.process_us,
            verify_us=max(0, times.verify_us - later_us),
            rollback_us=times.rollback_us,
            logprob_us=first_us + later_us,
            logprob=logprob,
            drafters={name: [0, 0, 0] for name in llm.speculation}
            | {d.name: [d.n_gen_drafts, d.n_gen_tokens, d.n_acc_tokens] for d in stats.drafters},
            tokens=result.tokens,
        )


def load_for(
    stack: ExitStack,
    model: str,
    drafts: Sequence[str],
    settings: Sequence[Setting],
    options: Mapping[str, Any],
    progress: Progress | None,
) -> tuple[Model, list[Model]]:
    """Load the target and the drafts so that all settings can use them; ``stack`` closes them."""
    names = sorted({n for s in settings for n in s.speculation if n != "off"})
    speculation: str | list[str] = "auto" if "auto" in names or not names else names
    if "draft-mtp" in names:  # "auto" with a draft would not load the target's own heads
        speculation = "draft-mtp"
    sorted_options = assemble.Options.sort(speculation, 0, options)
    target, draft, owned = assemble.load_models(model, drafts[0] if drafts else None, sorted_options, progress)
    stack.enter_context(owned)
    loaded = [draft] if draft is not None else []
    for path in drafts[1:]:
        _, draft, owned = assemble.load_models(target, path, sorted_options, progress)
        stack.enter_context(owned)
        assert draft is not None
        loaded.append(draft)
    return target, loaded


def _warm_up(llm: LLM) -> None:
    """A few tokens that nobody counts: the first pass of a context costs more."""
    token = max(llm.model.vocab.bos, 0)
    llm.generate([token] * 2, max_tokens=_WARM_UP, ignore_eos=True)


def _in_use(llm: LLM) -> dict[str, Any]:
    running = llm._running()
    return {
        "speculation": list(llm.speculation),
        "draft": llm.draft_model.path.name if llm.draft_model is not None else None,
        "n_draft_max": running.engine.n_draft_max,
        "kv_bytes": {
            "target": running.target.memory_bytes()["context"],
            "draft": sum(c.memory_bytes()["context"] for c in running.drafts),
        },
        "context": running.target.describe(),
        "draft_contexts": [c.describe() for c in running.drafts],
    }


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))
