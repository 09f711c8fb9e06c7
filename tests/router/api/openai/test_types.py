import json
import re
from collections.abc import Sequence
from typing import Any, get_type_hints

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams

from router.api.dialects.json_body import decode_body
from router.api.openai.fields import NOT_SERVED
from router.api.openai.shown_prompt import PromptWish
from router.api.openai.types import ChatBody, CompletionBody, GenerationBody
from router.api.responses.fields import ResponsesBody
from router.api.wishes.sampling_options import Options
from router.api.wishes.validation import IN_PLACE_BYTES, MAX_VALUES, Chat, Prompt
from runtime.errors import InvalidRequestError
from tests.test_packaging import ROOT

USER = {"role": "user", "content": "Hi"}


def read_body(data: bytes, kind: type[GenerationBody]) -> tuple[GenerationBody, Options, Sequence[Prompt]]:
    body = decode_body(data, kind)
    return body, body.options(), body.prompts()


def refused(kind: type[GenerationBody], body: dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        read_body(json.dumps(body).encode(), kind)
    return caught.value


@pytest.mark.parametrize(
    ("kind", "body", "field", "nearest"),
    [
        (CompletionBody, {"prompt": "a", "max_tokns": 5}, "max_tokns", "max_tokens"),
        (
            CompletionBody,
            {"prompt": "a", "stream_options": {"include_usag": 1}},
            "stream_options.include_usag",
            "usage",
        ),
        (ChatBody, {"messages": [USER], "temprature": 1}, "temprature", "temperature"),
        (ChatBody, {"messages": [USER, USER | {"conten": ""}]}, "messages[1].conten", "content"),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": [{"type": "text", "txt": ""}]}]},
            ".content[0].txt",
            "text",
        ),
        (ChatBody, {"messages": [USER], "x" * 100_000: 1}, "x" * 40, ""),
        (ChatBody, {"messages": [USER], "client_headers": {}}, "client_headers", ""),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_known_one(
    kind: type[GenerationBody], body: dict[str, Any], field: str, nearest: str
) -> None:
    error = refused(kind, body)
    assert error.field.endswith(field)
    assert ("the nearest known field is" in error.problem) == bool(nearest)
    assert nearest in error.problem
    assert len(str(error)) < 200


@pytest.mark.parametrize("field", ["functions", "audio", "suffix"])
def test_fields_that_would_change_the_answer_and_are_not_served_are_refused_by_both_endpoints(field: str) -> None:
    for kind, body in ((ChatBody, {"messages": [USER]}), (CompletionBody, {"prompt": "a"})):
        error = refused(kind, body | {field: ["x"]})
        assert (error.field, error.problem) == (field, "is not supported; leave it out")
        read_body(json.dumps(body | {field: None}).encode(), kind)


def test_the_page_names_what_is_not_served() -> None:
    rows = (ROOT / "docs" / "vllm.md").read_text().splitlines()
    (row,) = (row for row in rows if row.endswith("| not served, unless the value changes nothing |"))
    assert re.findall("`([^`]+)`", row) == sorted(NOT_SERVED)


def test_fields_that_change_nothing_are_taken() -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "skip_special_tokens": True,
    }
    assistant = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "tool_calls": None}
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    messages = [assistant, {"role": "user", "content": [part]}]
    options = {"include_obfuscation": False, "continuous_usage_stats": False}
    read_body(
        json.dumps({"messages": messages, "stream": True, "stream_options": options} | harmless).encode(),
        ChatBody,
    )
    read_body(json.dumps({"prompt": "a"} | harmless).encode(), CompletionBody)


def test_how_a_chats_prompt_ends_is_said_as_in_vllm() -> None:
    def ending(**fields: bool) -> str:
        (chat,) = read_body(json.dumps({"messages": [USER]} | fields).encode(), ChatBody)[2]
        assert isinstance(chat, Chat)
        return chat.ending

    assert ending() == ending(add_generation_prompt=True) == ending(continue_final_message=False) == "answer"
    assert ending(add_generation_prompt=False) == "none"
    assert ending(continue_final_message=True) == "continue"
    assert ending(continue_final_message=True, add_generation_prompt=False) == "continue"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(ChatBody, {"messages": [USER]} | both).field == "continue_final_message"


def test_documents_go_to_the_chat_template() -> None:
    documents = [{"title": "Rain", "text": "It is wet."}]
    (chat,) = read_body(json.dumps({"messages": [USER], "documents": documents}).encode(), ChatBody)[2]
    assert isinstance(chat, Chat)
    assert chat.variables == {"documents": documents}
    assert refused(ChatBody, {"messages": [USER], "documents": ["It is wet."]}).field == "documents"


def test_options_of_a_stream_are_refused_without_one() -> None:
    for kind, body in ((ChatBody, {"messages": [USER]}), (CompletionBody, {"prompt": "a"})):
        error = refused(kind, body | {"stream_options": {"include_usage": True}})
        assert str(error) == "stream_options: needs stream to be true"


def test_a_refusal_in_the_history_is_a_text_of_the_assistant() -> None:
    def prompts(role: str, part: dict[str, str]) -> Sequence[Prompt]:
        message = {"role": role, "content": [{"type": "text", "text": "No."}, part]}
        return read_body(json.dumps({"messages": [message, USER]}).encode(), ChatBody)[2]

    refusal = {"type": "refusal", "refusal": "I cannot."}
    assert prompts("assistant", refusal) == prompts("assistant", {"type": "text", "text": "I cannot."})
    for role, part in (("user", refusal), ("assistant", {"type": "refusal"})):
        with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[1\]"):
            prompts(role, part)


def test_an_echo_asks_for_log_probabilities_of_the_prompt() -> None:
    body, options, _ = read_body(b'{"prompt": "a", "echo": true, "logprobs": 2, "prompt_logprobs": 5}', CompletionBody)
    assert options.given["prompt_logprobs"] == 5
    assert body.wish() == PromptWish(echo=True, logprobs=2, details=5)
    body, _, _ = read_body(b'{"prompt": "a", "echo": true, "logprobs": 2}', CompletionBody)
    assert body.wish() == PromptWish(echo=True, logprobs=2, details=2)
    body, _, _ = read_body(b'{"prompt": "a", "echo": true, "logprobs": 2, "stream": true}', CompletionBody)
    assert body.wish() == PromptWish(echo=True, logprobs=2)
    body, options, _ = read_body(b'{"prompt": "a", "echo": true, "logprobs": 2, "max_tokens": 0}', CompletionBody)
    assert (options.given["max_tokens"], options.given["prompt_logprobs"]) == (1, 2)
    assert options.name_of("prompt_logprobs") == "logprobs"
    assert body.wish().no_output


@pytest.mark.parametrize(
    ("head", "unit", "tail"),
    [
        ('{"prompt":[', "5", "]}"),
        ('{"prompt":[', "[]", "]}"),
        ('{"prompt":"a","stop":[', '"a"', "]}"),
        ('{"prompt":"a","logit_bias":{', '"7":1', "}}"),
        ('{"prompt":"a",', '"x":1', "}"),
        ('{"prompt":"', "\\n\\n\\n\\n\\n\\n\\n\\n\\n", '"}'),
    ],
)
def test_a_long_body_of_many_values_is_refused_before_it_is_decoded(
    head: str, unit: str, tail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msgspec.json.decode", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(InvalidRequestError, match=f"body: has more than {MAX_VALUES} values"):
        decode_body((head + ",".join([unit] * (MAX_VALUES + 2)) + tail).encode(), CompletionBody)


def test_long_text_full_of_signs_is_no_list_of_values() -> None:
    text = '[{",:' * MAX_VALUES
    body = json.dumps({"prompt": text}).encode()
    assert len(body) > IN_PLACE_BYTES
    assert decode_body(body, CompletionBody).prompt == text


def test_messages_and_variables_are_bounded() -> None:
    assert "has 4097 messages; at most 4096" in refused(ChatBody, {"messages": [USER] * 4097}).problem
    variables = {"chat_template_kwargs": {"tools": "x" * 70_000}}
    assert "at most 65536 are allowed" in refused(ChatBody, {"messages": [USER]} | variables).problem
    assert refused(ChatBody, {"messages": [USER], "chat_template_kwargs": [1]}).field == "chat_template_kwargs"
    deep = b'{"messages":[],"chat_template_kwargs":{"a":%b1%b}}' % (b"[" * 5000, b"]" * 5000)
    with pytest.raises(InvalidRequestError):
        read_body(deep, ChatBody)


def test_all_that_openais_client_may_send_is_known_by_name() -> None:
    for params, kind in ((ChatParams, ChatBody), (CompletionParams, CompletionBody), (ResponseParams, ResponsesBody)):
        assert set(get_type_hints(params)) <= set(kind.__struct_fields__)


def test_how_long_an_answer_may_be_is_told_to_the_template() -> None:
    asked = b'{"messages": [{"role": "user", "content": "a"}], "verbosity": "low"}'
    (chat,) = read_body(asked, ChatBody)[2]
    assert isinstance(chat, Chat)
    assert chat.variables["verbosity"] == "low"


@pytest.mark.parametrize("kind", ["input_audio", "file"])
def test_a_part_that_is_no_text_is_refused_by_its_type(kind: str) -> None:
    error = refused(ChatBody, {"messages": [{"role": "user", "content": [{"type": kind, kind: {"url": "data:a"}}]}]})
    assert str(error) == f"messages[0].content[0]: is of type '{kind}', must be a part of type 'text' with a text"
