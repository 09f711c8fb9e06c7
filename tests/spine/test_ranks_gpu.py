"""Prefill and decode workers of several GPUs each: each rank sends KV over NVLink, and the answers are one GPU's."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.service import running_service
from tests.spine.prompts import ask, random_prompt
from tests.spine.worker_view import until_idle
from tests.tiny_model import write_tiny_model

MAX_TOKENS = 16
NUM_GPUS = torch.cuda.device_count()
MIXES = [(prefill, decode, 8) for prefill in (1, 2, 4) for decode in (1, 2, 4)] + [(4, 4, 2), (2, 4, 2)]
"""Ranks of each, and KV heads: at the end more ranks than heads."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two NVIDIA GPUs"),
]


def settings(prefill: int, decode: int) -> dict[str, Any]:
    return {
        "router": {"placement": {"local_prefill_tokens": 0}},
        "workers": {"ready_timeout_s": 200.0},
        "engine": {
            "device": "cuda",
            "dtype": "float32",
            "attention": "triton",
            "max_batch_tokens": 64,  # the longer prompts take several steps
            "max_model_len": 1024,
            "tensor_parallel": decode,
            "prefill_tensor_parallel": prefill,
        },
    }


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "{}to{}of{}heads".format(*mix))
async def test_answers_are_those_of_one_gpu(tmp_path: Path, mix: tuple[int, int, int]) -> None:
    prefill, decode, num_kv_heads = mix
    if max(prefill, decode) > NUM_GPUS:
        pytest.skip(f"needs {max(prefill, decode)} GPUs, and {NUM_GPUS} are here")
    folder = write_tiny_model(tmp_path, num_attention_heads=8, num_key_value_heads=num_kv_heads)
    prompts = [random_prompt(length, seed=length) for length in (1, 16, 17, 63, 200, 333)]
    prompts += [prompt + random_prompt(90, seed=1) for prompt in prompts[3:]]  # prefix hits on both sides

    async def answers(num_prefill: int, overrides: dict[str, Any], transport: str) -> list[list[int]]:
        async with running_service(folder, num_prefill, 1, overrides) as service:
            first = await asyncio.gather(*(ask(service.client, prompt, MAX_TOKENS) for prompt in prompts[:6]))
            then = await asyncio.gather(*(ask(service.client, prompt, MAX_TOKENS) for prompt in prompts[6:]))
            await until_idle(service)
        assert {answer.served_by[0].transport for answer in (*first, *then)} == {transport}
        return [answer.token_ids for answer in (*first, *then)]

    assert await answers(1, settings(prefill, decode), "cuda_ipc") == await answers(0, settings(1, 1), "")
