"""The planner adds a worker with a real vLLM, and drains one: no answer notices."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton_proto.planner_control import Scale
from runtime.calls.answer import Answer
from runtime.checkpoint.model_files import resolve_model
from tests.planner.live import Planned, planned_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import greedy
from tests.spine.worker_view import POLL_S, until_gone, until_idle, until_tree_is_right, until_used
from tests.vllm.environment import LIMIT_S, PATIENCE_S, START_S
from tests.vllm.test_workers import sections, text

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]

PLANNER: dict[str, Any] = {
    "policy": "threshold",
    "limits": {"min_prefill": 0, "max_prefill": 0, "min_decode": 1, "max_decode": 2},
    "start_s": START_S / 5,
}
ORDERS_ALONE = {"threshold.QUEUE_HIGH": 50.0, "threshold.QUEUE_LOW": 0.0}


async def test_the_planner_adds_and_drains_workers_with_vllm(vllm_python: Path, tmp_path: Path) -> None:
    oracle = Oracle(resolve_model("smollm2").folder)
    settings = {"model": "smollm2", **sections(vllm_python)}
    async with planned_service(tmp_path, 0, 1, dict(PLANNER), constants=ORDERS_ALONE, **settings) as planned:
        service = planned.service
        await planned.tell(Scale(0, 2))
        await planned.until(lambda: planned.count() == (0, 2), START_S)
        assert [effect.worker_id for effect in planned.effects("add")] == ["decode-2"]
        await until_used(service, PATIENCE_S)
        prompts = [text(number, 40) for number in range(6)]
        begun: set[int] = set()

        async def stream(number: int) -> Answer:
            request = greedy(prompts[number], 100, ignore_eos=True)
            return await service.client.generate(request, PATIENCE_S, lambda _: begun.add(number))

        asked = [asyncio.create_task(stream(number)) for number in range(len(prompts))]
        async with asyncio.timeout(PATIENCE_S):
            while len(begun) < len(prompts):
                await asyncio.sleep(POLL_S)
        await one_is_drained(planned)
        answers = await asyncio.gather(*asked)
        assert [answer.token_ids for answer in answers] == [oracle.greedy(one, 100, ignore_eos=True) for one in prompts]
        assert {answer.served_by[0].attempts for answer in answers} == {1}, "a drained worker ends what it has begun"
        assert {answer.served_by[0].decode_worker for answer in answers} == {"decode-1", "decode-2"}
        await until_idle(service, PATIENCE_S)
        await until_tree_is_right(service, PATIENCE_S)


async def one_is_drained(planned: Planned) -> None:
    """While both answer."""
    await planned.tell(Scale(0, 1))
    await planned.until(lambda: planned.count() == (0, 1), START_S)
    (drained,) = planned.effects("drain")
    assert drained.error == ""
    await until_gone(planned.service, drained.worker_id, PATIENCE_S)
