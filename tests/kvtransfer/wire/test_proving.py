"""Who does not have the cluster key writes no block, is told nothing, and is left soon."""

import socket
import struct
from contextlib import suppress

import pytest

from baton_proto.worker import Grant
from kvtransfer.wire.identity import hello
from runtime.security.cluster_key import ClusterKey, new_cluster_key
from runtime.security.handshake import MAGIC, MAX_FRAME_BYTES, NONCE_BYTES
from tests.kvtransfer.peers import PREFILL_IDENTITY, TIMEOUT_S, RawPeer, assert_arrived, pair, words

KEY = new_cluster_key()
both = pytest.mark.parametrize("transport", ["tcp", "shm"])


def framed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


@both
def test_with_the_same_key_blocks_arrive(transport: str) -> None:
    with pair(transport, KEY, KEY) as (decode, prefill):
        for _ in range(2):  # the second one on the same connection
            grant = decode.receiver.reserve([3, 4], 0)
            assert prefill.push(grant, [1, 2]).get(timeout=TIMEOUT_S).ok
        assert_arrived(decode.slab, [3, 4], prefill.slab, [1, 2])


@both
@pytest.mark.parametrize(
    ("decode_key", "prefill_key"), [(KEY, new_cluster_key()), (KEY, None), (None, KEY)], ids=["other", "none", "ours"]
)
def test_without_the_same_key_nothing_is_written(
    transport: str, decode_key: ClusterKey | None, prefill_key: ClusterKey | None
) -> None:
    with pair(transport, decode_key, prefill_key, connect_timeout_s=1.0) as (decode, prefill):
        grant = decode.receiver.reserve([1], 0)
        assert not prefill.push(grant, [1]).get(timeout=TIMEOUT_S).ok
        assert not words(decode.slab).any()
        decode.receiver.cancel(grant.transfer_id, "over")
        assert decode.receiver.lease_count() == 0
        assert decode.receiver.check_integrity() == []


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x01",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(1000),
        framed(MAGIC + bytes(NONCE_BYTES))[:-1],
        framed(bytes(MAX_FRAME_BYTES + 1)),
        struct.pack("<I", 2**32 - 1),
    ],
    ids=["silence", "a byte", "http", "zeros", "cut", "too long", "announces 4 GiB"],
)
@both
def test_a_stranger_hears_nothing_and_is_left(transport: str, said: bytes) -> None:
    with pair(transport, KEY, KEY) as (decode, prefill):
        grant = decode.receiver.reserve([1], 0)
        decode.receiver._door._timeout_s = 0.3
        stranger = RawPeer(grant, unix=transport == "shm", greet=False)
        with suppress(BrokenPipeError, ConnectionResetError):  # when the stranger was left before it said a word
            stranger.sock.sendall(said)
        assert heard(stranger.sock) == b""
        stranger.close()
        decode.receiver._door._timeout_s = TIMEOUT_S
        assert prefill.push(grant, [1]).get(timeout=TIMEOUT_S).ok


def test_a_stranger_who_says_hello_hears_nothing() -> None:
    with pair("tcp", KEY, KEY) as (decode, _):
        grant: Grant = decode.receiver.reserve([1], 0)
        stranger = RawPeer(grant, unix=False, greet=False)
        stranger.channel.send(hello(PREFILL_IDENTITY, grant, "tcp"))
        assert heard(stranger.sock) == b""
        stranger.close()


def test_who_proves_nothing_gets_a_question_and_no_more() -> None:
    with pair("tcp", KEY, KEY) as (decode, _):
        stranger = RawPeer(decode.receiver.reserve([1], 0), unix=False, greet=False)
        stranger.sock.sendall(framed(MAGIC + bytes(NONCE_BYTES)) + framed(bytes(32)))
        assert len(heard(stranger.sock)) == 4 + NONCE_BYTES
        stranger.close()


def heard(sock: socket.socket) -> bytes:
    """Until the other side ends it."""
    received = b""
    try:
        while data := sock.recv(4096):
            received += data
    except ConnectionResetError:
        pass
    return received
