import asyncio
import math
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from router.api.http.server import HttpServer, serve_http
from router.api.serving.app import create_app
from router.views.scrape_targets import Target
from tests.router.http_client import CHAT, COMPLETION, USER, events
from tests.router.scripted_generator import MODEL, ScriptedGenerator, make_frontend, tiny_tokenizer

TEXT = "It is 42, she said: ça va, 😀!"


@pytest.fixture
def generator(tiny_model: Path) -> ScriptedGenerator:
    return ScriptedGenerator(tiny_tokenizer(tiny_model), [TEXT, "Another one."])


@pytest.fixture
async def server(generator: ScriptedGenerator) -> AsyncIterator[HttpServer]:
    async with await serve_http(
        create_app(make_frontend(generator), lambda: b"baton_up 1\n"), "127.0.0.1", 0
    ) as server:
        yield server


async def test_a_chat_completion_has_openais_shape(client: openai.AsyncOpenAI, generator: ScriptedGenerator) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=USER)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("stop", 0, None)
    assert answer.usage is not None
    prompt = generator.tokenizer.chat(USER)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(generator.answers[0])
    assert answer.usage.total_tokens == len(prompt) + len(generator.answers[0])
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert generator.requests[0].prompt.tolist() == prompt.tolist()


async def test_streamed_chat_adds_up_to_the_whole(client: openai.AsyncOpenAI) -> None:
    stream: Any = await client.chat.completions.create(
        model=MODEL,
        messages=USER,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    contents = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(contents) == TEXT
    assert "😀" in "".join(content for content in contents if "😀" in content)
    assert "\ufffd" not in "".join(contents)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_told_where_they_are_asked_for(
    http: httpx.AsyncClient, generator: ScriptedGenerator, stream: bool
) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION | {"prompt": ["One", "Two"]})):
        asked = body | {"n": 2, "return_token_ids": True, "max_tokens": 100}
        if stream:
            answers = [event for event in await events(http, path, asked) if event != "[DONE]"]
        else:
            answers = [(await http.post(path, json=asked)).json()]
        prompts = [request.prompt.tolist() for request in generator.requests[-2 if body is not CHAT else -1 :]]
        choices = [choice for answer in answers for choice in answer["choices"]]
        told: dict[int, list[int]] = {}
        for choice in choices:
            told.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
        assert told == {index: generator.answers[index % 2] for index in range(2 * len(prompts))}
        if body is CHAT:
            assert [answer["prompt_token_ids"] for answer in answers if "prompt_token_ids" in answer] == prompts
        else:
            begun = {choice["index"]: choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice}
            assert begun == {index: prompts[index // 2] for index in range(4)}
    plain = (await http.post("/v1/chat/completions", json=CHAT)).json()
    assert "token_ids" not in plain["choices"][0]
    assert "prompt_token_ids" not in plain


async def test_chat_logprobs_name_token_bytes_and_alternatives(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=USER,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == len(generator.answers[0])
    spelled = b"".join(bytes(token.bytes or ()) for token in logprobs.content)
    assert spelled.decode() == TEXT + "<|im_end|>"
    first = logprobs.content[0]
    assert (first.token, first.logprob) == ("I", -0.5)
    assert [top.logprob for top in first.top_logprobs] == [-0.5, -1.5, -2.5]
    assert first.top_logprobs[0].token == "I"


async def test_choices_are_streamed_by_index(client: openai.AsyncOpenAI) -> None:
    stream: Any = await client.chat.completions.create(model=MODEL, messages=USER, n=2, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [TEXT, "Another one."]


async def test_a_completion_has_openais_shape(client: openai.AsyncOpenAI, generator: ScriptedGenerator) -> None:
    answer = await client.completions.create(model=MODEL, prompt="What is", max_tokens=500, n=2)
    assert answer.object == "text_completion"
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, TEXT, "stop"),
        (1, "Another one.", "stop"),
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(generator.requests[0].prompt)


async def test_completions_are_16_tokens_long_unless_told_otherwise(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="What is")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


async def test_completion_logprobs_say_where_each_token_begins(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="What is", max_tokens=500, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs == [-0.5] * len(logprobs.tokens)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if token != "<|im_end|>":
            assert TEXT[offset : offset + len(token)] == token
    assert all(1 <= len(top) <= 2 for top in logprobs.top_logprobs)


async def test_several_prompts_number_their_choices_through(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    prompts: list[list[int]] = [[5, 6], [7, 8, 9]]
    answer = await client.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=500)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, TEXT),
        (1, "Another one."),
        (2, TEXT),
        (3, "Another one."),
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5
    assert sorted(request.prompt.tolist() for request in generator.requests) == prompts
    assert len({request.request_id for request in generator.requests}) == 2
    stream: Any = await client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=500, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [TEXT, TEXT]


async def test_models_are_listed_and_retrieved(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).object == "model"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; served: tiny"):
        await client.models.retrieve("other")


async def test_options_that_are_no_sampling_parameters_arrive(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    more = {"priority": -2}
    asked: Any = {"max_completion_tokens": 9, "stop": ["x", "y"], "n": 2}
    await client.chat.completions.create(model=MODEL, messages=USER, **asked, extra_body=more)
    (request,) = generator.requests
    assert [sampling.max_tokens for sampling in request.sampling] == [9, 9]
    assert (request.stop, request.priority) == (("x", "y"), -2)


async def test_chat_events_are_exactly_openais(http: httpx.AsyncClient, generator: ScriptedGenerator) -> None:
    generator.answers = [[*generator.answers[0][:1], 2]]
    chunks = await events(http, "/v1/chat/completions", CHAT)
    head = {key: chunks[0][key] for key in ("id", "created", "model", "object")}

    def chunk(delta: dict[str, str], finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return head | {"choices": [choice]}

    opening = chunk({"role": "assistant", "content": ""}, None)
    assert chunks == [opening, chunk({"content": "I"}, None), chunk({}, "stop"), "[DONE]"]


async def test_usage_comes_last_and_is_null_before(http: httpx.AsyncClient) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        *chunks, last, done = await events(http, path, body | {"stream_options": {"include_usage": True}})
        assert done == "[DONE]"
        assert last["choices"] == []
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 1
        assert all(chunk["usage"] is None for chunk in chunks)


async def test_usage_so_far_stands_in_every_chunk_for_who_wants_it(
    http: httpx.AsyncClient, generator: ScriptedGenerator
) -> None:
    generator.answers = [[5, 6, 7, 2], [8, 2]]
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 2}
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        *chunks, last, _ = await events(http, path, body | options)
        num_prompt = last["usage"]["prompt_tokens"]
        told: dict[int, list[int]] = {0: [], 1: []}
        for chunk in chunks:
            num = chunk["usage"]["completion_tokens"]
            told[chunk["choices"][0]["index"]].append(num)
            assert chunk["usage"] == {
                "prompt_tokens": num_prompt,
                "completion_tokens": num,
                "total_tokens": num_prompt + num,
            }
        for nums, whole in zip(told.values(), (4, 2), strict=True):
            assert (nums, nums[-1]) == (sorted(nums), whole)
        assert told[0][0] == (0 if body is CHAT else 1)
        assert last["usage"]["completion_tokens"] == 6
    without = options["stream_options"] | {"include_usage": False}  # type: ignore[operator]
    chunks = await events(http, "/v1/completions", COMPLETION | {"stream_options": without})
    assert all("usage" not in chunk for chunk in chunks[:-1])


async def test_usage_so_far_of_several_prompts_is_each_ones_own(http: httpx.AsyncClient) -> None:
    body = COMPLETION | {"prompt": [[5, 6], [5, 6, 7]], "n": 2, "max_tokens": 1}
    *chunks, _, _ = await events(
        http,
        "/v1/completions",
        body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    lengths = {chunk["choices"][0]["index"]: chunk["usage"]["prompt_tokens"] for chunk in chunks}
    assert lengths == {0: 2, 1: 2, 2: 3, 3: 3}


async def test_stop_strings_never_show_even_in_part(http: httpx.AsyncClient) -> None:
    chunks = await events(http, "/v1/completions", COMPLETION | {"max_tokens": 500, "stop": "42, she said"})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "It is "
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


async def test_what_ended_an_answer_is_told(http: httpx.AsyncClient, generator: ScriptedGenerator) -> None:
    last = generator.answers[0][-1]
    for options, reason in (({"stop": ["she", " 42"]}, " 42"), ({"stop_token_ids": [last]}, last), ({}, None)):
        (choice,) = (await http.post("/v1/chat/completions", json=CHAT | options)).json()["choices"]
        assert (choice["finish_reason"], choice.get("stop_reason")) == ("stop", reason)
        *_, chunk, _ = await events(http, "/v1/completions", COMPLETION | {"max_tokens": 99} | options)
        assert chunk["choices"][0].get("stop_reason") == reason


async def test_tokens_of_log_probabilities_are_told_by_their_ids_for_who_wants_it(
    http: httpx.AsyncClient, generator: ScriptedGenerator
) -> None:
    names = [f"token_id:{token_id}" for token_id in generator.answers[0]]
    as_ids = {"return_tokens_as_token_ids": True, "max_tokens": 99}
    told = (await http.post("/v1/completions", json=COMPLETION | as_ids | {"logprobs": 1})).json()["choices"][0]
    assert told["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names, told["logprobs"]["top_logprobs"], strict=True))
    told = (await http.post("/v1/chat/completions", json=CHAT | as_ids | {"logprobs": True})).json()["choices"][0]
    assert [(one["token"], bytes(one["bytes"]).decode()) for one in told["logprobs"]["content"]] == [
        (name, name) for name in names
    ]


async def test_an_echo_of_a_chat_begins_with_the_message_that_goes_on(http: httpx.AsyncClient) -> None:
    messages = [*USER, {"role": "assistant", "content": "So: "}]
    goes_on = {"messages": messages, "continue_final_message": True, "echo": True}
    answer = (await http.post("/v1/chat/completions", json=CHAT | goes_on)).json()
    assert answer["choices"][0]["message"]["content"] == f"So: {TEXT}"
    chunks = await events(http, "/v1/chat/completions", CHAT | goes_on)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == f"So: {TEXT}"
    answer = (await http.post("/v1/chat/completions", json=CHAT | {"echo": True})).json()
    assert answer["choices"][0]["message"]["content"] == TEXT


async def test_a_request_id_may_stand_in_the_body(http: httpx.AsyncClient, generator: ScriptedGenerator) -> None:
    answer = await http.post("/v1/completions", json=COMPLETION | {"request_id": "mine"})
    assert (answer.json()["id"], answer.headers["x-request-id"]) == ("cmpl-mine", "mine")
    headers = {"x-request-id": "theirs"}
    answer = await http.post("/v1/completions", json=COMPLETION | {"request_id": "mine"}, headers=headers)
    assert answer.json()["id"] == "cmpl-theirs"
    assert generator.requests[-1].request_id.startswith("theirs-")


async def test_request_ids_are_echoed_or_made(http: httpx.AsyncClient, generator: ScriptedGenerator) -> None:
    for stream in (False, True):
        answer = await http.post(
            "/v1/completions", json=COMPLETION | {"stream": stream}, headers={"x-request-id": "r7"}
        )
        assert answer.headers["x-request-id"] == "r7"
        assert generator.requests[-1].request_id.startswith("r7-")
    assert (await http.post("/v1/completions", json=COMPLETION)).json()["id"].startswith("cmpl-")
    refused = await http.post("/v1/completions", json={}, headers={"x-request-id": "r8"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "r8")
    refused = await http.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "a b"})
    assert refused.json()["error"]["param"] == "request_id"


async def test_infinite_logprobs_stay_json(
    http: httpx.AsyncClient, generator: ScriptedGenerator, monkeypatch: Any
) -> None:
    from baton_proto.sampling import TokenLogprobs

    monkeypatch.setattr(
        "tests.router.scripted_generator.logprobs_of", lambda *_: TokenLogprobs(-math.inf, [(5, -math.inf)])
    )
    answer = await http.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "top_logprobs": 1})
    token = answer.json()["choices"][0]["logprobs"]["content"][0]
    assert (token["logprob"], token["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


async def test_health_readiness_and_metrics(http: httpx.AsyncClient, generator: ScriptedGenerator) -> None:
    assert (await http.get("/health")).json() == {"status": "ok"}
    assert (await http.get("/ready")).json() == {"status": "ready"}
    metrics = await http.get("/metrics")
    assert metrics.text == "baton_up 1\n"
    assert metrics.headers["content-type"].startswith("text/plain")

    async def targets() -> list[Target]:
        return [Target(["127.0.0.1:1"], {"component": "router"})]

    app = create_app(make_frontend(generator, not_ready="no worker can serve"), lambda: b"", targets)
    async with await serve_http(app, "127.0.0.1", 0) as server, httpx.AsyncClient(timeout=60) as client:
        answer = await client.get(f"http://127.0.0.1:{server.port}/ready")
        found = await client.get(f"http://127.0.0.1:{server.port}/metrics/targets")
    assert (answer.status_code, answer.json()) == (503, {"status": "no worker can serve"})
    assert found.json() == [{"targets": ["127.0.0.1:1"], "labels": {"component": "router"}}]
    assert found.headers["content-type"] == "application/json", "Prometheus insists"


async def test_stopping_waits_for_requests_in_flight_and_then_cancels_them(
    server: HttpServer, http: httpx.AsyncClient, generator: ScriptedGenerator
) -> None:
    generator.stuck_at = 2
    answer = asyncio.create_task(http.post("/v1/completions", json=COMPLETION))
    async with asyncio.timeout(30):
        while not generator.requests:
            await asyncio.sleep(0.005)
    await server.stop(grace_s=0.2)
    assert generator.cancelled.is_set()
    with pytest.raises(httpx.HTTPError):
        (await answer).raise_for_status()


async def test_a_port_of_who_does_not_share_it_is_an_os_error(generator: ScriptedGenerator) -> None:
    app = create_app(make_frontend(generator), lambda: b"")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        await serve_http(app, "127.0.0.1", taken.getsockname()[1])
