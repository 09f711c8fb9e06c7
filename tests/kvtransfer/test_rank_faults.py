"""Ranks that die, lag or give up: the transfer fails for all; no block comes free while one of them may write it."""

from contextlib import ExitStack, closing

import pytest

from baton_proto import transfer as wire
from kvtransfer.decode_side.events import Committed, Failed, LayerArrived, Released
from tests.kvtransfer.peers import child
from tests.kvtransfer.ranks import LAYOUT, SEED, PrefillRanks, RankProcesses, config_of
from tests.kvtransfer.raw_ranks import decode_worker, drain, kinds, raw_rank
from tests.kvtransfer.reference import reference

both = pytest.mark.parametrize("transport", ["shm", "tcp"])


@both
def test_killing_one_rank_fails_the_transfer_and_frees_the_blocks_after_the_last_other_has_drained(
    transport: str,
) -> None:
    with ExitStack() as stack:
        decode = stack.enter_context(decode_worker(transport))
        children = [stack.enter_context(child("prefill-rank")) for _ in range(2)]
        prefill = PrefillRanks(children, 8, config_of(transport), size=4)
        grant = decode.receiver.reserve([1, 2], 0)
        prefill.tell("begin", grant=grant)
        prefill.tell("layer", push=grant.transfer_id, layer=0, first=0, source=[3, 4])
        third, fourth = (stack.enter_context(closing(raw_rank(grant, transport, rank, 4))) for rank in (2, 3))
        for peer in (third, fourth):
            assert peer.begin() == wire.Accept(grant.transfer_id)
        for rank in (0, 1):
            decode.wait_for(LayerArrived, grant.transfer_id, rank=rank)
        children[1].kill()
        decode.wait_for(Failed, grant.transfer_id)
        assert not children[0].hear()["ok"]
        for peer in (third, fourth):
            assert isinstance(peer.channel.receive(), wire.Cancel)
        drain(third)
        assert decode.receiver.lease_count() == 1
        assert kinds(decode, grant) == [Failed]
        with pytest.raises(AssertionError, match="leased already"):
            decode.receiver.reserve([1], 0)
        drain(fourth)
        decode.wait_for(Released, grant.transfer_id)
        assert kinds(decode, grant) == [Failed, Released]
        assert decode.receiver.lease_count() == 0
        assert decode.receiver.check_integrity() == []


@both
def test_a_cancel_stops_all_four_ranks_and_then_frees_the_blocks(processes: RankProcesses, transport: str) -> None:
    config = config_of(transport)
    with (
        decode_worker(transport) as decode,
        closing(PrefillRanks(processes.take("prefill-rank", 4), 8, config)) as prefill,
    ):
        grant = decode.receiver.reserve([1, 2], 0)
        prefill.tell("begin", grant=grant)
        prefill.tell("layer", push=grant.transfer_id, layer=0, first=0, source=[3, 4])
        for rank in range(4):
            decode.wait_for(LayerArrived, grant.transfer_id, rank=rank)
        decode.receiver.cancel(grant.transfer_id, "the client left")
        assert [result["reason"] for result in prefill.results()] == ["the client left"] * 4
        decode.wait_for(Released, grant.transfer_id)
        assert kinds(decode, grant) == [Released]
        again = decode.receiver.reserve([1, 2], 0)
        assert all(result["ok"] for result in prefill.push(again, [5, 6]))
        decode.assert_holds(reference(prefill.layout, SEED), [5, 6], [1, 2])


@both
def test_a_rank_that_never_begins_lets_the_lease_run_out_and_frees_nothing_early(transport: str) -> None:
    with ExitStack() as stack:
        decode = stack.enter_context(decode_worker(transport))
        grant = decode.receiver.reserve([1, 2], 0)
        first, second = (stack.enter_context(closing(raw_rank(grant, transport, rank, 4))) for rank in (0, 1))
        for peer in (first, second):
            assert peer.begin() == wire.Accept(grant.transfer_id)
        decode.run_out_of_time()
        assert "out of time" in decode.wait_for(Failed, grant.transfer_id).reason
        for peer in (first, second):
            assert isinstance(peer.channel.receive(), wire.Cancel)
        late = stack.enter_context(closing(raw_rank(grant, transport, 2, 4)))
        assert isinstance(late.begin(), wire.Reject)
        drain(first)
        assert kinds(decode, grant) == [Failed]
        assert decode.receiver.lease_count() == 1
        drain(second)
        decode.wait_for(Released, grant.transfer_id)


@both
def test_a_rank_that_gives_up_before_it_began_fails_the_transfer(transport: str) -> None:
    with ExitStack() as stack:
        decode = stack.enter_context(decode_worker(transport))
        grant = decode.receiver.reserve([1], 0)
        first, second = (stack.enter_context(closing(raw_rank(grant, transport, rank, 2))) for rank in (0, 1))
        assert first.begin() == wire.Accept(grant.transfer_id)
        second.channel.send(wire.Abort(grant.transfer_id, "no slab here"))
        assert first.channel.receive() == wire.Cancel(grant.transfer_id, "no slab here")
        drain(first)
        assert kinds(decode, grant) == [Failed, Released]


@both
def test_cancels_and_aborts_at_any_moment_end_a_transfer_alike_for_all_ranks(
    processes: RankProcesses, transport: str
) -> None:
    config = config_of(transport)
    ends = set()
    with (
        decode_worker(transport) as decode,
        closing(PrefillRanks(processes.take("prefill-rank", 4), 8, config)) as prefill,
    ):
        for number in range(40):
            grant = decode.receiver.reserve([number % 20, number % 20 + 1], 0)
            name = grant.transfer_id
            prefill.tell("begin", grant=grant)
            for layer in range(LAYOUT.num_layers):
                prefill.tell("layer", push=name, layer=layer, first=0, source=[number % 20, 30])
                if number % 5 == layer:
                    decode.receiver.cancel(name, "race")
                if number % 7 == layer:
                    prefill.children[number % 4].tell(do="abort", push=name, reason="race")
            prefill.commit(grant, "")
            ok = all(result["ok"] for result in prefill.results())
            decode.wait_for(Committed if ok else Released, name)
            assert [kind for kind in kinds(decode, grant) if kind is not Failed] == [Committed if ok else Released]
            ends.add(ok)
        assert ends == {True, False}
        assert decode.receiver.lease_count() == 0
        assert decode.receiver.check_integrity() == []
