"""Messages that announce several layers: what the decode side makes of them, right and wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import pytest

from baton_proto import transfer as wire
from baton_proto.worker import Grant
from kvtransfer.decode_side.events import Failed, LayerArrived
from kvtransfer.transports import tcp
from kvtransfer.transports.host_window import HostWindow, StagedBlocks
from kvtransfer.wire.checksum import block_checksums
from tests.kvtransfer.peers import LAYOUT, Decode, RawPeer, assert_arrived, pair, words

both = pytest.mark.parametrize("transport", ["shm", "tcp"])


@contextmanager
def raw_peer(decode: Decode, transport: str, *, checksum: bool = False) -> Iterator[tuple[RawPeer, Grant]]:
    """It was granted blocks 5 and 6, and has begun."""
    grant = decode.receiver.reserve([5, 6], 0)
    peer = RawPeer(grant, unix=transport == "shm")
    try:
        peer.channel.send(wire.Begin(grant.transfer_id, 2, checksum))
        assert peer.channel.receive() == wire.Accept(grant.transfer_id)
        yield peer, grant
    finally:
        peer.close()


class StagedWindow(HostWindow):
    """As onto a GPU's memory."""

    @cached_property
    def _staged(self) -> StagedBlocks:
        return StagedBlocks(self._slab, self._heads)


@pytest.mark.parametrize("window", [HostWindow, StagedWindow])
def test_over_tcp_the_bytes_of_several_layers_follow_layer_by_layer(
    window: type[HostWindow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "HostWindow", window)
    with pair("tcp") as (decode, prefill), raw_peer(decode, "tcp") as (peer, grant):
        for layer, layers in ((1, 3), (0, 1)):
            sent = words(prefill.slab)[layer : layer + layers, [8, 9]]
            peer.channel.send(wire.Blocks(grant.transfer_id, layer, 0, 2, layers), [memoryview(sent.tobytes())])
        peer.channel.send(wire.Commit(grant.transfer_id, b""))
        assert peer.channel.receive() == wire.Committed(grant.transfer_id)
        arrived = [(event.layer, event.layers) for event in decode.of(grant.transfer_id)[:-1]]
        assert arrived == [(1, 3), (0, 1)]
        assert_arrived(decode.slab, [5, 6], prefill.slab, [8, 9])


@pytest.mark.parametrize(
    ("ranges", "problem"),
    [
        ([(0, 3)], "commits with 2 blocks missing"),
        ([(1, 3)], "commits with 2 blocks missing"),
        ([(0, 4), (2, 1)], "wrote a block of layer 2 twice"),
        ([(0, 2), (1, 3)], "wrote a block of layer 1 twice"),
    ],
)
def test_layers_that_are_missing_or_come_twice_fail_the_transfer(ranges: list[tuple[int, int]], problem: str) -> None:
    with pair("shm") as (decode, _), raw_peer(decode, "shm") as (peer, grant):
        for layer, layers in ranges:
            peer.channel.send(wire.Blocks(grant.transfer_id, layer, 0, 2, layers))
        peer.channel.send(wire.Commit(grant.transfer_id, b""))
        assert isinstance(peer.channel.receive(), wire.Cancel)
        assert problem in decode.wait_for(Failed, grant.transfer_id).reason


@both
@pytest.mark.parametrize(("layer", "layers"), [(0, 0), (0, 5), (3, 2), (4, 1), (2**53, 2**53)])
def test_layers_that_the_model_does_not_have_end_the_connection(transport: str, layer: int, layers: int) -> None:
    with pair(transport) as (decode, _), raw_peer(decode, transport) as (peer, grant):
        peer.channel.send(wire.Blocks(grant.transfer_id, layer, 0, 2, layers))
        assert peer.closed_by_peer()
        reason = decode.wait_for(Failed, grant.transfer_id).reason
        assert f"writes layers [{layer}, {layer + layers}); the model has 4 layers" in reason


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (None, ""),
        (0, "checksum of layer 1, granted block 0 differs"),
        (24, "checksum of layer 2, granted block 1 differs"),
        (32, "sent 24 bytes of checksums; due are 32"),
    ],
)
def test_several_layers_have_checksums_each(wrong: int | None, problem: str) -> None:
    """`wrong`: at which byte."""
    with pair("tcp") as (decode, prefill), raw_peer(decode, "tcp", checksum=True) as (peer, grant):
        sent = words(prefill.slab)[1:3, [8, 9]].tobytes()
        checksums = bytearray(block_checksums([memoryview(sent)], LAYOUT.block_bytes))
        if wrong == len(checksums):
            del checksums[-8:]
        elif wrong is not None:
            checksums[wrong] ^= 1
        peer.channel.send(wire.Blocks(grant.transfer_id, 1, 0, 2, 2, bytes(checksums)), [memoryview(sent)])
        if problem:
            assert problem in decode.wait_for(Failed, grant.transfer_id).reason
        else:
            decode.wait_for(LayerArrived, grant.transfer_id, layer=1, layers=2)
