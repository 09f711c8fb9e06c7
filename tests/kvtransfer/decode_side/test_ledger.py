"""The decode side's books: which news the owner gets, in which order, and when blocks are free."""

import threading
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from baton_proto.timeline import PushedChunk
from baton_proto.transfer import Commit
from kvtransfer.decode_side.events import Committed, Failed, LayerArrived, Released, TransferEvent
from kvtransfer.decode_side.ledger import Ledger, Notice
from kvtransfer.slab.head_plan import WHOLE, Shard
from kvtransfer.slab.layout import SlabLayout
from runtime.errors import ProtocolError

LAYOUT = SlabLayout(num_layers=3, num_blocks=8, num_kv_heads=2, block_size=16, head_dim=4, dtype="float16")
BLOCKS = (4, 2)
SEVEN, EIGHT = 7, 8  # connections
FIRST, SECOND = Shard(0, 2), Shard(1, 2)


class Books:
    """A ledger and what it has told."""

    def __init__(self) -> None:
        self.events: list[TransferEvent] = []
        self.notices: list[Notice] = []
        self.ledger = Ledger(LAYOUT, self.events.append, self.notices.append)
        self.ledger.reserve("a", BLOCKS, deadline_s=10.0)

    def begin(self, writer: int = SEVEN, shard: Shard = WHOLE, now_s: float = 1.0) -> tuple[int, ...] | None:
        return self.ledger.begin("a", writer, shard, len(BLOCKS), now_s)

    def write_all(self, writer: int = SEVEN) -> None:
        self.ledger.arrived("a", writer, range(3), 0, len(BLOCKS))

    def told(self) -> list[TransferEvent]:
        """The events since the last call."""
        self.ledger.deliver()
        events = self.events.copy()
        self.events.clear()
        return events


@pytest.fixture
def books() -> Books:
    return Books()


def test_a_transfer_says_what_arrived_and_commits_with_the_first_token(books: Books) -> None:
    assert books.begin() == BLOCKS
    books.ledger.arrived("a", SEVEN, range(2), 0, 2)
    books.ledger.arrived("a", SEVEN, range(2, 3), 0, 1)
    books.ledger.arrived("a", SEVEN, range(2, 3), 1, 1)
    assert books.ledger.commit(Commit("a", b"token"), SEVEN, "tcp")
    kv_bytes = 2 * 3 * LAYOUT.block_bytes
    assert books.told() == [
        LayerArrived("a", 0, 2, rank=0, layers=2),
        LayerArrived("a", 2, 1, rank=0, layers=1),
        LayerArrived("a", 2, 1, rank=0, layers=1),
        Committed("a", b"token", "tcp", kv_blocks=2, kv_bytes=kv_bytes),
    ]
    assert (books.ledger.lease_count(), books.ledger.transfers()) == (0, [])
    assert books.ledger.check_integrity({SEVEN}) == []
    assert books.notices == []


def test_a_writer_that_begins_with_another_number_of_blocks_is_refused(books: Books) -> None:
    with pytest.raises(ProtocolError, match="begins with 3 blocks, granted are 2"):
        books.ledger.begin("a", SEVEN, WHOLE, 3, 1.0)
    assert books.begin() == BLOCKS


def test_nobody_may_write_an_unknown_or_expired_lease(books: Books) -> None:
    assert books.ledger.begin("b", SEVEN, WHOLE, 2, 1.0) is None
    assert books.begin(now_s=10.0) is None
    assert books.ledger.check_integrity(set()) == []


def test_ranks_that_disagree_about_how_many_they_are_are_refused(books: Books) -> None:
    assert books.begin(SEVEN, FIRST) == BLOCKS
    with pytest.raises(ProtocolError, match=r"begins as one of ranks \(0,\), others began as \(0, 1\)"):
        books.begin(EIGHT, WHOLE)
    assert books.begin(EIGHT, SECOND) == BLOCKS


def test_a_block_written_twice_is_refused_and_one_missing_cannot_be_committed(books: Books) -> None:
    books.begin()
    books.ledger.arrived("a", SEVEN, range(2), 0, 2)
    with pytest.raises(ProtocolError, match="wrote a block of layer 1 twice"):
        books.ledger.arrived("a", SEVEN, range(1, 2), 1, 1)
    with pytest.raises(ProtocolError, match="commits with 2 blocks missing"):
        books.ledger.commit(Commit("a", b""), SEVEN, "tcp")


def test_the_last_rank_commits_with_the_payload_of_rank_0(books: Books) -> None:
    books.begin(SEVEN, FIRST)
    books.begin(EIGHT, SECOND)
    books.write_all(SEVEN)
    books.write_all(EIGHT)
    assert [event.rank for event in books.told() if isinstance(event, LayerArrived)] == [0, 1]
    assert books.ledger.commit(Commit("a", b"token"), SEVEN, "shm")
    assert books.told() == []
    assert books.ledger.commit(Commit("a", b""), EIGHT, "tcp")
    (committed,) = books.told()
    assert isinstance(committed, Committed)
    assert (committed.payload, committed.transport) == (b"token", "shm")


def test_a_commit_tells_the_chunks_of_all_ranks_each_with_its_rank(books: Books) -> None:
    books.begin(SEVEN, FIRST)
    books.begin(EIGHT, SECOND)
    for writer, starts in ((SEVEN, (10, 20)), (EIGHT, (30,))):
        books.write_all(writer)
        pushes = [PushedChunk(start, 5, 4, 4096, 3) for start in starts]
        assert books.ledger.commit(Commit("a", b"", pushes=pushes), writer, "shm")
    committed = books.told()[-1]
    assert isinstance(committed, Committed)
    assert [(chunk.rank, chunk.start_us) for chunk in committed.pushes] == [(0, 10), (0, 20), (1, 30)]


def test_a_stranger_can_neither_write_nor_commit(books: Books) -> None:
    books.begin()
    books.ledger.arrived("a", EIGHT, range(3), 0, 2)
    assert not books.ledger.commit(Commit("a", b""), EIGHT, "tcp")
    assert books.told() == []


def test_a_lease_that_nobody_began_is_released_when_it_fails(books: Books) -> None:
    assert books.ledger.fail("a", "gone")
    assert books.told() == [Failed("a", "gone"), Released("a")]
    assert not books.ledger.fail("a", "again")
    assert not books.ledger.fail("b", "unknown")
    assert books.told() == []


def test_a_begun_lease_that_fails_is_released_when_its_writer_has_stopped(books: Books) -> None:
    books.begin()
    assert books.ledger.fail("a", "gone")
    assert books.told() == [Failed("a", "gone")]
    assert books.notices == [Notice(SEVEN, "a", "gone")]
    books.write_all()  # late, and not booked
    assert not books.ledger.commit(Commit("a", b""), SEVEN, "tcp")
    books.ledger.writer_stopped("a", SEVEN, "stopped")
    assert books.told() == [Released("a")]
    assert books.ledger.check_integrity(set()) == []


def test_the_owner_that_cancels_is_told_of_the_release_alone(books: Books) -> None:
    books.begin()
    books.ledger.cancel("a", "not wanted")
    assert books.told() == []
    assert books.notices == [Notice(SEVEN, "a", "not wanted")]
    books.ledger.writer_stopped("a", SEVEN, "stopped")
    assert books.told() == [Released("a")]


def test_a_writer_that_stops_fails_the_transfer_and_is_not_told_so_itself(books: Books) -> None:
    books.begin(SEVEN, FIRST)
    books.begin(EIGHT, SECOND)
    books.ledger.writer_stopped("a", SEVEN, "no memory")
    assert books.told() == [Failed("a", "no memory")]
    assert books.notices == [Notice(EIGHT, "a", "no memory")]
    books.ledger.writer_stopped("a", EIGHT, "as told")
    assert books.told() == [Released("a")]


def test_a_lost_writer_keeps_its_blocks_until_it_is_proven_silent(books: Books) -> None:
    assert not books.ledger.writer_lost(SEVEN, "lost")
    books.begin()
    assert books.ledger.writer_lost(SEVEN, "lost")
    assert books.told() == [Failed("a", "lost")]
    assert books.notices == []
    assert books.ledger.lease_count() == 1
    books.ledger.writer_silent(SEVEN)
    assert books.told() == [Released("a")]
    assert books.ledger.lease_count() == 0


def test_leases_fail_when_their_time_is_over_and_not_before(books: Books) -> None:
    books.ledger.reserve("b", [1], deadline_s=5.0)
    assert books.ledger.next_deadline_s() == 5.0
    books.ledger.expire(4.9)
    assert books.told() == []
    books.ledger.expire(5.0)
    assert books.told() == [Failed("b", "the lease ran out of time"), Released("b")]
    assert books.ledger.next_deadline_s() == 10.0
    assert books.ledger.transfers() == ["a"]


def test_a_rank_that_will_not_begin_fails_what_nobody_has_begun(books: Books) -> None:
    books.ledger.abandon("b", WHOLE, "unknown")
    books.ledger.abandon("a", WHOLE, "refused")
    assert books.told() == [Failed("a", "refused"), Released("a")]


def test_a_rank_that_will_not_begin_fails_what_waits_for_it(books: Books) -> None:
    books.begin(SEVEN, FIRST)
    books.ledger.abandon("a", SECOND, "refused")
    assert books.told() == [Failed("a", "refused")]
    assert books.notices == [Notice(SEVEN, "a", "refused")]


@pytest.mark.parametrize("late", [FIRST, WHOLE])
def test_a_rank_that_has_begun_or_does_not_belong_cannot_abandon(books: Books, late: Shard) -> None:
    books.begin(SEVEN, FIRST)
    books.ledger.abandon("a", late, "late")
    assert books.told() == []
    assert books.ledger.lease_count() == 1


def test_a_lease_whose_connection_is_gone_is_found(books: Books) -> None:
    books.begin()
    assert books.ledger.check_integrity({SEVEN}) == []
    assert books.ledger.check_integrity({EIGHT}) == ["lease a waits for a connection that is gone"]


def test_records_and_leases_that_disagree_are_found(books: Books) -> None:
    books.begin()
    del books.ledger._progress["a"]
    assert books.ledger.check_integrity({SEVEN}) == ["begun leases and the records of what arrived disagree"]


def test_an_owner_that_fails_on_one_event_gets_the_next_and_the_log_says_so() -> None:
    heard: list[TransferEvent] = []

    def owner(event: TransferEvent) -> None:
        heard.append(event)
        if isinstance(event, Failed):
            raise ValueError("owner")

    ledger = Ledger(LAYOUT, owner, lambda notice: None)
    ledger.reserve("a", BLOCKS, 10.0)
    ledger.fail("a", "gone")
    with capture_logs() as logs:
        ledger.deliver()
    assert heard == [Failed("a", "gone"), Released("a")]
    assert [(entry["event"], entry["transfer_event"]) for entry in logs] == [
        ("the owner of a transfer failed on its event", Failed("a", "gone"))
    ]


def test_news_keep_their_order_while_several_threads_deliver(books: Books) -> None:
    for number in range(200):
        books.ledger.reserve(f"t{number}", [1], deadline_s=99.0)
        books.ledger.fail(f"t{number}", "gone")
    threads = [threading.Thread(target=books.ledger.deliver) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert books.events == [news for n in range(200) for news in (Failed(f"t{n}", "gone"), Released(f"t{n}"))]


@pytest.mark.parametrize(
    "break_protocol",
    [
        lambda ledger: ledger.begin("a", EIGHT, FIRST, 3, 1.0),
        lambda ledger: ledger.begin("a", EIGHT, FIRST, len(BLOCKS), 1.0),
        lambda ledger: ledger.arrived("a", SEVEN, range(1), 1, 1),
        lambda ledger: ledger.commit(Commit("a", b""), SEVEN, "tcp"),
    ],
)
def test_a_protocol_error_names_the_transfer(books: Books, break_protocol: Callable[[Ledger], object]) -> None:
    books.begin()
    books.ledger.arrived("a", SEVEN, range(1), 1, 1)
    with pytest.raises(ProtocolError) as refused:
        break_protocol(books.ledger)
    assert refused.value.peer == "transfer a"
