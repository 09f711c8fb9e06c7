"""Against an oracle that writes every head of every rank by hand."""

import pytest
from hypothesis import given, strategies as st

from kvtransfer.slab.head_plan import SIZES, Shard, fits, parts, sending_ranks

HEADS = (1, 2, 4, 8, 3, 6, 16, 32)
mixes = st.sampled_from([(a, b, h) for h in HEADS for a in SIZES for b in SIZES if fits(a, h) and fits(b, h)])


def holders(size: int, num_kv_heads: int) -> dict[int, list[tuple[int, int]]]:
    """Model head -> every (rank, position in its slab), lowest rank first, counted out one by one."""
    found: dict[int, list[tuple[int, int]]] = {head: [] for head in range(num_kv_heads)}
    for rank in range(size):
        position = 0
        for head in range(num_kv_heads):
            holds = head * size // num_kv_heads == rank if size <= num_kv_heads else rank * num_kv_heads // size == head
            if holds:
                found[head].append((rank, position))
                position += 1
    return found


@given(mixes)
def test_every_head_of_every_receiving_rank_is_written_once_by_the_first_rank_that_holds_it(
    mix: tuple[int, int, int],
) -> None:
    senders, receivers, num_kv_heads = mix
    owner = {head: places[0] for head, places in holders(senders, num_kv_heads).items()}
    expected = {place: owner[head] for head, places in holders(receivers, num_kv_heads).items() for place in places}
    written: dict[tuple[int, int], tuple[int, int]] = {}
    for rank in range(senders):
        for part in parts(Shard(rank, senders), receivers, num_kv_heads):
            for target in part.targets:
                for source, destination in zip(part.heads, target.heads, strict=True):
                    assert (target.rank, destination) not in written
                    written[target.rank, destination] = (rank, source)
    assert written == expected


@given(mixes)
def test_a_rank_sends_all_of_its_slab_once_and_in_order_or_nothing(mix: tuple[int, int, int]) -> None:
    senders, receivers, num_kv_heads = mix
    for rank in range(senders):
        shard = Shard(rank, senders)
        plan = parts(shard, receivers, num_kv_heads)
        sent = [head for part in plan for head in part.heads]
        assert sent == (list(range(len(shard.heads(num_kv_heads)))) if rank in sending_ranks(*mix[::2]) else [])
        ranks = [target.rank for part in plan for target in part.targets]
        assert len(set(ranks)) == len(ranks)


def test_one_rank_to_one_rank_is_one_part() -> None:
    (part,) = parts(Shard(), 1, 8)
    assert (part.heads, part.targets[0].heads) == (range(8), range(8))


def test_of_replicas_the_first_sends_and_all_receive() -> None:
    assert sending_ranks(8, 2) == (0, 4)
    assert sending_ranks(4, 8) == (0, 1, 2, 3)
    first, second = parts(Shard(0, 1), 4, 2)
    assert [target.rank for target in first.targets] == [0, 1]
    assert [target.rank for target in second.targets] == [2, 3]


@pytest.mark.parametrize(("size", "num_kv_heads", "does"), [(1, 3, True), (4, 8, True), (8, 8, True), (2, 3, False)])
def test_a_worker_holds_heads_of_which_each_rank_has_as_many(size: int, num_kv_heads: int, does: bool) -> None:
    assert fits(size, num_kv_heads) is does


@pytest.mark.parametrize(
    ("size", "num_kv_heads", "does"), [(3, 3, False), (4, 6, False), (8, 2, True), (16, 16, False)]
)
def test_what_fits(size: int, num_kv_heads: int, does: bool) -> None:
    assert fits(size, num_kv_heads) is does
