"""A service whose workers are vLLM servers that run already: exact answers, found prefixes, and a server that is killed
in mid-stream and comes back."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from baton_proto.generated import inference_pb2 as pb
from engine.external.server import VllmServer as Endpoint
from router.text.tokenizer import Tokenizer
from runtime.calls.answer import Answer
from runtime.checkpoint.model_files import resolve_model
from runtime.config.external import ExternalWorkerConfig
from runtime.config.serving import parse_config
from runtime.errors import ConfigError, UnavailableError
from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import greedy
from tests.spine.worker_view import inspect, until_idle, until_running, until_tree_is_right, until_used
from tests.vllm.environment import LIMIT_S, PATIENCE_S, START_S
from tests.vllm.mid_stream import killed_in_mid_stream
from tests.vllm.server import BLOCK, VllmServer, prompt
from tests.vllm.test_workers import (
    a_grammar_is_kept,
    ask,
    every_sampling_parameter_is_taken,
    text,
    whoever_leaves_frees_the_engine,
)
from worker.external.agreement import agreed

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]

FLAGS = ("--structured-outputs-config", '{"backend": "guidance", "disable_any_whitespace": true}')
FILES = resolve_model("smollm2")


def external(server: VllmServer, name: str, **changes: Any) -> dict[str, Any]:
    told = {"name": name, "address": server.address, "events": server.endpoint, "replay": server.replay_endpoint}
    return told | changes


def sections(**servers: VllmServer) -> dict[str, Any]:
    return {
        "external_workers": [external(server, name) for name, server in servers.items()],
        "engine": {"block_size": BLOCK, "cache_salt": "a test's own"},
        "router": {"max_priority": 5},
    }


async def test_servers_that_run_already(vllm_python: Path, tmp_path: Path) -> None:
    """All of it in one test, because each server takes a minute to start."""
    oracle, tokenizer = Oracle(FILES.folder), Tokenizer(FILES.folder, FILES.config.vocab_size)
    async with AsyncExitStack() as stack:
        one, two = (VllmServer(vllm_python, tmp_path / f"{name}.log", 1024, 256, FLAGS) for name in ("one", "two"))
        for server in (one, two):
            stack.push_async_callback(server.close)
        await asyncio.gather(one.start(), two.start())
        await asyncio.gather(one.complete(prompt(1)), two.complete(prompt(1)))  # the first one takes half a minute
        await what_differs_is_named(one)
        async with running_service("smollm2", 0, 0, **sections(gpu_one=one, gpu_two=two)) as service:
            await answers_are_those_of_transformers(service, oracle)
            await a_second_question_finds_the_first_ones_blocks(service)
            await every_sampling_parameter_is_taken(service, tokenizer)
            await a_grammar_is_kept(service)
            await whoever_leaves_frees_the_engine(service)
            await requests_of_others_count_in_the_load(service, one)
            await a_killed_server_costs_no_token_and_is_found_again(service, oracle, one)
        logs = "".join(service.log(name) for name in ("gpu_one", "gpu_two"))
        assert "on_step failed" not in logs
        assert "blocks that routers will not find" not in logs
        async with running_service("smollm2", 0, 1, **sections(gpu_one=one)) as service:
            await a_lost_server_leaves_its_requests_to_our_engine(service, oracle, one)


async def what_differs_is_named(server: VllmServer) -> None:
    for changes, block_size, named in (
        ({"model": "gpt-5"}, BLOCK, "the server has no model 'gpt-5': name one of its own: smollm2"),
        ({}, 16, "start it with --block-size 16, or set engine.block_size: 32"),
        ({"events": "tcp://127.0.0.1:9"}, BLOCK, "no vLLM at tcp://127.0.0.1:9 .*--kv-events-config"),
        ({"replay": "tcp://127.0.0.1:9"}, BLOCK, "no vLLM replay endpoint at tcp://127.0.0.1:9 .*--kv-events-config"),
        ({"address": server.address + "/elsewhere"}, BLOCK, "elsewhere: "),
    ):
        with pytest.raises(ConfigError, match=named):
            await agree(server, block_size, **changes)
    with pytest.raises(UnavailableError, match="no vLLM at http:"):
        await agree(server, BLOCK, address="http://127.0.0.1:9")


async def agree(server: VllmServer, block_size: int, **changes: Any) -> None:
    worker = external(server, "gpu-1", **changes)
    config = parse_config({"engine": {"block_size": block_size}, "external_workers": [worker]})
    async with Endpoint(ExternalWorkerConfig(**worker)) as endpoint:
        await agreed(config, config.external_workers[0], FILES, endpoint)


async def answers_are_those_of_transformers(service: Service, oracle: Oracle) -> None:
    """Also those of many at once, which share steps."""
    prompts = [text(number, length) for number, length in enumerate((1, 2, 31, 32, 33, 64, 100, 257))]
    requests = [greedy(one, 12) for one in prompts]
    for priority, request in enumerate(requests):
        request.priority = priority % 3
    answers = await asyncio.gather(*(service.client.generate(request, PATIENCE_S) for request in requests))
    assert [answer.token_ids for answer in answers] == [oracle.greedy(one, 12) for one in prompts]
    assert {answer.served_by[0].decode_worker for answer in answers} == {"gpu_one", "gpu_two"}
    await until_idle(service, PATIENCE_S)
    await until_tree_is_right(service, PATIENCE_S)


async def a_second_question_finds_the_first_ones_blocks(service: Service) -> None:
    """Prompts are long, because by the profile that a router begins with short ones cost nothing to compute again."""
    chats = [text(100 + number, 14 * BLOCK) for number in range(4)]
    first = [await ask(service, chat, 2 * BLOCK, ignore_eos=True) for chat in chats]
    await until_idle(service, PATIENCE_S)
    await until_tree_is_right(service, PATIENCE_S)
    for chat, before in zip(chats, first, strict=True):
        answer = await ask(service, [*chat, *before.token_ids, 504, 3575], 2)
        assert answer.served_by[0].decode_worker == before.served_by[0].decode_worker
        assert answer.usage.cached_tokens >= 15 * BLOCK, "prompt and answer but for the last block"
    await until_idle(service, PATIENCE_S)
    compared = await service.client.diff(pb.DiffRequest(), 10)
    assert [(worker.missing, worker.extra, worker.changed) for worker in compared] == [(0, 0, 0)] * 2
    assert sum(worker.worker_blocks for worker in compared) >= 4 * 15


async def requests_of_others_count_in_the_load(service: Service, server: VllmServer) -> None:
    theirs = asyncio.create_task(server.complete(prompt(3), 400))
    await until_running(service, "gpu_one", PATIENCE_S)
    load = (await inspect(service, "gpu_one")).load
    assert (load.running, load.waiting) == (1, 0)
    assert load.blocks_used >= 3
    assert load.blocks_total == 256
    async with asyncio.timeout(PATIENCE_S):  # for the router to hear of it
        while not any(worker.running for worker in (await service.client.status(60)).workers):
            await asyncio.sleep(0.05)
    answer = await ask(service, text(400, 20), 2)
    assert answer.served_by[0].decode_worker == "gpu_two", "it is the less busy one"
    theirs.cancel()
    await asyncio.gather(theirs, return_exceptions=True)
    await until_idle(service, PATIENCE_S)


async def a_killed_server_costs_no_token_and_is_found_again(
    service: Service, oracle: Oracle, server: VllmServer
) -> None:
    before = await incarnation(service, "gpu_one")
    answers = await goes_on_elsewhere(service, oracle, server)
    assert {answer.served_by[0].decode_worker for answer in answers} == {"gpu_two"}
    await until_status(service, {"gpu_two"})
    await server.start()
    await until_used(service, START_S)
    assert await incarnation(service, "gpu_one") > before
    chat = text(500, 3 * BLOCK)
    await asyncio.gather(*(ask(service, [*chat, number], 4) for number in range(8)))
    found = [await ask(service, [*text(510 + number, 2 * BLOCK), 7], 4) for number in range(6)]
    assert "gpu_one" in {answer.served_by[0].decode_worker for answer in found}, "it takes requests again"
    async with asyncio.timeout(PATIENCE_S):
        while any(worker.missing or worker.extra for worker in await service.client.diff(pb.DiffRequest(), 10)):
            await asyncio.sleep(0.1)


async def a_lost_server_leaves_its_requests_to_our_engine(service: Service, oracle: Oracle, server: VllmServer) -> None:
    """In a service that has both."""
    answers = await goes_on_elsewhere(service, oracle, server)
    assert {answer.served_by[0].decode_worker for answer in answers} == {"decode-1"}
    await until_status(service, {"decode-1"})


async def goes_on_elsewhere(service: Service, oracle: Oracle, server: VllmServer) -> list[Answer]:
    """The server is killed while it answers."""
    prompts = [text(200 + number, 40) for number in range(6)]
    requests = [greedy(prompt, 60, ignore_eos=True) for prompt in prompts]
    _, answers = await killed_in_mid_stream(service, requests, {"gpu_one": server.kill})
    expected = [oracle.greedy(one, 60, ignore_eos=True) for one in prompts]
    assert [answer.token_ids for answer in answers] == expected
    return answers


async def incarnation(service: Service, worker_id: str) -> int:
    workers = (await service.client.status(60)).workers
    return next(worker.incarnation for worker in workers if worker.worker_id == worker_id)


async def until_status(service: Service, worker_ids: set[str]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while {worker.worker_id for worker in (await service.client.status(60)).workers} != worker_ids:
            await asyncio.sleep(0.05)
