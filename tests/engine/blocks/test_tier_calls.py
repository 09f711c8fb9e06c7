"""What the block manager asks of its tiers, what it tells those that wait for them, and what it counts."""

import random
from collections.abc import Callable
from math import inf

import pytest

from baton_proto.worker import CacheHint
from engine.blocks.block_manager import BlockManager
from engine.sequences.sequence import SequenceStatus
from tests.engine.blocks.block_machine import allocated, compute, computed, served
from tests.engine.blocks.fake_tiers import Disk, LateMove, LateSlots, Slots
from tests.engine.core.test_disk_waits import ON_DISK, Waits
from tests.engine.kv_oracle import make_sequence


def serve(manager: BlockManager, first_token: int, num_tokens: int) -> None:
    served(manager, "request", range(first_token, first_token + num_tokens))
    assert manager.check_integrity() == []


def late(num_blocks: int, spare: int) -> tuple[BlockManager, LateSlots]:
    """A pool of blocks of 4 tokens whose content is known, above 8 slots with slow copies."""
    slots = LateSlots(8, dict.fromkeys(range(num_blocks), (0,)))
    slots.spare = spare
    return BlockManager(num_blocks, 4, slots), slots


def held(manager: BlockManager) -> int:
    """Blocks that were read and are kept for those that wait for them."""
    return len(manager.cache.copies.held)


@pytest.mark.parametrize("seed", range(40))
def test_two_prompts_share_the_whole_blocks_of_their_common_beginning(seed: int) -> None:
    dice = random.Random(seed)
    manager = BlockManager(32, 4)
    common = dice.randrange(18)
    ours = [*range(common), *[100] * dice.randrange(1, 12)]
    theirs = [*range(common), *[200] * dice.randrange(1, 12)]
    if seed % 4 == 0:  # one begins with the other
        ours, theirs = sorted((ours[: common + 1], [*ours, 9]), key=len, reverse=bool(seed % 8))
    other = computed(manager, "other", theirs)
    equal = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if len(set(pair)) > 1), len(ours))
    whole = min(equal, len(theirs), len(ours) - 1) // 4
    assert make_sequence("ours", ours).shared_tokens(other, 4) == 4 * whole


def test_a_manager_without_tiers_waits_for_nothing_and_evicts_nothing_before_it_must() -> None:
    manager = BlockManager(4, 4)
    serve(manager, 0, 16)
    assert not manager.land()
    assert manager.num_cached == 4
    assert not manager.tiers.flush()
    assert not manager.tiers.restores(make_sequence("again", range(16)))
    assert manager.tiers.restoring_ms() == (0.0, 0.0)
    assert (len(manager.cache.copies.of), len(manager.cache.copies.all)) == (0, 0)
    manager.tiers.on_copied(lambda: None)
    manager.tiers.move_disk("other")
    manager.tiers.close()


def test_a_prefix_that_lies_in_host_memory_alone_is_not_waited_for_without_a_disk() -> None:
    manager = BlockManager(4, 4, Slots(8, dict.fromkeys(range(4), (0,))))
    serve(manager, 0, 16)
    manager.vacate()
    assert not manager.tiers.restores(make_sequence("again", range(16)))
    assert (len(manager.cache.copies.of), len(manager.cache.copies.all)) == (0, 0)
    assert not manager.tiers.flush()


def test_a_prompt_is_kept_from_its_end_on_also_when_the_clock_was_never_told() -> None:
    manager = BlockManager(8, 4)
    sequence = make_sequence("kept", range(8))
    sequence.hint = CacheHint(keep_s=10)
    sequence.status = SequenceStatus.FINISHED
    assert manager.allocate(sequence)
    compute(manager, sequence)
    manager.free(sequence)
    manager.expire(9.9)
    assert len(manager.cache.kept) == 2
    manager.expire(10.0)
    assert len(manager.cache.kept) == 0


@pytest.mark.parametrize(("num_free", "after"), [(0, 8), (1, 8), (3, 8), (4, 4), (5, 5)])
def test_empty_blocks_are_made_up_to_the_spare_when_less_than_half_of_it_is_left(num_free: int, after: int) -> None:
    manager, _ = late(12, spare=8)
    passing = make_sequence("passing", range(900, 900 + 4 * num_free + 1))
    filling = make_sequence("filling", range(4 * (11 - num_free)))
    for sequence in (passing, filling):
        assert manager.allocate(sequence)
    compute(manager, filling)
    rests = make_sequence("rests", range(500, 504))
    manager.free(filling)
    manager.free(passing)  # these blocks were returned, and are not lost among the evicted ones
    assert manager.allocate(rests)
    compute(manager, rests)
    manager.free(rests)
    assert manager.num_free == num_free
    manager.land()
    assert manager.num_free == after
    assert manager.check_integrity() == []


# --- who waits for copies ---------------------------------------------------------------------------------------------


def test_those_that_wait_for_copies_are_woken_and_others_cause_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    wakes: list[Callable[[], object]] = []
    monkeypatch.setattr(LateMove, "then", lambda move, wake: wakes.append(wake))
    manager, slots = late(4, spare=0)
    disk = Disk(4, slots)
    manager = BlockManager(4, 4, slots, disk)
    serve(manager, 0, 16)

    def moving(first_token: int) -> None:
        sequence = allocated(manager, "moving", range(first_token, first_token + 4))
        assert manager.tiers.is_moving(sequence)

    def end_copies() -> None:
        while slots.moves:
            slots.work()

    moving(100)
    wakes.pop()()  # before anybody cares: it is called all the same
    end_copies()
    assert manager.land()
    manager.tiers.on_copied(wake := lambda: None)
    assert disk.wake is wake
    moving(200)
    assert wakes == [wake]
    still = make_sequence("not moving", [9])
    assert not manager.tiers.is_moving(still)
    end_copies()
    assert manager.land(), "somebody else's question takes nothing from the first one"
    unasked = allocated(manager, "nobody asks", range(300, 304))
    assert unasked.moves
    end_copies()
    assert not manager.land()


def test_nobody_is_told_of_copies_that_nobody_asked_about() -> None:
    manager, slots = late(4, spare=0)
    serve(manager, 0, 16)
    serve(manager, 100, 4)
    assert slots.moves
    while slots.moves:
        slots.work()
    assert not manager.land()


def test_a_sequence_that_grows_comes_after_the_copies_of_all_its_blocks() -> None:
    manager, _ = late(4, spare=0)
    serve(manager, 0, 16)
    grows = allocated(manager, "grows", range(100, 104))
    first = list(grows.moves)
    grows.token_ids.append(1)
    assert manager.append(grows)
    assert len(first) == 1
    assert len(grows.moves) == 2
    assert grows.moves == manager.tiers.moves.of(grows.block_table)


def test_a_sequence_that_moves_over_to_a_restored_block_comes_after_its_own_copies_too() -> None:
    manager, _ = late(6, spare=0)
    serve(manager, 500, 24)
    slow = allocated(manager, "slow", [*range(8), 1])
    own = list(slow.moves)
    assert len(own) == 1
    serve(manager, 0, 4)
    pushes_out = allocated(manager, "pushes out", [9] * 12)
    manager.free(pushes_out)
    restored = allocated(manager, "restored", [0, 1, 2, 3, 7])
    assert restored.num_cached_tokens == 4
    compute(manager, slow)
    assert slow.block_table[0] == restored.block_table[0]
    assert slow.moves[: len(own)] == own
    assert slow.moves[len(own) :] == manager.tiers.moves.of(slow.block_table[:1])
    assert len(slow.moves) == 2


# --- who waits for the disk -------------------------------------------------------------------------------------------


def test_a_block_that_was_read_is_kept_until_the_last_that_waits_for_it_has_let_go() -> None:
    waits = Waits()
    manager = waits.manager
    first, second, third = (make_sequence(name, ON_DISK) for name in ("first", "second", "third"))
    assert all(manager.tiers.restores(one) for one in (first, second, third))
    waits.read()
    assert held(manager) == 3
    manager.tiers.forgo(first)
    assert held(manager) == 3
    manager.free(second)
    assert held(manager) == 3
    assert manager.allocate(third)
    assert third.num_cached_tokens == 12
    assert held(manager) == 0
    assert manager.check_integrity() == []


def test_a_sequence_without_blocks_that_is_freed_waits_for_the_disk_no_more() -> None:
    waits = Waits()
    gone = make_sequence("gone", ON_DISK)
    assert waits.manager.tiers.restores(gone)
    waits.manager.free(gone)
    waits.read()
    assert held(waits.manager) == 0
    assert not waits.manager.tiers._restoring


def test_what_was_read_before_is_kept_for_who_waits_for_the_blocks_after_it() -> None:
    waits = Waits()
    short = make_sequence("short", ON_DISK[:5])
    assert waits.manager.tiers.restores(short)
    waits.read()
    waits.manager.tiers.forgo(short)
    assert (held(waits.manager), waits.manager.tiers.num_read) == (0, 1)
    assert waits.manager.tiers.restores(make_sequence("long", ON_DISK))
    assert held(waits.manager) == 1, "it is not given to another block meanwhile"
    waits.read()
    assert (held(waits.manager), waits.manager.tiers.num_read) == (3, 3)
    assert waits.manager.check_integrity() == []


def test_who_waits_is_asked_again_without_a_look_at_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Waits().manager
    waiting = make_sequence("waiting", ON_DISK)
    assert manager.tiers.restores(waiting)
    monkeypatch.setattr(manager.cache.table, "match", None)
    assert manager.tiers.restores(waiting)


def test_only_blocks_that_are_not_being_read_yet_count_as_reads_to_come() -> None:
    waits = Waits()
    manager, asked = waits.manager, []
    waits.disk.read_s = lambda num_blocks: asked.append(num_blocks) or 0.1  # type: ignore[method-assign,func-returns-value]
    assert manager.tiers._tier is not None
    manager.tiers._tier.load_s = lambda num_blocks: {3: 0.03, 2: 0.02, 1: 0.01}[num_blocks]  # type: ignore[method-assign]
    manager.tiers.compute_s = lambda num_tokens: {12: 0.2, 8: 0.2, 4: 0.11}[num_tokens]
    first, second = make_sequence("first", ON_DISK), make_sequence("second", ON_DISK)
    assert manager.tiers.restores(first)
    assert manager.tiers.restores(second)
    assert manager.tiers.restores(first)
    assert asked == [3, 0, 0]
    waits.disk.work(False, True)
    assert manager.land()
    assert asked == [3, 0, 0, 0], "of a disk that answers nothing more is asked"
    assert manager.tiers.restores(first)
    waits.disk.work(False, True)
    assert manager.land()
    assert not manager.tiers.restores(first), "0.1 + 0.01 s are no less than 0.11 s"


def test_a_block_that_could_not_be_read_ends_the_wait_of_those_alone_that_wait_for_it() -> None:
    waits = Waits()
    short, long = make_sequence("short", ON_DISK[:5]), make_sequence("long", ON_DISK)
    assert waits.manager.tiers.restores(short)
    assert waits.manager.tiers.restores(long)
    waits.disk.work(False, False)  # the last one
    assert waits.manager.land()
    assert list(waits.manager.tiers._restoring) == [short]
    waits.read()
    assert held(waits.manager) == 1
    assert waits.manager.check_integrity() == []


def test_those_that_wait_are_told_when_something_was_read_or_the_disk_does_not_answer_and_else_not() -> None:
    waits = Waits()
    manager = waits.manager
    waits.disk.late = True
    assert not manager.land(), "nobody waits"
    waits.disk.late = False
    waiting = [make_sequence(name, ON_DISK) for name in ("first", "second")]
    assert all(manager.tiers.restores(one) for one in waiting)
    assert not manager.land(), "nothing was read"
    assert all(manager.tiers.restores(one) for one in waiting)
    assert waits.disk.read_s(0) < inf
    waits.disk.late = True
    assert manager.land()
    assert not manager.tiers._restoring
    waits.disk.late = False
    waits.disk.finish()
    assert manager.land()
    assert held(manager) == 0, "what comes at last is kept for nobody"
    assert manager.tiers.num_read == 3
    assert not manager.land()


def test_nothing_is_written_while_host_memory_has_room_until_the_worker_ends() -> None:
    slots = Slots(12, dict.fromkeys(range(4), (0,)))
    disk = Disk(12, slots)
    manager = BlockManager(4, 4, slots, disk)
    for first_token in (0, 100):
        serve(manager, first_token, 16)
    assert manager.cache.num_lowered == 4
    assert not disk._writes
    assert not manager.land()
    assert manager.tiers.flush()
    assert disk._writes
    disk.finish()
    assert not manager.land(), "a write is no news"


# --- counts and ends --------------------------------------------------------------------------------------------------


def test_copies_between_device_and_host_memory_are_counted_over_all_times() -> None:
    manager = BlockManager(2, 4, Slots(8, dict.fromkeys(range(2), (0,))))
    assert (manager.tiers.num_moved_down, manager.tiers.num_raised, manager.tiers.num_read) == (0, 0, 0)
    serve(manager, 0, 8)
    serve(manager, 100, 8)
    assert (manager.tiers.num_moved_down, manager.tiers.num_raised) == (2, 0)
    serve(manager, 0, 8)  # one block is computed, because something has to be
    assert (manager.tiers.num_moved_down, manager.tiers.num_raised) == (4, 1)
    serve(manager, 100, 8)
    assert (manager.tiers.num_moved_down, manager.tiers.num_raised) == (6, 2)


def test_what_a_token_takes_from_a_tier_is_known_when_it_was_measured() -> None:
    waits = Waits()
    assert waits.manager.tiers.restoring_ms() == (0.0, 0.0)
    tier = waits.manager.tiers._tier
    assert tier is not None
    tier.block_s = 0.008  # type: ignore[misc]
    assert waits.manager.tiers.restoring_ms() == pytest.approx((2.0, 0.0))
    waits.disk.block_s = 0.016
    assert waits.manager.tiers.restoring_ms() == pytest.approx((2.0, 6.0))


def test_both_tiers_are_closed_and_the_disk_goes_on_under_the_name_that_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = Waits()
    done: list[str] = []
    monkeypatch.setattr(Disk, "move", lambda disk, name: done.append(name))
    monkeypatch.setattr(Disk, "close", lambda disk: done.append("disk"))
    monkeypatch.setattr(Slots, "close", lambda slots: done.append("slots"))
    waits.manager.tiers.move_disk("other")
    waits.manager.tiers.close()
    assert done == ["other", "disk", "slots"]
