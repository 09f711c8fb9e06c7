"""What is seen of a JSON text before it is decoded."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings, strategies as st

from router.api.wishes import json_shape
from router.api.wishes.json_shape import MAX_DEPTH, check_shape
from runtime.errors import InvalidRequestError


def expected(value: Any) -> int:
    """As the count should be, escaped characters aside."""
    match value:
        case list():
            return 1 + max(0, len(value) - 1) + sum(map(expected, value))
        case dict():
            return 1 + max(0, len(value) - 1) + json_shape.NAME_COST * len(value) + sum(map(expected, value.values()))
    return 0


signs = st.text(alphabet='\\",:[]{}nu aé', max_size=12)
trees = st.recursive(
    signs | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(signs, inner), max_leaves=20
)


@settings(max_examples=60, deadline=None)
@given(tree=trees, slice_bytes=st.integers(1, 40))
@example(tree=["\\", "\\\\", '"', '\\"', ","], slice_bytes=1)
def test_values_are_counted_wherever_texts_and_escapes_are_cut(tree: Any, slice_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_shape, "SLICE_BYTES", slice_bytes)
        patch.setattr(json_shape, "ESCAPES_PER_VALUE", 10**9)
        data = json.dumps(tree, ensure_ascii=False).encode()
        patch.setattr(json_shape, "MAX_VALUES", expected(tree))
        json_shape._check(data, None)
        patch.setattr(json_shape, "MAX_VALUES", expected(tree) - 1)
        with pytest.raises(InvalidRequestError, match="values"):
            json_shape._check(data, None)


def depth_of(value: Any) -> int:
    match value:
        case list():
            return 1 + max(map(depth_of, value), default=0)
        case dict():
            return 1 + max(map(depth_of, value.values()), default=0)
    return 0


@settings(max_examples=60, deadline=None)
@given(tree=trees, slice_bytes=st.integers(1, 40), allowed=st.integers(2, 5))
@example(tree=[[["[["]], {"{": ["]"]}], slice_bytes=1, allowed=2)
def test_depth_is_measured_wherever_texts_and_escapes_are_cut(tree: Any, slice_bytes: int, allowed: int) -> None:
    data = json.dumps({"first": 1, "second": tree, "third": [1]}, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_shape, "SLICE_BYTES", slice_bytes)
        patch.setattr(json_shape, "MAX_DEPTH", allowed)
        if depth_of(tree) + 1 <= allowed:
            json_shape._check(data, None)
            return
        with pytest.raises(InvalidRequestError) as refused:
            json_shape._check(data, None)
        assert refused.value.field == "second"


@settings(max_examples=60, deadline=None)
@given(tree=trees, allowed=st.integers(1, 5))
@example(tree=[["]"], "]", [["]", ["}"]]]], allowed=2)
def test_what_looks_flat_is_not_deep(tree: Any, allowed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_shape, "MAX_DEPTH", allowed)
        data = json.dumps(tree, ensure_ascii=False).encode()
        assert json_shape._may_be_deep(data) or depth_of(tree) <= allowed


def test_a_long_conversation_looks_flat() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": 'a "]}" b'}]}] * 200
    assert not json_shape._may_be_deep(json.dumps({"messages": messages}).encode())


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"[" * 10**6, "body"),
        (b'{"a":' * 10**5, "a"),
        (b'{"x":"\\"[","tools":' + b"[" * 500, "tools"),
        (b'{"' + b"n" * 10**5 + b'":' + b"[" * 500, "body"),
    ],
)
def test_the_field_that_is_too_deep_is_named(data: bytes, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"is nested more than {MAX_DEPTH} levels deep") as refused:
        check_shape(data)
    assert refused.value.field == field


ONE = '{"role": "user", "content": "a"}'
CALL = (
    '{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": %s}}]}'
)
PLACES = [
    ("/v1/chat/completions", '{"messages": [USER], "metadata": %s}', "metadata"),
    ("/v1/chat/completions", '{"messages": [USER], "chat_template_kwargs": {"a": %s}}', "chat_template_kwargs"),
    ("/v1/chat/completions", '{"messages": [CALL]}', "messages"),
    (
        "/v1/chat/completions",
        '{"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]}',
        "tools",
    ),
    ("/v1/completions", '{"prompt": "a", "guided_json": %s}', "guided_json"),
    (
        "/v1/completions",
        '{"prompt": "a", "response_format": {"type": "structural_tag", "format": {"type": "json_schema", '
        '"json_schema": %s}}}',
        "response_format",
    ),
    ("/v1/responses", '{"input": "a", "metadata": %s}', "metadata"),
    ("/v1/responses", '{"input": "a", "tools": [{"type": "function", "name": "f", "parameters": %s}]}', "tools"),
    (
        "/v1/messages",
        '{"max_tokens": 1, "messages": [USER], "tools": [{"name": "f", "input_schema": %s}]}',
        "tools",
    ),
    ("/v1/messages/count_tokens", '{"messages": [USER], "metadata": %s}', "metadata"),
    ("/tokenize", '{"prompt": %s}', "prompt"),
    ("/detokenize", '{"tokens": %s}', "tokens"),
]


def filled(body: str, nested: str) -> str:
    return body.replace("USER", ONE).replace("CALL", CALL).replace("%s", nested)


@pytest.mark.parametrize(("path", "body", "field"), PLACES, ids=[f"{path} {field}" for path, _, field in PLACES])
async def test_what_is_nested_too_deeply_is_refused_at_every_door(
    http: httpx.AsyncClient, path: str, body: str, field: str
) -> None:
    for depth in (200, 970, 20_000):
        for begin, end in (("[", "]"), ('{"a":', "}"), ('{"type":"array","items":', "}")):
            nested = begin * depth + "1" + end * depth
            answer = await http.post(path, content=filled(body, nested))
            said = answer.text
            assert answer.status_code == 400, said
            assert f"{field}: is nested more than {MAX_DEPTH} levels deep" in said


@pytest.mark.parametrize("depth", [200, 970, 9_000])
async def test_a_text_of_json_in_a_field_has_the_same_bound(http: httpx.AsyncClient, depth: int) -> None:
    nested = json.dumps('{"a":' * depth + "1" + "}" * depth)
    for path, body, field in (PLACES[2], PLACES[4]):
        answer = await http.post(path, content=filled(body, nested))
        assert answer.status_code == 400
        assert "is nested more than" in answer.text
        assert field in answer.text
