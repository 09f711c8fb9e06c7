"""Cancels, deadlines and quarantine: a block comes free when nobody can write it any more, and not earlier."""

import queue

import pytest

from baton_proto import transfer as wire
from kvtransfer.decode_side import connection
from kvtransfer.decode_side.events import Committed, Failed, LayerArrived, Released
from kvtransfer.prefill_side import dial, link
from tests.kvtransfer.peers import TIMEOUT_S, Prefill, RawPeer, pair, patient
from tests.kvtransfer.raw_decode import RawDecode

both = pytest.mark.parametrize("transport", ["shm", "tcp"])


@both
def test_a_cancel_in_mid_push_stops_the_sender_and_then_frees_the_blocks(transport: str) -> None:
    with pair(transport) as (decode, prefill):
        grant = decode.receiver.reserve([1, 2], 0)
        push, results = prefill.begin(grant)
        push.layer_ready(0, 0, [5, 6])
        decode.wait_for(LayerArrived, grant.transfer_id)
        decode.receiver.cancel(grant.transfer_id, "the client left")
        decode.receiver.cancel(grant.transfer_id, "the client left")
        result = results.get(timeout=TIMEOUT_S)
        assert (result.ok, result.reason) == (False, "the client left")
        decode.wait_for(Released, grant.transfer_id)
        push.layer_ready(1, 0, [5, 6])
        push.commit(b"too late")
        push.abort("too late")
        again = decode.receiver.reserve([1, 2], 0)
        assert prefill.push(again, [7, 8]).get(timeout=TIMEOUT_S).ok
        kinds = [type(event) for event in decode.of(grant.transfer_id)]
        assert kinds == [LayerArrived, Released]
        assert results.empty()


@both
def test_cancelled_blocks_stay_quarantined_until_the_sender_says_drained(transport: str) -> None:
    with pair(transport) as (decode, prefill):
        grant = decode.receiver.reserve([1, 2], 0)
        peer = RawPeer(grant, unix=transport == "shm")
        assert peer.begin() == wire.Accept(grant.transfer_id)
        decode.receiver.cancel(grant.transfer_id, "why not")
        assert peer.channel.receive() == wire.Cancel(grant.transfer_id, "why not")
        bystander = decode.receiver.reserve([3], 0)
        assert prefill.push(bystander, [1]).get(timeout=TIMEOUT_S).ok
        assert decode.of(grant.transfer_id) == []
        assert decode.receiver.lease_count() == 1
        with pytest.raises(AssertionError, match="leased already"):
            decode.receiver.reserve([2], 0)
        peer.channel.send(wire.Commit(grant.transfer_id, b"crossed the cancel"))
        peer.channel.send(wire.Drained(grant.transfer_id))
        decode.wait_for(Released, grant.transfer_id)
        assert [type(event) for event in decode.of(grant.transfer_id)] == [Released]
        assert decode.receiver.lease_count() == 0
        peer.close()


@both
def test_a_lease_that_runs_out_in_mid_push_is_quarantined_not_freed(transport: str) -> None:
    with pair(transport) as (decode, _):
        grant = decode.receiver.reserve([1], 0)
        peer = RawPeer(grant, unix=transport == "shm")
        assert peer.begin() == wire.Accept(grant.transfer_id)
        decode.run_out_of_time()
        decode.wait_for(Failed, grant.transfer_id)
        assert isinstance(peer.channel.receive(), wire.Cancel)
        assert [type(event) for event in decode.of(grant.transfer_id)] == [Failed]
        assert decode.receiver.lease_count() == 1
        peer.channel.send(wire.Drained(grant.transfer_id))
        decode.wait_for(Released, grant.transfer_id)
        peer.close()


@both
def test_cancels_and_aborts_at_any_moment_end_every_lease_once(transport: str) -> None:
    """Both sides give up in a race with the commit, many times; books agree afterwards."""
    with pair(transport) as (decode, prefill):
        grants, results = [], []
        for number in range(60):
            grant = decode.receiver.reserve([number % 30], 0)
            push, result = prefill.begin(grant)
            for layer in range(4):
                push.layer_ready(layer, 0, [number % 40])
                if number % 5 == layer:
                    decode.receiver.cancel(grant.transfer_id, "race")
                if number % 7 == layer:
                    push.abort("race")
            push.commit(b"")
            grants.append(grant)
            results.append(result)
            outcome = result.get(timeout=TIMEOUT_S)
            decode.wait_for(Committed if outcome.ok else Released, grant.transfer_id)
        for grant, result in zip(grants, results, strict=True):
            ends = [event for event in decode.of(grant.transfer_id) if isinstance(event, Committed | Released)]
            assert len(ends) == 1
            with pytest.raises(queue.Empty):
                result.get_nowait()
        assert decode.receiver.lease_count() == 0
        assert decode.receiver.check_integrity() == []


def test_a_tcp_sender_that_never_drains_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own thread is the writer there: its end is the proof."""
    monkeypatch.setattr(connection, "STALL_TIMEOUT_S", 0.2)
    with pair("tcp") as (decode, _):
        grant = decode.receiver.reserve([1], 0)
        peer = RawPeer(grant, unix=False)
        assert peer.begin() == wire.Accept(grant.transfer_id)
        decode.receiver.cancel(grant.transfer_id, "why not")
        decode.wait_for(Released, grant.transfer_id)
        assert peer.closed_by_peer()
        peer.close()


def test_a_decode_worker_that_takes_no_bytes_fails_the_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "STALL_TIMEOUT_S", 0.3)
    prefill, stalled = Prefill(patient(transport="tcp")), RawDecode(read_blocks=False)
    push, results = prefill.begin(stalled.grant([1] * 32))
    for _ in range(2000):
        push.layer_ready(0, 0, [1] * 32)
    result = results.get(timeout=TIMEOUT_S)
    assert not result.ok
    assert "takes no bytes" in result.reason
    prefill.close()
    stalled.close()


def test_a_decode_worker_that_never_answers_begin_fails_the_push() -> None:
    prefill, silent = Prefill(patient(transport="tcp", connect_timeout_s=0.3)), RawDecode(accept=False)
    result = prefill.push(silent.grant([1]), [1]).get(timeout=TIMEOUT_S)
    assert "did not answer in time" in result.reason
    assert silent.heard(wire.Abort).transfer_id == silent.transfer_id
    prefill.close()
    silent.close()


def test_a_decode_worker_that_never_answers_commit_fails_the_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "STALL_TIMEOUT_S", 0.3)
    prefill, silent = Prefill(patient(transport="tcp")), RawDecode()
    result = prefill.push(silent.grant([1]), [1]).get(timeout=TIMEOUT_S)
    assert "did not answer in time" in result.reason
    prefill.close()
    silent.close()
