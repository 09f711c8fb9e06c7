"""Workers come, sleep, wake, change their role and go: each answer is what it would have been."""

import asyncio
from pathlib import Path

import pytest

from baton_proto.generated import inference_pb2 as pb
from baton_proto.planner_control import Order, Scale
from runtime.calls.router import Client
from tests.planner.live import planned_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PROMPTS = ["The capital of France is", "Once upon a time", "Water boils at", "Two and two make"]
TOKENS = 200  # an answer is under way whenever a worker is told to go
SETTLE_S = 60.0
SETTINGS = {
    "keep_asleep": 1,
    "interval_s": 1.0,
    "limits": {"gpu_budget": 4},
}
AT_ONCE = {"pace.DOWN_COOLDOWN_S": 0.0, "pace.REVERSAL_S": 0.0, "pace.REVERSALS_PER_HOUR": 100}


async def test_answers_are_the_same_while_workers_sleep_wake_flip_and_leave(tmp_path: Path, tiny_model: Path) -> None:
    engine = {"kv_memory": "16MiB", "threads": 1}
    async with planned_service(
        tmp_path, 1, 2, SETTINGS, constants=AT_ONCE, model=str(tiny_model), engine=engine
    ) as planned:
        client = planned.service.client
        truth = [await greedy(client, prompt) for prompt in PROMPTS]
        answers: list[tuple[int, list[int]]] = []
        asking = [asyncio.create_task(keep_asking(client, number, answers)) for number in range(len(PROMPTS))]

        async def until(verb: str, prefill: int, decode: int) -> None:
            await planned.until(
                lambda: bool(planned.effects(verb)) and planned.awake() == (prefill, decode), timeout_s=SETTLE_S
            )

        await planned.tell(Scale(prefill=1, decode=1))
        await until("sleep", 1, 1)
        await planned.tell(Scale(prefill=1, decode=2))
        await until("wake", 1, 2)
        await planned.tell(Scale(prefill=2, decode=1))
        await until("flip", 2, 1)
        (prefill, *_) = planned.ready("prefill")
        await planned.tell(Order("drain", prefill))
        await planned.until(lambda: bool(planned.effects("drain")), timeout_s=SETTLE_S)
        seen = len(answers)
        async with asyncio.timeout(SETTLE_S):
            while len(answers) < seen + len(PROMPTS):
                await asyncio.gather(*(task for task in asking if task.done()))  # raises what went wrong
                await asyncio.sleep(0.1)
        for task in asking:
            task.cancel()
        ended = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended
        assert [effect.error for effect in planned.effects("sleep") + planned.effects("flip")] == [""] * 2
        assert [answer for number, answer in answers if answer != truth[number]] == []


async def greedy(client: Client, prompt: str) -> list[int]:
    sampling = pb.SamplingOptions(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    answer = await client.generate(pb.GenerateRequest(text=prompt, sampling=sampling), timeout_s=60)
    return list(answer.token_ids)


async def keep_asking(client: Client, number: int, answers: list[tuple[int, list[int]]]) -> None:
    while True:
        answers.append((number, await greedy(client, PROMPTS[number])))
