"""Pushes of several ranks, with ranks that do what the test says: what they are told, and when a push is over."""

import threading
from collections.abc import Callable, Sequence
from itertools import permutations

import pytest

from baton_proto.discovery import TransferEndpoint
from baton_proto.worker import Grant
from engine.ranks.rank_commands import (
    AbortPush,
    BeginPush,
    CloseSender,
    Command,
    CommitPush,
    OpenSender,
    Ship,
    ShippedPiece,
)
from engine.ranks.rank_reports import OnPushEnded
from engine.ranks.ranked_sender import RankedPush, RankedSender
from kvtransfer.prefill_side.push import PushResult
from kvtransfer.prefill_side.sending import LayerDone, Piece
from kvtransfer.slab.head_plan import Shard
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.wire.identity import SlabIdentity
from runtime.config.serving import TransferConfig
from runtime.errors import ProtocolError, UnavailableError

SIZE = 3
ORDERS = list(permutations(range(SIZE)))
CONFIG = TransferConfig(transport="shm")
IDENTITY = SlabIdentity("prefill-0", 5, "model", SlabLayout(2, 8, 6, 16, 4, "float32"), Shard(0, SIZE))
GRANT = Grant("t1", "decode-0", 7, 1, [4, 5], 0, 10.0, TransferEndpoint("host", "", ""))
GOOD = PushResult(True, "", "shm", 2, 100, 0.5)


def bad(reason: str) -> PushResult:
    return PushResult(False, reason, "", 0, 7, 0.1)


class OwnPush:
    """Rank 0's part."""

    def __init__(self, transfer_id: str, on_done: Callable[[PushResult], None]) -> None:
        self.transfer_id = transfer_id
        self.on_done, self.started_s = on_done, 0.0
        self.calls: list[tuple[object, ...]] = []

    def layer_ready(self, *arguments: object) -> None:
        self.calls.append(("layer_ready", *arguments))

    def commit(self, payload: bytes) -> None:
        self.calls.append(("commit", payload))

    def abort(self, reason: str) -> None:
        self.calls.append(("abort", reason))


class OwnSender:
    """Rank 0's. `fails_at_once`: a push's end is told by a thread before `begin` returns, if it can be."""

    def __init__(self) -> None:
        self.pushes: list[OwnPush] = []
        self.threads: list[threading.Thread] = []
        self.fails_at_once = False
        self.closed = False

    def begin(self, grant: Grant, on_done: Callable[[PushResult], None]) -> OwnPush:
        self.pushes.append(OwnPush(grant.transfer_id, on_done))
        if self.fails_at_once:
            self.threads.append(threading.Thread(target=on_done, args=(bad("at once"),)))
            self.threads[-1].start()
            self.threads[-1].join(0.05)
        return self.pushes[-1]

    def ship(self, pieces: Sequence[Piece]) -> LayerDone:
        return lambda layer: [piece.push.layer_ready(layer, piece.first, piece.source) for piece in pieces] and None

    def close(self) -> None:
        self.closed = True
        for push in self.pushes:
            push.on_done(bad("closing"))


class ScriptedRanks:
    """Implements `engine.ranks.ranked_sender.RanksOfSender`."""

    size = SIZE

    def __init__(self) -> None:
        self.told: list[Command] = []
        self.waited: list[int] = []
        self.report: OnPushEnded = lambda *_: None

    def tell(self, command: Command) -> int:
        self.told.append(command)
        return len(self.told)

    def wait_done(self, sequence: int, timeout_s: float) -> None:
        self.waited.append(sequence)
        assert isinstance(self.told[sequence - 1], CloseSender)
        threading.Timer(0.05, lambda: [self.report(rank, "t1", bad("closing")) for rank in (1, 2)]).start()

    def listen(self, on_push_ended: OnPushEnded) -> None:
        self.report = on_push_ended

    def aborts(self) -> list[str]:
        return [command.reason for command in self.told if isinstance(command, AbortPush)]


class Case:
    def __init__(self) -> None:
        self.own, self.ranks = OwnSender(), ScriptedRanks()
        self.sender = RankedSender(self.own, IDENTITY, CONFIG, self.ranks)
        self.results: list[PushResult] = []

    def begin(self) -> RankedPush:
        return self.sender.begin(GRANT, self.results.append)

    def end(self, rank: int, result: PushResult) -> None:
        if rank == 0:
            self.own.pushes[-1].on_done(result)
        else:
            self.ranks.report(rank, "t1", result)


@pytest.fixture
def case() -> Case:
    return Case()


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_push_has_gone_well_when_that_of_the_last_rank_has(case: Case, order: tuple[int, ...]) -> None:
    push = case.begin()
    push.commit(b"first token")
    for rank in order[:-1]:
        case.end(rank, GOOD if rank == 0 else PushResult(True, "", "", 2, 10 * rank, 0.1 * rank))
        assert case.results == []
    case.end(order[-1], GOOD if order[-1] == 0 else PushResult(True, "", "", 2, 10 * order[-1], 0.1 * order[-1]))
    assert case.results == [PushResult(True, "", "shm", 2, 100 + 10 + 20, 0.5)]
    assert case.own.pushes[0].calls == [("commit", b"first token")]
    identify = OpenSender("prefill-0", 5, "model", CONFIG, None)
    assert case.ranks.told == [identify, BeginPush(GRANT), CommitPush("t1")], "the payload is rank 0's to send"


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("failing", range(1, SIZE + 1))
def test_the_first_rank_that_fails_aborts_the_others_and_the_last_one_ends_the_push(
    case: Case, order: tuple[int, ...], failing: int
) -> None:
    """The last `failing` of the ranks fail."""
    case.begin()
    reasons = {rank: f"of rank {rank}" for rank in order[-failing:]}
    first = next(iter(reasons.values()))
    for rank in order:
        assert case.results == []
        case.end(rank, bad(reasons[rank]) if rank in reasons else GOOD)
    (result,) = case.results
    assert (result.ok, result.reason, result.kv_blocks) == (False, first, 0)
    assert result.kv_bytes == 7 * failing + 100 * (SIZE - failing)
    aborted = [first] if failing > 1 else []  # else nobody is left who could be aborted
    assert case.ranks.aborts() == aborted
    assert case.own.pushes[0].calls == [("abort", reason) for reason in aborted]


def test_an_abort_reaches_every_rank(case: Case) -> None:
    case.begin().abort("cancelled")
    assert case.own.pushes[0].calls == [("abort", "cancelled")]
    assert case.ranks.aborts() == ["cancelled"]
    for rank in range(SIZE):
        case.end(rank, bad("cancelled"))
    assert [result.reason for result in case.results] == ["cancelled"]


def test_nobody_is_told_to_abort_what_he_was_not_told_to_begin(case: Case) -> None:
    case.own.fails_at_once = True
    case.begin()
    case.own.threads[0].join(30)
    assert [type(command) for command in case.ranks.told] == [OpenSender, BeginPush, AbortPush]
    for rank in (1, 2):
        case.end(rank, bad("aborted"))
    assert [result.reason for result in case.results] == ["at once"]


def test_ranks_hear_what_a_step_completes_before_it_begins(case: Case) -> None:
    push = case.begin()
    layer_done = case.sender.ship([Piece(push, 1, (6,), tail=3)])
    assert case.ranks.told[-1] == Ship([ShippedPiece("t1", 1, (6,), 3)])
    layer_done(0)
    layer_done(1)
    assert case.own.pushes[0].calls == [("layer_ready", layer, 1, (6,), None) for layer in (0, 1)]


def test_a_rank_that_ends_a_push_twice_or_one_that_nobody_began_is_out_of_step(case: Case) -> None:
    case.begin()
    case.end(1, GOOD)
    with pytest.raises(ProtocolError, match="rank 1"):
        case.end(1, GOOD)
    with pytest.raises(ProtocolError, match="rank 2: ended push t9, which nobody awaits"):
        case.ranks.report(2, "t9", GOOD)
    assert case.results == []
    case.end(2, GOOD)
    case.end(0, GOOD)
    assert len(case.results) == 1


def test_a_grant_that_is_in_use_is_refused_and_nobody_hears_of_it(case: Case) -> None:
    case.begin()
    told = len(case.ranks.told)
    with pytest.raises(ProtocolError, match="granted t1 a second time"):
        case.begin()
    assert (len(case.ranks.told), len(case.own.pushes)) == (told, 1)


def test_close_ends_what_is_open_on_every_rank(case: Case) -> None:
    """The other ranks' reports come a moment after they have done it."""
    case.begin()
    case.sender.close()
    assert [result.reason for result in case.results] == ["closing"]
    assert case.own.closed
    assert len(case.ranks.waited) == 1
    case.sender.close()
    assert len(case.ranks.waited) == 1
    with pytest.raises(UnavailableError, match="closed"):
        case.begin()
