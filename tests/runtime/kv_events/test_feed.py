"""The order in which one worker's batches are handed out."""

from baton_proto.kv_events import MAJOR, KvEventBatch
from runtime.kv_events.feed import MAX_PENDING, EventFeed


def batch(event_id: int) -> KvEventBatch:
    return KvEventBatch(MAJOR, "w", 1, event_id, 0.0, [])


def ready(feed: EventFeed) -> list[int]:
    return [each.event_id for each in feed.ready()]


def test_batches_come_out_in_order_and_once() -> None:
    feed = EventFeed()
    assert feed.offer(batch(1))
    assert feed.offer(batch(3))
    assert not feed.offer(batch(3))
    assert ready(feed) == [1]
    assert not feed.offer(batch(1))
    assert feed.holed
    assert feed.behind
    assert feed.missing == range(2, 3)
    feed.offer(batch(2))
    assert ready(feed) == [2, 3]
    assert not feed.holed
    assert not feed.behind
    assert not feed.missing


def test_what_a_worker_says_it_published_is_missing_until_it_comes() -> None:
    feed = EventFeed()
    feed.expected = 4
    assert feed.behind
    assert not feed.holed
    assert feed.missing == range(1, 5)


def test_a_snapshot_replaces_what_it_contains_and_keeps_what_came_after() -> None:
    feed = EventFeed()
    for event_id in (1, 2, 5, 6, 8):
        feed.offer(batch(event_id))
    feed.rebase(4)
    assert ready(feed) == [5, 6]
    assert feed.missing == range(7, 8)


def test_the_number_of_waiting_batches_is_bounded_and_the_hole_stays_known() -> None:
    feed = EventFeed()
    for event_id in range(2, MAX_PENDING + 10):
        feed.offer(batch(event_id))
    assert len(feed._pending) <= MAX_PENDING
    assert ready(feed) == []
    assert feed.behind
    assert feed.missing.start == 1


def test_a_batch_that_a_snapshot_contains_waits_no_longer() -> None:
    feed = EventFeed()
    for event_id in (3, 5):
        feed.offer(batch(event_id))
    feed.rebase(5)
    assert (feed.applied, feed.expected) == (5, 5)
    assert not feed.holed
    assert not feed.behind
    assert not feed.offer(batch(5))
    assert feed.offer(batch(6))
    assert ready(feed) == [6]


def test_as_many_batches_wait_as_the_bound_says_and_one_more_lets_all_go() -> None:
    feed = EventFeed()
    for event_id in range(2, MAX_PENDING + 2):
        assert feed.offer(batch(event_id))
    assert feed.missing == range(1, 2)
    assert feed.offer(batch(MAX_PENDING + 2))
    assert feed.missing == range(1, MAX_PENDING + 2)
