"""A service whose worker is two processes: it answers like any other, and a lost rank is a lost worker."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil

from runtime.calls.answer import Answer
from tests.service import Service, running_service
from tests.spine.busy import killed_while_busy
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, random_prompt
from tests.spine.worker_view import until_idle

TWO_RANKS: dict[str, Any] = {"engine": {"device": "cpu", "tensor_parallel": 2, "max_batch_tokens": 128}}


def rank_pid(service: Service, worker_id: str) -> int:
    (rank,) = psutil.Process(service.pid(worker_id)).children()
    return rank.pid


async def test_answers_are_those_of_transformers(tiny_model: Path) -> None:
    oracle = Oracle(tiny_model)
    prompts = [random_prompt(length, seed=length) for length in (1, 17, 64, 200)]
    async with running_service(tiny_model, 0, 1, TWO_RANKS) as service:
        answers = await asyncio.gather(*(ask(service.client, prompt, 16) for prompt in prompts))
        again = await ask(service.client, prompts[-1], 16)
        await until_idle(service)
    for prompt, answer in zip([*prompts, prompts[-1]], [*answers, again], strict=True):
        assert answer.token_ids == oracle.greedy(prompt, 16, guess=answer.token_ids)
    assert again.usage.cached_tokens >= 192


async def test_a_killed_rank_ends_its_worker_and_the_request_goes_on_elsewhere(tiny_model: Path) -> None:
    oracle = Oracle(tiny_model)
    async with running_service(tiny_model, 0, 1, TWO_RANKS) as service:
        await service.start_worker("decode")
        pids = {worker_id: rank_pid(service, worker_id) for worker_id in service.workers("decode")}

        async def answer_of(number: int) -> Answer:
            return await ask(service.client, random_prompt(40, seed=number), 200)

        doomed, answers = await killed_while_busy(
            service, list(pids), answer_of, 6, lambda worker_id: os.kill(pids[worker_id], signal.SIGKILL)
        )
        exit_ = await asyncio.wait_for(service.supervisor.children[doomed].wait(), 30)
        assert exit_.returncode == 1
        assert f"tensor-parallel rank 1 (pid {pids[doomed]}) was ended by SIGKILL" in exit_.log_tail
    for number, answer in answers.items():
        assert answer.token_ids == oracle.greedy(random_prompt(40, seed=number), 200, guess=answer.token_ids)
    assert any(answer.served_by[0].attempts > 1 for answer in answers.values()), "it was killed in mid-answer"
