"""Live ends of KV connections against peers that know the words and not the rules."""

import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, strategies as st
from structlog.testing import capture_logs

from baton_proto import transfer as wire
from baton_proto.discovery import TransferEndpoint
from baton_proto.worker import Grant
from kvtransfer.prefill_side.push import PushResult
from runtime.streams.length_prefix import framed
from tests.fuzz.budget import fuzzed
from tests.fuzz.shapes import almost, messages, packed
from tests.kvtransfer.peers import LAYOUT, TIMEOUT_S, Decode, Prefill, RawPeer, pair, patient

SMALL = st.integers(0, 5)
TRANSFERS = st.sampled_from(("first", "second", "none"))
FAULTS = ("KV link failed", "KV connection failed", "turned away", "the owner of a push failed on its end")

to_decode = messages(wire.ToDecode, transfer_id=TRANSFERS, layer=SMALL, layers=SMALL, first=SMALL, count=SMALL)
to_prefill = messages(wire.ToPrefill, transfer_id=st.just("first"), size=st.just(1), num_blocks=st.just(32))
said_to_decode = st.lists(st.one_of(to_decode, to_decode, to_decode, st.binary(max_size=60)), max_size=8)
bytes_for_prefill = st.lists(almost(st.builds(lambda one: framed(packed(one)), to_prefill)), max_size=6)


def faults(logs: Sequence[object]) -> list[object]:
    """Lines about exceptions that nobody expected."""
    return [row for row in logs if isinstance(row, dict) and (row.get("exc_info") or row["event"] in FAULTS[:2])]


def meant(message: wire.ToDecode, grants: list[Grant]) -> wire.ToDecode:
    """The message, of a transfer that there is."""
    names = {"first": grants[0].transfer_id, "second": grants[1].transfer_id}
    if isinstance(message, wire.Hello):
        return message
    return msgspec.structs.replace(message, transfer_id=names.get(message.transfer_id, message.transfer_id))


@pytest.fixture(scope="module", params=["shm", "tcp"])
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Decode, Prefill, str]]:
    with pair(request.param, connect_timeout_s=2.0) as (decode, prefill):
        yield decode, prefill, request.param


@pytest.mark.slow
@fuzzed(seconds=6)
@given(greeted=st.booleans(), said=said_to_decode)
def test_a_receiver_outlives_every_sender(
    both: tuple[Decode, Prefill, str], greeted: bool, said: list[wire.ToDecode | bytes]
) -> None:
    decode, prefill, transport = both
    grants = [decode.receiver.reserve(blocks, 0) for blocks in ([1, 2], [3, 4, 5])]
    with capture_logs() as logs:
        peer = RawPeer(grants[0], unix=transport == "shm", greet=greeted)
        try:
            for grant in grants[: 2 * greeted]:
                peer.channel.send(wire.Begin(grant.transfer_id, len(grant.block_ids), checksum=False))
            for data in said:
                peer.sock.sendall(data if isinstance(data, bytes) else framed(packed(meant(data, grants))))
        except OSError:  # it has hung up
            pass
        peer.close()
        for grant in grants:
            decode.receiver.cancel(grant.transfer_id, "over")
        for grant in grants:
            decode.wait_ended(grant.transfer_id)
        assert prefill.push(decode.receiver.reserve([1, 2], 0), [7, 8]).get(timeout=TIMEOUT_S).ok
    assert faults(logs) == []
    assert decode.receiver.problem == ""
    assert decode.receiver.check_integrity() == []


class Liar:
    """A decode worker on TCP that takes what comes and says what it was told to say."""

    def __init__(self, welcome: bool, said: list[bytes]) -> None:
        self._welcome, self._said = welcome, said
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def grant(self) -> Grant:
        endpoint = TransferEndpoint("another host", "", f"127.0.0.1:{self._listener.getsockname()[1]}", ("tcp",))
        return Grant("first", "decode-0", 7, 1, [1, 2], 0, 1.0, endpoint)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        self._listener.close()

    def _serve(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        with sock:
            try:
                if self._welcome:
                    sock.sendall(framed(packed(wire.Welcome(wire.MAJOR, LAYOUT.num_blocks, 1))))
                for data in self._said:
                    sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
            except OSError:
                pass


@contextmanager
def liar(welcome: bool, said: list[bytes]) -> Iterator[Liar]:
    one = Liar(welcome, said)
    try:
        yield one
    finally:
        one.close()


@pytest.mark.slow
@fuzzed(seconds=6)
@given(welcome=st.booleans(), said=bytes_for_prefill)
def test_every_push_ends_whatever_the_receiver_answers(welcome: bool, said: list[bytes]) -> None:
    prefill = Prefill(patient(transport="tcp", connect_timeout_s=1.0))
    with capture_logs() as logs, liar(welcome, said) as receiver:
        push, results = prefill.begin(receiver.grant())
        for layer in range(LAYOUT.num_layers):
            push.layer_ready(layer, 0, [1, 2])
        push.commit(b"token")
        ended: PushResult = results.get(timeout=TIMEOUT_S)
        prefill.close()
    assert faults(logs) == []
    assert ended.transport in ("", "tcp")
    with pytest.raises(queue.Empty):
        results.get_nowait()
