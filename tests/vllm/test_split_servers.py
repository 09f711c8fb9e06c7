"""Prompts and answers on different vLLM servers that run already, whose own connector moves the KV between them: NIXL,
which works on CPUs, too."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton_proto.generated import inference_pb2 as pb
from decode_worker.passed_prompts import TRANSPORT
from router.text.tokenizer import Tokenizer
from runtime.calls.answer import Answer
from runtime.checkpoint.model_files import resolve_model
from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import greedy, random_prompt
from tests.spine.worker_view import until_idle, until_tree_is_right, until_used
from tests.vllm.environment import LIMIT_S, PATIENCE_S, START_S
from tests.vllm.mid_stream import killed_in_mid_stream
from tests.vllm.server import BLOCK, MODEL, VllmServer
from tests.vllm.test_external_workers import FLAGS, external, until_status
from tests.vllm.test_windows import answers_are_exact, write_tiny_gemma, write_tiny_mistral
from tests.vllm.test_workers import a_grammar_is_kept, ask, every_sampling_parameter_is_taken, text

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
MAX_TOKENS = 1024
STEP_TOKENS = 128  # prompts take several steps
ROLES = {"gpu_p": "prefill", "gpu_one": "decode", "gpu_two": "decode"}
FILES = resolve_model("smollm2")


async def test_a_prefill_server_and_decode_servers(vllm_python: Path, tmp_path: Path) -> None:
    """All of it in one test, because each server takes a minute to start."""
    oracle, tokenizer = Oracle(FILES.folder), Tokenizer(FILES.folder, FILES.config.vocab_size)
    async with split_servers(vllm_python, tmp_path, ROLES) as (servers, settings):
        async with running_service("smollm2", 0, 0, **settings) as service:
            await until_used(service, START_S)
            await they_have_shaken_hands(service)
            await every_prompt_is_passed_on_and_answered_exactly(service, oracle)
            await a_second_question_finds_the_prefix_where_it_was_computed(service, oracle)
            await every_sampling_parameter_is_taken(service, tokenizer)
            await a_grammar_is_kept(service)
            await who_leaves_frees_the_servers(service)
            await a_killed_decode_server_costs_no_token(service, oracle, servers)
            await a_killed_prefill_server_costs_no_answer(service, oracle, servers["gpu_p"])
        logs = "".join(service.log(name) for name in ROLES)
        assert "on_step failed" not in logs
        assert "Traceback" not in logs


@pytest.mark.parametrize("write", [write_tiny_mistral, write_tiny_gemma])
async def test_layers_with_sliding_windows_answer_exactly_on_servers_apart(
    vllm_python: Path, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    """All layers slide, or three of four."""
    folder, roles = write(tmp_path / "model"), {"gpu_p": "prefill", "gpu_d": "decode"}
    async with (
        split_servers(vllm_python, tmp_path, roles, folder) as (_, settings),
        running_service(folder, 0, 0, **settings) as service,
    ):
        await until_used(service, START_S)
        await they_have_shaken_hands(service)
        await answers_are_exact(service, folder)
        served = (await ask(service, random_prompt(6 * BLOCK, seed=9), 4)).served_by[0]
        found = served.attempts, served.transport, served.prefill_worker, served.decode_worker
        assert found == (1, TRANSPORT, "gpu_p", "gpu_d")


@asynccontextmanager
async def split_servers(
    python: Path, logs: Path, roles: Mapping[str, str], model: Path | None = None
) -> AsyncIterator[tuple[dict[str, VllmServer], dict[str, Any]]]:
    """Yields the servers, and the settings of a service before them. model: None: SmolLM2."""
    if subprocess.run([python, "-c", "import nixl"], capture_output=True, check=False).returncode:
        pytest.skip("no NIXL in the environment with vLLM: `make vllm-env` installs it")
    named = {} if model is None else {"model": MODEL}
    flags = [*FLAGS, "--max-num-batched-tokens", str(STEP_TOKENS), "--kv-transfer-config", json.dumps(CONNECTOR)]
    servers = {name: VllmServer(python, logs / f"{name}.log", MAX_TOKENS, 256, flags, model=model) for name in roles}
    async with AsyncExitStack() as stack:
        for server in servers.values():
            stack.push_async_callback(server.close)
        await asyncio.gather(*(server.start() for server in servers.values()))
        await asyncio.gather(*(server.complete([5, 6, 7]) for server in servers.values()))
        rows = [external(server, name, role=roles[name], **named) for name, server in servers.items()]
        settings = {
            "external_workers": rows,
            "engine": {"block_size": BLOCK, "cache_salt": "a test's own"},
            "router": {"placement": {"local_prefill_tokens": 0}},
        }
        yield servers, settings


async def they_have_shaken_hands(service: Service) -> None:
    """NIXL gives a first handshake 5 s, which may be too few where cores are shared; the next one finds all ready."""
    for number in range(8):
        await ask(service, random_prompt(40, seed=number), 1)


async def every_prompt_is_passed_on_and_answered_exactly(service: Service, oracle: Oracle) -> None:
    prompts = [text(100 + number, length) for number, length in enumerate((1, 2, 31, 32, 33, 64, 127, 129, 300))]
    answers = await asyncio.gather(*(ask(service, prompt, 12) for prompt in prompts))
    assert [answer.token_ids for answer in answers] == [oracle.greedy(prompt, 12) for prompt in prompts]
    served = [answer.served_by[0] for answer in answers]
    assert {(one.attempts, one.transport, one.prefill_worker) for one in served} == {(1, TRANSPORT, "gpu_p")}
    assert {one.decode_worker for one in served} == {"gpu_one", "gpu_two"}
    hops = (await service.client.explain(pb.ExplainRequest(request_id=answers[-1].request_id), PATIENCE_S)).hops
    rows = [(hop.name, hop.worker, hop.tokens) for hop in hops]
    assert ("prefill", "gpu_p", 300) in rows
    assert ("first step", served[-1].decode_worker, 0) in rows
    await until_idle(service, PATIENCE_S)
    await until_tree_is_right(service, PATIENCE_S)


async def a_second_question_finds_the_prefix_where_it_was_computed(service: Service, oracle: Oracle) -> None:
    chat = text(200, 6 * BLOCK)
    await ask(service, chat, 2)
    await until_tree_is_right(service, PATIENCE_S)
    again = [*chat, 504, 3575]
    answer = await ask(service, again, 8)
    assert answer.token_ids == oracle.greedy(again, 8)
    assert answer.usage.cached_tokens == 6 * BLOCK
    assert answer.served_by[0].prefill_worker == "gpu_p"


async def who_leaves_frees_the_servers(service: Service) -> None:
    for delay_s in (0.0, 0.05, 0.2):
        leaving = asyncio.create_task(ask(service, text(300, 600), 200, ignore_eos=True))
        await asyncio.sleep(delay_s)  # wherever it is by then
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    await until_idle(service, PATIENCE_S)


async def a_killed_decode_server_costs_no_token(
    service: Service, oracle: Oracle, servers: dict[str, VllmServer]
) -> None:
    prompts = [text(400 + number, 40) for number in range(6)]
    kills = {name: server.kill for name, server in servers.items() if ROLES[name] == "decode"}
    requests = [greedy(prompt, 60, ignore_eos=True) for prompt in prompts]
    lost, answers = await killed_in_mid_stream(service, requests, kills)
    assert [answer.token_ids for answer in answers] == [oracle.greedy(one, 60, ignore_eos=True) for one in prompts]
    left = kills.keys() - {lost}
    assert {answer.served_by[0].decode_worker for answer in answers} == left
    await until_status(service, {"gpu_p", *left})


async def a_killed_prefill_server_costs_no_answer(service: Service, oracle: Oracle, server: VllmServer) -> None:
    """Prompts that it was computing, and later ones, are computed where they are answered."""
    prompts = [text(500 + number, 500) for number in range(6)]
    asked = [asyncio.create_task(ask(service, prompt, 8)) for prompt in prompts]
    async with asyncio.timeout(PATIENCE_S):
        while not any(one.worker_id == "gpu_p" and one.running for one in await statuses(service)):
            await asyncio.sleep(0.01)
    server.kill()
    answers: list[Answer] = await asyncio.gather(*asked)
    assert [answer.token_ids for answer in answers] == [oracle.greedy(one, 8) for one in prompts]
    assert any(answer.served_by[0].attempts > 1 for answer in answers)
    later = await ask(service, text(600, 100), 8)
    assert later.token_ids == oracle.greedy(text(600, 100), 8)
    away = {one.worker_id: (one.role, one.state) for one in await statuses(service) if one.state == "away"}
    assert away["gpu_p"] == ("prefill", "away")


async def statuses(service: Service) -> list[pb.WorkerStatus]:
    return [*(await service.client.status(60)).workers]
