"""``LLM``: a target, a way to speculate, and text."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, overload

import numpy as np

from . import assemble as _assemble
from . import lora as _lora
from .config import ContextParams, SamplingParams
from .control import AutoController
from .drafters import registry
from .engine import Engine
from .errors import ClosedError, ConfigError
from .results import GenerationResult, Logprob, Piece, TokenLogprob, Usage, logprobs_of, result_of
from .runtime import Model, Sequence, TextStream
from .runtime import Piece as _EnginePiece
from .sampling import GrammarConstraint, Grammars
from .stats import SpecStats
from .types import CONSTRAINT, I32Array

__all__ = ["LLM", "GenerationResult", "Logprob", "Piece", "TokenLogprob", "Usage"]

log = logging.getLogger("pyspec")

Prompt: TypeAlias = "str | Seq[int]"

#: ``n_seq_max=None`` grows up to this many sequences a pass.
N_SEQ_AUTO_MAX = 8


class LLM:
    """A target model with speculative decoding.

    Args:
        model: path of the target's GGUF file, or a loaded :class:`Model` (which stays yours to close).
        draft: the draft: a path, a loaded Model, or the name of a method that needs none. Its method is read from the
            file unless ``speculation`` names one. A draft that cannot be used is an error.
        speculation: "auto": the draft's method or what the target itself offers, and look-ups in the text, each as
            far as it pays (docs/auto.md). "off": none. Or a method's name, or several in order of priority. A method
            of your own: its class, or an instance (docs/drafters.md).
        n_ctx: tokens of one sequence, prompt and output; 0: the model's training length, 4096 at most.
        n_seq_max: sequences that share a pass. None: as many as the longest list given to :meth:`generate` so far,
            up to 8; contexts are made anew when that grows.
        lora: LoRA adapters for the target: a path, a (path, scale) pair, or a list of these; see :meth:`set_lora`.
        progress: called with 0.0 to 1.0 while a model loads.
        **options: any option of :class:`ModelParams`, :class:`ContextParams` and :class:`SpeculationParams` by name;
            ``draft_n_gpu_layers``, ``draft_cache_type_k`` and so on for the draft's own.

    Any method may be called from any thread; generations that run at the same time share passes or wait for a slot.
    A context manager.

    Raises:
        ConfigError, VocabMismatchError, UnsupportedError: options or models do not fit together.
        ModelLoadError: a file cannot be loaded. NativeError: a context cannot be made.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Model,
        draft: str | os.PathLike[str] | Model | None = None,
        *,
        speculation: _assemble.Speculation = "auto",
        n_ctx: int = 0,
        n_seq_max: int | None = None,
        lora: _lora.LoraSpec | None = None,
        progress: Callable[[float], bool | None] | None = None,
        **options: Any,
    ) -> None:
        self._lock = threading.RLock()
        self._closed = False
        self._stack = ExitStack()
        self._assembly: _assemble.Assembly | None = None
        self._grammars: Grammars | None = None
        self._no_room: set[str] = set()
        if isinstance(draft, str) and not _assemble.is_path(draft) and draft in registry.names():
            if speculation != "auto":
                raise ConfigError(f"draft={draft!r} names a method, and so does speculation={speculation!r}: give one")
            speculation, draft = draft, None
        if n_seq_max is not None:
            ContextParams(n_seq_max=n_seq_max)
        self._auto_seq = n_seq_max is None
        self._options = _assemble.Options.sort(speculation, n_ctx, options)
        self._lora = _lora.parse(lora)
        self._model, self._draft, owned = _assemble.load_models(model, draft, self._options, progress, n_seq_max or 1)
        with owned:
            self._adapters = _lora.load(self._model, self._lora)
            owned.callback(self._close_adapters)
            self._assembly = self._assemble(n_seq_max or 1)
            self._stack = owned.pop_all()

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str,
        *,
        draft_filename: str | None = None,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        **kwargs: Any,
    ) -> LLM:
        """Fetch a model from the Hugging Face hub, or take it from the local cache, and load it.

        Needs huggingface_hub (extra ``hub``).

        Args:
            repo_id: such as "user/name-GGUF". filename: a file of that repository, or a pattern that fits one.
            draft_filename: a draft in the same repository.
            revision, cache_dir, local_files_only: as in huggingface_hub.
            **kwargs: for :class:`LLM`.
        """
        from .hub import download

        options: dict[str, Any] = {
            "revision": revision,
            "cache_dir": os.fspath(cache_dir) if cache_dir is not None else None,
            "local_files_only": local_files_only,
        }
        if draft_filename is not None:
            kwargs["draft"] = download(repo_id, draft_filename, **options)
        return cls(download(repo_id, filename, **options), **kwargs)

    # -- what is loaded --

    @property
    def model(self) -> Model:
        """The target."""
        return self._model

    @property
    def draft_model(self) -> Model | None:
        """The draft that is really in use, or None."""
        return self._draft

    @property
    def speculation(self) -> tuple[str, ...]:
        """Names of the methods in use, in order of priority; empty: plain decoding."""
        return self._running().names

    @property
    def n_ctx(self) -> int:
        """Tokens of one sequence, prompt and output."""
        return self._running().engine.n_ctx

    @property
    def n_seq_max(self) -> int:
        """Sequences that share a pass at present."""
        return self._running().n_seq

    @property
    def stats(self) -> SpecStats:
        """Totals since the contexts were made. With "auto", ``control`` says what was chosen and why."""
        engine = self._running().engine
        if isinstance(engine.control, AutoController):
            engine.stats.control = engine.control.publish()
        return engine.stats

    def describe(self) -> dict[str, Any]:
        """What is loaded and how it is set up, as plain values."""
        info = _assemble.describe(self._running(), self._model, self._draft)
        info["lora"] = _lora.describe(self._lora)
        return info

    # -- adapters --

    @property
    def lora(self) -> list[tuple[Path, float]]:
        """LoRA adapters of the target, with their scales."""
        return [(a.path, a.scale) for a in self._lora]

    def set_lora(self, lora: _lora.LoraSpec | None) -> None:
        """Other LoRA adapters for the target, from the next request on; what runs is finished first. None: none.

        The draft stays as it is: the output is that of the adapted target, drafts are just accepted less often.

        Raises:
            ModelLoadError: a file is missing or damaged. ConfigError: it is for another model, or a scale is no finite
                number. UnsupportedError: a kind of adapter that does not work here. Nothing has changed then.
        """
        adapters = _lora.parse(lora)
        with self._lock:
            self._running()
            loaded = _lora.load(self._model, adapters)
            try:
                self._finish_running()
                self._running().set_loras(loaded)
            except BaseException:
                for handle, _ in loaded:
                    handle.close()
                raise
            self._close_adapters()
            self._lora, self._adapters = adapters, loaded

    # -- text --

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Text to token ids; see :meth:`pyspec.runtime.Vocab.encode`."""
        self._running()
        return self._model.vocab.encode(text, add_special, parse_special)

    def detokenize(self, tokens: Seq[int], skip_special: bool = True) -> str:
        """Token ids to text; see :meth:`pyspec.runtime.Vocab.decode`."""
        self._running()
        return self._model.vocab.decode(tokens, skip_special)

    # -- generation --

    @overload
    def generate(
        self, prompt: str, params: SamplingParams | None = None, *, prediction: Prompt | None = None, **overrides: Any
    ) -> GenerationResult: ...
    @overload
    def generate(
        self,
        prompt: Seq[int] | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        prediction: Prompt | Seq[Prompt | None] | None = None,
        **overrides: Any,
    ) -> Any: ...
    def generate(
        self,
        prompt: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        prediction: Prompt | Seq[Prompt | None] | None = None,
        **overrides: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Generate to the end.

        Args:
            prompt: text, or token ids, or a list of either (then a list comes back, in the same order).
            params: how to sample; for a list of prompts one for all, or a list with one for each.
            **overrides: options of SamplingParams, such as ``max_tokens=100``; for a list of prompts ``seed`` may be a
                list too. ``json_schema``, ``regex``, ``choice`` and ``grammar`` bound the text (extra ``grammar``);
                the first such request makes contexts anew with room for the tokens that are forced, unless
                ``speculation`` is "off" or "grammar" is among the loaded drafters.
            prediction: what the answer will mostly repeat, as text or token ids, such as the file that is to be
                edited: drafts come from it. Never changes the output. One for all prompts, or one or None for each.
                The first request with a prediction makes contexts anew with room for its drafts, after what runs has
                ended; ``speculation=["prediction", ...]`` makes that room from the start.

        Returns:
            A GenerationResult, or a list of them.

        Raises:
            ConfigError: an option is wrong, or a prompt is empty or too long.
            NativeError: a pass failed; the object stays usable unless ``state`` is "lost".
        """
        single = isinstance(prompt, str) or _is_token_list(prompt)
        if not single and not isinstance(prompt, (list, tuple)):
            raise ConfigError(f"a prompt is a str, token ids, or a list of these; got {type(prompt).__name__}")
        prompts: list[Any] = [prompt] if single else list(prompt)
        samplings = _samplings(params, overrides, len(prompts), single)
        encoded = [self._encode(p, s) for p, s in zip(prompts, samplings, strict=True)]
        if isinstance(prediction, (list, tuple)) and not single and not _is_token_list(prediction):
            if len(prediction) != len(prompts):
                raise ConfigError(f"{len(prediction)} predictions for {len(prompts)} prompts: give one for each")
            given = list(prediction)
        else:
            given = [prediction] * len(prompts)
        predictions = [self._encode_prediction(p, s) for p, s in zip(given, samplings, strict=True)]
        results = self._generate(self._requests(encoded, samplings, predictions))
        return results[0] if single else results

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        prediction: Prompt | None = None,
        **overrides: Any,
    ) -> Iterator[Piece]:
        """Generate piece by piece. Closing the iterator cancels; the last piece carries the result.

        Args and errors as in :meth:`generate`; they are checked at the call.
        """
        sampling = _sampling(params, overrides)
        tokens = self._encode(prompt, sampling)
        (request,) = self._requests([tokens], [sampling], [self._encode_prediction(prediction, sampling)])
        return self._stream(request)

    def chat(
        self,
        messages: Seq[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        template: str | None = None,
        tools: Seq[Mapping[str, Any]] | None = None,
        documents: Seq[Mapping[str, Any]] | None = None,
        **overrides: Any,
    ) -> Any:
        """Answer a conversation, written with the model's chat template. Needs jinja2 (extra ``chat``).

        Args:
            messages: dicts with "role" and "content".
            params, overrides: as in :meth:`generate`; ``prediction`` too.
            stream: give pieces, as :meth:`stream` does, instead of a GenerationResult.
            template: another Jinja template.
            tools, documents: handed to the template, for models that know what to do with them.
        """
        from . import chat

        self._running()
        tokens = chat.encode(self._model, messages, template=template, tools=tools, documents=documents)
        if stream:
            return self.stream(tokens, params, **overrides)
        return self.generate(tokens, params, **overrides)

    def cancel(self) -> None:
        """End all generations that run or wait now, with reason "cancelled". From any thread, during a prompt too."""
        assembly = self._assembly
        if assembly is not None:
            assembly.engine.cancel_all()
            assembly.abort()

    # -- life --

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """End what runs and free contexts and models. Idempotent; using the object afterwards raises ClosedError."""
        if self._closed:
            return
        self.cancel()
        with self._lock:
            self._closed = True
            if self._assembly is not None:
                self._assembly.close()
                self._assembly = None
            self._stack.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed or self._assembly is None:
            return "<pyspec.LLM closed>"
        return f"<pyspec.LLM {self._model.path.name!r} speculation={list(self._assembly.names)}>"

    # -- inside --

    def _running(self) -> _assemble.Assembly:
        if self._closed or self._assembly is None:
            raise ClosedError("this LLM is closed")
        return self._assembly

    def _assemble(self, n_seq: int) -> _assemble.Assembly:
        return _assemble.assemble(self._model, self._draft, self._options, n_seq, self._adapters)

    def _finish_running(self) -> None:
        """Step until nothing runs or waits. The lock is held."""
        engine = self._running().engine
        while not engine.idle:
            engine.step()

    def _close_adapters(self) -> None:
        while self._adapters:
            self._adapters.pop()[0].close()

    def _encode(self, prompt: Any, sampling: SamplingParams) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenize(prompt, sampling.add_special, sampling.parse_special)
        if _is_token_list(prompt) or (isinstance(prompt, (list, tuple, np.ndarray)) and not len(prompt)):
            return [int(t) for t in prompt]
        raise ConfigError(f"a prompt is a str or a sequence of token ids, got {type(prompt).__name__}")

    def _encode_prediction(self, prediction: Any, sampling: SamplingParams) -> I32Array | None:
        """Token ids, or None where there is nothing to propose."""
        if prediction is None:
            return None
        if isinstance(prediction, str):
            tokens = self.tokenize(prediction, False, sampling.parse_special)
        elif _is_token_list(prediction) or (isinstance(prediction, (list, tuple, np.ndarray)) and not len(prediction)):
            tokens = [int(t) for t in prediction]
        else:
            raise ConfigError(f"a prediction is a str or a sequence of token ids, got {type(prediction).__name__}")
        n_vocab = self._model.vocab.n_tokens
        for token in tokens:
            if not 0 <= token < n_vocab:
                raise ConfigError(f"token id {token} of the prediction is out of range: the model has {n_vocab} tokens")
        return np.array(tokens, np.int32) if tokens else None

    def _grow(self, n: int) -> None:
        """Make contexts for more sequences, when that is ours to decide and nothing runs. The lock is held."""
        assembly = self._running()
        n = min(n, N_SEQ_AUTO_MAX)
        if not self._auto_seq or n <= assembly.n_seq or not assembly.engine.idle:
            return
        n_old = assembly.n_seq
        assembly.close()
        try:
            self._assembly = self._assemble(n)
        except Exception:
            # not enough memory for that many: one after another still works
            self._auto_seq = False
            self._assembly = self._assemble(n_old)
        self._assembly.inherit(assembly)

    def _make_room(self, names: Iterable[str]) -> None:
        """Drafters for what requests bring along, and contexts that can verify their drafts. The lock is held.

        Raises:
            ConfigError: this target or these options allow no drafts. NativeError: no memory; all is as before.
        """
        assembly = self._running()
        have = (*assembly.names, *self._no_room)
        missing = [name for name in ("grammar", "prediction") if name in names and name not in have]
        if not missing:
            return
        self._finish_running()
        assembly.close()
        before, self._options = self._options, replace(self._options, extra=(*missing, *self._options.extra))
        try:
            self._assembly = self._assemble(assembly.n_seq)
        except Exception:
            self._options = before
            self._assembly = self._assemble(assembly.n_seq)
            if missing != ["grammar"]:
                raise
            # forced tokens can do without drafts
            self._no_room.add("grammar")
            log.warning("no contexts with room for the tokens that grammars force: they are not drafted", exc_info=True)
        finally:
            self._running().inherit(assembly)

    def _room_wanted(self, samplings: Seq[SamplingParams], predictions: Seq[I32Array | None]) -> set[str]:
        """Drafters that these requests have work for. Forced tokens are not drafted where speculation is off."""
        names = {"prediction"} if any(p is not None for p in predictions) else set()
        for sampling in samplings:
            chosen = sampling.speculation
            if sampling.grammar_spec is None:
                continue
            if "grammar" in chosen if chosen is not None else self._options.speculation != ("off",):
                names.add("grammar")
        return names

    def _constraints(self, samplings: Seq[SamplingParams]) -> list[GrammarConstraint | None]:
        """One for each request that asks for it. Raises GrammarError."""
        specs = [s.grammar_spec for s in samplings]
        if self._grammars is None and any(specs):
            self._grammars = Grammars(self._model.vocab)
        return [None if spec is None or self._grammars is None else self._grammars.constraint(spec) for spec in specs]

    def _submit(self, engine: Engine, request: _Request) -> Sequence:
        sampling, constraint = request.sampling, request.constraint
        text = TextStream(self._model.vocab, sampling.stop, sampling.skip_special)
        extra: dict[str, Any] = {} if request.prediction is None else {"prediction": request.prediction}
        if constraint is not None:
            extra[CONSTRAINT] = constraint
        return engine.submit(request.tokens, sampling, text, extra, constraint)

    def _requests(
        self, prompts: list[list[int]], samplings: list[SamplingParams], predictions: list[I32Array | None]
    ) -> list[_Request]:
        """Check everything that can be told without the lock."""
        engine = self._running().engine
        for tokens, sampling in zip(prompts, samplings, strict=True):
            engine.check_prompt(tokens)
            engine.check_speculation(sampling, ("grammar", "prediction"))
        constraints = self._constraints(samplings)
        return [_Request(*r) for r in zip(prompts, samplings, predictions, constraints, strict=True)]

    def _start(self, requests: list[_Request]) -> tuple[Engine, list[Sequence]]:
        """Submit all or none. The lock is held."""
        self._grow(len(requests))
        predictions = [r.prediction for r in requests]
        self._make_room(self._room_wanted([r.sampling for r in requests], predictions))
        engine = self._running().engine
        if any(p is not None for p in predictions) and not engine.n_draft_max:
            raise ConfigError("a prediction needs room for drafts: n_outputs_max and n_batch must be 2 or more")
        seqs: list[Sequence] = []
        try:
            for request in requests:
                seqs.append(self._submit(engine, request))
        except BaseException:
            for seq in seqs:
                engine.release(seq)
            raise
        return engine, seqs

    def _generate(self, requests: list[_Request]) -> list[GenerationResult]:
        with self._lock:
            engine, seqs = self._start(requests)
        try:
            running = True
            while running:
                with self._lock:
                    running = not all(s.done for s in seqs)
                    if running:
                        engine.step()
        finally:
            with self._lock:
                for seq in seqs:
                    engine.release(seq)
        for seq in seqs:
            if seq.error is not None:
                raise seq.error
        return [result_of(self._model.vocab, seq, list(seq.pieces)) for seq in seqs]

    def _stream(self, request: _Request) -> Iterator[Piece]:
        with self._lock:
            engine, (seq,) = self._start([request])
        vocab = self._model.vocab
        pieces: list[_EnginePiece] = []
        try:
            while True:
                while seq.pieces:
                    piece = seq.pieces.popleft()
                    pieces.append(piece)
                    result = result_of(vocab, seq, pieces) if piece.finish_reason and seq.error is None else None
                    if piece.text or piece.tokens or piece.finish_reason:
                        logprobs = logprobs_of(vocab, piece.logprobs, seq.params.skip_special)
                        yield Piece(piece.text, piece.tokens, piece.drafted, piece.finish_reason, result, logprobs)
                if seq.error is not None:
                    raise seq.error
                if seq.done:
                    return
                with self._lock:
                    if not seq.pieces:
                        engine.step()
        finally:
            with self._lock:
                engine.release(seq)


@dataclass(frozen=True, slots=True)
class _Request:
    """One generation, checked."""

    tokens: list[int]
    sampling: SamplingParams
    prediction: I32Array | None
    constraint: GrammarConstraint | None


def _samplings(params: Any, overrides: Mapping[str, Any], n: int, single: bool) -> list[SamplingParams]:
    """One for each of ``n`` prompts; ``params`` and ``seed`` may be lists.

    Raises:
        ConfigError: a list for a single prompt, or of another length; or an option is wrong.
    """
    seeds = overrides.get("seed")
    for name, given in (("params", params), ("seed", seeds)):
        if isinstance(given, (list, tuple)) and (single or len(given) != n):
            raise ConfigError(f"{name} is a list of {len(given)} for {'one prompt' if single else f'{n} prompts'}")
    if not n:
        _sampling(None, overrides)
    many = list(params) if isinstance(params, (list, tuple)) else [params] * n
    if not isinstance(seeds, (list, tuple)):
        out = {id(p): _sampling(p, overrides) for p in many}
        return [out[id(p)] for p in many]
    return [_sampling(p, {**overrides, "seed": seed}) for p, seed in zip(many, seeds, strict=True)]


def _sampling(params: SamplingParams | None, overrides: Mapping[str, Any]) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise ConfigError(f"params must be SamplingParams, got {type(params).__name__}")
    base = params or SamplingParams()
    sampling: SamplingParams = base.override(**overrides) if overrides else base
    return sampling


def _is_token_list(prompt: Any) -> bool:
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and np.issubdtype(prompt.dtype, np.integer)
    return (
        isinstance(prompt, (list, tuple))
        and len(prompt) > 0
        and all(isinstance(t, (int, np.integer)) and not isinstance(t, bool) for t in prompt)
    )
