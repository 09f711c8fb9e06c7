"""kill -9 of a decode worker: its slab, which a prefill worker maps, comes free while the prefill worker lives on."""

import asyncio
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, random_prompt
from tests.spine.worker_view import POLL_S, until_gone, until_idle, until_running, until_used

SLAB_MIB = 1024
TOLERANCE_MIB = 128  # what kernels and buffers of a prefill worker take more in another decode worker's life
SHIP_ALL = {"router": {"placement": {"local_prefill_tokens": 0}, "no_worker_timeout_s": 1.0}}
ON_ONE_GPU = {"device": "cuda", "dtype": "float32", "attention": "triton", "kv_memory": f"{SLAB_MIB}MiB"}
SLOW_PROMPTS = {"max_batch_tokens": 16}  # a long prompt takes hundreds of steps, and its KV as many shipments
PROMPTS = [random_prompt(length, seed=length) for length in (17, 100, 333)]

while_it = pytest.mark.parametrize("pushing", [False, True], ids=["idles", "takes_kv"])


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    oracle = Oracle(tiny_model)
    return [oracle.greedy(prompt, 8) for prompt in PROMPTS]


async def serve(service: Service, expected: list[list[int]], transport: str) -> None:
    answers = await asyncio.gather(*(ask(service.client, prompt, 8) for prompt in PROMPTS))
    assert [answer.token_ids for answer in answers] == expected
    assert {answer.served_by[0].transport for answer in answers} == {transport}


async def kill_decode_worker(service: Service, pushing: bool) -> None:
    """`pushing`: while a prefill worker computes prompts and ships their KV chunk by chunk."""
    (worker,) = service.workers("decode")
    lost: list[asyncio.Task[object]] = []
    if pushing:
        lost = [asyncio.create_task(ask(service.client, random_prompt(3000, seed), 4)) for seed in range(3)]
        await until_running(service, "prefill-1")
    service.kill(worker)
    await until_gone(service, worker)
    await asyncio.gather(*lost, return_exceptions=True)


async def until(condition: Callable[[], bool], timeout_s: float = 45) -> bool:
    give_up_s = time.monotonic() + timeout_s
    while not (met := condition()) and time.monotonic() < give_up_s:
        await asyncio.sleep(POLL_S)
    return met


def host_memory(pid: int) -> set[int]:
    """Inodes of the anonymous files that a process maps or holds open: slabs of its own and of peers."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = {int(line.split()[4]) for line in lines if "/memfd:" in line}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(entry).startswith("/memfd:"):
                found.add(entry.stat().st_ino)
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


@while_it
async def test_no_memory_of_a_killed_decode_worker_stays_mapped_at_the_prefill_worker(
    tiny_model: Path, expected: list[list[int]], pushing: bool
) -> None:
    transfer = {"transport": "shm"}
    on_cpus = SLOW_PROMPTS | {"device": "cpu", "threads": 1}
    async with running_service(tiny_model, 1, 1, SHIP_ALL, engine=on_cpus, transfer=transfer) as service:
        await serve(service, expected, "shm")
        prefill, theirs = service.pid("prefill-1"), host_memory(service.pid("decode-1"))
        assert theirs & host_memory(prefill), "the slab is mapped while the decode worker lives"
        await kill_decode_worker(service, pushing)
        assert await until(lambda: not theirs & host_memory(prefill))
        await until_idle(service)
        await service.start_worker("decode")
        await until_used(service)
        await serve(service, expected, "shm")


def free_mib() -> int:
    """Of the first GPU, as the driver tells a process that uses none."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.timeout(300)
@while_it
async def test_a_gpu_has_as_much_free_memory_after_a_decode_workers_death_as_before_its_start(
    tiny_model: Path, expected: list[list[int]], pushing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone on the GPU. What the prefill worker itself takes for its first prompts comes in the first life."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    engine, transfer = SLOW_PROMPTS | ON_ONE_GPU, {"transport": "cuda_ipc"}
    async with running_service(tiny_model, 1, 1, SHIP_ALL, engine=engine, transfer=transfer) as service:
        await serve(service, expected, "cuda_ipc")
        with_slab = free_mib()
        await kill_decode_worker(service, pushing)
        assert await until(lambda: free_mib() > with_slab + SLAB_MIB - TOLERANCE_MIB), f"{free_mib()} MiB are free"
        for _life in range(2):
            await live_and_die(service, expected, pushing)
        await service.start_worker("decode")
        await until_used(service)
        await serve(service, expected, "cuda_ipc")


async def live_and_die(service: Service, expected: list[list[int]], pushing: bool) -> None:
    """A decode worker's life leaves no less memory free than there was before it."""
    without = free_mib()
    await service.start_worker("decode")
    await until_used(service)
    await serve(service, expected, "cuda_ipc")
    assert free_mib() < without - SLAB_MIB
    await kill_decode_worker(service, pushing)
    assert await until(lambda: free_mib() >= without - TOLERANCE_MIB), f"{free_mib()} of {without} MiB are free"
    await until_idle(service)
