"""One tenant's work, whatever and however much it is, shuts no other tenant out of any lane."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import grpc.aio
import httpx
import pytest

from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from baton_proto.grammar import Grammar, GrammarVerdict
from router.api.serving.grpc_api import GrpcApi
from router.requests.body_budget import BodyBudget
from router.requests.frontend import Frontend
from router.text.segment_cache import Unfinished
from router.text.text_encoder import TokenIds
from router.text.tokenizer import Tokenizer
from runtime.grammar.checker import GrammarChecker
from runtime.security.bearer_keys import BearerKeys
from runtime.security.callers import parse_callers
from runtime.side_lane import SideLane
from tests.router.api.conversations import serving, talking_frontend, write_talking_model
from tests.router.operator_questions import make_questions
from tests.router.scripted_generator import ScriptedGenerator
from tests.tiny_model import EOS_TOKEN_IDS, VOCAB_SIZE

LINES: Final = "flooding tenant=a\nordinary tenant=b\n"
FLOOD: Final = "flood " * 2000  # longer than what is tokenized at once
TEXT: Final = "an ordinary text " * 300
AT_ONCE: Final = 16


class Held:
    """What floods wait for on their threads, so that each takes as long as the whole test."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.num_begun = 0

    def wait_if(self, text: str, least: int = 1000) -> None:
        """`least`: a text that is tokenized at once, on the loop, has fewer."""
        if text.count("flood") >= least:
            self.num_begun += 1
            assert self.go.wait(120)


class HeldTokenizer(Tokenizer):
    held: Held

    def encode(self, text: str, add_special_tokens: bool = True) -> TokenIds:
        self.held.wait_if(text)
        return super().encode(text, add_special_tokens)

    def finish_chat(self, text: Unfinished) -> TokenIds:
        self.held.wait_if("".join(text.segments))
        return super().finish_chat(text)


class HeldChecker(GrammarChecker):
    held: Held

    def verdict(self, grammar: Grammar) -> GrammarVerdict:
        self.held.wait_if(grammar.text, least=1)
        return super().verdict(grammar)


@dataclass
class Service:
    http: httpx.AsyncClient
    stub: pb_grpc.InferenceStub
    held: Held
    lane: SideLane

    async def until_held(self, num_jobs: int) -> None:
        """Returns when so many jobs are in the lane."""
        while self.lane._held.total() != num_jobs:
            await asyncio.sleep(0.01)

    async def post(self, key: str, path: str, body: dict[str, Any]) -> httpx.Response:
        return await self.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})

    async def generate(self, key: str, text: str) -> grpc.StatusCode:
        told = [("authorization", f"Bearer {key}")]
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=text)])
        call = self.stub.Generate(pb.GenerateRequest(chat=chat), metadata=told, timeout=120)
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        return await call.code()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    folder, held = write_talking_model(tmp_path / "model"), Held()
    tokenizer, grammars = HeldTokenizer(folder, VOCAB_SIZE), HeldChecker(folder, VOCAB_SIZE, EOS_TOKEN_IDS)
    tokenizer.held = grammars.held = held
    generator = ScriptedGenerator(tokenizer)
    generator.max_model_len = 65_536
    frontend = replace(talking_frontend(generator, folder), grammars=grammars, bodies=BodyBudget(1 << 22))
    async with _served(frontend) as (http, stub):
        try:
            yield Service(http, stub, held, frontend.lane)
        finally:
            held.go.set()
            await asyncio.to_thread(grammars.close)


@asynccontextmanager
async def _served(frontend: Frontend) -> AsyncIterator[tuple[httpx.AsyncClient, pb_grpc.InferenceStub]]:
    keys = BearerKeys(parse_callers(LINES, "test"))
    api = GrpcApi(frontend, make_questions(), keys)
    await api.start("127.0.0.1", 0)
    limits = httpx.Limits(max_connections=1000)
    async with (
        serving(frontend, keys=keys) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=120, limits=limits) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel,
    ):
        yield http, pb_grpc.InferenceStub(channel)
    await api.stop()


def asking(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Each way into each lane."""
    messages: Any = [{"role": "user", "content": text}]
    schema = {"type": "object", "properties": {text[:5]: {"type": "string"}}}
    function = {"name": "find", "parameters": schema}
    long_body = {"prompt": text, "user": text * (60 if text == FLOOD else 20)}  # in memory until it is tokens
    return [
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": messages}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": [text, text]}),
        ("/v1/completions", long_body),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "guided_json": schema}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"type": "function", "function": function}],
                "tool_choice": "required",
            },
        ),
        ("/v1/responses", {"input": text}),
        ("/v1/responses/input_tokens", {"input": text}),
        ("/v1/messages", {"max_tokens": 9, "messages": messages}),
        ("/v1/messages/count_tokens", {"messages": messages}),
    ]


@pytest.mark.slow
async def test_a_flood_of_one_tenant_refuses_no_ordinary_request_of_another(service: Service) -> None:
    flood = [service.post("flooding", path, body) for _ in range(8) for path, body in asking(FLOOD)]
    tasks: Sequence[asyncio.Task[Any]] = [asyncio.create_task(each) for each in flood]
    tasks += [asyncio.create_task(service.generate("flooding", FLOOD)) for _ in range(80)]
    while service.held.num_begun < 3:
        await asyncio.sleep(0.01)
    for path, body in asking(TEXT):
        answers = await asyncio.gather(*(service.post("ordinary", path, body) for _ in range(AT_ONCE)))
        assert {(answer.status_code, path) for answer in answers} == {(200, path)}, answers[0].text
    codes = await asyncio.gather(*(service.generate("ordinary", TEXT) for _ in range(AT_ONCE)))
    assert {*codes} == {grpc.StatusCode.OK}
    service.held.go.set()
    for answer in await asyncio.gather(*tasks):
        if isinstance(answer, httpx.Response):
            assert answer.status_code in (200, 429, 503), "a full lane is nobody's mistake"
            assert answer.status_code == 200 or int(answer.headers["retry-after"]) >= 1
        else:
            assert answer in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize(("path", "body"), asking(FLOOD)[:2] + asking(FLOOD)[5:6] + asking(FLOOD)[-1:])
async def test_work_of_a_client_that_has_left_never_begins(service: Service, path: str, body: dict[str, Any]) -> None:
    first = [asyncio.create_task(service.post("flooding", "/tokenize", {"prompt": FLOOD})) for _ in range(10)]
    await service.until_held(10)
    began = service.held.num_begun
    left = [asyncio.create_task(service.post("flooding", path, body)) for _ in range(10)]
    await service.until_held(20)
    for task in left:
        task.cancel()
    await service.until_held(10)
    service.held.go.set()
    assert all(answer.status_code == 200 for answer in await asyncio.gather(*first))
    assert began < service.held.num_begun == 10
