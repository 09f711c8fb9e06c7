import asyncio

from worker.requests.in_flight import InFlight


async def test_waiting_ends_when_the_last_one_is_discarded() -> None:
    in_flight: InFlight[str, int] = InFlight()
    in_flight.add("a", 1)
    in_flight.add("b", 2)
    waiting = asyncio.create_task(in_flight.wait_empty(5))
    in_flight.discard("a")
    await asyncio.sleep(0)
    assert not waiting.done()
    in_flight.discard("b")
    assert await waiting == 0


async def test_waiting_tells_how_many_are_left_when_the_time_is_up() -> None:
    in_flight: InFlight[str, int] = InFlight()
    in_flight.add("a", 1)
    assert await in_flight.wait_empty(0.01) == 1


async def test_nothing_in_flight_is_empty_at_once() -> None:
    assert await InFlight().wait_empty(0.01) == 0


async def test_items_may_be_discarded_while_iterating() -> None:
    in_flight: InFlight[int, int] = InFlight()
    for number in range(5):
        in_flight.add(number, number)
    for number in in_flight:
        in_flight.discard(number)
    assert len(in_flight) == 0
