"""Prompts with images, which vLLM makes tokens of, in an external server and inside workers: its own answers, prefixes
that are found by what the images show, and a server or a worker that is killed in mid-answer."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from baton_proto.generated import inference_pb2 as pb
from tests.service import Service, running_service
from tests.spine.worker_view import until_idle, until_tree_is_right
from tests.vllm.environment import LIMIT_S, PATIENCE_S
from tests.vllm.server import BLOCK, MODEL, VllmServer
from tests.vllm.test_external_workers import MAX_TOKENS, sections
from tests.vllm.test_workers import sections as vllm_sections
from tests.vllm.tiny_idefics import MARK, PATCHES, picture, write_tiny_idefics

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]

CHAT = "/v1/chat/completions"
LONG = "The streets are empty and the shops are closed. " * 6
RED, BLUE = ({"type": "image_url", "image_url": {"url": picture(colour)}} for colour in ("red", "blue"))
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
GREEDY |= {"return_token_ids": True}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def user(*parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


async def test_images_go_to_servers_that_take_them(vllm_python: Path, tmp_path: Path) -> None:
    """One test, because the server takes a minute to start."""
    model = write_tiny_idefics(tmp_path / "idefics")
    server = VllmServer(vllm_python, tmp_path / "vllm.log", MAX_TOKENS, 256, ["--enable-scale-out"], model=model)
    try:
        await server.start()
        others = sections(gpu_one=server) | {"served_model_name": MODEL}
        others["router"] |= {"no_worker_timeout_s": PATIENCE_S}
        async with running_service(model, 0, 0, **others) as service:
            async with httpx.AsyncClient(base_url=service.http_url, timeout=PATIENCE_S) as ours:
                await answers_are_those_of_the_server(ours, server)
                await the_next_turn_finds_the_images_blocks(service, ours)
                await every_dialect_has_images(ours)
                await what_cannot_be_is_refused(ours)
                await a_kill_costs_no_token(ours, server.kill, lambda: restarted(server))
            assert "blocks that routers will not find" not in service.log("gpu_one")
    finally:
        await server.close()


async def test_images_go_to_vllm_inside_workers(vllm_python: Path, tmp_path: Path) -> None:
    """The answers of a server that stands by itself; with workers for prompts alone, which get none with images."""
    model = write_tiny_idefics(tmp_path / "idefics")
    server = VllmServer(vllm_python, tmp_path / "vllm.log", MAX_TOKENS, 256, model=model)
    others = vllm_sections(vllm_python) | {"served_model_name": MODEL}
    others["router"] = {"no_worker_timeout_s": PATIENCE_S, "placement": {"local_prefill_tokens": 0}}
    try:
        await server.start()
        async with running_service(model, 1, 1, **others) as service:
            async with httpx.AsyncClient(base_url=service.http_url, timeout=PATIENCE_S) as ours:
                await answers_are_those_of_the_server(ours, server)
                await server.stop()
                await the_next_turn_finds_the_images_blocks(service, ours)
                await every_dialect_has_images(ours)
                await what_cannot_be_is_refused(ours)
                (worker,) = service.workers("decode")
                kill = psutil.Process(service.pid(worker)).kill
                await a_kill_costs_no_token(ours, kill, lambda: service.start_worker("decode"))
            assert "blocks that routers will not find" not in service.log(worker)
    finally:
        await server.close()


async def answers_are_those_of_the_server(ours: httpx.AsyncClient, server: VllmServer) -> None:
    chats: Sequence[Sequence[Mapping[str, Any]]] = (
        [user(RED, text("What is it?"))],
        [user(BLUE, text("What is it?"))],
        [user(text("One"), RED, text("two"), BLUE)],
        [user(BLUE, RED), {"role": "assistant", "content": "Yes."}, user(text("And this?"), BLUE)],
    )
    said = set[tuple[int, ...]]()
    for messages in chats:
        body = GREEDY | {"messages": messages, "logprobs": True, "top_logprobs": 2}
        (mine, usage), (theirs, wanted) = [await answer(client, body) for client in (ours, server.client)]
        assert mine["token_ids"] == theirs["token_ids"]
        told, known = (choice["logprobs"]["content"] for choice in (mine, theirs))
        assert [one["logprob"] for one in told] == pytest.approx([one["logprob"] for one in known], abs=2e-3)
        assert usage["prompt_tokens"] == wanted["prompt_tokens"]
        said.add(tuple(mine["token_ids"]))
    assert len(said) == len(chats)


async def the_next_turn_finds_the_images_blocks(service: Service, ours: httpx.AsyncClient) -> None:
    await until_idle(service)
    first = [user(text("Look: "), RED, text(LONG))]
    said, usage = await answer(ours, GREEDY | {"messages": first})
    await until_tree_is_right(service)
    turn = [*first, {"role": "assistant", "content": said["message"]["content"]}, user(text("And now?"))]
    told = await ours.post(CHAT, json=GREEDY | {"messages": turn})
    again = told.json()["usage"]
    assert cached(again) >= usage["prompt_tokens"] // BLOCK * BLOCK > PATCHES
    asked = pb.ExplainRequest(request_id=told.headers["x-request-id"])
    candidates = (await service.client.explain(asked, PATIENCE_S)).decisions[-1].candidates
    candidate = next(one for one in candidates if one.chosen and one.role == "decode")
    assert candidate.cached_blocks * BLOCK == cached(again), "the router has found what the server has"
    another = [user(text("Look: "), BLUE, text(LONG)), *turn[1:]]
    _, other = await answer(ours, GREEDY | {"messages": another})
    assert cached(other) < BLOCK
    await until_tree_is_right(service)


async def every_dialect_has_images(ours: httpx.AsyncClient) -> None:
    url = picture("green")
    parts = {"type": "image_url", "image_url": {"url": url}}
    chat, _ = await answer(ours, GREEDY | {"messages": [user(parts, text("What is it?"))]})
    limits: dict[str, Any] = {"model": MODEL, "temperature": 0, "ignore_eos": True}
    asked = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is it?"}]
    body = limits | {"max_output_tokens": 24, "input": [{"role": "user", "content": asked}]}
    response = (await ours.post("/v1/responses", json=body)).json()
    assert response["output"][-1]["content"][0]["text"] == chat["message"]["content"]
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    blocks = [{"type": "image", "source": source}, text("What is it?")]
    body = limits | {"max_tokens": 24, "messages": [{"role": "user", "content": blocks}]}
    message = (await ours.post("/v1/messages", json=body)).json()
    assert message["content"][0]["text"] == chat["message"]["content"]


async def what_cannot_be_is_refused(ours: httpx.AsyncClient) -> None:
    where = "messages[0].content[0]"
    far, broken, empty = "http://127.0.0.1:9/a.png", "data:image/png;base64,????", "data:image/png;base64,iVBORw=="
    assert "router.image_hosts is empty" in await refusal(ours, {"image_url": {"url": far}}, where)
    await refusal(ours, {"image_url": broken}, where)
    assert "cannot identify image" in await refusal(ours, {"image_url": empty}, "request: worker ")
    told = await ours.post(CHAT, json=GREEDY | {"messages": [user(RED, text(f"{MARK} is its name"))]})
    assert told.status_code == 200, "a mark that a user spells is text"


async def a_kill_costs_no_token(
    ours: httpx.AsyncClient, kill: Callable[[], None], start: Callable[[], Coroutine[Any, Any, object]]
) -> None:
    body = GREEDY | {"messages": [user(RED, text(LONG), BLUE)], "max_tokens": 300}
    whole, _ = await answer(ours, body)
    said = list[int]()
    again: asyncio.Task[object] | None = None
    async with ours.stream("POST", CHAT, json=body | {"stream": True}) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                said += choice.get("token_ids") or ()
                if said and again is None:
                    kill()
                    again = asyncio.create_task(start())
    assert again is not None
    await again
    assert said == whole["token_ids"]


async def restarted(server: VllmServer) -> None:
    await server.stop()
    await server.start()


async def answer(client: httpx.AsyncClient, body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(choice, usage)."""
    told = await client.post(CHAT, json=body)
    assert told.status_code == 200, told.text
    return told.json()["choices"][0], told.json()["usage"]


async def refusal(client: httpx.AsyncClient, part: Mapping[str, Any], where: str) -> str:
    told = await client.post(CHAT, json=GREEDY | {"messages": [user({"type": "image_url", **part})]})
    assert told.status_code == 400, told.text
    message = str(told.json()["error"]["message"])
    assert message.startswith(where)
    return message


def cached(usage: Mapping[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])
