"""Counts of reused prefixes: bounded, and fading."""

from router.index.prefix_hits import PrefixHits


def test_reuse_of_the_same_prefix_adds_up_and_no_reuse_counts_nothing() -> None:
    hits = PrefixHits()
    for block in (b"a" * 8, b"b" * 8, b"a" * 8, b""):
        hits.count(block)
    assert hits.counts() == {b"a" * 8: 2, b"b" * 8: 1}


def test_what_is_used_stays_when_thousands_are_used_once() -> None:
    hits = PrefixHits(max_prefixes=100)
    for i in range(10_000):
        hits.count(i.to_bytes(8, "little"))
        if i % 10 == 0:
            hits.count(b"hot     ")
    counts = hits.counts()
    assert len(counts) <= 100
    assert max(counts, key=counts.__getitem__) == b"hot     "
    assert counts[b"hot     "] > 1
