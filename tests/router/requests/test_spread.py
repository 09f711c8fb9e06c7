"""Choices of one call begin over turns of the event loop, and those of several tenants side by side."""

import asyncio

from router.requests.spread import AT_A_TIME, Spread
from runtime.side_lane import TENANT


async def begin(spread: Spread, tenant: str, begun: list[str]) -> None:
    TENANT.set(tenant)
    await spread.turn()
    begun.append(tenant)


async def test_others_run_between_the_turns_of_many() -> None:
    spread, begun = Spread(), list[str]()
    tasks = [asyncio.create_task(begin(spread, "a", begun)) for _ in range(10 * AT_A_TIME)]
    seen = []
    while not all(task.done() for task in tasks):
        before = len(begun)
        await asyncio.sleep(0)
        seen.append(len(begun) - before)
    assert max(seen) <= AT_A_TIME
    assert len(begun) == 10 * AT_A_TIME


async def test_tenants_take_turns_and_who_leaves_has_none() -> None:
    spread, begun = Spread(), list[str]()
    tasks = [asyncio.create_task(begin(spread, "a", begun)) for _ in range(100 * AT_A_TIME)]
    tasks += [asyncio.create_task(begin(spread, "b", begun)) for _ in range(AT_A_TIME)]
    await asyncio.sleep(0)
    for task in tasks[: 50 * AT_A_TIME]:
        task.cancel()
    await asyncio.wait(tasks)
    assert begun.count("a") >= 50 * AT_A_TIME - AT_A_TIME
    last = max(place for place, tenant in enumerate(begun) if tenant == "b")
    assert last <= 4 * AT_A_TIME
    await asyncio.create_task(begin(spread, "c", begun))
    assert begun[-1] == "c"
