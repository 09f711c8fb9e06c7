"""Many mock workers in one process, behind a real router: all that is real about them works."""

import asyncio
import re
from collections.abc import AsyncIterator

import msgspec
import psutil
import pytest

from baton_proto.generated import inference_pb2 as pb
from runtime.config.step_times import StepTimes
from tests.service import Service, running_service

PREFILL, DECODE = 8, 24
ANSWER_TOKENS = 12


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with running_service(
        "mock",
        PREFILL,
        DECODE,
        router={"placement": {"local_prefill_tokens": 0}},
        step_times=msgspec.to_builtins(StepTimes().faster(20)),
        mock={"kv_blocks": 256, "answer_tokens": ANSWER_TOKENS},
    ) as running:
        yield running


def request(text: str, **sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=pb.SamplingOptions(**sampling))  # type: ignore[arg-type]


async def test_32_workers_share_a_process_and_serve(service: Service) -> None:
    (process,) = [child for name, child in service.supervisor.children.items() if name.startswith("workers-")]
    assert len(service.workers("prefill")) == PREFILL
    assert len(service.workers("decode")) == DECODE
    assert "torch" not in " ".join(mapped.path for mapped in psutil.Process(process.pid).memory_maps())

    prompts = [f"prompt {number} " + "of some length " * 10 for number in range(96)]
    answers = await asyncio.gather(*(service.client.generate(request(prompt, seed=1)) for prompt in prompts))

    for answer in answers:
        assert len(answer.choices[0].token_ids) == ANSWER_TOKENS
        assert re.fullmatch("[a-z ]+", answer.choices[0].text)
    served = [service for answer in answers for service in answer.served_by]
    assert len({service.decode_worker for service in served}) > DECODE // 2
    assert len({service.prefill_worker for service in served}) > PREFILL // 2
    assert all(service.kv_blocks and service.transport == "shm" for service in served)
    assert answers[0].choices[0].text == answers[1].choices[0].text  # of one seed


async def test_a_prompt_that_was_seen_before_is_cached_and_found_by_its_events(service: Service) -> None:
    prompt = "the same beginning " * 20
    first = await service.client.generate(request(prompt))
    assert first.usage.cached_tokens == 0
    for _ in range(50):  # events take a moment
        again = await service.client.generate(request(prompt))
        if again.usage.cached_tokens:
            break
    assert again.usage.cached_tokens >= len(prompt) - 32
