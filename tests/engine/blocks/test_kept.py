from engine.blocks.kept import Kept
from engine.blocks.resting import LONG, REUSED, SHORT


def test_a_kept_block_has_the_kind_that_it_would_have_without_being_kept() -> None:
    kept = Kept(8)
    assert kept.add(1, LONG, 5)
    assert (kept.kind(1, SHORT), kept.kind(2, SHORT)) == (LONG, SHORT)
    kept.reused(1)
    assert kept.add(1, SHORT, 3)
    assert list(kept.take_expired(4.9)) == []
    assert list(kept.take_expired(5)) == [(1, REUSED[LONG])]
    assert kept.kind(1, SHORT) == SHORT


def test_when_all_are_over_nothing_is_looked_for_and_new_ones_count() -> None:
    kept = Kept(8)
    kept.add(1, LONG, 0.2)
    assert list(kept.take_expired(0.9)) == []
    assert len(list(kept.take_expired(1))) == 1
    assert list(kept.take_expired(1e9)) == []
    assert kept.add(2, LONG, 7)
    assert list(kept.take_expired(7)) == [(2, LONG)]


def test_children_are_over_before_their_parents_and_a_forgotten_block_never() -> None:
    kept = Kept(16)
    for block in (1, 2, 3, 4):
        assert kept.add(block, LONG, 5)
    assert not kept.add(5, LONG, 5)
    assert kept.add(1, LONG, 9)
    kept.discard(3)
    kept.discard(3)
    assert len(kept) == 3
    assert [block for block, _ in kept.take_expired(6)] == [4, 2]
    assert [block for block, _ in kept.take_expired(9)] == [1]
