"""Chat templates, on fakes: no native library."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pyspec.errors import ConfigError, UnsupportedError

jinja2 = pytest.importorskip("jinja2")

from pyspec.chat import ChatTemplate, encode, template_of  # noqa: E402

USER = [{"role": "user", "content": "Hi"}]

CHATML = """\
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' -}}
    {% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' -}}
{% endif %}
"""


class FakeVocab:
    """Encodes each character as its code point; "<s>" is BOS (1) and "</s>" is EOS (2)."""

    def __init__(self, bos: int = 1, add_bos: bool = True) -> None:
        self.bos, self.eos, self.add_bos = bos, 2, add_bos
        self.calls: list[dict[str, bool]] = []

    def token_text(self, token: int) -> bytes:
        return {1: b"<s>", 2: b"</s>"}[token]

    def encode(self, text: str, **flags: bool) -> list[int]:
        self.calls.append(flags)
        return [{"<s>": 1, "</s>": 2}.get(part, ord(part[0])) for part in re.findall(r"<s>|</s>|.", text, re.S)]


def fake_model(metadata: dict[str, str] | None = None, **vocab: Any) -> Any:
    return SimpleNamespace(path="models/fake.gguf", metadata=metadata or {}, vocab=FakeVocab(**vocab))


def render(source: str, messages: Any = None, **kwargs: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages or USER, **kwargs)


# ---- what templates may use -------------------------------------------------------------


def test_blocks_are_trimmed_as_hugging_face_does() -> None:
    assert render(CHATML) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_generation_prompt() -> None:
    assert render(CHATML, add_generation_prompt=False).endswith("<|im_start|>user\nHi<|im_end|>\n")


def test_special_token_variables() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "<s>Hi</s>"


def test_tojson_is_plain_json() -> None:
    tools = [{"name": "größer", "expr": "a<b & c>'d'"}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"name": "größer", "expr": "a<b & c>\'d\'"}]'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'


def test_strftime_now() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


def test_loop_controls_and_generation_tag() -> None:
    source = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"  # noqa: E501
    assert render(source, [*USER, *USER]) == "Hi"


def test_extra_variables_tools_and_documents_reach_the_template() -> None:
    source = "{{ enable_thinking }} {{ tools[0].name }} {{ documents[0].text }}"
    out = render(source, tools=[{"name": "f"}], documents=[{"text": "d"}], enable_thinking=False)
    assert out == "False f d"


def test_undefined_names_are_false_as_templates_expect() -> None:
    assert render("{% if tools %}T{% endif %}{% if custom_flag is defined %}C{% endif %}-{{ custom_flag }}") == "-"


def test_message_keys_are_passed_on() -> None:
    messages = [{"role": "assistant", "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "7", "name": "f"}]
    source = "{{ messages[0].tool_calls[0].name }}{{ messages[0].content is none }}{{ messages[1].name }}"
    assert render(source, messages) == "fFalsef"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}, "c"]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb\nc"


# ---- what templates may not do ------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ '{0.__class__}'.format(messages) }}{{ ''.__class__.__name__.x }}",
        "{% include 'file' %}",
        "{{ range(10000000) }}",
    ],
)
def test_sandbox(source: str) -> None:
    with pytest.raises(ConfigError, match="given template fails on these messages"):
        render(source)


def test_messages_of_the_caller_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    render("{{ messages[0].content }}", messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


# ---- errors --------------------------------------------------------------------------------


def test_raise_exception() -> None:
    with pytest.raises(ConfigError, match="refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ 1 // 0 }}", "{{ absent.x.y }}", "{{ f() }}"])
def test_failing_template(source: str) -> None:
    with pytest.raises(ConfigError, match="fails on these messages"):
        render(source)


def test_syntax_error_names_the_line() -> None:
    with pytest.raises(UnsupportedError, match=r"fake\.gguf does not compile: line 2: "):
        template_of(fake_model({"tokenizer.chat_template": "ok\n{% if %}"}))


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ("Hi", "must be a list of dicts"),
        ({"role": "user", "content": "Hi"}, "must be a list of dicts"),
        ([], "is empty"),
        (["Hi"], r"messages\[0\] must be a dict"),
        ([{"content": "Hi"}], r"messages\[0\] has no 'role'"),
        ([*USER, {"role": "user"}], r"messages\[1\] has no 'content'"),
        ([{"role": "user", "content": 3}], "must be a string, got int"),
        ([{"role": "user", "content": b"x"}], "must be a string, got bytes"),
    ],
)
def test_bad_messages(messages: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ChatTemplate("{{ messages[0].content }}").render(messages)


def test_image_part() -> None:
    with pytest.raises(UnsupportedError, match=r"'image_url'.*text only"):
        render("x", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_no_template() -> None:
    with pytest.raises(UnsupportedError, match=r"fake\.gguf has no chat template .*call generate\(\)"):
        template_of(fake_model())


def test_named_template() -> None:
    model = fake_model({"tokenizer.chat_template.tool_use": "{{ messages[0].content }}!"})
    assert template_of(model, name="tool_use").render(USER) == "Hi!"
    with pytest.raises(UnsupportedError, match="It has templates named tool_use"):
        template_of(model)


def test_without_jinja2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'pyspec-llm\[chat\]'"):
        ChatTemplate("x")


# ---- tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
def test_exactly_one_bos(template: str) -> None:
    model = fake_model({"tokenizer.chat_template": template})
    assert encode(model, USER) == [1, ord("H"), ord("i")]
    assert model.vocab.calls == [{"add_special": False, "parse_special": True}]


def test_no_bos_unless_the_model_wants_it() -> None:
    template = {"tokenizer.chat_template": "{{ messages[0].content }}"}
    assert encode(fake_model(template, add_bos=False), USER) == [ord("H"), ord("i")]
    assert encode(fake_model(template, bos=-1), USER) == [ord("H"), ord("i")]
    assert encode(fake_model({"tokenizer.chat_template": ""}, bos=1), USER, template="") == [1]


def test_given_template_wins() -> None:
    model = fake_model({"tokenizer.chat_template": "no"})
    assert encode(model, USER, template="{{ messages[0].role[0] }}") == [1, ord("u")]
