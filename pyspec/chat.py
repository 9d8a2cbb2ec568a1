"""Chat templates: messages to a prompt.

A model file carries its template in the language that Hugging Face tokenizers use: Jinja2 with a few additions. It is
a program written by whoever made the file, so it runs in Jinja2's immutable sandbox: it sees the values given here
and no attribute or module of Python. The sandbox does not limit time or memory.

Needs the package jinja2 (extra ``chat``), imported at first use.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    import jinja2

    from .runtime import Model

__all__ = ["ChatTemplate", "encode", "template_of"]

_KEY = "tokenizer.chat_template"


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the template's text.
        variables: names that the template sees besides the messages, such as ``bos_token`` and ``eos_token``.
        origin: where it comes from, for messages.

    Raises:
        UnsupportedError: jinja2 is not installed, or the template does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None, *, origin: str = "given template"):
        self.source = source
        self.origin = origin
        self._variables = dict(variables or {})
        environment = _environment()
        from jinja2 import TemplateSyntaxError

        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as e:
            raise UnsupportedError(
                f"the chat template of {origin} does not compile: line {e.lineno}: {e.message}"
            ) from e
        except (RecursionError, MemoryError) as e:
            raise UnsupportedError(f"the chat template of {origin} does not compile: {type(e).__name__}") from e

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for these messages.

        Args:
            messages: each with ``role`` and, except for some tool calls, ``content``: a string, or a list of
                ``{"type": "text", "text": ...}`` parts, which are joined by newlines. Other keys are passed on.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools, documents: passed to the template as they are, for templates that use them.
            **variables: more names for the template (``enable_thinking=False``).

        Raises:
            ConfigError: the messages are not of this form, or the template refuses or fails on them.
            UnsupportedError: a message has a part that is not text.
        """
        checked = [_check_message(i, m) for i, m in enumerate(_check_list(messages))]
        values: dict[str, Any] = {**self._variables, **variables}
        values.update(messages=checked, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt)
        from jinja2 import TemplateError

        try:
            return self._template.render(values)
        except _Refused as e:
            raise ConfigError(f"the chat template of {self.origin} refuses these messages: {e}") from e
        except TemplateError as e:
            raise ConfigError(f"the chat template of {self.origin} fails on these messages: {e.message}") from e
        except Exception as e:  # whatever the template's own expressions raise: TypeError, KeyError, MemoryError ...
            raise ConfigError(
                f"the chat template of {self.origin} fails on these messages: {type(e).__name__}: {e}"
            ) from e


def template_of(model: Model, template: str | None = None, *, name: str | None = None) -> ChatTemplate:
    """The chat template of a model, with the model's special tokens as variables.

    Args:
        model: borrowed; its metadata and vocabulary are read.
        template: use this text instead of the model's own template.
        name: one of several templates of a model, such as ``"tool_use"``; None: the default one.

    Raises:
        UnsupportedError: the model has no such template, jinja2 is missing, or the template does not compile.
    """
    metadata = model.metadata
    origin = "the caller" if template is not None else Path(model.path).name
    if template is None:
        key = _KEY if name is None else f"{_KEY}.{name}"
        template = metadata.get(key)
        if not template:
            others = sorted(k[len(_KEY) + 1 :] for k in metadata if k.startswith(_KEY + "."))
            hint = f" It has templates named {', '.join(others)}." if others else ""
            raise UnsupportedError(
                f"{origin} has no chat template ({key} is not in its metadata).{hint} "
                "Pass a template, or write the prompt yourself and call generate()"
            )
    return ChatTemplate(template, _special_tokens(model), origin=origin)


def encode(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    name: str | None = None,
    **render: Any,
) -> list[int]:
    """Messages to prompt tokens.

    Special tokens written by the template become single tokens. A BOS token is put in front if the model's metadata
    asks for one and the template did not write it, so there is never more than one. No EOS is added: the answer
    follows.

    Args:
        model: borrowed. template, name: see :func:`template_of`. render: see :meth:`ChatTemplate.render`.
    """
    text = template_of(model, template, name=name).render(messages, **render)
    vocab = model.vocab
    tokens = vocab.encode(text, add_special=False, parse_special=True)
    if vocab.add_bos and vocab.bos >= 0 and (not tokens or tokens[0] != vocab.bos):
        tokens = [vocab.bos, *tokens]
    return tokens


def _special_tokens(model: Model) -> dict[str, str]:
    """The names Hugging Face templates expect; an absent token is an empty string."""
    vocab = model.vocab
    ids = {"bos_token": vocab.bos, "eos_token": vocab.eos}
    return {name: vocab.token_text(i).decode("utf-8", "replace") if i >= 0 else "" for name, i in ids.items()}


def _check_list(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ConfigError(f"messages must be a list of dicts with 'role' and 'content', got {type(messages).__name__}")
    if not messages:
        raise ConfigError("messages is empty: a chat needs at least one message")
    return messages


def _check_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ConfigError(f"messages[{index}] must be a dict with 'role' and 'content', got {message!r}")
    if not isinstance(message.get("role"), str):
        raise ConfigError(f"messages[{index}] has no 'role' (a string such as 'user'): {dict(message)!r}")
    out = dict(message)
    content = out.get("content")
    if content is None:
        if not set(out) - {"role", "content"}:
            raise ConfigError(f"messages[{index}] has no 'content'")
    elif isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        out["content"] = "\n".join(_text_part(index, part) for part in content)
    elif not isinstance(content, str):
        raise ConfigError(f"messages[{index}]['content'] must be a string, got {type(content).__name__}")
    return out


def _text_part(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UnsupportedError(f"messages[{index}] has a content part of type {kind!r}; pyspec takes text only")


class _Refused(Exception):
    """Raised by a template through ``raise_exception``."""


def _refuse(message: object = "") -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja2's own filter escapes <, >, & and ' for HTML, which would put "\u003c" into the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox
    except ImportError as e:
        raise UnsupportedError(
            "chat templates need the package jinja2, which cannot be imported: pip install 'pyspec-llm[chat]'"
        ) from e

    class Generation(jinja2.ext.Extension):
        """``{% generation %} ... {% endgeneration %}`` marks the assistant's words for training; here it is inert."""

        tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment
