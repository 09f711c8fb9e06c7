"""A service whose workers are vLLM servers that run already: exact answers, found prefixes, and a server that is killed
in mid-stream and comes back."""

import asyncio
from collections.abc import Sequence, Set
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from baton_proto.generated import inference_pb2 as pb
from engine.vllm.arguments import CPU_EXTENSION
from engine.vllm.server.agreement import SAMPLE as SAMPLE_TEXT, Facts, agreed
from engine.vllm.server.server import VllmServer as Endpoint
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
    SAMPLED,
    STEP_TOKENS,
    a_grammar_is_kept,
    a_seed_draws_the_same_however_many_steps_the_prompt_takes,
    ask,
    ask_any,
    every_sampling_parameter_is_taken,
    text,
    whoever_leaves_frees_the_engine,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]

FLAGS = ("--structured-outputs-config", '{"backend": "guidance", "disable_any_whitespace": true}')
MAX_TOKENS = 1024
STEPS = ("--max-num-batched-tokens", str(STEP_TOKENS))
WINDS_BACK = (*STEPS, "--worker-extension-cls", CPU_EXTENSION)
STRANGE = ("--load-format", "dummy", "--chat-template", "{{ messages }}", "--no-enable-prefix-caching")
WHOLE_PROMPTS = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(MAX_TOKENS))
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
        one, two = (
            VllmServer(vllm_python, tmp_path / f"{number}.log", MAX_TOKENS, 256, [*FLAGS, *way_out])
            for number, way_out in enumerate((WINDS_BACK, WHOLE_PROMPTS))
        )
        for server in (one, two):
            stack.push_async_callback(server.close)
        await asyncio.gather(one.start(), two.start())
        await asyncio.gather(one.complete(prompt(1)), two.complete(prompt(1)))  # the first one takes half a minute
        await what_differs_is_named(one)
        await what_may_differ_is_told(one, two, oracle, tokenizer)
        async with running_service("smollm2", 0, 0, **sections(gpu_one=one, gpu_two=two)) as service:
            await answers_are_those_of_transformers(service, oracle)
            await a_second_question_finds_the_first_ones_blocks(service)
            await every_sampling_parameter_is_taken(service, tokenizer)
            await a_seed_draws_the_same_however_many_steps_the_prompt_takes(service)
            await long_seeded_prompts_end_no_server(service)
            await a_grammar_is_kept(service)
            await whoever_leaves_frees_the_engine(service)
            await requests_of_others_count_in_the_load(service, one)
            await a_killed_server_costs_no_token_and_is_found_again(service, oracle, {"gpu_one": one, "gpu_two": two})
        logs = "".join(service.log(name) for name in ("gpu_one", "gpu_two"))
        assert "on_step failed" not in logs
        assert "blocks that routers will not find" not in logs
        async with running_service("smollm2", 0, 1, **sections(gpu_one=one)) as service:
            await a_lost_server_leaves_its_requests_to_our_engine(service, oracle, one)


async def test_sampled_prompts_without_a_seed_end_no_server(vllm_python: Path, tmp_path: Path) -> None:
    """Where a caller's seed would: vLLM 0.32 ends on a CPU at a seeded prompt that takes several steps. This server has
    other weights behind the same name, which its answer to the fixed prompt shows, and two things that are noted."""
    server = VllmServer(vllm_python, tmp_path / "plain.log", MAX_TOKENS, 256, [*STEPS, *STRANGE])
    try:
        await server.start()
        await server.complete(prompt(1))
        tokens = tokens_of(Tokenizer(FILES.folder, FILES.config.vocab_size), SAMPLE_TEXT)
        right = Oracle(FILES.folder).greedy(tokens, 8, ignore_eos=True)
        facts = await agree(server, BLOCK)
        assert facts.greedy not in ("", " ".join(map(str, right)))
        assert "prefix caching is off" in facts.note
        assert "its chat template is another one" in facts.note
        async with running_service("smollm2", 0, 0, **sections(gpu_one=server)) as service:
            options = SAMPLED | {"max_tokens": 4, "ignore_eos": True}
            prompts = [text(900 + number, 3 * STEP_TOKENS) for number in range(8)]
            answers = await asyncio.gather(*(ask_any(service, prompt, **options) for prompt in prompts))
            assert {(len(one.token_ids), one.served_by[0].attempts) for one in answers} == {(4, 1)}
    finally:
        await server.close()


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


async def what_may_differ_is_told(one: VllmServer, two: VllmServer, oracle: Oracle, tokenizer: Tokenizer) -> None:
    ours, theirs = await agree(one, BLOCK), await agree(two, BLOCK)
    answer = oracle.greedy(tokens_of(tokenizer, SAMPLE_TEXT), 8, ignore_eos=True)
    assert ours.greedy == theirs.greedy == " ".join(map(str, answer))
    assert (ours.root, ours.note) == (str(FILES.folder), "")


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


async def agree(server: VllmServer, block_size: int, **changes: Any) -> Facts:
    worker = external(server, "gpu-1", **changes)
    config = parse_config({"engine": {"block_size": block_size}, "external_workers": [worker]})
    async with Endpoint(ExternalWorkerConfig(**worker)) as endpoint:
        return await agreed(config, config.external_workers[0], FILES, endpoint)


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


async def long_seeded_prompts_end_no_server(service: Service) -> None:
    """One server winds back the random stream of a prompt that takes several steps, the other one takes none apart."""
    prompts = [text(950 + number, 3 * STEP_TOKENS) for number in range(4)]
    answers = await asyncio.gather(*(ask_any(service, prompt, max_tokens=4, seed=5, **SAMPLED) for prompt in prompts))
    served = [answer.served_by[0] for answer in answers]
    assert {(one.decode_worker, one.attempts) for one in served} == {("gpu_one", 1), ("gpu_two", 1)}


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
    theirs.cancel()
    await asyncio.gather(theirs, return_exceptions=True)
    await until_idle(service, PATIENCE_S)


async def a_killed_server_costs_no_token_and_is_found_again(
    service: Service, oracle: Oracle, servers: dict[str, VllmServer]
) -> None:
    before = {name: await incarnation(service, name) for name in servers}
    lost, answers = await goes_on_elsewhere(service, oracle, servers)
    left = servers.keys() - {lost}
    assert {answer.served_by[0].decode_worker for answer in answers} == left
    await until_status(service, left)
    await servers[lost].start()
    await until_used(service, START_S)
    assert await incarnation(service, lost) > before[lost]
    chat = text(500, 3 * BLOCK)
    await asyncio.gather(*(ask(service, [*chat, number], 4) for number in range(8)))
    found = [await ask(service, [*text(510 + number, 2 * BLOCK), 7], 4) for number in range(6)]
    assert lost in {answer.served_by[0].decode_worker for answer in found}, "it takes requests again"
    async with asyncio.timeout(PATIENCE_S):
        while any(worker.missing or worker.extra for worker in await service.client.diff(pb.DiffRequest(), 10)):
            await asyncio.sleep(0.1)


async def a_lost_server_leaves_its_requests_to_our_engine(service: Service, oracle: Oracle, server: VllmServer) -> None:
    """In a service that has both."""
    _, answers = await goes_on_elsewhere(service, oracle, {"gpu_one": server}, later=["decode-1"])
    assert {answer.served_by[0].decode_worker for answer in answers} == {"decode-1"}
    await until_status(service, {"decode-1"})


async def goes_on_elsewhere(
    service: Service, oracle: Oracle, servers: dict[str, VllmServer], later: Sequence[str] = ()
) -> tuple[str, list[Answer]]:
    """A server is killed while it answers. Returns its worker's id and the answers."""
    prompts = [text(200 + number, 40) for number in range(6)]
    requests = [greedy(prompt, 60, ignore_eos=True) for prompt in prompts]
    kills = {name: server.kill for name, server in servers.items()}
    lost, answers = await killed_in_mid_stream(service, requests, kills, later)
    expected = [oracle.greedy(one, 60, ignore_eos=True) for one in prompts]
    assert [answer.token_ids for answer in answers] == expected
    return lost, answers


async def incarnation(service: Service, worker_id: str) -> int:
    workers = (await service.client.status(60)).workers
    return next(worker.incarnation for worker in workers if worker.worker_id == worker_id)


async def until_status(service: Service, worker_ids: Set[str]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while {
            worker.worker_id for worker in (await service.client.status(60)).workers if worker.state != "away"
        } != worker_ids:
            await asyncio.sleep(0.05)
