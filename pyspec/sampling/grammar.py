"""Structured output: JSON schema, regular expression, list of choices, Lark or GBNF, through the package llguidance.

A grammar is compiled for a vocabulary once and matched token by token, one :class:`GrammarConstraint` a request. The
constraint knows the tokens that were emitted, nothing of drafts: what a draft would lead to is asked of a copy of the
state that is taken back at once.

llguidance compiles by recursion, so definitions that refer to each other some hundred deep would overflow the stack of
an ordinary thread and end the process. Compiling therefore happens in a short-lived thread with a large one, and the
number of definitions is limited.

Needs the extra ``grammar``, imported at first use.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..config import GrammarSpec
from ..errors import GrammarError, SamplingError, UnsupportedError

if TYPE_CHECKING:
    import llguidance

__all__ = ["GrammarConstraint", "GrammarVocab", "Grammars", "schema_error_path"]

Mask = npt.NDArray[np.uint32]
T = TypeVar("T")

#: Most characters of a grammar, and most definitions: what takes seconds to compile is no grammar for a text.
MAX_CHARS = 4 << 20
MAX_RULES = 4096
_STACK_BYTES = 512 << 20
_N_CACHED = 64

_stack_lock = threading.Lock()


class GrammarVocab(Protocol):
    """What is needed of a vocabulary; ``pyspec.Vocab`` has it."""

    @property
    def n_tokens(self) -> int: ...
    @property
    def bos(self) -> int: ...
    @property
    def eos(self) -> int: ...
    @property
    def eog_tokens(self) -> Collection[int]: ...
    def token_bytes(self, token: int, special: bool = False) -> bytes: ...
    def is_control(self, token: int) -> bool: ...
    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]: ...


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as e:
        raise UnsupportedError(
            "json_schema, regex, choice and grammar need the package llguidance, which cannot be imported: "
            "pip install 'pyspec-llm[grammar]'"
        ) from e
    return llguidance


class _Tokenizer:
    """What ``llguidance.LLTokenizer`` asks for."""

    is_tokenizer_wrapper = True

    def __init__(self, vocab: GrammarVocab) -> None:
        special, self.tokens = [], []
        for token in range(vocab.n_tokens):
            self.tokens.append(vocab.token_bytes(token, True))
            if vocab.is_control(token):
                special.append(token)
        self.special_token_ids = sorted({*special, *vocab.eog_tokens})
        self.bos_token_id = vocab.bos if vocab.bos >= 0 else None
        self.eos_token_id = vocab.eos if vocab.eos >= 0 else min(vocab.eog_tokens, default=0)
        self._vocab = vocab

    def __call__(self, text: str) -> list[int]:
        """How the model's tokenizer spells a text in the middle of another."""
        wanted = text.encode("utf-8", "surrogateescape")
        for before in ("", "\x02"):
            # SentencePiece puts a space in front of what it is given; behind another character it does not
            tokens = self._vocab.encode(before + text, False, False)
            head, n = before.encode(), 0
            got = b""
            while before and n < len(tokens) and got.lstrip() != head:
                got += self.tokens[tokens[n]]
                n += 1
            if b"".join(self.tokens[t] for t in tokens[n:]) == wanted:
                return tokens[n:]
        return self._vocab.encode(text, False, False)


class Grammars:
    """Compiles grammars for one vocabulary, and keeps the last ones. Thread-safe.

    The first use reads the whole vocabulary: 0.1 s for 50,000 tokens.

    Args:
        vocab: the target's.

    Raises:
        UnsupportedError: llguidance is not installed, or the vocabulary has no token that ends a text.
    """

    def __init__(self, vocab: GrammarVocab) -> None:
        ll = _llguidance()
        if not vocab.eog_tokens:
            raise UnsupportedError("structured output needs a model with an end-of-generation token; this one has none")
        self.n_vocab = vocab.n_tokens
        eog = set(vocab.eog_tokens)
        ends = [vocab.eos, *sorted(eog - {vocab.eos})] if vocab.eos in eog else sorted(eog)
        self._tokenizer: llguidance.LLTokenizer = ll.LLTokenizer(
            _Tokenizer(vocab), n_vocab=vocab.n_tokens, eos_token=ends
        )
        self._cache: dict[GrammarSpec, llguidance.LLMatcher] = {}
        self._lock = threading.Lock()

    def constraint(self, spec: GrammarSpec) -> GrammarConstraint:
        """A constraint at the start of the text.

        Raises:
            GrammarError: the grammar is wrong, and where; or it admits no text at all.
        """
        with self._lock:
            matcher = self._cache.pop(spec, None)
            if matcher is None:
                matcher = self._compile(spec)
            self._cache[spec] = matcher
            while len(self._cache) > _N_CACHED:
                del self._cache[next(iter(self._cache))]
            return GrammarConstraint(matcher.deep_copy(), self.n_vocab, spec)

    def _compile(self, spec: GrammarSpec) -> llguidance.LLMatcher:
        ll, source = _llguidance(), spec.source
        if len(source) > MAX_CHARS:
            raise GrammarError(f"{spec.kind} has {len(source)} characters; at most {MAX_CHARS} are possible")
        kind = _FORMATS[spec.kind]
        n_rules = source.count('"$ref"') if spec.kind == "json_schema" else source.count("\n") + source.count("::=") + 1
        if n_rules > MAX_RULES:
            raise GrammarError(
                f"{spec.kind} has {n_rules} lines, rules or references; at most {MAX_RULES} are possible"
            )

        def build() -> llguidance.LLMatcher:
            if spec.kind == "json_schema":
                return self._matcher_of(source, spec.compact)
            # log_level 0: messages are ours to give
            matcher: llguidance.LLMatcher = ll.LLMatcher(self._tokenizer, ll.grammar_from(kind, source), log_level=0)
            return matcher

        try:
            matcher = _with_stack(build)
        except (ValueError, RecursionError) as e:
            raise GrammarError(f"{spec.kind} is wrong: {_first_lines(str(e))}") from None
        if matcher.is_error():
            raise GrammarError(self._message(spec, matcher.get_error()))
        probe = matcher.deep_copy()
        probe.compute_bitmask()
        if probe.is_stopped() and not matcher.is_accepting():
            raise GrammarError(f"{spec.kind} admits no text at all: {_shorten(source)}")
        return matcher

    def _message(self, spec: GrammarSpec, error: str) -> str:
        if spec.kind != "json_schema":
            return f"{spec.kind} is wrong: {_first_lines(error)}"
        errors = [error]

        def is_wrong(part: Any) -> bool:
            matcher = self._matcher_of(json.dumps(part))
            if matcher.is_error():
                errors.append(matcher.get_error())
            return matcher.is_error()

        try:
            path = _with_stack(lambda: schema_error_path(json.loads(spec.source), is_wrong))
        except RecursionError:
            return f"json_schema is nested too deeply: {_first_lines(error)}"
        # the last one is that of the part itself
        return f"json_schema is wrong at {path}: {_first_lines(errors[-1])}"

    def _matcher_of(self, schema: str, compact: bool = False) -> llguidance.LLMatcher:
        ll = _llguidance()
        overrides = {"whitespace_flexible": False} if compact else None
        grammar = ll.LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
        matcher: llguidance.LLMatcher = ll.LLMatcher(self._tokenizer, grammar, log_level=0)
        return matcher


_FORMATS: Mapping[str, str] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}


class GrammarConstraint:
    """The state of one grammar-bound text; a ``Constraint`` of the sampler chain. One thread at a time.

    Args:
        matcher: at its start; owned from now on.
        n_vocab: width of the mask.
    """

    def __init__(self, matcher: llguidance.LLMatcher, n_vocab: int, spec: GrammarSpec) -> None:
        self._matcher = matcher
        self._spec = spec
        self._n = 0
        self._mask: Mask = np.zeros((n_vocab + 31) // 32, np.uint32)
        self._address = self._mask.ctypes.data
        self._mask_is_new = False
        self._forced: list[int] | None = None

    def mask(self) -> Mask:
        """Tokens allowed next: uint32 [ceil(n_vocab / 32)], bit set = allowed. Borrowed until the next ``accept``.

        Raises:
            SamplingError: the grammar became too complex for llguidance's limits.
        """
        if not self._mask_is_new:
            self._matcher.unsafe_compute_mask_ptr(self._address, self._mask.nbytes)
            self._check()
            self._mask_is_new = True
        return self._mask

    def accept(self, token: int) -> None:
        """``token`` was emitted.

        Raises:
            SamplingError: the grammar does not allow it here.
        """
        self._changed()
        self._n += 1
        self._matcher.consume_token(token)
        self._check()

    def forced(self) -> list[int]:
        """Tokens that must come next, in the model's own spelling; empty: there is a choice. A copy."""
        if self._forced is None:
            self._forced = [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()
        return list(self._forced)

    @property
    def stopped(self) -> bool:
        """The text is complete: nothing may follow."""
        return self._matcher.is_stopped()

    @property
    def n(self) -> int:
        """Tokens accepted."""
        return self._n

    def rewind(self, n: int) -> None:
        """Be again as after ``n`` accepted tokens."""
        if n < self._n:
            self._matcher.rollback(self._n - n)
            self._n = n
            self._changed()
            self._check()

    def n_allowed(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens`` could follow in this order. The state does not change."""
        return self._matcher.validate_tokens(list(tokens)) if tokens else 0

    @contextlib.contextmanager
    def looking_ahead(self) -> Iterator[Callable[[int], bool]]:
        """A function that steps ahead by a token if the grammar allows it, and says whether it did.

        When the block ends the state is as before.
        """
        n = 0

        def step(token: int) -> bool:
            nonlocal n
            if self._matcher.validate_tokens([token]) != 1:
                return False
            self._matcher.consume_token(token)
            n += 1
            return True

        try:
            yield step
        finally:
            if n:
                self._matcher.rollback(n)

    def first_allowed(self, tokens: Sequence[int], candidates: Sequence[int]) -> int:
        """Index of the first of ``candidates`` that could follow ``tokens``; -1: none. The state does not change."""
        with self.looking_ahead() as step:
            if all(step(t) for t in tokens):
                for i, token in enumerate(candidates):
                    if self._matcher.validate_tokens([token]) == 1:
                        return i
        return -1

    def forced_after(self, tokens: Sequence[int]) -> list[int]:
        """What would be forced once ``tokens``, which are allowed, had been emitted. The state does not change."""
        if not tokens:
            return self.forced()
        with self.looking_ahead() as step:
            if all(step(t) for t in tokens) and not self._matcher.is_stopped():
                return self._matcher.compute_ff_tokens()
        return []

    def _changed(self) -> None:
        self._mask_is_new = False
        self._forced = None

    def _check(self) -> None:
        if self._matcher.is_error():
            why = _first_lines(self._matcher.get_error())
            raise SamplingError(f"{self._spec.kind} cannot be followed after {self._n} tokens: {why}")


def schema_error_path(schema: Any, is_wrong: Callable[[Any], bool]) -> str:
    """Where a JSON schema is wrong, as a path such as ``$.properties.name``: the smallest part that is wrong by itself.

    Args:
        schema: wrong as a whole. is_wrong: tells whether a schema cannot be compiled.
    """
    path, node = "$", schema
    definitions = {k: schema[k] for k in ("$defs", "definitions") if isinstance(schema, dict) and k in schema}
    while True:
        for step, part in _parts(node):
            whole = {**definitions, **part} if isinstance(part, dict) else part
            if is_wrong(whole):
                path, node = path + step, part
                break
        else:
            return path


_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTED = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_ONE = frozenset({"items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else"})


def _parts(node: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, with the step of the path that leads to each."""
    if not isinstance(node, dict):
        return
    # definitions first: what refers to a wrong one is not to blame
    for key, value in sorted(node.items(), key=lambda item: item[0] not in ("$defs", "definitions")):
        if key in _NAMED:
            if isinstance(value, dict):
                yield from ((f".{key}.{name}", part) for name, part in value.items())
        elif key in _LISTED:
            if isinstance(value, list):
                yield from ((f".{key}[{i}]", part) for i, part in enumerate(value))
        elif key in _ONE and isinstance(value, dict):
            yield f".{key}", value


def _with_stack(function: Callable[[], T]) -> T:
    """Call in a thread with a large stack, which takes address space, and memory only as far as it is used."""
    out: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            out.append(function())
        except BaseException as e:  # handed to the caller
            errors.append(e)

    with _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="pyspec-grammar")
            thread.start()
        except RuntimeError as e:
            raise GrammarError(f"no memory for compiling a grammar: {e}") from e
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return out[0]


def _first_lines(text: str) -> str:
    # after a blank line or <state> follows a dump of the parser's state
    text = re.split(r"\n\s*\n|\n<state>", text.strip())[0]
    return text if len(text) <= 600 else text[:600] + " ..."


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:100] + "...")
