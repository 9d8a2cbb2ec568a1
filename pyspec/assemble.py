"""From options to a running engine: load models, plan drafters, make contexts, connect them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from . import backends, fit
from .config import ContextParams, ModelParams, SpeculationParams
from .control import AutoController, IdleCpus, ThreadGovernor
from .drafters import choose, custom, registry
from .drafters.base import Drafter, Plan
from .drafters.custom import Maker
from .drafters.gguf import read_header
from .engine import Engine
from .errors import ConfigError, NativeError, UnsupportedError
from .runtime import Context, Model
from .types import RollbackKind

__all__ = ["Assembly", "Options", "assemble", "load_models"]

log = logging.getLogger("pyspec")

#: n_ctx = 0 means the model's training length, up to this many tokens: caches of long-context models are large.
N_CTX_DEFAULT_MAX = 4096

#: Recurrent snapshots are kept for drafts up to this length; longer ones use checkpoints.
N_RS_SEQ_MAX = 16

#: n_max of "auto" where none is given: most tokens a draft model is asked for. How many it makes is decided as it goes.
AUTO_N_MAX = 8

#: Cells that a window cache which several sequences of a draft share has beyond their windows, at least.
N_SPARE_CELLS = 256

#: Room for output rows that is made at once: as many as fit in these bytes.
_OUTPUT_BYTES = 64 << 20

Progress = Callable[[float], "bool | None"]
Speculation: TypeAlias = "str | Maker | Sequence[str | Maker]"


@dataclass(frozen=True, slots=True)
class Options:
    """What :class:`pyspec.LLM` was given, sorted by where it goes. ``n_ctx`` is per sequence here."""

    speculation: tuple[str, ...]
    n_ctx: int
    target_model: ModelParams
    draft_model: ModelParams
    context: ContextParams
    draft_context: Mapping[str, Any]
    params: SpeculationParams
    #: Drafters for what requests bring along, such as a prediction; they come first.
    extra: tuple[str, ...] = ()
    #: Names of the speculation options that were given.
    given: frozenset[str] = frozenset()
    #: Drafters that were given as classes or instances, by name.
    custom: Mapping[str, Maker] = field(default_factory=dict)

    @classmethod
    def sort(cls, speculation: Speculation, n_ctx: int, options: Mapping[str, Any]) -> Options:
        """Distribute keyword options over the option classes; ``draft_*`` goes to the draft.

        Raises:
            ConfigError: an option that nobody knows, or a bad value.
        """
        speculation, makers = custom.resolve(speculation)
        model_names, context_names, spec_names = ModelParams.names(), ContextParams.names(), SpeculationParams.names()
        groups: dict[str, dict[str, Any]] = {"model": {}, "context": {}, "spec": {}, "draft_model": {}, "draft_ctx": {}}
        for name, value in options.items():
            base = name[6:] if name.startswith("draft_") else None
            if name in spec_names:
                groups["spec"][name] = value
            elif name in model_names:
                groups["model"][name] = value
            elif name in context_names:
                groups["context"][name] = value
            elif base in model_names:
                groups["draft_model"][base] = value
            elif base in context_names:
                groups["draft_ctx"][base] = value
            else:
                known = sorted(model_names | context_names | spec_names)
                raise ConfigError(
                    f"unknown option {name!r}; known are {', '.join(known)}, and draft_* for the draft's own"
                )
        if not isinstance(speculation, (str, list, tuple)):
            raise ConfigError(f"speculation must be a drafter name or a list of them, got {speculation!r}")
        names = (speculation,) if isinstance(speculation, str) else tuple(speculation)
        if not all(isinstance(n, str) for n in names):
            raise ConfigError(f"speculation must be a drafter name or a sequence of them, got {speculation!r}")
        if len(set(names)) != len(names):
            raise ConfigError(f"speculation names a drafter twice: {', '.join(names)}")
        if len(names) > 1 and {"auto", "off"} & set(names):
            raise ConfigError("speculation 'auto' and 'off' stand alone")
        for name in names:
            if name not in ("auto", "off", *makers):
                registry.get(name)
        target_model = ModelParams(**groups["model"])
        # a draft lives where the target does unless told otherwise
        shared = {k: v for k, v in groups["model"].items() if k in ("devices", "n_gpu_layers", "use_mmap", "main_gpu")}
        ContextParams(**groups["draft_ctx"])
        return cls(
            speculation=names,
            n_ctx=ContextParams(n_ctx=n_ctx).n_ctx,
            target_model=target_model,
            draft_model=ModelParams(**{**shared, **groups["draft_model"]}),
            context=ContextParams(**groups["context"]),
            draft_context=groups["draft_ctx"],
            params=SpeculationParams(**groups["spec"]),
            given=frozenset(groups["spec"]),
            custom=makers,
        )


def load_models(
    model: str | os.PathLike[str] | Model,
    draft: str | os.PathLike[str] | Model | None,
    options: Options,
    progress: Progress | None = None,
    n_seq: int = 1,
) -> tuple[Model, Model | None, ExitStack]:
    """Load what is given as a path; a Model stays its owner's. The stack closes what was loaded here.

    Raises:
        DoesNotFitError: a device lacks the memory; found before anything is loaded.
        ModelLoadError: a file cannot be loaded. UnsupportedError: the target is a draft.
    """
    for what, given in (("model", model), ("draft", draft)):
        if not isinstance(given, (str, os.PathLike, Model)) and not (what == "draft" and given is None):
            raise ConfigError(f"{what} must be a path or a pyspec.Model, got {type(given).__name__}")
    owned = ExitStack()
    with ExitStack() as stack:
        _check_target(model.path if isinstance(model, Model) else model)
        if not isinstance(model, Model):
            params = options.target_model
            wants_mtp = "draft-mtp" in options.speculation or (options.speculation == ("auto",) and draft is None)
            if wants_mtp and read_header(model).get("nextn_predict_layers", 0):
                params = replace(params, load_mtp=True)
            _check_memory(model, params, draft, options, n_seq)
            model = stack.enter_context(Model(model, params, progress))
        if draft is not None and not isinstance(draft, Model):
            params = options.draft_model
            if choose.kind_of_file(draft) == "draft-mtp":
                params = replace(params, load_mtp=True)
            draft = stack.enter_context(Model(draft, params, progress))
        owned = stack.pop_all()
    return model, draft, owned


def _check_memory(
    path: str | os.PathLike[str],
    params: ModelParams,
    draft: str | os.PathLike[str] | Model | None,
    options: Options,
    n_seq: int,
) -> None:
    """Refuse what does not fit, with what would. A draft that is loaded already has its memory."""
    backends.load()
    path = os.fspath(path)
    trained = int(read_header(path).get("context_length", 0)) or N_CTX_DEFAULT_MAX
    n_ctx = options.n_ctx or min(trained, N_CTX_DEFAULT_MAX)
    context = options.context
    changes: dict[str, Any] = {
        "n_ctx": n_ctx if context.kv_unified else n_ctx * n_seq,
        "n_batch": max(context.n_batch, n_seq),
        "n_seq_max": n_seq,
    }
    if not context.n_outputs_max:
        changes["n_outputs_max"] = min(changes["n_batch"], n_seq * (options.params.n_max + 1))
    parts = fit.parts_of(
        fit.Part("target", path, params, context.override(**changes)),
        None if draft is None or isinstance(draft, Model) else os.fspath(draft),
        options.draft_model,
        options.draft_context,
        params.load_mtp and draft is None,
    )
    fit.check(parts, backends.devices())


def _check_target(path: str | os.PathLike[str]) -> None:
    """A draft is no target: some kinds would load, and write nonsense."""
    kind = choose.kind_of_file(path)
    if kind != "draft-simple":
        name = Path(path).name
        raise UnsupportedError(f"{name!r} is a {kind} draft, no model of its own: give it as the draft of its target")


@dataclass(slots=True)
class Assembly:
    """An engine and the contexts it runs on. ``close()`` frees the contexts, not the models."""

    engine: Engine
    target: Context
    drafts: list[Context]
    names: tuple[str, ...]
    n_seq: int
    n_threads: int
    pool: backends.ThreadPool | None

    def inherit(self, previous: Assembly) -> None:
        """Hand on what drafters had learned to those that take their place."""
        closed = {d.name: d for d in previous.engine.chain.drafters}
        for drafter in self.engine.chain.drafters:
            old = closed.get(drafter.name)
            if old is not None and old is not drafter and type(old) is type(drafter):
                drafter.inherit(old)
        control, before = self.engine.control, previous.engine.control
        if isinstance(control, AutoController) and isinstance(before, AutoController):
            control.inherit(before)

    def set_loras(self, loras: Sequence[tuple[backends.LoraHandle, float]]) -> None:
        """Other adapters for the target; nothing may be running. What its cache holds was computed with others."""
        self.target.handle.set_loras(loras)
        for seq in range(self.n_seq):
            self.target.memory.clear(seq)

    def abort(self) -> None:
        """Stop the pass that runs now."""
        for context in (self.target, *self.drafts):
            context.abort()

    def close(self) -> None:
        """Free engine and contexts. Idempotent."""
        self.engine.close()
        for context in reversed(self.drafts):
            context.close()
        self.target.close()
        if self.pool is not None:
            self.pool.close()


def _names(options: Options, target: Model, draft: Model | None) -> tuple[str, ...]:
    if options.speculation == ("off",):
        if draft is not None:
            raise ConfigError("a draft was given but speculation is 'off': leave one of them out")
        return ()
    if options.speculation == ("auto",):
        # acceptance by lot is for benchmarks of one method
        return choose.for_auto(target, draft) if _is_controlled(options) else (choose.choose(target, draft),)
    return options.speculation


def _is_controlled(options: Options) -> bool:
    synthetic = options.params.synth_len is not None or options.params.synth_rates
    return options.speculation == ("auto",) and not synthetic


def assemble(
    target: Model,
    draft: Model | None,
    options: Options,
    n_seq: int,
    loras: Sequence[tuple[backends.LoraHandle, float]] = (),
) -> Assembly:
    """Make contexts, drafters and engine for ``n_seq`` sequences; ``loras`` are for the target's context alone.

    Raises:
        ConfigError, VocabMismatchError, UnsupportedError: target, draft and options do not fit together.
        NativeError: a context could not be made; what had been made is freed.
    """
    names = _names(options, target, draft)
    is_auto = _is_controlled(options)
    exact = options.params.exact
    if is_auto and "n_max" not in options.given and not exact and not (target.is_recurrent or target.is_hybrid):
        own = options.draft_context
        rows = (options.context.n_ubatch, *(own[name] for name in ("n_batch", "n_ubatch") if name in own))
        n_max = max(1, options.params.n_min, min(AUTO_N_MAX, min(rows) - 1))
        options = replace(options, params=options.params.override(n_max=n_max))
    chosen = () if is_auto else names
    names = (*(name for name in options.extra if name not in names), *names)
    makers = [options.custom.get(name) or registry.get(name) for name in names]
    plans = [custom.plan(maker, target, draft, options.params, n_seq) for maker in makers]
    if draft is not None and not any(p.draft_context is not None for p in plans):
        raise ConfigError(
            f"a draft model was given but {', '.join(names)} does not use one: leave it out, or name one that does"
        )
    n_ctx = options.n_ctx or min(target.n_ctx_train or N_CTX_DEFAULT_MAX, N_CTX_DEFAULT_MAX)
    n_draft = max((p.n_max for p in plans), default=0)
    if options.params.exact:
        n_draft = options.params.n_max
    params = _target_params(target, options, plans, n_seq, n_ctx, n_draft)
    with ExitStack() as stack:
        context = stack.enter_context(_context(target, params, options, n_seq))
        if loras:
            context.handle.set_loras(loras)
        params = context.params  # with the thread counts that are really used
        n_threads = params.n_threads or 1
        n_threads_pool = max(n_threads, params.n_threads_batch or 1)
        drafts: list[Context] = []
        drafters: list[Drafter] = []
        for name, maker, plan in zip(names, makers, plans, strict=True):
            draft_ctx: Context | None = None
            n_max = min(plan.n_max, options.params.n_max) if exact else plan.n_max
            # what nobody asked for by name is cut to what fits
            if name in chosen or plan.draft_context is not None:
                _check_window(context, maker, n_max, "")
            if plan.draft_context is not None:
                draft_ctx = stack.enter_context(_draft_context(draft or target, context, params, plan, options, n_seq))
                _check_window(draft_ctx, maker, n_max, "draft_")
                drafts.append(draft_ctx)
            context.require(plan.requirements)
            drafters.append(custom.make(maker, plan, context, draft_ctx, options.params, n_seq))
        if drafters:
            _reserve_outputs(context, n_seq)
        pool = None
        if n_threads_pool > 1:
            pool = backends.ThreadPool(n_threads_pool)
            stack.callback(pool.close)
            for c in (context, *drafts):
                c.handle.attach_threadpool(pool)
        control = AutoController(padded=exact) if is_auto and drafters else None
        engine = Engine(
            context, drafters, target.vocab.eog_tokens, n_ctx, drafts, options.params, target.vocab, control=control
        )
        # another number of threads may sum in another order, and where a GPU computes there is nothing to gain
        if n_threads > 1 and options.context.adapt_threads and not exact and not target.on_gpu:
            n_batch = params.n_threads_batch or n_threads
            engine.threads = _governor(n_threads, (context, *drafts), n_batch, pool, control)
        stack.pop_all()
    return Assembly(engine, context, drafts, names, n_seq, n_threads, pool)


def _reserve_outputs(context: Context, n_seq: int) -> None:
    """Let no verification wait for memory because it is the longest so far: up to 40 ms where a draft reads layers."""
    rows = min(context.n_outputs_max, _OUTPUT_BYTES // (4 * context.n_vocab), n_seq * context.n_ctx_seq)
    if rows <= n_seq:
        return
    try:
        context.handle.reserve_outputs(rows)
    except NativeError as e:
        if e.state == "lost":
            raise
        log.debug("room for %d output rows was not made at once: %s", rows, e)


def _governor(
    n_threads: int,
    contexts: Sequence[Context],
    n_threads_batch: int,
    pool: backends.ThreadPool | None,
    control: AutoController | None,
) -> ThreadGovernor:
    """Follows the passes of the first context, for all of them."""

    def apply(n: int) -> None:
        n_batch = max(1, n_threads_batch * n // n_threads)
        # every pass wakes all threads of a pool, those too that have nothing to do in it
        threads = pool if max(n, n_batch) > 1 else None
        for context in contexts:
            context.handle.attach_threadpool(threads)
            context.handle.set_n_threads(n, n_batch)
        if control is not None:
            control.n_threads = n

    idle = IdleCpus()
    return ThreadGovernor(n_threads, apply, idle=idle if idle.works else None)


def _target_params(
    target: Model, options: Options, plans: Sequence[Plan], n_seq: int, n_ctx: int, n_draft: int
) -> ContextParams:
    base, exact = options.context, options.params.exact
    n_batch = max(base.n_batch, n_seq)
    if exact:
        n_ctx += n_draft  # rows of padding at the end of the text
    n_rs_seq = max((p.requirements.n_rs_seq for p in plans), default=0)
    if (target.is_recurrent or target.is_hybrid) and 0 < n_draft <= N_RS_SEQ_MAX:
        n_rs_seq = max(n_rs_seq, n_draft)
    n_rs_seq = max(base.n_rs_seq, min(n_rs_seq, max(base.n_ubatch - 2, 0)))
    # With a cache of its own for each sequence libllama cuts a pass into parts in which all have equally many rows, and
    # each part reads all the weights. Drafts differ in length, so there one cache is shared. Exact passes, and plain
    # decoding, have equally many rows, and shorter caches to attend to.
    shared = n_seq > 1 and n_draft > 0 and not exact and not (target.is_recurrent or target.is_hybrid or target.n_swa)
    changes: dict[str, Any] = {
        "kv_unified": base.kv_unified or shared,
        "n_ctx": n_ctx if base.kv_unified else n_ctx * n_seq,
        "n_batch": n_batch,
        "n_seq_max": n_seq,
        "n_rs_seq": n_rs_seq if plans or exact else base.n_rs_seq,
    }
    if not base.n_outputs_max:
        # the compute buffer holds a row of logits for every output: no more than a verification needs
        changes["n_outputs_max"] = min(n_batch, n_seq * (n_draft + 1))
    params: ContextParams = base.override(**changes)
    return params


def _draft_context(
    model: Model, target: Context, params: ContextParams, plan: Plan, options: Options, n_seq: int
) -> Context:
    given = dict(plan.draft_context or {})
    other = target if given.pop("other", False) else None
    own = dict(options.draft_context)
    if own.get("n_ctx"):
        own["n_ctx"] = own["n_ctx"] * (1 if options.context.kv_unified else n_seq)
    else:
        own.pop("n_ctx", None)
    changes = {"n_rs_seq": 0, "n_outputs_max": 0, "cache_type_k": "f16", "cache_type_v": "f16", **given, **own}
    # a small n_batch is a limit for the target's passes; a block of a draft has to fit its own
    least = given.get("n_outputs_max", 0)
    if model.n_swa and params.kv_unified and n_seq > 1:
        # drafts of several sequences, row by row in one window cache, are taken back only if it has cells to spare
        least = max(least, N_SPARE_CELLS)
    for name in ("n_batch", "n_ubatch"):
        changes.setdefault(name, max(getattr(params, name), least))
    draft_params: ContextParams = params.override(**changes)
    return _context(model, draft_params, options, n_seq, other)


def _context(
    model: Model, params: ContextParams, options: Options, n_seq: int, other: Context | None = None
) -> Context:
    context = Context(model, params, other)
    if params.kv_unified and not options.context.kv_unified:
        # nobody asked for a shared cache: each sequence has its share of it, as if it were its own
        context.n_ctx_seq = min(context.n_ctx_seq, context.params.n_ctx // n_seq)
    return context


def _check_window(context: Context, maker: Maker, n_max: int, prefix: str) -> None:
    """A sliding-window cache gives back the rows of one micro-batch, so a whole verification has to fit into one.

    ``n_max``: length of the longest draft.

    Raises:
        ConfigError: the drafts of this method may be longer.
    """
    limit = context.memory.n_rows_max
    n_rows = min(n_max, context.n_ctx_seq - 1) + 1
    if context.memory.kind is RollbackKind.NONE or n_rows <= limit:
        return
    option = maker.limit_option
    lower = f"lower {option} to {limit - 1}, " if option and limit > 1 else ""
    raise ConfigError(
        f"{prefix}n_ubatch={limit} is too small for {maker.name} with {option or 'n_max'}={n_max}: the window "
        f"cache of {context.model.path.name!r} can take back no more rows than a micro-batch has, and a pass with such "
        f"a draft has {n_rows}. Raise {prefix}n_ubatch (and {prefix}n_batch) to {n_rows}, {lower}or use "
        f"{prefix}swa_full=True"
    )


def describe(assembly: Assembly, target: Model, draft: Model | None) -> dict[str, Any]:
    """What is loaded and how it is set up, as plain values."""

    def model_info(m: Model) -> dict[str, Any]:
        return {"path": str(m.path), "size_bytes": m.size_bytes, "architecture": m.architecture, "type": m.file_type}

    return {
        "target": model_info(target),
        "draft": model_info(draft) if draft is not None else None,
        "speculation": list(assembly.names),
        "n_threads": assembly.n_threads,
        "context": assembly.target.describe(),
        "draft_contexts": [c.describe() for c in assembly.drafts],
    }


def is_path(value: object) -> bool:
    """True for what names a file."""
    return isinstance(value, (str, os.PathLike)) and (os.path.exists(value) or os.sep in os.fspath(value))
