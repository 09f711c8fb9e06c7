"""Input of every bad sort, sent to a real service over both APIs: refused in words that name the field and the limit,
never with a stack trace, and nobody else notices."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from baton_proto.generated import inference_pb2 as pb
from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, greedy, random_prompt
from tests.spine.worker_view import until_idle

JSON = {"content-type": "application/json"}
SHIP_ALL = {"router": {"placement": {"local_prefill_tokens": 0}}}
MAX_LEN = 4096  # of the tiny model
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ONE_MESSAGE = [{"role": "user", "content": "x"}]

COMPLETION_REFUSALS: list[tuple[dict[str, Any], str, str]] = [  # change of a sound body, field, what is said of it
    ({"prompt": ""}, "prompt", "at least one token"),
    ({"prompt": [5] * MAX_LEN}, "prompt", f"has {MAX_LEN} tokens"),
    ({"prompt": "a b " * 1_000_000}, "prompt", f"the model takes {MAX_LEN}"),
    ({"prompt": [5] * (MAX_LEN - 2), "max_tokens": 3}, "max_tokens", f"the model takes {MAX_LEN} in all"),
    ({"prompt": [512]}, "prompt", "0 to 511"),
    ({"prompt": [-1]}, "prompt", "0 to 511"),
    ({"prompt": [2**64]}, "prompt", "0 to 511"),
    ({"prompt": [[5], []]}, "prompt[1]", "is empty"),
    ({"model": "gpt"}, "model", "served: tiny-llama"),
    ({"temperature": 2.5}, "temperature", "at most 2.0"),
    ({"temperature": "hot"}, "temperature", "Expected `float | null`, got `str`"),
    ({"max_tokens": 10**30}, "max_tokens", f"the model takes {MAX_LEN}"),
    ({"seed": 2**63}, "seed", "at most 9223372036854775807"),
    ({"logit_bias": {"512": 1}}, "logit_bias", "0 to 511"),
    ({"logprobs": 21}, "logprobs", "at most 20"),
    ({"stop": [""]}, "stop", "at least one character"),
    ({"n": 17}, "n", "at most 16"),
]
CHAT_REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "x"}, "messages", "Expected `array`, got `str`"),
    ({"messages": [{"role": "user", "content": "\u0151" * MAX_LEN}]}, "messages", f"the model takes {MAX_LEN}"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "must be one of system"),
]
BAD_BODIES = (
    b"",
    b"{",
    b"null",
    b'{"prompt": NaN}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x"}'.decode().encode("utf-16"),
    b'{"prompt": "x", "unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
)


@pytest.fixture
async def service(tiny_model: Path) -> AsyncIterator[Service]:
    async with running_service(tiny_model, 1, 1, SHIP_ALL) as service:
        yield service


async def test_bad_input_is_refused_while_a_good_request_runs(service: Service, tiny_model: Path) -> None:
    prompt = random_prompt(100, seed=1)
    good = asyncio.create_task(ask(service.client, prompt, 400, ignore_eos=True))
    await refused_over_http(service)
    await refused_over_grpc(service)
    await the_longest_prompt_is_taken(service)
    answer = await good
    assert answer.token_ids == Oracle(tiny_model).greedy(prompt, 400, ignore_eos=True, guess=answer.token_ids)
    await until_idle(service)
    for name in service.supervisor.children:
        assert "Traceback" not in service.log(name)
    assert service.log("router-1").count("request refused") >= len(COMPLETION_REFUSALS) + len(CHAT_REFUSALS)


async def refused_over_http(service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.http_url, timeout=60) as http:
        for path, sound, refusals in (
            (COMPLETIONS, {"prompt": "x", "max_tokens": 3}, COMPLETION_REFUSALS),
            (CHAT, {"messages": ONE_MESSAGE, "max_tokens": 3}, CHAT_REFUSALS),
        ):
            for change, field, words in refusals:
                answer = await http.post(path, json=sound | change)
                assert answer.status_code == (404 if field == "model" else 400), change
                assert openai_error(answer)["param"] == field
                assert words in openai_error(answer)["message"]
        for body in BAD_BODIES:
            answer = await http.post(COMPLETIONS, content=body, headers=JSON)
            assert answer.status_code == 400, body[:40]
            assert openai_error(answer)["param"] in ("body", "prompt", "unknown")
        answer = await http.post(COMPLETIONS, json={"prompt": "a" * 10_000_000})
        assert (answer.status_code, openai_error(answer)["param"]) == (413, "body")
        for method, path, status in (("GET", CHAT, 405), ("DELETE", COMPLETIONS, 405), ("POST", "/v1/nothing", 404)):
            assert openai_error(answer := await http.request(method, path))
            assert answer.status_code == status


def openai_error(answer: httpx.Response) -> dict[str, Any]:
    """Checks the shape, too."""
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in json.dumps(error)
    return error


async def refused_over_grpc(service: Service) -> None:
    status = grpc.StatusCode
    for request, code, words in (
        (pb.GenerateRequest(), status.INVALID_ARGUMENT, "input: is missing"),
        (pb.GenerateRequest(text=""), status.INVALID_ARGUMENT, "text: is empty"),
        (pb.GenerateRequest(chat=pb.ChatMessages()), status.INVALID_ARGUMENT, "chat.messages: is empty"),
        (greedy([512], 3), status.INVALID_ARGUMENT, "tokens.ids: token id 512 is not in the vocabulary, 0 to 511"),
        (greedy([5] * MAX_LEN, 3), status.INVALID_ARGUMENT, f"tokens.ids: has {MAX_LEN} tokens"),
        (greedy([5], MAX_LEN), status.INVALID_ARGUMENT, f"max_tokens: is {MAX_LEN}, the prompt has 1 tokens"),
        (greedy([5], 3, min_p=float("nan")), status.INVALID_ARGUMENT, "min_p: is nan"),
        (pb.GenerateRequest(text="x", model="gpt"), status.NOT_FOUND, "served: tiny-llama"),
        (pb.GenerateRequest(text="a" * 10_000_000), status.RESOURCE_EXHAUSTED, "larger than max"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.client.generate(request, 30)
        assert caught.value.code() is code, caught.value.details()
        assert words in (caught.value.details() or "")


async def the_longest_prompt_is_taken(service: Service) -> None:
    answer = await service.client.generate(pb.GenerateRequest(tokens=pb.TokenIds(ids=[5] * (MAX_LEN - 1))), 60)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (MAX_LEN - 1, 1)
    assert answer.served_by[0].prefill_worker == "prefill-1"
