"""What is charged for a request's prompt is what it takes in memory, whatever it consists of."""

import json
import tracemalloc
from typing import Any

import pytest

from router.api.dialects.json_body import decode_body
from router.api.openai.types import ChatBody, CompletionBody
from router.api.wishes.held_bytes import prompt_bytes

NESTED = '{"a":' * 120 + "1" + "}" * 120


def user(**more: Any) -> dict[str, Any]:
    return {"role": "user", "content": "a", **more}


def called(arguments: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "i" * 500, "function": {"name": "n" * 500, "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": "a" * 200_000}),
        (CompletionBody, {"prompt": "a" * 200_000 + "\U0001f600"}),
        (CompletionBody, {"prompt": [5000] * 50_000}),
        (CompletionBody, {"prompt": ["ab" * 5000] * 60}),
        (ChatBody, {"messages": [user(content="")] * 4000}),
        (ChatBody, {"messages": [user(name="n" * 500, tool_call_id="i" * 500)] * 1000}),
        (ChatBody, {"messages": [called("{}")] * 1000}),
        (ChatBody, {"messages": [called('{{"a":[{}]}}'.format(",".join(["{}"] * 10_000)))] * 10}),
        (ChatBody, {"messages": [called(NESTED)] * 100}),
        (ChatBody, {"messages": [called('{{"a":[{}]}}'.format(",".join(["1.5"] * 10_000)))] * 10}),
        (ChatBody, {"messages": [user()], "chat_template_kwargs": {"a": [[]] * 15_000}}),
    ],
)
def test_a_prompt_is_charged_for_at_least_what_it_takes(kind: Any, body: dict[str, Any]) -> None:
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        prompts = decode_body(data, kind).prompts()
        charged = sum(map(prompt_bytes, prompts))
        _ = None
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before <= 1.2 * charged + 20_000
    assert charged <= 4 * (after - before) + 20_000
