import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer, models
from transformers import PreTrainedTokenizerFast

from router.text import chat_template
from router.text.chat_template import ChatTemplate, Ending, load_chat_template
from runtime.errors import ContextLengthError, InvalidRequestError, ModelError
from tests.tiny_model import CHAT_TEMPLATE

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LAID_OUT = """{{- bos_token }}
{% for message in messages %}
    {%- if loop.index > 8 %}{% break %}{% endif %}
    {% if message.role == 'assistant' %}
        {% generation %}
{{ message.content | trim }}
        {% endgeneration %}
    {% else %}
  [{{ message.role }}] {{ message | tojson }} {{ [1, 'é<'] | tojson(indent=2) }}
    {% endif %}
{% endfor %}
{%- set found = namespace(last='') -%}
{% for message in messages %}{% set found.last = message.content %}{% endfor %}
{{ found.last[::-1] }} {{ tools is none }} {{ strftime_now('%Y') | length }} {{ enable_thinking | default('unset') }}
{% if add_generation_prompt %}>>{% endif %}
"""
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<b>é</b>  "},
        {"role": "assistant", "content": "  Yes.\n"},
        {"role": "user", "content": "{{ 1 + 1 }}\n"},
    ],
    [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": " The sum  "}],
]


def rendered_by_transformers(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=LibraryTokenizer(models.BPE()), bos_token="<s>", chat_template=template
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False, **variables)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("template", [SMOLLM2, CHAT_TEMPLATE, LAID_OUT], ids=["smollm2", "tiny", "laid out"])
def test_templates_render_as_in_transformers(template: str, messages: list[dict[str, Any]]) -> None:
    ours = ChatTemplate(template, {"bos_token": "<s>"})
    endings: dict[Ending, str] = {"answer": "add_generation_prompt", "none": "", "continue": "continue_final_message"}
    for ending, flag in endings.items():
        theirs = rendered_by_transformers(template, messages, enable_thinking=False, **({flag: True} if flag else {}))
        assert ours.render(messages, {"enable_thinking": False}, ending) == theirs


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ messages | length }}"])
def test_a_final_message_that_the_template_does_not_show_cannot_be_continued(template: str) -> None:
    with pytest.raises(InvalidRequestError, match="messages: cannot be continued"):
        ChatTemplate(template, {}).render(CONVERSATIONS[1], ending="continue")


def test_a_model_without_a_template_refuses_messages(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="messages: the model has no chat template"):
        load_chat_template(tmp_path).render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_what_a_template_refuses_is_the_callers_mistake(template: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(template, {}).render(CONVERSATIONS[0])
    assert caught.value.field == "messages"


def test_the_words_of_the_template_reach_the_caller() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(CONVERSATIONS[0])


def test_a_template_that_cannot_be_parsed_is_an_error_of_the_model() -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate("{% for %}", {}, "tiny")


def test_callers_cannot_replace_the_messages_or_special_tokens_that_a_template_sees(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages | length }}{{ mood }}")
    variables = {"mood": "!", "messages": [], "self": 1, "bos_token": "?", "add_generation_prompt": False}
    assert load_chat_template(tmp_path).render(CONVERSATIONS[0], variables) == "<s>1!"


def test_the_default_of_several_templates_is_used(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]}'
    )
    assert load_chat_template(tmp_path).render([]) == "yes"


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "template",
    ["{{ deep | tojson }}", "{{ deep }}", "{% macro walk(x) %}{{ walk(x[0]) }}{% endmacro %}{{ walk(deep) }}"],
)
def test_variables_that_are_nested_too_deep_are_the_callers_mistake(template: str) -> None:
    with pytest.raises(InvalidRequestError, match="nested too deep"):
        ChatTemplate(template, {}).render(CONVERSATIONS[0], {"deep": nested(50_000)})


def test_a_text_that_gets_too_long_is_not_rendered_to_its_end() -> None:
    endless = ChatTemplate("{% for a in tools %}{% for b in tools %}{{ a }}{{ b }}{% endfor %}{% endfor %}", {})
    with pytest.raises(ContextLengthError, match="messages: give a text of more than 1000 characters"):
        endless.render(CONVERSATIONS[0], {"tools": "x" * 60_000}, max_chars=1000)


def test_a_text_that_takes_too_long_is_not_rendered_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.0)
    with pytest.raises(InvalidRequestError, match="take the model's chat template more than"):
        ChatTemplate(SMOLLM2, {}).render(CONVERSATIONS[1])


CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "é"}}}]},
]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("'```' + call.function.arguments + '```'", '```{"a": "é"}```'),
        ("call.function.arguments if call.function.arguments is string else raise_exception('no')", '{"a": "é"}'),
        ("call.function.arguments.a", "é"),
    ],
)  # fmt: skip
def test_arguments_are_an_object_or_the_text_that_a_template_joins(written: str, text: str) -> None:
    template = f"{{% for call in messages[-1].tool_calls %}}{{{{ {written} }}}}{{% endfor %}}"
    assert ChatTemplate(template, {}).render(CALLED) == text
    with pytest.raises(InvalidRequestError, match="refuses them: first"):
        ChatTemplate("{{ raise_exception('first' if messages[-1].tool_calls[0].function.arguments is mapping) }}", {}
        ).render(CALLED)  # fmt: skip


@pytest.mark.parametrize("as_file", [False, True])
def test_chats_with_tools_take_the_template_that_is_named_for_them(tmp_path: Path, as_file: bool) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    settings = {"chat_template": named[:1] if as_file else named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if as_file:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(named[1]["template"])
    template = load_chat_template(tmp_path)
    assert template.render(CONVERSATIONS[0]) == template.render(CONVERSATIONS[0], {"tools": []}) == "plain"
    assert template.render(CONVERSATIONS[0], {"tools": [{}]}) == "1 tools"
    assert "tools" in template.variables
