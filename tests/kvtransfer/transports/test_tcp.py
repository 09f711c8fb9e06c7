import socket

import pytest

from baton_proto import transfer as wire
from kvtransfer.slab.head_plan import WHOLE, parts
from kvtransfer.slab.slab import Slab
from kvtransfer.transports.tcp import TcpWriter
from kvtransfer.transports.transport import PrefillEnd, Shipment
from kvtransfer.wire.framing import Channel
from tests.kvtransfer.peers import LAYOUT


def test_a_shipment_of_several_layers_is_a_fault_of_ours_and_sends_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel: Channel[wire.ToPrefill] = Channel(ours, wire.decode_to_prefill, "the decode worker")
        welcome, plan = wire.Welcome(wire.MAJOR, LAYOUT.num_blocks, 1), parts(WHOLE, 1, LAYOUT.num_kv_heads)
        writer = TcpWriter(PrefillEnd(channel, Slab(LAYOUT), LAYOUT, plan, welcome, [], 1.0))
        assert not writer.at_once
        with pytest.raises(AssertionError, match="one at a time"):
            writer.write(Shipment(wire.Blocks("t", 0, 0, 1, layers=2), [3], [5], None, lambda: False))
        assert writer.write(Shipment(wire.Blocks("t", 0, 0, 1), [3], [5], None, lambda: False))
        channel.shutdown()
        received = b""
        while data := theirs.recv(1 << 16):
            received += data
        assert LAYOUT.block_bytes < len(received) < LAYOUT.block_bytes + 100
