"""The router is killed in the middle of streams: each goes on at the next router, and every token comes once."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from baton.client.async_client import AsyncClient
from baton_proto.generated import inference_pb2 as pb
from runtime.calls.answer import Answer
from tests.router.api.conversations import write_talking_model
from tests.service import Service, running_service
from tests.spine.conversations import metric
from tests.spine.prompts import greedy, random_prompt

TOKENS = 1500  # of an answer: more than a second on a quiet machine, so that the router is killed before its end
BEGUN = 20  # events that each client has by then
PROMPT = random_prompt(60, seed=1)
GREEDY = greedy(PROMPT, TOKENS, ignore_eos=True)
ASKED: dict[str, Any] = {"stream": True, "ignore_eos": True, "max_tokens": TOKENS}
COMPLETION = ASKED | {"prompt": PROMPT, "return_token_ids": True}
CHAT = ASKED | {"messages": [{"role": "user", "content": "So?"}], "n": 2, "seed": 3}


class Stream:
    """A client of server-sent events, which notes what it has."""

    def __init__(self, service: Service, path: str, body: dict[str, Any]) -> None:
        self._url = f"{service.http_url}{path}"
        self._body = body
        self.events: list[dict[str, str]] = []
        self.begun = asyncio.Event()
        self.broke_off = False

    async def read(self, last: str = "") -> "Stream":
        """Reads from the start, or what is behind an event, as long as events come."""
        headers = {"accept": "text/event-stream"} | ({"last-event-id": last} if last else {})
        lines = list[str]()
        try:
            async with (
                httpx.AsyncClient(timeout=60) as http,
                http.stream("POST", self._url, json=self._body, headers=headers) as answer,
            ):
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if line:
                        lines.append(line)
                        continue
                    self.events.append(dict(one.split(": ", 1) for one in lines))
                    lines = []
                    if len(self.events) >= BEGUN:
                        self.begun.set()
        except httpx.RemoteProtocolError:
            self.broke_off = True
        return self

    def said(self, index: int = 0) -> tuple[str, list[int], str]:
        """(text, tokens, finish reason) of a choice."""
        text, tokens, finish = "", list[int](), ""
        for event in self.events:
            data = {} if event["data"] == "[DONE]" else json.loads(event["data"])
            for choice in data.get("choices", ()):
                if choice["index"] == index:
                    text += choice.get("text", "") + choice.get("delta", {}).get("content", "")
                    tokens += choice.get("token_ids") or ()
                    finish = choice["finish_reason"] or finish
        return text, tokens, finish


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talking_model(tmp_path_factory.mktemp("talking"))


async def far_text(service: Service) -> str:
    """What the first answer to CHAT says late and not before."""
    text, _, _ = (await Stream(service, "/v1/chat/completions", CHAT).read()).said()
    far = len(text) * 3 // 4
    parts = (text[at : at + 8] for at in range(far, len(text)))
    return next(part for part in parts if text.index(part) >= far and "\ufffd" not in part)


async def over_grpc(service: Service, request: pb.GenerateRequest, begun: asyncio.Event) -> list[pb.GenerateResponse]:
    messages = list[pb.GenerateResponse]()
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for message in service.client.stream(request):
            messages.append(message)
            if len(messages) >= BEGUN:
                begun.set()
    return messages


def heard(messages: Sequence[pb.GenerateResponse]) -> Answer:
    answer = Answer()
    for message in messages:
        answer.add(message, 0.0)
    return answer


async def by_client(service: Service, begun: asyncio.Event, **options: Any) -> Answer:
    async with AsyncClient(service.grpc_address) as client, client.stream(PROMPT, **options) as stream:
        number = 0
        async for _ in stream:
            number += 1
            if number == BEGUN:
                begun.set()
        return stream.answer


async def by_command(service: Service, begun: asyncio.Event) -> str:
    arguments = ["--tokens", ",".join(map(str, PROMPT)), "--temperature", "0", "--max-tokens", str(TOKENS)]
    command = [sys.executable, "-m", "baton", "generate", *arguments, "--ignore-eos", "--address", service.grpc_address]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    text = await process.stdout.read(1)
    begun.set()
    text += await process.stdout.read()
    assert await process.wait() == 0
    return text.decode()


async def test_streams_whose_router_is_killed_go_on_at_the_next_one_and_every_token_comes_once(folder: Path) -> None:
    async with running_service(folder, 1, 1) as service:
        chat = CHAT | {"stop": await far_text(service)}
        seeded = {"max_tokens": TOKENS, "ignore_eos": True, "seed": 5, "n": 2}
        whole, greedily, twice = await asyncio.gather(
            Stream(service, "/v1/chat/completions", chat).read(),
            service.client.generate(GREEDY),
            by_client(service, asyncio.Event(), **seeded),
        )
        streams = [
            Stream(service, "/v1/completions", COMPLETION | {"temperature": 0}),
            Stream(service, "/v1/completions", COMPLETION),
            Stream(service, "/v1/chat/completions", chat),
        ]
        sampled = pb.GenerateRequest(
            tokens=GREEDY.tokens, sampling=pb.SamplingOptions(max_tokens=TOKENS, ignore_eos=True)
        )
        begun = [asyncio.Event() for _ in range(3)]
        async with asyncio.TaskGroup() as group:
            command = group.create_task(by_command(service, begun[2]))
            await begun[2].wait()  # it starts as slowly as a program does
            for stream in streams:
                group.create_task(stream.read())
            messages = group.create_task(over_grpc(service, sampled, begun[0]))
            client = group.create_task(by_client(service, begun[1], **seeded))
            for one in [*begun, *(stream.begun for stream in streams)]:
                await one.wait()
            service.kill("router-1")
            assert (await service.supervisor.wait()).name == "router-1"
            await service.supervisor.start_again("router-1")
            service.note_pids()
        assert all(stream.broke_off for stream in streams)
        greedy_one, sampled_one, chat_one = streams
        again = Stream(service, "/v1/completions", COMPLETION)
        again.events = sampled_one.events[:1]
        await asyncio.gather(*(stream.read(stream.events[-1]["id"]) for stream in (*streams, again)))
        assert greedy_one.said() == (greedily.text, greedily.token_ids, "length")
        assert sampled_one.said() == again.said()
        assert len(again.said()[1]) == TOKENS
        assert [chat_one.said(index) for index in (0, 1)] == [whole.said(index) for index in (0, 1)]
        assert chat_one.said()[2] == "stop"
        cut = await messages
        assert not cut[-1].HasField("finished")
        since_start = cut[:1]
        for told in (cut, since_start):
            sampled.resume_from = told[-1].bookmark
            told += await over_grpc(service, sampled, asyncio.Event())
        assert heard(cut).choices == heard(since_start).choices
        assert len(heard(cut).token_ids) == TOKENS
        assert (await client).choices == twice.choices
        assert await command == greedily.text + "\n"


async def test_streams_that_a_router_cuts_off_at_its_end_say_so_and_go_on_at_the_next_one(folder: Path) -> None:
    async with running_service(folder, 0, 1, workers={"drain_timeout_s": 0.1}) as service:
        seeded = {"max_tokens": TOKENS, "ignore_eos": True, "seed": 5}
        completion, begun = COMPLETION | {"seed": 5}, asyncio.Event()
        whole = await by_client(service, asyncio.Event(), **seeded)
        stream = Stream(service, "/v1/completions", completion)
        async with asyncio.TaskGroup() as group:
            group.create_task(stream.read())
            client = group.create_task(by_client(service, begun, **seeded))
            await begun.wait()
            await stream.begun.wait()
            service.kill("router-1", signal.SIGTERM)
            assert (await service.supervisor.wait()).name == "router-1"
            await service.supervisor.start_again("router-1")
            service.note_pids()
        assert (await client).choices == whole.choices
        assert not stream.broke_off
        error = stream.events.pop()
        assert list(error) == ["data"]
        assert "the next one goes on with the answer" in json.loads(error["data"])["error"]["message"]
        computed, told = await metric(service, "decode-1", "output_tokens_total"), stream.said()[1]
        await stream.read(stream.events[-1]["id"])
        assert stream.said() == (whole.text, whole.token_ids, "length")
        computed += TOKENS - len(told)
        assert await metric(service, "decode-1", "output_tokens_total") == computed, "told tokens were computed again"
