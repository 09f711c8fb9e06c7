"""Sequences whose prefix is read from the disk: others pass them, and they wait only where that is sooner."""

import random
from math import inf
from types import SimpleNamespace
from typing import cast

import pytest

from baton_proto.discovery import TimedStep
from decode_worker.reservations import Reservations
from engine.blocks.block_manager import BlockManager
from engine.core.engine import Engine
from engine.core.scheduler import Scheduler
from engine.core.timed_steps import TimedSteps
from engine.sequences.sequence import Sequence
from kvtransfer.decode_side.receiver import Receiver
from runtime.config.step_times import StepTimes
from tests.engine.blocks.block_machine import allocated, compute, served
from tests.engine.blocks.fake_tiers import Disk, LateSlots, Slots
from tests.engine.core.test_scheduler import names, step
from tests.engine.kv_oracle import EOS, FakeRunner, make_sequence
from worker.requests.request import Phase, Request

ON_DISK = list(range(13))


class Waits:
    """A pool of 8 blocks of 4 tokens with its tiers. The blocks of ON_DISK are known from an earlier process."""

    def __init__(self) -> None:
        content = dict.fromkeys(range(8), (0,))
        former = Disk(8, slots := Slots(4, content))
        manager = BlockManager(8, 4, slots, former)
        served(manager, "first", ON_DISK)
        manager.vacate()
        while manager.land() or former.finish():
            pass
        self.disk = Disk(8, slots := Slots(8, content))
        self.disk.files = former.files
        found = [(copy, block) for copy, (block, _) in reversed(former.files.items())]
        assert len(found) == 3
        self.manager = BlockManager(8, 4, slots, self.disk, found)
        self.manager.cache.take_events()

    def read(self) -> None:
        self.disk.finish()
        assert self.manager.land()


@pytest.fixture
def waits() -> Waits:
    return Waits()


def request(sequence: Sequence) -> Request:
    submit = SimpleNamespace(priority=0, prefill=None)
    facts = {"sequence": sequence, "submit": submit, "deadline_s": 9e9, "phase": Phase.RESERVING}
    return cast(Request, SimpleNamespace(**facts, is_arriving=False))


def reserving(manager: BlockManager) -> tuple[Engine, Reservations, list[str]]:
    """The last one lists, in order, who has got a grant."""
    engine = Engine(FakeRunner(4), manager, max_batch_tokens=64, max_running=8, eos_token_ids=EOS)
    granted: list[str] = []
    receiver = cast(Receiver, SimpleNamespace(reserve=lambda blocks, skipped, *_: (len(blocks), skipped)))
    return (
        engine,
        Reservations(engine, receiver, 4, 9.0, lambda one: granted.append(one.sequence.request_id)),
        granted,
    )


def test_others_pass_a_sequence_that_waits_for_the_disk_until_it_was_read(waits: Waits) -> None:
    scheduler = Scheduler(waits.manager, max_batch_tokens=64, max_running=8)
    restored = make_sequence("restored", ON_DISK, max_tokens=99)
    scheduler.add(restored)
    scheduler.add(make_sequence("other", range(100, 104)))
    assert names(step(scheduler)) == (["other"], [])
    assert names(step(scheduler)) == ([], ["other"])
    waits.read()
    batch = step(scheduler)
    assert names(batch) == (["restored"], ["other"])
    assert batch.prefill[0].num_tokens == 1
    assert restored.num_cached_tokens == 12


def test_a_sequence_that_was_aborted_lets_go_of_what_was_read_for_it(waits: Waits) -> None:
    scheduler = Scheduler(waits.manager, max_batch_tokens=64, max_running=8)
    aborted = make_sequence("aborted", ON_DISK)
    scheduler.add(aborted)
    assert step(scheduler).num_tokens == 0
    waits.read()
    assert len(waits.manager.cache.copies.held) == 3
    scheduler.finish(aborted)
    assert not waits.manager.cache.copies.held
    assert waits.manager.check_integrity() == []


def test_a_block_that_is_damaged_ends_the_wait_for_those_behind_it(waits: Waits) -> None:
    scheduler = Scheduler(waits.manager, max_batch_tokens=64, max_running=8)
    waiting = make_sequence("waiting", ON_DISK)
    scheduler.add(waiting)
    assert step(scheduler).num_tokens == 0
    waits.disk.work(False, True)
    waits.disk.work(False, False)  # the first one
    assert len(waits.disk._reads) == 1
    assert waits.manager.land()
    assert names(step(scheduler)) == (["waiting"], [])
    waits.disk.finish()
    waits.manager.land()
    assert waits.manager.check_integrity() == []


def test_a_prefix_is_computed_where_the_disk_would_take_longer(waits: Waits) -> None:
    restored = make_sequence("restored", ON_DISK)
    waits.manager.tiers.compute_s = lambda num_tokens: {12: 0.1}[num_tokens]
    assert not waits.manager.tiers.restores(restored)
    waits.manager.tiers.compute_s = lambda num_tokens: {12: 0.11}[num_tokens]
    tier = waits.manager.tiers._tier
    assert tier is not None
    tier.load_s = lambda num_blocks: {3: 0.01}[num_blocks]  # type: ignore[method-assign]
    assert not waits.manager.tiers.restores(restored), "the copy to the device counts, too"
    tier.load_s = lambda num_blocks: 0.009  # type: ignore[method-assign]
    assert waits.manager.tiers.restores(restored)
    waits.disk.late = True
    assert waits.manager.land(), "whoever waits may go on"
    assert not waits.manager.tiers.restores(restored)
    assert waits.manager.allocate(restored)
    assert restored.num_computed_tokens == 0


def test_others_reserve_while_the_first_reservation_waits_for_the_disk(waits: Waits) -> None:
    engine, reservations, granted = reserving(waits.manager)
    restored = request(make_sequence("restored", ON_DISK))
    reservations.add(restored)
    reservations.add(request(make_sequence("other", range(100, 104))))
    assert granted == ["other"]
    large = request(make_sequence("large", range(200, 232)))
    reservations.add(large)
    reservations.add(request(make_sequence("behind", range(300, 304))))
    assert granted == ["other"], "nobody passes who waits for memory"
    reservations.cancel(large)
    assert granted == ["other", "behind"]
    waits.disk.finish()
    assert engine.step().restored
    reservations.retry()
    assert granted == ["other", "behind", "restored"]
    assert restored.grant == (1, 12)


@pytest.mark.parametrize("num_copies", [0, 40])
def test_a_reservation_whose_blocks_are_being_copied_holds_up_nobody_and_waits_for_no_disk(num_copies: int) -> None:
    """Its blocks are being emptied, and meanwhile what it would have read becomes worth reading."""
    slots = LateSlots(4, dict.fromkeys(range(6), (0,)))
    disk = Disk(num_copies, slots) if num_copies else None
    manager = BlockManager(6, 4, slots, disk)
    engine, reservations, granted = reserving(manager)
    manager.tiers.compute_s = lambda num_tokens: 0.0

    def finish() -> None:
        while slots.moves or (disk is not None and disk.finish()) or manager.land():
            for _ in range(len(slots.moves)):
                slots.work()

    for number, tokens in enumerate((ON_DISK, range(100, 116), range(200, 216), range(300, 316))):
        sequence = allocated(manager, str(number), tokens)
        finish()
        compute(manager, sequence)
        manager.free(sequence)
        finish()
    moving = request(make_sequence("moving", [*ON_DISK, 1]))
    reservations.add(moving)
    assert manager.tiers.is_moving(moving.sequence)
    manager.tiers.compute_s = lambda num_tokens: inf
    reservations.add(request(make_sequence("behind", range(400, 404))))
    assert granted == ["behind"]
    assert engine.check_integrity() == []
    assert not manager.cache.copies.reads, "nothing is read for who has blocks"
    finish()
    reservations.retry()
    assert granted == ["behind", "moving"]


@pytest.mark.parametrize("seed", range(8))
def test_reservations_keep_the_books_and_all_get_their_turn_whatever_the_tiers_do(seed: int) -> None:
    dice = random.Random(seed)
    slots = LateSlots(4, dict.fromkeys(range(6), (0,)))
    disk = Disk(40, slots)
    manager = BlockManager(6, 4, slots, disk)
    engine, reservations, granted = reserving(manager)
    requests: dict[str, Request] = {}
    num_moving = 0

    def tiers_work() -> None:
        if slots.moves and dice.randrange(2):
            slots.work()
        disk.work(writes=bool(dice.randrange(2)), ok=dice.randrange(9) > 0)
        if manager.land():
            reservations.retry()

    def one_arrives() -> None:
        if granted:
            sequence = requests.pop(granted.pop(dice.randrange(len(granted)))).sequence
            compute(manager, sequence)
            engine.release(sequence)
            reservations.retry()

    for number in range(400):
        manager.tiers.compute_s = dice.choice((lambda num_tokens: 0.0, lambda num_tokens: inf))
        if len(requests) < 5:
            first = 100 * dice.randrange(8)
            tokens = range(first, first + dice.choice((9, 13, 17)))
            requests[str(number)] = request(make_sequence(str(number), tokens))
            reservations.add(requests[str(number)])
        num_moving += any(one.sequence.block_table for one in reservations._waiting)
        if reservations._waiting and dice.randrange(12) == 0:
            cancelled = dice.choice(reservations._waiting)
            del requests[cancelled.sequence.request_id]
            reservations.cancel(cancelled)
        tiers_work()
        if dice.randrange(3) == 0:
            one_arrives()
        assert engine.check_integrity() == []
    assert num_moving > 20
    assert manager.tiers.num_read > 5
    for _ in range(200):
        tiers_work()
        one_arrives()
    assert not requests


def test_a_reservation_that_was_cancelled_waits_for_the_disk_no_more(waits: Waits) -> None:
    engine = Engine(FakeRunner(4), waits.manager, max_batch_tokens=64, max_running=8, eos_token_ids=EOS)
    cancelled = make_sequence("cancelled", ON_DISK)
    assert not engine.reserve(cancelled)
    engine.forgo(cancelled)
    waits.read()
    assert not waits.manager.cache.copies.held


def test_how_long_a_prompt_takes_is_known_from_enough_steps_with_prompts() -> None:
    steps, now_s = TimedSteps(StepTimes()), 0.0
    assert steps.prompt_s(100) == float("inf")
    for ms in (10.0, 100.0):
        for _ in range(160):
            now_s += ms / 1e3
            steps.add(TimedStep(1000, 5e5, 0, 0, ms), now_s)
        assert steps.prompt_s(1000) == pytest.approx(ms / 1e3, rel=0.1)
