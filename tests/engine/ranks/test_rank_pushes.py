"""A prefill worker's ranks in one process, pushing to a real receiver: what rank 0 tells them is all that they know."""

import queue
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from baton_proto.worker import Grant
from engine.ranks.rank_commands import CloseSender, Command, CommitPush, Ship, decode_command, encode_command
from engine.ranks.rank_pushes import RankPushes
from engine.ranks.rank_reports import OnPushEnded
from engine.ranks.ranked_sender import RankedPush, RankedSender
from kvtransfer.decode_side.events import Committed, LayerArrived, Released
from kvtransfer.prefill_side.push import PushResult
from kvtransfer.prefill_side.sender import Sender
from kvtransfer.prefill_side.sending import LayerDone, Piece
from kvtransfer.slab.adopted_slab import AdoptedSlab
from kvtransfer.slab.head_plan import Shard
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from kvtransfer.wire.identity import SlabIdentity, rank_layout
from runtime.config.serving import TransferConfig
from runtime.device.host_memory import HostMemory
from runtime.errors import ProtocolError
from tests.kvtransfer.peers import Decode
from tests.kvtransfer.reference import heads_of, rank_words, reference

LAYOUT = SlabLayout(num_layers=3, num_blocks=12, num_kv_heads=4, block_size=16, head_dim=4, dtype="float32")
TIMEOUT_S = 60.0


class LocalRanks:
    """Implements `engine.ranks.ranked_sender.RanksOfSender`: commands are carried out at once, through their bytes."""

    def __init__(self, layout: SlabLayout, size: int, words: Any) -> None:
        self.size = size
        self.on_push_ended: OnPushEnded = lambda *_: None
        self.slabs = [Slab(rank_layout(layout, size)) for _ in range(size)]
        for rank, slab in enumerate(self.slabs):
            rank_words(slab)[:] = words[:, :, heads_of(rank, size, layout.num_kv_heads)]
        self.pushes = [
            RankPushes(self.slabs[rank], Shard(rank, size), layout.num_kv_heads, self._report(rank))
            for rank in range(1, size)
        ]

    def tell(self, command: Command) -> int:
        for pushes in self.pushes:
            pushes.obey(decode_command(encode_command(command)))  # type: ignore[arg-type]
        return 1

    def wait_done(self, sequence: int, timeout_s: float) -> None:
        """It is."""

    def listen(self, on_push_ended: OnPushEnded) -> None:
        self.on_push_ended = on_push_ended

    def _report(self, rank: int) -> Any:
        return lambda transfer_id, result: self.on_push_ended(rank, transfer_id, result)


class Workers:
    """A prefill and a decode worker; blocks of the first are numbered from its end in the second."""

    def __init__(self, prefill: int, decode: int, num_kv_heads: int) -> None:
        layout = replace(LAYOUT, num_kv_heads=num_kv_heads)
        config = TransferConfig(transport="shm", checksum=True)
        self.kv = reference(layout, seed=3)
        self.ranks = LocalRanks(layout, prefill, self.kv)
        identity = SlabIdentity("prefill-0", 1, "model", layout, Shard(0, prefill))
        self.sender = RankedSender(Sender(self.ranks.slabs[0], identity, config), identity, config, self.ranks)
        self.results: queue.Queue[PushResult] = queue.Queue()
        self.theirs = [Slab(rank_layout(layout, decode)) for _ in range(1, decode)]
        self.others = []
        for rank, slab in enumerate(self.theirs, 1):
            with open(slab.export(), "rb", buffering=0) as fd:
                self.others.append(AdoptedSlab(slab.layout, HostMemory(), fd.fileno(), f"rank {rank}"))
        self.decode = Decode(config, SlabIdentity("decode-0", 7, "model", layout, Shard(0, decode)), self.others)
        self.layout = layout

    def begin(self, blocks: list[int]) -> tuple[Grant, RankedPush]:
        grant = self.decode.receiver.reserve(blocks, 0, TIMEOUT_S)
        return grant, self.sender.begin(grant, self.results.put)

    def step(self, *pieces: Piece) -> list[LayerDone]:
        """By rank, what it calls after a layer."""
        hooks: list[LayerDone | None] = [self.sender.ship(pieces)]
        hooks += [pushes.take_layer_done() for pushes in self.ranks.pushes]
        assert all(hooks)
        return [hook for hook in hooks if hook is not None]

    def result(self) -> PushResult:
        return self.results.get(timeout=TIMEOUT_S)

    def arrived(self, rank: int, blocks: list[int]) -> Any:
        slab = [self.decode.slab, *self.theirs][rank]
        return rank_words(slab)[:, blocks]

    def close(self) -> None:
        self.sender.close()
        self.decode.close()
        for slab in (*self.others, *self.theirs, *self.ranks.slabs):
            slab.close()


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Two ranks to two."""
    workers = Workers(2, 2, 4)
    yield workers
    workers.close()


@pytest.mark.parametrize("mix", [(2, 1, 4), (4, 2, 4), (2, 4, 4), (4, 4, 2), (4, 1, 2)], ids=str)
def test_every_rank_ships_its_heads_and_clears_the_tail_of_the_last_block(mix: tuple[int, int, int]) -> None:
    workers = Workers(*mix)
    grant, push = workers.begin([7, 2, 9])
    for pieces in ([Piece(push, 0, (4, 5))], [Piece(push, 2, (8,), tail=5)]):
        for layer_done in workers.step(*pieces):
            for layer in range(LAYOUT.num_layers):
                layer_done(layer)
    push.commit(b"first token")
    assert workers.result().ok
    assert workers.decode.wait_for(Committed, grant.transfer_id).payload == b"first token"
    expected = workers.kv[:, [4, 5, 8]].copy()
    expected[:, 2, :, :, 5:] = 0
    _, decode, num_kv_heads = mix
    for rank in range(decode):
        assert np.array_equal(workers.arrived(rank, [7, 2, 9]), expected[:, :, heads_of(rank, decode, num_kv_heads)]), (
            rank
        )
    assert workers.decode.receiver.check_integrity() == []
    assert workers.decode.receiver.lease_count() == 0
    workers.close()


def test_a_layer_of_a_rank_arrives_before_its_next_one_is_computed(workers: Workers) -> None:
    grant, push = workers.begin([1])
    _, of_rank_1 = workers.step(Piece(push, 0, (3,)))
    for layer in range(LAYOUT.num_layers):
        of_rank_1(layer)
        workers.decode.wait_for(LayerArrived, grant.transfer_id, rank=1, layer=layer)
    push.abort("enough")
    assert workers.result().reason == "enough"


def test_a_hook_is_good_for_one_step(workers: Workers) -> None:
    _, push = workers.begin([1])
    workers.step(Piece(push, 0, (3,)))
    assert [pushes.take_layer_done() for pushes in workers.ranks.pushes] == [None]
    push.abort("enough")
    workers.result()


def test_a_cancel_of_the_decode_worker_ends_the_push_of_every_rank(workers: Workers) -> None:
    grant, push = workers.begin([1, 2])
    for layer_done in workers.step(Piece(push, 0, (3,))):
        layer_done(0)
    for rank in (0, 1):
        workers.decode.wait_for(LayerArrived, grant.transfer_id, rank=rank)
    workers.decode.receiver.cancel(grant.transfer_id, "the client is gone")
    assert workers.result().reason == "the client is gone"
    workers.decode.wait_for(Released, grant.transfer_id)
    assert workers.decode.receiver.lease_count() == 0
    assert workers.results.empty()


def test_a_rank_that_cannot_reach_the_decode_worker_fails_the_push_and_frees_the_blocks(workers: Workers) -> None:
    """Both ranks are connected, and have begun."""
    grant, push = workers.begin([1, 2])
    for layer_done in workers.step(Piece(push, 0, (3,))):
        layer_done(0)
    for rank in (0, 1):
        workers.decode.wait_for(LayerArrived, grant.transfer_id, rank=rank)
    sender = workers.ranks.pushes[0]._sender
    assert sender is not None
    (link,) = sender._links.values()
    link._break("the cable is cut")
    # The rank says so itself, or the decode worker has seen its end and told the other rank.
    reason = workers.result().reason
    assert reason == "the cable is cut" or "prefill worker prefill-0 rank 1" in reason
    workers.decode.wait_for(Released, grant.transfer_id)
    assert workers.decode.receiver.check_integrity() == []
    _, again = workers.begin([1, 2])
    again.abort("the next one is begun on a new connection")
    assert not workers.result().ok


def test_commands_for_a_push_that_has_ended_are_of_no_effect(workers: Workers) -> None:
    grant, push = workers.begin([1])
    push.abort("enough")
    workers.result()
    push.commit(b"too late")
    push.abort("again")
    workers.ranks.tell(CommitPush(grant.transfer_id))
    assert workers.sender.ship([Piece(push, 0, (3,))]) is not None
    assert [pushes.take_layer_done() for pushes in workers.ranks.pushes] == [None]
    assert workers.results.empty()


def test_closing_ends_every_push_once(workers: Workers) -> None:
    workers.begin([1])
    workers.begin([2])
    workers.sender.close()
    for _ in range(2):
        assert "closing" in workers.result().reason
    assert workers.results.empty()


def test_a_rank_that_knows_of_no_worker_obeys_no_push() -> None:
    pushes = RankPushes(Slab(LAYOUT), Shard(1, 2), 8, lambda *_: None)
    for command in (Ship([]), CloseSender()):
        with pytest.raises(ProtocolError, match="before it has said who it is"):
            pushes.obey(command)
