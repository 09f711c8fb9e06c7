"""Prefixes that leave the device and come back: a few cases by hand, then anything at all against a plain dict."""

from collections.abc import Iterable

from baton_proto.kv_events import DEVICE, HOST, KvEvent
from engine.blocks.block_manager import BlockManager
from engine.sequences.sequence import Sequence
from tests.engine.blocks.block_machine import (
    DiskBlockMachine,
    LateBlockMachine,
    LateDiskBlockMachine,
    TieredBlockMachine,
    allocated,
    compute,
    few_and_many,
)
from tests.engine.blocks.fake_tiers import LateSlots, Slots
from tests.engine.kv_oracle import make_sequence, snapshot, u64


class Tiered:
    """A block manager of `num_blocks` with four tokens each above `num_slots`, and what its blocks hold."""

    def __init__(self, num_blocks: int, num_slots: int, slots: type[Slots] = Slots) -> None:
        self.content: dict[int, tuple[int, ...]] = {}
        self.manager = BlockManager(num_blocks, 4, slots(num_slots, self.content))

    def begin(self, *tokens: int) -> Sequence:
        return allocated(self.manager, "request", tokens)

    def compute(self, sequence: Sequence) -> None:
        for i in range(sequence.num_cached_tokens // 4, sequence.num_tokens // 4):
            self.content[sequence.block_table[i]] = tuple(sequence.token_ids[: (i + 1) * 4])
        compute(self.manager, sequence)

    def run(self, *tokens: int) -> Sequence:
        """A request from its beginning to its end."""
        sequence = self.begin(*tokens)
        held = [self.content[block] for block in sequence.block_table[: sequence.num_cached_tokens // 4]]
        assert held == [tuple(tokens[: (i + 1) * 4]) for i in range(len(held))]
        self.compute(sequence)
        self.manager.free(sequence)
        assert self.manager.check_integrity() == []
        return sequence


def told(events: Iterable[KvEvent]) -> list[tuple[str, int | None, list[int]]]:
    """(type, home, sequence hashes)"""
    return [
        (type(event).__name__, getattr(event, "home", None), u64(getattr(event, "sequence_hashes", b"")))
        for event in events
    ]


def test_blocks_that_are_sooner_computed_than_copied_are_not_at_hand_at_a_second_look_either() -> None:
    tiered = Tiered(num_blocks=3, num_slots=8)
    tiered.run(*range(12))
    tiered.run(*range(100, 112))
    manager, again = tiered.manager, make_sequence("again", range(12))
    manager.tiers.compute_s = lambda num_tokens: -1.0
    at_hand = manager.tiers.tokens_at_hand(again)
    assert at_hand < 8
    assert manager.tiers.more_at_hand(again, at_hand) == at_hand


def test_when_both_are_full_the_oldest_of_all_is_forgotten() -> None:
    tiered = Tiered(num_blocks=2, num_slots=2)
    first, second, third = ([seed * 100 + i for i in range(8)] for seed in range(3))
    tiered.run(*first)
    tiered.run(*second)
    tiered.manager.cache.take_events()
    oldest = tiered.run(*third).sequence_hashes
    events = told(tiered.manager.cache.take_events())
    assert [(name, len(hashes)) for name, _, hashes in events] == [("Moved", 2), ("Removed", 2), ("Stored", 2)]
    assert len(snapshot(tiered.manager)) == 4
    assert oldest[0] in snapshot(tiered.manager)
    assert tiered.begin(*first).num_cached_tokens == 0


def test_what_was_reused_often_stays_longer_than_what_is_younger() -> None:
    """One long prompt that nobody asks for again does not wash out a prefix that many share."""
    tiered = Tiered(num_blocks=4, num_slots=4)
    for _ in range(8):
        shared = tiered.run(*range(8), 1)
    for seed in range(1, 4):
        tiered.run(*(seed * 100 + i for i in range(16)))
    assert set(shared.sequence_hashes) <= snapshot(tiered.manager).keys()
    assert tiered.run(*range(8), 1).num_cached_tokens == 8


def test_who_computes_what_lies_in_the_lower_tier_gives_it_a_block_again() -> None:
    tiered = Tiered(num_blocks=4, num_slots=4)
    slow = tiered.begin(*range(8), 1)
    quick = allocated(tiered.manager, "quick", [0, 1, 2, 3])
    tiered.content[quick.block_table[0]] = (0, 1, 2, 3)
    compute(tiered.manager, quick)
    tiered.manager.free(quick)
    allocated(tiered.manager, "pushes out", [9])
    assert tiered.manager.cache.num_lowered == 1
    tiered.manager.cache.take_events()
    tiered.compute(slow)
    assert tiered.manager.cache.num_lowered == 0
    assert tiered.manager.tiers.num_raised == 0, "nothing was copied"
    assert told(tiered.manager.cache.take_events()) == [
        ("Moved", DEVICE, slow.sequence_hashes[:1]),
        ("Stored", DEVICE, slow.sequence_hashes[1:2]),
    ]
    assert tiered.manager.check_integrity() == []


def test_a_device_that_is_emptied_keeps_its_prefixes_in_the_lower_tier() -> None:
    tiered = Tiered(num_blocks=4, num_slots=3)
    tiered.run(*range(16))
    tiered.manager.cache.take_events()
    tiered.manager.vacate()
    assert (tiered.manager.num_free, tiered.manager.cache.num_lowered) == (4, 3)
    assert [(name, home, len(hashes)) for name, home, hashes in told(tiered.manager.cache.take_events())] == [
        ("Moved", HOST, 4),
        ("Removed", None, 1),
    ]
    tiered.content.clear()
    assert tiered.run(*range(13)).num_cached_tokens == 12


def test_who_takes_a_block_for_its_next_token_comes_after_what_is_copied_out_of_it() -> None:
    tiered = Tiered(num_blocks=3, num_slots=8, slots=LateSlots)
    tiered.run(*range(8))
    sequence = tiered.begin(20, 21, 22, 23)
    tiered.compute(sequence)
    assert not sequence.moves
    sequence.token_ids.append(24)
    assert tiered.manager.append(sequence)
    assert [move.left_s() for move in sequence.moves] == [1.0]
    sequence.moves[0].wait()
    assert tiered.manager.cache.num_lowered == 1
    assert tiered.manager.tiers.is_near(sequence)


def test_who_moves_over_to_a_block_that_is_being_restored_comes_after_that() -> None:
    tiered = Tiered(num_blocks=5, num_slots=8, slots=LateSlots)
    slow = tiered.begin(*range(8), 1)
    quick = tiered.begin(0, 1, 2, 3)
    tiered.compute(quick)
    tiered.manager.free(quick)
    tiered.manager.free(tiered.begin(9, 9, 9, 9, 9))
    assert tiered.manager.cache.num_lowered == 1
    restored = tiered.begin(0, 1, 2, 3, 7)
    assert restored.num_cached_tokens == 4
    assert not slow.moves
    compute(tiered.manager, slow)
    assert slow.block_table[0] == restored.block_table[0]
    assert slow.moves == restored.moves
    assert not tiered.manager.tiers.is_near(slow)


def test_a_peer_writes_blocks_when_nothing_is_copied_out_of_them_any_more() -> None:
    tiered = Tiered(num_blocks=3, num_slots=8, slots=LateSlots)
    woken: list[int] = []
    tiered.manager.tiers.on_copied(lambda: woken.append(1))
    tiered.run(*range(12))
    sequence = tiered.begin(*range(20, 28))
    assert tiered.manager.tiers.is_moving(sequence)
    assert not tiered.manager.land()
    for move in sequence.moves:
        move.wait()
    assert tiered.manager.land()
    assert not tiered.manager.tiers.is_moving(sequence)
    assert not tiered.manager.land(), "nobody asked again"


def test_some_blocks_of_the_device_are_emptied_before_anybody_needs_them() -> None:
    tiered = Tiered(num_blocks=4, num_slots=8, slots=LateSlots)
    tiered.run(*range(16))
    assert (tiered.manager.num_free, tiered.manager.num_cached) == (0, 4)
    tiered.manager.land()
    assert (tiered.manager.num_free, tiered.manager.num_cached, tiered.manager.cache.num_lowered) == (2, 2, 2)
    tiered.manager.land()
    assert tiered.manager.num_free == 2
    assert tiered.manager.check_integrity() == []


def test_a_long_prompt_that_waits_for_copies_leaves_an_empty_block_to_a_decode() -> None:
    tiered = Tiered(num_blocks=6, num_slots=8, slots=LateSlots)
    reader = tiered.begin(50, 51, 52)
    tiered.compute(reader)
    tiered.run(*range(16))
    assert (tiered.manager.num_free, tiered.manager.num_cached) == (1, 4)
    long = tiered.begin(*range(20, 28))
    assert long.moves
    reader.token_ids += [53, 54]
    assert tiered.manager.append(reader)
    assert not reader.moves, "its step does not wait for the copies"
    assert tiered.manager.check_integrity() == []


def test_what_is_copied_later_than_it_would_be_computed_is_computed() -> None:
    tiered = Tiered(num_blocks=3, num_slots=8)
    tiered.run(*range(9))
    tiered.run(*range(100, 109))
    tier = tiered.manager.tiers._tier
    assert tier is not None
    tier.load_s = lambda num_blocks: num_blocks * 2.0  # type: ignore[method-assign]
    asks = make_sequence("asks", range(9))
    tiered.manager.tiers.compute_s = lambda num_tokens: num_tokens * 0.4
    assert tiered.manager.tiers.usable_hits(asks) == []
    tiered.manager.tiers.compute_s = lambda num_tokens: num_tokens * 0.5
    assert tiered.manager.tiers.tokens_at_hand(asks) == 8


TestFewTieredBlockMachine, TestManyTieredBlockMachine = few_and_many(TieredBlockMachine, many=150, steps=50)
TestFewLateBlockMachine, TestManyLateBlockMachine = few_and_many(LateBlockMachine, many=300, steps=50)
TestFewDiskBlockMachine, TestManyDiskBlockMachine = few_and_many(DiskBlockMachine, many=300, steps=60)
TestFewLateDiskBlockMachine, TestManyLateDiskBlockMachine = few_and_many(LateDiskBlockMachine, many=150, steps=60)
