"""Prefill and decode workers of several processes each, of the same number or not: KV finds its way between them."""

import asyncio
import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.calls.answer import Answer
from tests.service import Service, running_service
from tests.spine.busy import killed_while_busy
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, random_prompt
from tests.spine.worker_view import until_idle
from tests.tiny_model import write_tiny_model

LENGTHS = (1, 16, 17, 95, 200, 333)
STEP_TOKENS = 64  # the longer prompts take several steps
MAX_TOKENS = 12
MIXES = [  # ranks of a prefill worker, of a decode worker, KV heads, transport; tests/kvtransfer has more of them
    (4, 1, 2, "shm"),
    (2, 4, 2, "tcp"),
]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By number of KV heads: the folder of a model, and its oracle."""

    @cache
    def of(num_kv_heads: int) -> tuple[Path, Oracle]:
        heads = {"num_attention_heads": 8, "num_key_value_heads": num_kv_heads}
        folder = write_tiny_model(tmp_path_factory.mktemp(f"heads-{num_kv_heads}"), **heads)
        return folder, Oracle(folder)

    return of


def settings(prefill: int, decode: int, transport: str = "shm", step_tokens: int = STEP_TOKENS) -> dict[str, Any]:
    """Every prompt is shipped while there is a prefill worker."""
    return {
        "router": {"placement": {"local_prefill_tokens": 0}, "no_worker_timeout_s": 2.0},
        "transfer": {"transport": transport, "checksum": True},
        "engine": {
            "device": "cpu",
            "max_batch_tokens": step_tokens,
            "tensor_parallel": decode,
            "prefill_tensor_parallel": prefill,
        },
    }


def ranks_of(service: Service, worker_id: str) -> list[psutil.Process]:
    """But the first, which is the worker."""
    return psutil.Process(service.pid(worker_id)).children()


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "{}to{}of{}heads_{}".format(*mix))
async def test_answers_are_those_of_one_process(oracles: Any, mix: tuple[int, int, int, str]) -> None:
    prefill, decode, num_kv_heads, transport = mix
    folder, oracle = oracles(num_kv_heads)

    async def check(service: Service, prompt: list[int]) -> tuple[int, int]:
        """(tokens that the prefill worker had cached, blocks that were shipped)"""
        answer = await ask(service.client, prompt, MAX_TOKENS)
        assert answer.token_ids == oracle.greedy(prompt, MAX_TOKENS, guess=answer.token_ids), (
            f"prompt of {len(prompt)} tokens"
        )
        assert (answer.served_by[0].prefill_worker, answer.served_by[0].transport) == ("prefill-1", transport)
        return answer.usage.cached_tokens, answer.served_by[0].kv_blocks

    async with running_service(folder, 1, 1, settings(prefill, decode, transport)) as service:
        assert len(ranks_of(service, "prefill-1")) == prefill - 1
        assert len(ranks_of(service, "decode-1")) == decode - 1
        prompts = [random_prompt(length, seed=length) for length in LENGTHS]
        shipped = await asyncio.gather(*(check(service, prompt) for prompt in prompts))
        assert shipped == [(0, -(-length // 16)) for length in LENGTHS]
        # Both have the whole blocks of these prompts; what comes behind is all that travels.
        longer = [prompt + random_prompt(90, seed=1) for prompt in prompts[3:]]
        shipped = await asyncio.gather(*(check(service, prompt) for prompt in longer))
        cached = [length // 16 * 16 for length in LENGTHS[3:]]
        assert shipped == [
            (tokens, -(-len(prompt) // 16) - tokens // 16) for tokens, prompt in zip(cached, longer, strict=True)
        ]
        await until_idle(service)


async def test_a_killed_prefill_rank_ends_its_worker_and_costs_no_answer(oracles: Any) -> None:
    """In mid-transfer: a prompt of 1,500 tokens takes a hundred steps, and each ships a block."""
    folder, oracle = oracles(8)
    async with running_service(folder, 1, 1, settings(2, 2, step_tokens=16)) as service:
        answers = await while_a_rank_dies(
            service, oracle, ["prefill-1"], 1500, MAX_TOKENS, callers=2, prompt_ahead=1000
        )
        replayed = [answer.served_by[0] for answer in answers if answer.served_by[0].attempts > 1]
        assert {served.prefill_worker for served in replayed} == {""}, "the decode worker ran them all"
        await until_idle(service)


async def test_a_killed_decode_rank_ends_its_worker_and_the_requests_go_on_elsewhere(oracles: Any) -> None:
    folder, oracle = oracles(8)
    async with running_service(folder, 1, 2, settings(2, 2)) as service:
        answers = await while_a_rank_dies(service, oracle, ["decode-1", "decode-2"], 150, 150, callers=6)
        replayed = [answer.served_by[0] for answer in answers if answer.served_by[0].attempts > 1]
        assert len({served.decode_worker for served in replayed}) == 1
        await until_idle(service)


async def while_a_rank_dies(
    service: Service,
    oracle: Oracle,
    worker_ids: list[str],
    prompt_tokens: int,
    max_tokens: int,
    callers: int,
    prompt_ahead: int = 0,
) -> list[Answer]:
    """Right answers, of prompts that were on their way when the second rank of a busy worker was killed."""
    pids = {worker_id: ranks_of(service, worker_id)[0].pid for worker_id in worker_ids}

    async def answer_of(number: int) -> Answer:
        return await ask(service.client, random_prompt(prompt_tokens, seed=number), max_tokens)

    lost, answers = await killed_while_busy(
        service,
        worker_ids,
        answer_of,
        callers,
        lambda doomed: os.kill(pids[doomed], signal.SIGKILL),
        prompt_tokens=prompt_ahead,
    )
    exit_ = await asyncio.wait_for(service.supervisor.children[lost].wait(), 30)
    assert exit_.returncode == 1
    assert f"tensor-parallel rank 1 (pid {pids[lost]}) was ended by SIGKILL" in exit_.log_tail
    for number, answer in answers.items():
        prompt = random_prompt(prompt_tokens, seed=number)
        assert answer.token_ids == oracle.greedy(prompt, max_tokens, guess=answer.token_ids)
    return list(answers.values())
