"""How many lines of batches are in flight beside others."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton_proto.discovery import WorkerLoad
from router.batches import room as rooms
from router.batches.room import LOOK_S, Room, beside_others
from router.requests.admission import AdmissionQueue
from router.workers.load import LoadLedger

DECODE = (("d0", 1), ("d1", 1))


async def test_lines_take_half_of_what_workers_run_and_nothing_while_others_wait() -> None:
    ledger, queue = LoadLedger(16), AdmissionQueue(8)
    pool = cast(Any, SimpleNamespace(decode_keys=lambda: DECODE, prefill_keys=lambda: ()))
    look = beside_others(pool, ledger, queue, each=10)
    assert look(0) == 0.0
    assert look(9) == 0.0
    assert look(10) is None, "half of 2 workers that run 10 each"
    for worker in DECODE:
        ledger.report(worker, WorkerLoad(running=2))
    assert look(3) == LOOK_S, "one line after the other beside a request of somebody else"
    charges = [ledger.charge(f"r{number}", worker, None, 100, 100) for number, worker in enumerate(DECODE)]
    assert look(3) is None, "each worker has a prompt"
    charges[1].prefill_done()
    assert look(3) == LOOK_S
    for worker in DECODE:
        ledger.report(worker, WorkerLoad(running=5))
    assert look(3) is None, "others and lines together run 10"
    for worker in DECODE:
        ledger.report(worker, WorkerLoad())
    with queue.admit() as ticket, queue.turn(ticket, lambda: None):
        assert look(0) is None


async def test_lines_enter_in_their_order_and_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "MAX_BYTES", 100)
    room, entered = Room(lambda lines: 0.0), list[int]()

    async def enter(number: int, num_bytes: int) -> None:
        await room.enter(num_bytes)
        entered.append(number)

    await enter(0, 500)  # one alone may be larger than all may be together
    waiting = [asyncio.create_task(enter(number, num_bytes)) for number, num_bytes in ((1, 90), (2, 90), (3, 5))]
    await asyncio.sleep(3 * LOOK_S)
    assert entered == [0]
    room.leave(500)
    await waiting[0]
    assert entered == [0, 1], "the short one waits for its turn"
    waiting[1].cancel()
    await waiting[2]
    assert entered == [0, 1, 3]
