"""No id and no name of any protocol is longer than a name: what is kept beside the texts of a request is short."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import inspect

from baton_proto.generated import inference_pb2 as pb
from router.api.dialects.json_body import decode_body
from router.api.dialects.tolerant import tolerant
from router.api.grpc.messages import prompt_of
from router.api.messages.fields import CountBody, MessagesBody
from router.api.openai.types import ChatBody, CompletionBody
from router.api.pages.tokenization import DetokenizeBody, TokenizeBody
from router.api.responses.fields import ResponsesBody
from router.api.wishes.names import MAX_NAME_CHARS
from runtime.errors import InvalidRequestError

STRICT: list[Any] = [ChatBody, CompletionBody, ResponsesBody, MessagesBody, CountBody]
BODIES: list[Any] = [*STRICT, *map(tolerant, STRICT), TokenizeBody, DetokenizeBody]
TEXTS = {"content", "text", "refusal", "reasoning", "reasoning_content", "arguments", "input", "output", "instructions"}
TEXTS |= {"prompt", "stop", "stop_sequences", "thinking", "system", "bad_words"}
"""Fields that a template, the context's length or a bound of their own limits."""


def unbounded(kind: inspect.Type, where: str) -> Iterator[str]:
    """Paths of texts without a bound, but those of TEXTS."""
    match kind:
        case inspect.StrType(max_length=None):
            if where.rpartition(".")[2].strip("[]") not in TEXTS and ".vllm_xargs." not in where:
                yield where
        case inspect.UnionType(types=types):
            for each in types:
                yield from unbounded(each, where)
        case inspect.ListType(item_type=item) | inspect.CollectionType(item_type=item):
            yield from unbounded(item, where)
        case inspect.DictType(key_type=key, value_type=value):
            yield from unbounded(key, f"{where}.key")
            yield from unbounded(value, f"{where}.value")
        case inspect.StructType(fields=fields):
            for field in fields:
                yield from unbounded(field.type, f"{where}.{field.name}")


@pytest.mark.parametrize("body", BODIES)
def test_each_text_of_a_body_is_a_text_of_the_prompt_or_has_a_bound(body: Any) -> None:
    assert not set(unbounded(inspect.type_info(body), body.__name__))


LONG = "x" * (MAX_NAME_CHARS + 1)
CALL = {"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}"}
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (ChatBody, {"messages": [USER | {"name": LONG}]}, "messages[0].name"),
        (ChatBody, {"messages": [USER], "model": LONG}, "model"),
        (ResponsesBody, {"input": [CALL | {"call_id": LONG}]}, "input[0].call_id"),
        (ResponsesBody, {"input": "a", "previous_response_id": LONG}, "previous_response_id"),
        (ResponsesBody, {"input": "a", "metadata": {"k": LONG}}, "metadata[...]"),
    ],
)
def test_a_long_name_is_refused_with_its_field_its_limit_and_the_way_out(kind: Any, body: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_body(json.dumps(body).encode(), kind)
    assert str(caught.value) == f"{field}: is longer than the 512 characters that are allowed; give a shorter one"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.ChatMessage(role="user", name=LONG), "name"),
        (pb.ChatMessage(role="tool", tool_call_id=LONG), "tool_call_id"),
        (pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id=LONG, name="n")]), "tool_calls[0].id"),
        (pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="i", name=LONG)]), "tool_calls[0].name"),
    ],
)
def test_so_it_is_over_grpc(message: pb.ChatMessage, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        prompt_of(pb.GenerateRequest(chat=pb.ChatMessages(messages=[message])))
    assert caught.value.field == f"chat.messages[0].{field}"
    assert "give a shorter one" in caught.value.problem
