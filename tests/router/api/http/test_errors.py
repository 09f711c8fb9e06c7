import asyncio
import errno
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.api.http.server import HttpServer, serve_http
from router.api.serving.app import create_app
from runtime.errors import DeadlineError, OverloadedError, UnavailableError, WorkerLostError
from runtime.grammar.compiler import GrammarCompiler
from tests.clock import Clock
from tests.router.http_client import CHAT, COMPLETION, events
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer
from tests.tiny_model import EOS_TOKEN_IDS, VOCAB_SIZE


@pytest.fixture
def generator(tiny_model: Path) -> ScriptedGenerator:
    return ScriptedGenerator(tiny_tokenizer(tiny_model), ["It is 42, she said."])


@pytest.fixture(scope="module")
def grammars(tiny_model: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny_model, VOCAB_SIZE, EOS_TOKEN_IDS)


@pytest.fixture
async def server(generator: ScriptedGenerator, grammars: GrammarCompiler) -> AsyncIterator[HttpServer]:
    app = create_app(make_frontend(generator, grammars=grammars), lambda: b"")
    async with await serve_http(app, "127.0.0.1", 0) as server:
        yield server


SCHEMA_FIELD = "response_format.json_schema.schema"
CHAT_REFUSALS: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"messages": None}, 400, "messages", None),
    ({"messages": []}, 400, "messages", None),
    ({"messages": [{"content": "x"}]}, 400, "messages[0].role", None),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role", None),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content", None),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", None),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0]", None),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "messages[0].tool_calls[0].function", None),
    ({"temperature": "hot"}, 400, "temperature", None),
    ({"max_tokens": 1.5}, 400, "max_tokens", None),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens", None),
    ({"messages": [{"role": "user", "content": "ő" * 2100}]}, 400, "messages", "context_length_exceeded"),
    ({"max_tokens": 5000}, 400, "max_tokens", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": "a b" * 9000}]}, 400, "messages", "context_length_exceeded"),
    ({"model": "gpt-5"}, 404, "model", "model_not_found"),
    ({"top_logprobs": 2}, 400, "top_logprobs", None),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function", None),
    ({"response_format": {"type": "yaml"}}, 400, "response_format.type", None),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, 400, SCHEMA_FIELD, None),
    ({"guided_regex": "(a"}, 400, "guided_regex", None),
    ({"logit_bias": {"word": 1}}, 400, "logit_bias", None),
    ({"stream_options": 1}, 400, "stream_options", None),
    ({"seed": 2**63}, 400, "seed", None),
    ({"n": 99}, 400, "n", None),
    ({"moderation": {"model": "omni"}}, 400, "moderation", None),
    ({"prompt_cache_options": {"ttl": "1y"}}, 400, "prompt_cache_options.ttl", None),
    ({"prompt_cache_options": {"tll": "30m"}}, 400, "prompt_cache_options.tll", None),
]
COMPLETION_REFUSALS: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"prompt": ""}, 400, "prompt", None),
    ({"prompt": []}, 400, "prompt", None),
    ({"prompt": [[]]}, 400, "prompt", None),
    ({"prompt": ["a", ""]}, 400, "prompt[1]", None),
    ({"prompt": ["a", 1]}, 400, "prompt", None),
    ({"prompt": [512]}, 400, "prompt", None),
    ({"prompt": ["a"] * 65}, 400, "prompt", None),
    ({"prompt": {"text": "a"}}, 400, "prompt", None),
    ({"best_of": 2}, 400, "best_of", None),
    ({"suffix": "end"}, 400, "suffix", None),
    ({"best_of": 3}, 400, "best_of", None),
    ({"logprobs": 21}, 400, "logprobs", None),
    ({"logprobs": True}, 400, "logprobs", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "sound", "refusals"),
    [("/v1/chat/completions", CHAT, CHAT_REFUSALS), ("/v1/completions", COMPLETION, COMPLETION_REFUSALS)],
)
async def test_bad_input_is_refused_as_openai_does(
    http: httpx.AsyncClient,
    generator: ScriptedGenerator,
    path: str,
    sound: dict[str, Any],
    refusals: list[tuple[dict[str, Any], int, str, str | None]],
    stream: bool,
) -> None:
    for change, status, param, code in refusals:
        answer = await http.post(path, json=sound | change | {"stream": stream})
        error = answer.json()["error"]
        refused = (answer.status_code, error["type"], error["param"], error["code"])
        assert refused == (status, "invalid_request_error", param, code), change
        assert error["message"].startswith(f"{param}: ")
    assert generator.requests == []


async def test_a_frontend_without_a_compiler_refuses_grammars(generator: ScriptedGenerator) -> None:
    async with (
        await serve_http(create_app(make_frontend(generator), lambda: b""), "127.0.0.1", 0) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as http,
    ):
        answer = await http.post("/v1/chat/completions", json=CHAT | {"response_format": {"type": "json_object"}})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "response_format: is not supported here"


async def test_what_is_refused_is_not_sent_back_whole(http: httpx.AsyncClient) -> None:
    long = "long " * 10_000
    for change in ({"model": long}, {"messages": [{"role": long, "content": "x"}]}):
        answer = await http.post("/v1/chat/completions", json=CHAT | change)
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 1000


async def test_malformed_json_is_refused(http: httpx.AsyncClient) -> None:
    for body in (b"", b"{", b'{"model": "\xff"}', b"[" * 100_000, b'{"prompt": "\\ud800"}', b"[]", b"1e999"):
        answer = await http.post("/v1/completions", content=body)
        assert answer.status_code == 400, body[:30]
        assert answer.json()["error"]["param"] in ("body", "prompt")


@pytest.mark.parametrize("text", ["\\ud83d", "\\ud83d x", "x \\udc00", "\\ud83d\\u0041"])
async def test_half_an_emoji_is_called_what_it_is(http: httpx.AsyncClient, text: str) -> None:
    answer = await http.post("/v1/completions", content=f'{{"prompt": "{text}"}}')
    assert answer.status_code == 400
    assert "is half a character" in answer.json()["error"]["message"]


async def test_escaped_characters_are_no_problem(http: httpx.AsyncClient, generator: ScriptedGenerator) -> None:
    answer = await http.post("/v1/completions", content=r'{"prompt": "\ud83d\ude00 \\ud83d"}')
    assert answer.status_code == 200
    assert generator.tokenizer.decode(generator.requests[0].prompt.tolist()) == "😀 \\ud83d"


async def test_a_client_that_does_not_read_for_a_minute_loses_its_answer(
    server: HttpServer, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.api.http.watched_transport.READ_TIMEOUT_S", 0.2)
    generator.answers = [[5] * 100_000]
    body = json.dumps(COMPLETION | {"stream": True, "max_tokens": 4000, "n": 16, "logprobs": 20}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    writer.write(head % len(body) + body)
    await asyncio.wait_for(generator.cancelled.wait(), 30)
    writer.transport.abort()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_fields_that_change_nothing_are_taken(http: httpx.AsyncClient) -> None:
    harmless: dict[str, Any] = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "functions": None,
        "user": "me",
        "top_logprobs": 0,
        "verbosity": "low",
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    }
    assert (await http.post("/v1/chat/completions", json=CHAT | harmless)).status_code == 200
    harmless = {"echo": False, "suffix": "", "best_of": 1, "logit_bias": None, "stop": None, "stream": None}
    assert (await http.post("/v1/completions", json=COMPLETION | harmless)).status_code == 200


async def test_text_parts_and_the_developer_role_become_what_templates_know(
    http: httpx.AsyncClient, generator: ScriptedGenerator
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert (await http.post("/v1/chat/completions", json={"messages": messages})).status_code == 200
    prompt = generator.tokenizer.decode(generator.requests[0].prompt.tolist(), skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>")


async def test_bodies_over_the_limit_are_refused_announced_or_not(http: httpx.AsyncClient) -> None:
    big = json.dumps(COMPLETION | {"prompt": "a" * 10_000_000}).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(big), 1 << 16):
            yield big[start : start + (1 << 16)]

    for content in (big, chunks()):
        answer = await http.post("/v1/completions", content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "body: is larger than 1048576 bytes"
    assert (await http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_unknown_paths_and_methods_are_refused_as_openai_does(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "GET /v1/chat/completions: the method there is POST"
    answer = await http.post("/v1/audio/speech", json={})
    assert answer.status_code == 404
    assert (
        answer.json()["error"]["message"]
        == "POST /v1/audio/speech: is not served here; GET /openapi.json lists what is"
    )


@pytest.mark.parametrize(
    ("error", "status", "code", "words"),
    [
        (OverloadedError("queue", 8, 1.2), 429, "overloaded", "the queue holds its limit of 8 requests"),
        (UnavailableError("the router is draining"), 503, "unavailable", "the router is draining"),
        (WorkerLostError("decode-0", "died"), 503, "unavailable", "worker decode-0: died"),
        (DeadlineError("the request", 2.0), 504, "deadline_exceeded", "did not finish within 2.0 s"),
        (OSError(errno.EMFILE, "secret"), 503, "unavailable", "no more open files (ulimit -n)"),
        (ZeroDivisionError("secret"), 500, "internal_error", "internal error; request r9"),
    ],
)
async def test_failures_have_their_status_and_no_stack_trace(
    http: httpx.AsyncClient, generator: ScriptedGenerator, error: Exception, status: int, code: str, words: str
) -> None:
    generator.error = error
    for stream in (False, True):
        headers = {"x-request-id": "r9"}
        answer = await http.post("/v1/chat/completions", json=CHAT | {"stream": stream}, headers=headers)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == code
        assert words in answer.json()["error"]["message"]
        assert "secret" not in answer.text
    assert answer.headers.get("retry-after") == {429: "2", 503: "1"}.get(status)


async def test_a_failure_in_mid_stream_is_the_last_event(http: httpx.AsyncClient, generator: ScriptedGenerator) -> None:
    generator.error, generator.error_at = ZeroDivisionError("secret"), 3
    chunks = await events(http, "/v1/chat/completions", CHAT)
    assert [set(chunk) == {"error"} for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(chunks)


async def test_one_failing_prompt_of_several_ends_them_all(
    http: httpx.AsyncClient, generator: ScriptedGenerator
) -> None:
    generator.error, generator.error_at = UnavailableError("gone"), 2
    answer = await http.post("/v1/completions", json=COMPLETION | {"prompt": ["a", "b", "c"]})
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "gone")


@pytest.mark.parametrize("stuck_at", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_a_client_that_leaves_cancels_its_request(
    server: HttpServer, generator: ScriptedGenerator, stuck_at: int, stream: bool, prompt: Any
) -> None:
    generator.stuck_at = stuck_at
    body = json.dumps(COMPLETION | {"prompt": prompt, "stream": stream}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    async with asyncio.timeout(30):
        while not generator.requests:
            await asyncio.sleep(0.005)
        writer.close()
        await generator.cancelled.wait()


async def test_a_timeout_header_sets_the_deadline(
    http: httpx.AsyncClient, generator: ScriptedGenerator, clock: Clock
) -> None:
    await http.post("/v1/completions", json=COMPLETION)
    await http.post("/v1/completions", json=COMPLETION, headers={"x-request-timeout-s": "5"})
    default, wanted = (request.deadline_s for request in generator.requests)
    assert default - wanted == pytest.approx(55)
    for bad in ("soon", "0", "nan", "-1"):
        answer = await http.post("/v1/completions", json=COMPLETION, headers={"x-request-timeout-s": bad})
        assert answer.json()["error"]["param"] == "x-request-timeout-s"
