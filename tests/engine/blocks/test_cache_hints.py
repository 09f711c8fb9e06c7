"""Prompts that are to stay cached, and those that nobody asks for again."""

from baton_proto.worker import NO_HINT, CacheHint
from engine.blocks.block_manager import BlockManager
from engine.blocks.resting import OUTPUT, SHORT
from engine.sequences.sequence import SequenceStatus
from tests.engine.blocks.block_machine import compute
from tests.engine.blocks.fake_tiers import Slots
from tests.engine.kv_oracle import make_sequence

KEEP = CacheHint(keep_s=10)


class Cache:
    """A block manager of 8 blocks with 4 tokens each, above `num_slots`."""

    def __init__(self, num_slots: int = 0) -> None:
        self.manager = BlockManager(8, 4, Slots(num_slots, dict.fromkeys(range(8), ())) if num_slots else None)

    def run(self, seed: int, hint: CacheHint = NO_HINT, num_tokens: int = 16, *, ends: bool = True) -> int:
        """A request from beginning to end. Returns how many of its blocks were cached."""
        sequence = make_sequence("request", [seed * 100 + i for i in range(num_tokens)] + [1])
        sequence.hint = hint
        assert self.manager.allocate(sequence)
        compute(self.manager, sequence)
        if ends:
            sequence.status = SequenceStatus.FINISHED
        self.manager.free(sequence)
        assert self.manager.check_integrity() == []
        return sequence.num_cached_tokens // 4

    def wash(self) -> None:
        """Younger prompts that would push everything out."""
        for seed in range(50, 55):
            self.run(seed)


def test_a_prompt_that_is_to_stay_outlives_younger_ones() -> None:
    cache = Cache()
    cache.run(1, KEEP, num_tokens=8)
    cache.wash()
    assert cache.run(1, num_tokens=8) == 2
    assert len(cache.manager.cache.kept) == 2


def test_its_time_counts_from_its_end_and_then_it_is_as_any_other() -> None:
    cache = Cache()
    cache.manager.expire(100)
    cache.run(1, KEEP, num_tokens=8)
    cache.manager.expire(109)
    cache.wash()
    assert len(cache.manager.cache.kept) == 2
    cache.manager.expire(110)
    assert len(cache.manager.cache.kept) == 0
    cache.wash()
    assert cache.run(1, num_tokens=8) == 0


def test_who_asks_again_gets_the_later_end() -> None:
    cache = Cache()
    cache.run(1, KEEP, num_tokens=8)
    cache.manager.expire(5)
    cache.run(1, KEEP, num_tokens=8)
    cache.run(1, CacheHint(keep_s=1), num_tokens=8)
    cache.manager.expire(14)
    assert len(cache.manager.cache.kept) == 2
    cache.manager.expire(15)
    assert len(cache.manager.cache.kept) == 0


def test_only_a_quarter_of_all_blocks_is_kept_and_the_first_ones_are() -> None:
    cache = Cache()
    cache.run(1, KEEP, num_tokens=16)
    assert len(cache.manager.cache.kept) == 2
    cache.run(2, KEEP, num_tokens=8)
    assert len(cache.manager.cache.kept) == 2
    cache.wash()
    assert cache.run(1, num_tokens=16) == 2


def test_a_kept_prompt_gives_way_when_a_request_needs_all_blocks() -> None:
    cache = Cache()
    cache.run(1, KEEP, num_tokens=8)
    cache.run(2, num_tokens=31)
    assert len(cache.manager.cache.kept) == 0


def test_a_kept_prompt_that_gives_way_goes_into_the_lower_tier_before_all_others() -> None:
    cache = Cache(num_slots=4)
    cache.run(1, KEEP, num_tokens=8)
    cache.wash()
    cache.run(2, num_tokens=31)
    assert len(cache.manager.cache.kept) == 2
    assert cache.run(1, num_tokens=8) == 2


def test_a_hint_counts_when_the_request_ends_not_when_it_is_preempted() -> None:
    cache = Cache()
    cache.run(1, KEEP, num_tokens=8, ends=False)
    assert len(cache.manager.cache.kept) == 0


def test_a_prompt_whose_time_is_over_in_the_lower_tier_goes_after_those_that_came_to_rest_before() -> None:
    cache = Cache(num_slots=8)
    cache.run(1, KEEP, num_tokens=8)
    cache.run(2, num_tokens=8)
    cache.run(3, num_tokens=31)
    cache.manager.expire(10)
    for seed in range(4, 7):
        cache.run(seed, num_tokens=12)
    assert cache.run(1, num_tokens=8) == 2
    assert cache.manager.check_integrity() == []


def test_only_the_end_that_nobody_reused_ages_as_an_answer_does() -> None:
    manager = BlockManager(8, 4)
    kinds: list[int] = []
    for number, hint in enumerate((NO_HINT, CacheHint(drop=True))):
        sequence = make_sequence("request", [*range(8), *[50 + number] * 9])
        sequence.hint = hint
        sequence.status = SequenceStatus.FINISHED
        assert manager.allocate(sequence)
        compute(manager, sequence)
        blocks = list(sequence.block_table)
        manager.free(sequence)
        kinds = [manager.cache.table.kinds[block] for block in blocks[:4]]
    assert kinds == [SHORT + 1, SHORT + 1, OUTPUT, OUTPUT]
