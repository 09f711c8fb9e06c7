"""What a worker that ends leaves on the disk."""

import pytest

from engine.blocks.block_manager import BlockManager
from engine.sequences.sequence import Sequence
from tests.engine.blocks.block_machine import compute, served
from tests.engine.blocks.fake_tiers import Disk, Slots
from tests.engine.kv_oracle import make_sequence


def flushed(num_copies: int, *prompts: range) -> tuple[BlockManager, Disk, list[Sequence]]:
    """A pool of 6 blocks of 4 tokens with 12 slots above a disk that has written nothing before it is asked to."""
    slots = Slots(12, dict.fromkeys(range(6), (0,)))
    disk = Disk(num_copies, slots)
    manager = BlockManager(6, 4, slots, disk)
    sequences = []
    for prompt in prompts:
        sequences.append(make_sequence("request", prompt))
        assert manager.allocate(sequences[-1])
        compute(manager, sequences[-1])
        manager.free(sequences[-1])
        assert not disk.files
    while manager.tiers.flush():
        disk.finish()
        manager.land()
    assert manager.check_integrity() == []
    return manager, disk, sequences


def on_disk(disk: Disk) -> set[int]:
    return {block.sequence_hash for block, _ in disk.files.values()}


def test_all_that_memory_holds_is_written_parents_before_children() -> None:
    _, disk, sequences = flushed(12, range(13), range(100, 113))
    written = [block for block, _ in disk.files.values()]
    assert {block.sequence_hash for block in written} == {name for one in sequences for name in one.sequence_hashes}
    seen: set[int | None] = {None}
    for block in written:
        assert block.parent in seen
        seen.add(block.sequence_hash)


@pytest.mark.parametrize("num_slots", [12, 6, 4, 3, 1])
def test_nothing_is_lost_while_the_disk_has_room_however_small_host_memory_is(num_slots: int) -> None:
    slots = Slots(num_slots, dict.fromkeys(range(6), (0,)))
    disk = Disk(40, slots)
    manager = BlockManager(6, 4, slots, disk)
    for number in range(8):
        served(manager, "request", range(100 * number, 100 * number + 8))
        disk.finish()
        manager.land()
    before = len(manager.cache.table.block_of)
    while manager.tiers.flush():
        assert manager.check_integrity() == []
        disk.finish()
        manager.land()
    assert len(on_disk(disk)) == (len(manager.cache.copies.of), len(manager.cache.copies.all))[0] == before


def test_when_host_memory_is_full_and_nothing_there_can_be_written_one_block_is_given_up_for_the_others() -> None:
    slots = Slots(3, dict.fromkeys(range(6), (0,)))
    disk = Disk(40, slots)
    disk.max_writes = 0
    manager = BlockManager(6, 4, slots, disk)
    sequences = [make_sequence("request", tokens) for tokens in (range(24), range(100, 112))]
    for sequence in sequences:
        assert manager.allocate(sequence)
        compute(manager, sequence)
        manager.free(sequence)
    disk.max_writes = 2
    while manager.tiers.flush():
        assert manager.check_integrity() == []
        disk.finish()
        manager.land()
    first, second = (one.sequence_hashes for one in sequences)
    assert on_disk(disk) == {*first[:5], *second}


def test_where_the_disk_is_too_small_it_gets_what_would_be_given_up_last() -> None:
    _, disk, (_, younger) = flushed(3, range(13), range(100, 113))
    assert on_disk(disk) == set(younger.sequence_hashes)


def test_a_beginning_is_written_first_so_that_less_time_means_shorter_prefixes() -> None:
    slots = Slots(12, dict.fromkeys(range(6), (0,)))
    disk = Disk(12, slots)
    manager = BlockManager(6, 4, slots, disk)
    sequence = served(manager, "request", range(21))
    assert manager.tiers.flush()
    disk.finish()  # two of five blocks, and then the time is over
    assert on_disk(disk) == set(sequence.sequence_hashes[:2])


def test_a_disk_that_cannot_be_written_is_not_waited_for() -> None:
    slots = Slots(12, dict.fromkeys(range(6), (0,)))
    disk = Disk(12, slots)
    disk.max_writes = 0
    manager = BlockManager(6, 4, slots, disk)
    served(manager, "request", range(13))
    assert not manager.tiers.flush()
