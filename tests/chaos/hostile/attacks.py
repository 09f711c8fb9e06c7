"""The table of attacks: what a stranger does until it is ended, and which strangers can do it."""

import asyncio
import itertools
import json
import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.chaos.hostile import connections
from tests.chaos.hostile.stranger import Stranger, Who, again
from tests.fuzz.hostile_asks import LINKS, written

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
EVERYONE: tuple[Who, ...] = ("nobody", "user", "page")
ON_WIRES: tuple[Who, ...] = ("nobody", "user")  # no page can do it
Posts = Iterator[tuple[str, Any]]
"""(path, body), for ever."""


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    work: Callable[[Stranger], Coroutine[Any, Any, None]]
    by: tuple[Who, ...] = EVERYONE


def posting(posts: Callable[[], Posts], at_once: int = 8) -> Callable[[Stranger], Coroutine[Any, Any, None]]:
    """`at_once` connections take the bodies in turns."""

    async def work(stranger: Stranger) -> None:
        bodies = posts()
        requests = (stranger.posted(path, body) for path, body in bodies)
        await asyncio.gather(*(again(stranger.http, requests) for _ in range(at_once)))

    return work


def asked(**options: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "a", "max_tokens": 16, **options}


def tool(parameters: Any, **told: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **told}}


def chat(**options: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 16, **options}


def formatted(schema: Any) -> tuple[str, Any]:
    """Asks for an answer that matches the schema, as OpenAI has it."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return CHAT, written(chat(response_format=form)[1]).encode()


def backtracking() -> Posts:
    texts = (
        "{" + " " * 1000,
        "{" + "\t" * 250_000,
        '"' + '\\"' * 120_000,
        "[" * 16_000,
        "{9," * 80_000,
        "(a?){9}" * 2000,
    )
    for text in itertools.cycle(texts):
        yield asked(guided_regex=text)
        yield asked(guided_grammar=f'start: "a" /{text}/')
        yield asked(guided_json={"type": "string", "description": text, "pattern": text})
        named = {"type": "object", "properties": {"a": {"type": "string", "pattern": text}}, "description": text}
        yield chat(tools=[tool(named, description=text[:100_000])], tool_choice="required")


def chained_schemas() -> Posts:
    for serial in itertools.count():
        for link in LINKS.values():
            named = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(1500)}
            schema = {"$ref": "#/$defs/d0", "$defs": named | {"d1500": {"type": "string", "title": str(serial)}}}
            yield formatted(schema)
            yield chat(tools=[tool({"type": "object", "properties": {"a": schema}})], tool_choice="required")


def deep_schemas() -> Posts:
    for depth in itertools.cycle((970, 490, 300, 5000)):
        for name in LINKS:
            yield formatted(f"@{name} {depth}")
            named = {"type": "object", "properties": {"a": f"@{name} {depth}"}}
            yield CHAT, written(chat(tools=[tool(named)], tool_choice="required")[1]).encode()


def heavy_schemas() -> Posts:
    for serial in itertools.count(1009, 2):
        yield asked(guided_json={"type": "integer", "multipleOf": serial})
        yield asked(guided_json={"type": "number", "multipleOf": serial / 1000})
        yield asked(guided_json={"type": "array", "items": {"enum": [str(i * serial) for i in range(3000)]}})


def late_faults() -> Posts:
    """Grammars that go wrong behind the first tokens of an answer."""
    for serial in itertools.count():
        yield asked(guided_regex=f"x{{6}}(.|\\n)*{serial % 10}(.|\\n){{{18 + serial % 9}}}y", max_tokens=200)
        schema = {
            "type": "object",
            "properties": {"a": {"type": "string"}},
            "patternProperties": {"^a": {"type": "integer"}},
        }
        yield asked(guided_json={**schema, "required": ["a"], "title": str(serial)}, max_tokens=200)


def large_texts() -> Posts:
    words = ("a b ", "relay ", "\u00e9\u4f60", " " * 1000, "<|im_end|>", "x" * 1000)
    for word in itertools.cycle(words):
        yield "/tokenize", {"prompt": word * (2_000_000 // len(word.encode()))}


def large_names() -> Posts:
    """Each another one, lest it is known already."""
    for serial in itertools.count():
        name = f"{serial}" + "i" * 7_500_000
        call = {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}
        yield RESPONSES, {"input": [{"role": "user", "content": "a"}, call], "max_output_tokens": 1}
        yield RESPONSES, {"input": "a", "metadata": {name[:1000]: name}, "max_output_tokens": 1}
        yield CHAT, {"messages": [{"role": "user", "content": "a", "name": name}], "max_tokens": 1}


def many_choices() -> Posts:
    bias = {str(i): i % 7 - 3 for i in range(400)}
    for serial in itertools.count():
        wanted = [f"{i} {serial}" for i in range(64)]
        yield COMPLETIONS, {"prompt": wanted, "n": 16, "max_tokens": 1, "logit_bias": bias if serial % 2 else {}}


def long_stops() -> Posts:
    stops = ["a" * 1023 + chr(98 + i) for i in range(16)]
    for _ in itertools.count():
        yield asked(stop=stops, n=16, max_tokens=64)


def kept_prompts() -> Posts:
    for serial, keep_s in enumerate(itertools.cycle((-1, 3600, 1e308, "x"))):
        yield asked(prompt=f"{serial} " * 300, keep_cache_s=keep_s, max_tokens=1)


async def bad_keys(stranger: Stranger) -> None:
    def requests() -> Iterator[bytes]:
        while True:
            yield stranger.posted(COMPLETIONS, asked()[1], {"Authorization": f"Bearer {secrets.token_hex(32)}"})

    await asyncio.gather(*(again(stranger.http, requests()) for _ in range(16)))


async def upgrades(stranger: Stranger) -> None:
    more: Mapping[str, str] = {"Upgrade": "h2c", "Connection": "Upgrade, HTTP2-Settings", "HTTP2-Settings": "AAMAAABk"}
    data = stranger.posted(COMPLETIONS, asked(prompt="a " * 50)[1], more)
    await asyncio.gather(*(again(stranger.http, itertools.repeat(data)) for _ in range(16)))


async def large_heads(stranger: Stranger) -> None:
    more = {f"X-{i}": "x" * 7000 for i in range(10)}
    data = stranger.posted(COMPLETIONS, json.dumps(asked()[1]).encode(), more)
    await asyncio.gather(*(again(stranger.http, itertools.repeat(data)) for _ in range(16)))


ATTACKS: tuple[Attack, ...] = (
    Attack("backtracking", posting(backtracking)),
    Attack("chained schemas", posting(chained_schemas)),
    Attack("deep schemas", posting(deep_schemas)),
    Attack("heavy schemas", posting(heavy_schemas)),
    Attack("late faults", posting(late_faults)),
    Attack("large texts", posting(large_texts, at_once=16)),
    Attack("large names", posting(large_names, at_once=4)),
    Attack("many choices", posting(many_choices)),
    Attack("long stops", posting(long_stops, at_once=4)),
    Attack("kept prompts", posting(kept_prompts)),
    Attack("bad keys", bad_keys, ("nobody", "page")),
    Attack("upgrades", upgrades, ON_WIRES),
    Attack("large heads", large_heads, ON_WIRES),
    Attack("idle connections", connections.idle, ("nobody",)),
    Attack("slow heads", connections.slow_heads, ("nobody",)),
    Attack("slow bodies", connections.slow_bodies, ON_WIRES),
    Attack("stuck viewers", connections.stuck_viewers),
    Attack("unread answers", connections.unread_answers),
    Attack("header floods", connections.header_floods, ("nobody",)),
    Attack("endless heads", connections.endless_heads, ("nobody",)),
    Attack("resets", connections.resets, ON_WIRES),
    Attack("idle channels", connections.idle_channels, ("nobody",)),
)
BY_NAME = {attack.name: attack for attack in ATTACKS}
