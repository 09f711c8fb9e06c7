"""A service whose engines run elsewhere, as its router and its clients see it. The servers count, so that every lost or
repeated token shows. tests/vllm has the same with real ones."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web
from msgspec.structs import replace

from baton.service.local.local_launcher import this_machine
from baton.service.wanted.configuration import Wanted
from baton_proto.generated import inference_pb2 as pb
from router.text.tokenizer import Tokenizer
from runtime.checkpoint.model_files import resolve_model
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig
from runtime.processes.ports import free_port
from runtime.processes.process import ProcessFailedError
from tests.engine.vllm.events.vllm_engine import Engine, Messages
from tests.engine.vllm.server.imitation import METRICS, Imitation
from tests.service import Service, running_service
from tests.spine.prompts import ask
from tests.spine.worker_view import until_idle

BLOCK = 16
PREFIX = 24 * BLOCK  # tokens: with few, it costs as much to compute them as not to
FIRST_TOKENS = 3


class Counting:
    """A server whose answer to a prompt goes on counting from the prompt's last token. `slow`: it stops after a few
    tokens, until it is ended. `others`: what its further ranks publish."""

    def __init__(self, folder: Path, ranks: int = 1) -> None:
        files = resolve_model(str(folder))
        tokenizer = Tokenizer(files.folder, files.config.vocab_size)
        self.http = Imitation(
            self._say, lambda text: [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
        )
        self.has_blocks_of(BLOCK)
        self.http.metrics = "".join(self.http.metrics.replace('"0"', f'"{rank}"') for rank in range(ranks))
        self.events, *self.others = (Engine() for _ in range(ranks))
        ports = [free_port("0.0.0.0", in_a_row=ranks) for _ in range(2)]
        for rank, events in enumerate((self.events, *self.others)):
            events.port, events.replay_port = (port + rank for port in ports)
        self.slow = False
        self._serving = AsyncExitStack()

    def has_blocks_of(self, size: int) -> None:
        """Of so many tokens; nobody else asks it."""
        idle = METRICS.replace("} 3.0", "} 0.0").replace("} 1.0", "} 0.0").replace("} 0.25", "} 0.0")
        self.http.metrics = idle.replace('block_size="32"', f'block_size="{size}"')

    async def start(self) -> None:
        for events in (self.events, *self.others):
            await events.start()
        await self._serving.enter_async_context(self.http.serving())

    async def stop(self) -> None:
        await self._serving.aclose()
        for events in (self.events, *self.others):
            await events.stop()

    def worker(self, name: str) -> dict[str, Any]:
        told = {"name": name, "address": f"http://127.0.0.1:{self.http.port}", "model": "m"}
        return told | {"events": self.events.endpoint, "replay": self.events.replay_endpoint}

    async def _say(self, answer: web.StreamResponse) -> None:
        last, count = self.http.question["prompt"][-1], self.http.question["max_tokens"]
        for number in range(1, count + 1):
            if self.slow and number > FIRST_TOKENS:
                await asyncio.Event().wait()
            finish = '"length"' if number == count else "null"
            data = f'{{"choices":[{{"text":"","token_ids":[{last + number}],"finish_reason":{finish}}}]}}'
            await answer.write(f"data: {data}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")


@asynccontextmanager
async def counting(folder: Path) -> AsyncIterator[tuple[Counting, Counting]]:
    async with AsyncExitStack() as stack:
        servers = Counting(folder), Counting(folder)
        for server in servers:
            await server.start()
            stack.push_async_callback(server.events.close)
            stack.push_async_callback(server.stop)
        yield servers


async def until_there(service: Service, *worker_ids: str) -> None:
    async with asyncio.timeout(60):
        while {worker.worker_id for worker in (await service.client.status(60)).workers if not worker.note} != {
            *worker_ids
        }:
            await asyncio.sleep(0.02)


async def until_away(service: Service, worker_id: str) -> None:
    async with asyncio.timeout(60):
        while worker_id not in [
            one.worker_id for one in (await service.client.status(60)).workers if one.state == "away"
        ]:
            await asyncio.sleep(0.02)


async def until_found(service: Service, blocks: int) -> None:
    """The router's tree has so many blocks."""
    async with asyncio.timeout(30):
        while sum(worker.blocks_in_tree for worker in (await service.client.status(60)).workers) != blocks:
            await asyncio.sleep(0.02)


async def test_servers_elsewhere_are_indexed_chosen_lost_and_found_again(tiny_model: Path) -> None:
    async with counting(tiny_model) as (one, two):
        workers = [one.worker("gpu-1"), two.worker("gpu-2")]
        sections: dict[str, Any] = {"external_workers": workers, "engine": {"block_size": BLOCK}}
        async with running_service(tiny_model, 0, 0, **sections) as service:
            prompt = [10 + at % 200 for at in range(PREFIX + 1)]
            messages = Messages(block_size=BLOCK)
            await two.events.publish(messages.payload(messages.stored([*range(1, 25)], None, prompt[:PREFIX])))
            await until_found(service, 24)
            answer = await ask(service.client, prompt, 5)
            assert answer.token_ids == list(range(prompt[-1] + 1, prompt[-1] + 6))
            assert (answer.served_by[0].decode_worker, answer.usage.cached_tokens) == ("gpu-2", PREFIX)

            await until_idle(service)
            two.slow = True
            stopped: list[asyncio.Task[None]] = []

            def stop_in_mid_stream(piece: pb.Piece) -> None:
                if not stopped:
                    stopped.append(asyncio.create_task(two.stop()))

            request = pb.GenerateRequest(
                tokens=pb.TokenIds(ids=prompt), sampling=pb.SamplingOptions(temperature=0.0, max_tokens=20)
            )
            answer = await service.client.generate(request, 60, stop_in_mid_stream)
            assert answer.token_ids == list(range(prompt[-1] + 1, prompt[-1] + 21))
            assert (answer.served_by[0].decode_worker, answer.served_by[0].attempts) == ("gpu-1", 2)
            await asyncio.gather(*stopped)
            await until_there(service, "gpu-1")
            await until_found(service, 0)

            await until_away(service, "gpu-2")

            two.slow = False
            two.has_blocks_of(32)
            await two.start()
            async with asyncio.timeout(60):
                while "start it with --block-size 16" not in service.log("gpu-2"):
                    await asyncio.sleep(0.02)
            two.has_blocks_of(BLOCK)
            await until_there(service, "gpu-1", "gpu-2")
            prompt = [token + 1 for token in prompt]  # the router expects the other one at gpu-1, too
            await two.events.publish(messages.payload(messages.stored([*range(1, 25)], None, prompt[:PREFIX])))
            await until_found(service, 24)
            answer = await ask(service.client, prompt, 5)
            assert (answer.served_by[0].decode_worker, answer.usage.cached_tokens) == ("gpu-2", PREFIX)


async def test_each_rank_of_a_server_is_a_worker_and_all_are_lost_together(tiny_model: Path) -> None:
    server = Counting(tiny_model, ranks=2)
    await server.start()
    sections: dict[str, Any] = {"external_workers": [server.worker("gpu")], "engine": {"block_size": BLOCK}}
    async with running_service(tiny_model, 0, 0, **sections) as service:
        await until_there(service, "gpu-dp0", "gpu-dp1")
        for rank, events in enumerate((server.events, *server.others)):
            prompt = [10 + rank + at % 200 for at in range(PREFIX + 1)]
            messages = Messages(rank=rank, block_size=BLOCK)
            await events.publish(messages.payload(messages.stored([*range(1, 25)], None, prompt[:PREFIX])))
            await until_found(service, 24 * (rank + 1))
            answer = await ask(service.client, prompt, 5)
            assert (answer.served_by[0].decode_worker, answer.usage.cached_tokens) == (f"gpu-dp{rank}", PREFIX)
            assert server.http.rank == str(rank)
        await server.stop()
        await until_away(service, "gpu")
        await until_found(service, 0)
        await server.start()
        await until_there(service, "gpu-dp0", "gpu-dp1")
    await server.stop()
    for events in (server.events, *server.others):
        await events.close()


async def test_a_penalized_answer_survives_its_server_and_what_no_server_takes_is_refused_with_the_reason(
    tiny_model: Path,
) -> None:
    async with counting(tiny_model) as servers:
        workers = [server.worker(f"gpu-{number}") for number, server in enumerate(servers, 1)]
        sections: dict[str, Any] = {"external_workers": workers, "engine": {"block_size": BLOCK}}
        async with running_service(tiny_model, 0, 0, **sections) as service:
            prompt = [10, 11, 12]
            for server in servers:
                server.http.refuses = 400, "max_tokens is too large for me"
            with pytest.raises(grpc.aio.AioRpcError, match=r"cannot serve it: .* too large for me") as no:
                await ask(service.client, prompt, 4)
            assert no.value.code() is grpc.StatusCode.INVALID_ARGUMENT

            servers[0].http.refuses = servers[1].http.refuses = None
            servers[0].slow = servers[1].slow = True
            stopped: list[asyncio.Task[None]] = []

            def stop_in_mid_stream(piece: pb.Piece) -> None:
                """The server that has been asked; the other one goes on."""
                if not stopped:
                    asked, other = servers if servers[0].http.question else reversed(servers)
                    other.slow = False
                    stopped.append(asyncio.create_task(asked.stop()))

            servers[0].http.question = servers[1].http.question = {}
            sampling = pb.SamplingOptions(temperature=0.0, max_tokens=20, presence_penalty=0.5)
            request = pb.GenerateRequest(tokens=pb.TokenIds(ids=prompt), sampling=sampling)
            answer = await service.client.generate(request, 60, stop_in_mid_stream)
            assert answer.token_ids == list(range(13, 33))
            assert answer.served_by[0].attempts == 2
            assert {tuple(server.http.question["prompt"]) for server in servers} == {(10, 11, 12)}
            await asyncio.gather(*stopped)


async def test_while_the_only_long_server_is_away_a_long_request_is_not_the_callers_mistake(
    tiny_model: Path,
) -> None:
    async with counting(tiny_model) as (short, long):
        short.http.models = {"data": [{"id": "m", "max_model_len": 64}]}
        workers = [short.worker("short"), long.worker("long")]
        sections: dict[str, Any] = {
            "external_workers": workers,
            "engine": {"block_size": BLOCK},
            "router": {"no_worker_timeout_s": 0.5},
        }
        async with running_service(tiny_model, 0, 0, **sections) as service:
            (model,) = await service.client.models()
            assert model.max_model_len == 512, "the longest that a server takes, not the model"
            prompt = [10] * 100
            assert (await ask(service.client, prompt, 5)).served_by[0].decode_worker == "long"
            await long.stop()
            await until_away(service, "long")
            with pytest.raises(grpc.aio.AioRpcError, match="no decode worker that can serve was ready") as no:
                await ask(service.client, prompt, 5)
            assert no.value.code() is grpc.StatusCode.UNAVAILABLE
            assert (await ask(service.client, prompt[:20], 5)).served_by[0].decode_worker == "short"
            with pytest.raises(grpc.aio.AioRpcError, match="the largest worker takes 512") as no:
                await ask(service.client, prompt * 6, 5)
            assert no.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_blocks_are_as_large_as_the_servers_where_the_user_says_nothing(tiny_model: Path) -> None:
    async with counting(tiny_model) as (away, one):
        one.has_blocks_of(64)
        workers = [away.worker("gpu-1"), one.worker("gpu-2")]
        await away.stop()
        sections: dict[str, Any] = {"external_workers": workers, "workers": {"prefill": 0, "decode": 0}}
        config = with_overrides(ServingConfig(model=str(tiny_model)), sections, "test")
        service = Wanted(config, sections, resolve_model(str(tiny_model)))
        suited = await asyncio.to_thread(service.suited, this_machine())
        assert suited.config.engine.block_size == 64
        given = replace(service, given=sections | {"engine": {"block_size": 32}})
        assert (await asyncio.to_thread(given.suited, this_machine())).config.engine.block_size == 16, "as it is"


async def test_when_no_server_fits_the_start_ends_with_the_reason(tiny_model: Path) -> None:
    async with counting(tiny_model) as (one, _):
        one.http.tokenize = lambda text: [1, 2, 3]
        sections: dict[str, Any] = {"external_workers": [one.worker("gpu-1")], "engine": {"block_size": BLOCK}}
        with pytest.raises(ProcessFailedError, match=r"gpu-1 does not serve: .* its tokenizer is another one"):
            async with running_service(tiny_model, 0, 0, **sections):
                pass


async def test_a_service_whose_servers_are_all_late_is_there_before_them(tiny_model: Path) -> None:
    async with counting(tiny_model) as (one, _):
        await one.stop()
        sections: dict[str, Any] = {
            "external_workers": [one.worker("gpu-1")],
            "engine": {"block_size": BLOCK},
            "workers": {"ready_timeout_s": 10.0},
            "router": {"no_worker_timeout_s": 0.5},
        }
        async with running_service(tiny_model, 0, 0, **sections) as service:
            with pytest.raises(grpc.aio.AioRpcError, match="no decode worker that can serve was ready"):
                await ask(service.client, [10, 11], 5)
            await one.start()
            await until_there(service, "gpu-1")
            assert (await ask(service.client, [10, 11], 5)).served_by[0].decode_worker == "gpu-1"


async def test_one_wrong_server_among_others_does_not_end_the_start(tiny_model: Path) -> None:
    async with counting(tiny_model) as (one, two):
        right, one.http.tokenize = one.http.tokenize, lambda text: [1, 2, 3]
        workers = [one.worker("gpu-1"), two.worker("gpu-2")]
        sections: dict[str, Any] = {"external_workers": workers, "engine": {"block_size": BLOCK}}
        async with running_service(tiny_model, 0, 0, **sections) as service:
            await until_away(service, "gpu-1")
            assert (await ask(service.client, [10, 11], 5)).served_by[0].decode_worker == "gpu-2"
            assert "its tokenizer is another one" in service.log("gpu-1")
            one.http.tokenize = right
            await until_there(service, "gpu-1", "gpu-2")
