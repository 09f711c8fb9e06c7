"""Processes that die and peers that misbehave: the other side learns of it, frees what is safe, and serves on."""

import os
import struct
from collections.abc import Callable

import msgspec
import pytest

from baton_proto import transfer as wire
from baton_proto.worker import Grant
from kvtransfer.decode_side.events import Failed, LayerArrived, Released
from kvtransfer.transports.shm import ShmWriter
from kvtransfer.wire.framing import MAX_FRAME_BYTES
from kvtransfer.wire.identity import hello
from tests.kvtransfer.peers import LAYOUT, PREFILL_IDENTITY, TIMEOUT_S, RawPeer, assert_arrived, child, pair

both = pytest.mark.parametrize("transport", ["shm", "tcp"])


@both
def test_killing_the_sender_in_mid_push_fails_and_then_releases_the_blocks(transport: str) -> None:
    with child("prefill", config={"transport": transport}) as process, pair(transport) as (decode, prefill):
        grant = decode.receiver.reserve([1, 2], 0)
        process.tell(do="begin", grant=grant)
        process.tell(do="layer", push=grant.transfer_id, layer=0, source=[3, 4])
        decode.wait_for(LayerArrived, grant.transfer_id)
        process.kill()
        decode.wait_for(Failed, grant.transfer_id)
        decode.wait_for(Released, grant.transfer_id)
        assert [type(event) for event in decode.of(grant.transfer_id)] == [LayerArrived, Failed, Released]
        assert decode.receiver.lease_count() == 0
        assert prefill.push(decode.receiver.reserve([1, 2], 0), [7, 8]).get(timeout=TIMEOUT_S).ok
        assert_arrived(decode.slab, [1, 2], prefill.slab, [7, 8])


def test_a_dead_sender_is_proven_dead_though_its_child_holds_every_descriptor() -> None:
    """The forked child keeps socket and token open; only the pidfd of the dead process can tell."""
    with pair("shm") as (decode, _):
        grant = decode.receiver.reserve([1, 2], 0)
        with child("forking-prefill", grant=msgspec.to_builtins(grant)) as process:
            assert process.hear() == {"answer": "Accept"}
            decode.receiver.cancel(grant.transfer_id, "why not")
            process.kill()
            decode.wait_for(Released, grant.transfer_id)
            assert decode.receiver.lease_count() == 0


def test_a_closed_socket_alone_frees_no_block_that_is_still_mapped() -> None:
    with pair("shm") as (decode, prefill):
        grant = decode.receiver.reserve([1, 2], 0)
        peer = RawPeer(grant, unix=True)
        assert peer.begin() == wire.Accept(grant.transfer_id)
        peer.sock.close()
        decode.wait_for(Failed, grant.transfer_id)
        assert prefill.push(decode.receiver.reserve([3], 0), [1]).get(timeout=TIMEOUT_S).ok
        assert decode.receiver.lease_count() == 1
        assert decode.receiver.check_integrity() == []
        assert not any(isinstance(event, Released) for event in decode.of(grant.transfer_id))
        slab_fd, token = peer.fds
        os.close(slab_fd)
        os.close(token)  # what a sender does after it has unmapped
        decode.wait_for(Released, grant.transfer_id)
        assert decode.receiver.lease_count() == 0


@both
def test_the_death_of_the_decode_worker_ends_a_push_promptly(transport: str) -> None:
    with child("decode", config={"transport": transport}) as process, pair(transport) as (survivor, prefill):
        process.tell(blocks=[1, 2])
        push, results = prefill.begin(msgspec.convert(process.hear()["grant"], Grant))
        push.layer_ready(0, 0, [3, 4])
        process.tell(blocks=[5])
        process.hear()
        process.kill()
        result = results.get(timeout=TIMEOUT_S)
        assert not result.ok
        push.layer_ready(1, 0, [3, 4])
        push.commit(b"")
        assert prefill.push(survivor.receiver.reserve([1], 0), [1]).get(timeout=TIMEOUT_S).ok


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def message(message: wire.ToDecode) -> bytes:
    return frame(wire.encode(message))


MISBEHAVIOUR: dict[str, Callable[[Grant], bytes]] = {
    "noise": lambda grant: bytes(range(1, 200)),
    "an oversized message": lambda grant: struct.pack("<I", MAX_FRAME_BYTES + 1),
    "no msgpack": lambda grant: frame(b"\xc1" * 20),
    "an unknown message": lambda grant: frame(msgspec.msgpack.encode({"type": "surprise"})),
    "a wrong type": lambda grant: frame(msgspec.msgpack.encode({"type": "begin", "transfer_id": 5})),
    "a negative count": lambda grant: frame(
        msgspec.msgpack.encode({"type": "blocks", "transfer_id": "x", "layer": 0, "first": 0, "count": -1})
    ),
    "an answer": lambda grant: frame(wire.encode(wire.Accept(grant.transfer_id))),
    "a second hello": lambda grant: message(hello(PREFILL_IDENTITY, grant, "tcp")),
    "blocks of a transfer that is not its own": lambda grant: message(wire.Blocks("another", 0, 0, 1)),
    "a commit of a transfer that is not its own": lambda grant: message(wire.Commit("another", b"")),
    "a layer too many": lambda grant: message(wire.Blocks(grant.transfer_id, LAYOUT.num_layers, 0, 1)),
    "a block too many": lambda grant: message(wire.Blocks(grant.transfer_id, 0, 1, 2)),
    "no block": lambda grant: message(wire.Blocks(grant.transfer_id, 0, 0, 0)),
    "a huge range": lambda grant: message(wire.Blocks(grant.transfer_id, 0, 0, 2**62)),
}


@both
@pytest.mark.parametrize("what", MISBEHAVIOUR)
def test_a_peer_that_sends_nonsense_is_cut_off_and_harms_nobody(transport: str, what: str) -> None:
    with pair(transport) as (decode, prefill):
        victim, other = decode.receiver.reserve([1, 2], 0), decode.receiver.reserve([3, 4], 0)
        push, results = prefill.begin(other)
        push.layer_ready(0, 0, [1, 2])
        decode.wait_for(LayerArrived, other.transfer_id)
        peer = RawPeer(victim, unix=transport == "shm")
        assert peer.begin() == wire.Accept(victim.transfer_id)
        peer.sock.sendall(MISBEHAVIOUR[what](victim))
        assert peer.closed_by_peer()
        peer.close()
        decode.wait_for(Failed, victim.transfer_id)
        decode.wait_for(Released, victim.transfer_id)
        for layer in range(1, LAYOUT.num_layers):
            push.layer_ready(layer, 0, [1, 2])
        push.commit(b"")
        assert results.get(timeout=TIMEOUT_S).ok
        assert_arrived(decode.slab, [3, 4], prefill.slab, [1, 2])
        assert decode.receiver.check_integrity() == []


@both
def test_a_stranger_that_does_not_say_hello_is_cut_off(transport: str) -> None:
    with pair(transport, connect_timeout_s=0.2) as (decode, _):
        grant = decode.receiver.reserve([1], 0)
        silent = RawPeer(grant, unix=transport == "shm", greet=False)
        assert silent.closed_by_peer()
        rude = RawPeer(grant, unix=transport == "shm", greet=False)
        rude.channel.send(wire.Begin(grant.transfer_id, 1, checksum=False))
        assert rude.closed_by_peer()
        assert decode.receiver.lease_count() == 1
        silent.close()
        rude.close()


@both
def test_a_begin_for_an_unknown_or_a_different_grant_is_rejected(transport: str) -> None:
    with pair(transport) as (decode, _):
        grant = decode.receiver.reserve([1, 2], 0)
        peer = RawPeer(grant, unix=transport == "shm")
        peer.channel.send(wire.Begin("guessed", 2, checksum=False))
        assert isinstance(peer.channel.receive(), wire.Reject)
        peer.channel.send(wire.Begin(grant.transfer_id, 3, checksum=False))
        answer = peer.channel.receive()
        assert isinstance(answer, wire.Reject)
        assert "begins with 3 blocks, granted are 2" in answer.reason
        decode.wait_for(Released, grant.transfer_id)
        peer.close()


def test_a_writer_that_fails_to_close_ends_its_pushes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    close = ShmWriter.close

    def closing(writer: ShmWriter) -> None:
        close(writer)
        raise RuntimeError("a fault of the device")

    monkeypatch.setattr(ShmWriter, "close", closing)
    with pair("shm") as (decode, prefill):
        push, results = prefill.begin(grant := decode.receiver.reserve([1, 2], 0))
        push.layer_ready(0, 0, [3, 4])
        decode.wait_for(LayerArrived, grant.transfer_id)
        decode.close()
        assert not results.get(timeout=TIMEOUT_S).ok
