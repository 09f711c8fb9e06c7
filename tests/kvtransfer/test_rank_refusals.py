"""Ranks that lie, come twice or come late, and bytes that are wrong: refused, and nobody else is harmed."""

import itertools
from collections.abc import Iterable
from contextlib import ExitStack, closing

import pytest

from baton_proto import transfer as wire
from kvtransfer.decode_side.events import Failed, Released
from kvtransfer.prefill_side import layer_writer
from kvtransfer.wire.checksum import block_checksums
from kvtransfer.wire.identity import hello
from tests.kvtransfer.peers import TIMEOUT_S, Prefill, RawPeer
from tests.kvtransfer.ranks import DecodeRanks, PrefillRanks, RankProcesses, config_of
from tests.kvtransfer.raw_ranks import decode_worker, drain, identity, kinds, raw_rank

both = pytest.mark.parametrize("transport", ["shm", "tcp"])


@both
def test_a_grant_that_ran_out_is_written_by_no_rank(processes: RankProcesses, transport: str) -> None:
    config = config_of(transport)
    with (
        decode_worker(transport) as decode,
        closing(PrefillRanks(processes.take("prefill-rank", 4), 8, config)) as prefill,
    ):
        grant = decode.receiver.reserve([1, 2], 0, ttl_s=0.05)
        decode.wait_for(Released, grant.transfer_id)
        assert not any(result["ok"] for result in prefill.push(grant, [3, 4]))
        decode.assert_untouched()


@both
def test_a_rank_that_lies_about_its_size_fails_the_transfer_for_all(transport: str) -> None:
    with ExitStack() as stack:
        decode = stack.enter_context(decode_worker(transport))
        grant = decode.receiver.reserve([1, 2], 0)
        honest = stack.enter_context(closing(raw_rank(grant, transport, 0, 2)))
        liar = stack.enter_context(closing(raw_rank(grant, transport, 1, 4)))
        assert honest.begin() == wire.Accept(grant.transfer_id)
        answer = liar.begin()
        assert isinstance(answer, wire.Reject)
        assert "begins as one of ranks (0, 1, 2, 3), others began as (0, 1)" in answer.reason
        assert isinstance(honest.channel.receive(), wire.Cancel)
        assert kinds(decode, grant) == [Failed]
        drain(honest)
        decode.wait_for(Released, grant.transfer_id)


@both
@pytest.mark.parametrize(
    ("rank", "size", "field"),
    [(2, 2, "rank"), (0, 3, "size"), (0, 0, "size"), (0, 16, "size"), (2**40, 2**40, "size"), (1, 4, "rank")],
)
def test_a_rank_that_cannot_be_is_refused(transport: str, rank: int, size: int, field: str) -> None:
    """Of 4 ranks and 2 heads, rank 1 holds only what rank 0 sends."""
    with decode_worker(transport, num_kv_heads=2) as decode:
        grant = decode.receiver.reserve([1], 0)
        with closing(RawPeer(grant, unix=transport == "shm", greet=False)) as peer:
            peer.channel.send(hello(identity(rank, size, num_kv_heads=2), grant, "tcp"))
            answer = peer.channel.receive()
            assert isinstance(answer, wire.Refused)
            assert answer.field == field
            assert peer.closed_by_peer()


@both
def test_a_rank_that_begins_twice_is_rejected_and_the_transfer_goes_on(transport: str) -> None:
    with ExitStack() as stack:
        decode = stack.enter_context(decode_worker(transport))
        grant = decode.receiver.reserve([1], 0)
        first = stack.enter_context(closing(raw_rank(grant, transport, 0, 2)))
        twin = stack.enter_context(closing(raw_rank(grant, transport, 0, 2)))
        assert first.begin() == wire.Accept(grant.transfer_id)
        assert isinstance(twin.begin(), wire.Reject)
        assert isinstance(first.begin(), wire.Reject)
        assert kinds(decode, grant) == []
        second = stack.enter_context(closing(raw_rank(grant, transport, 1, 2)))
        assert second.begin() == wire.Accept(grant.transfer_id)


@both
def test_a_wrong_byte_in_one_ranks_share_is_found(
    processes: RankProcesses, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of the heads, which are rank 1's on the decode side."""
    parts = itertools.cycle([0, 1])

    def wrong_for_rank_1(pieces: Iterable[memoryview], nbytes: int) -> bytes:
        sums = bytearray(block_checksums(pieces, nbytes))
        sums[0] ^= next(parts)
        return bytes(sums)

    monkeypatch.setattr(layer_writer, "block_checksums", wrong_for_rank_1)
    config = config_of(transport, checksum=True)
    decode, prefill = DecodeRanks(processes.take("decode-rank", 1), 8, config), Prefill(config, identity(0, 1))
    grant = decode.receiver.reserve([1, 2], 0)
    result = prefill.push(grant, [3, 4]).get(timeout=TIMEOUT_S)
    assert "checksum of layer 0, granted block 0 differs" in result.reason
    decode.wait_for(Released, grant.transfer_id)
    prefill.close()
    decode.close()
