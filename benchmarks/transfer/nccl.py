"""NCCL with its gather and scatter kernels, alone: writer and intake of `kvtransfer/nccl.py` over one connection."""

import socket
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from baton_proto import transfer as wire
from benchmarks.transfer.case import Case
from kvtransfer.framing import Channel
from kvtransfer.head_plan import WHOLE, Part, parts
from kvtransfer.layout import SlabLayout
from kvtransfer.slab import Slab
from kvtransfer.tcp import tune
from kvtransfer.transport import Shipment

TIMEOUT_S = 20.0
MIB = (4, 64, 512)
LAYOUT = SlabLayout(num_layers=8, num_blocks=2048, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16")
PLAN: tuple[Part, ...] = parts(WHOLE, 1, LAYOUT.num_kv_heads)
LAYER_BLOCKS = 1024  # 64 MiB


def decode(case: Case, pipe: Connection, answers: Any) -> None:
    from kvtransfer.nccl import NcclIntake

    slab = Slab(LAYOUT, case.start())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        sock, _ = listener.accept()
    tune(sock)
    channel: Channel[wire.ToDecode] = Channel(sock, wire.to_decode_decoder, "the prefill side")
    intake = NcclIntake(channel, [slab], TIMEOUT_S)
    intake.welcome(wire.Welcome(wire.MAJOR, LAYOUT.num_blocks, 1), PLAN)
    blocks: list[int] = pipe.recv()
    while (message := channel.receive()) is not None:
        if isinstance(message, wire.Blocks):
            intake.take(message.layer, blocks[message.first : message.first + message.count])
        else:
            intake.settle()
            channel.send_now(wire.Committed(""))
    intake.close()


def prefill(case: Case, pipe: Connection, answers: Any) -> None:
    import torch

    from kvtransfer.nccl import NcclWriter

    slab = Slab(LAYOUT, case.start())
    sock = socket.create_connection(("127.0.0.1", pipe.recv()))
    tune(sock)
    channel: Channel[wire.ToPrefill] = Channel(sock, wire.to_prefill_decoder, "the decode side")
    welcome = channel.receive()
    assert isinstance(welcome, wire.Welcome)
    writer = NcclWriter(channel, slab, PLAN, welcome.pair_id, TIMEOUT_S)
    blocks = torch.randperm(LAYOUT.num_blocks).tolist()
    pipe.send(torch.randperm(LAYOUT.num_blocks).tolist())
    for mib in MIB:
        left = (mib << 20) // LAYOUT.block_bytes
        layers = [min(LAYER_BLOCKS, left - begin) for begin in range(0, left, LAYER_BLOCKS)]
        times = []
        for _ in range(case.rounds + 1):
            begin_s = time.perf_counter()
            for layer, count in enumerate(layers):
                for first in range(0, count, writer.piece_blocks):
                    source = blocks[first : min(first + writer.piece_blocks, count)]
                    message = wire.Blocks("", layer, first, len(source))
                    assert writer.write(Shipment(message, source, source, None, lambda: False))
            channel.send(wire.Commit("", b""))
            assert isinstance(channel.receive(), wire.Committed)
            times.append(time.perf_counter() - begin_s)
        seconds = statistics.median(times[1:])
        answers.put(
            {"way": "nccl", "MiB": mib, "run KiB": 64, "GB/s": (mib << 20) / seconds / 1e9, "us": seconds * 1e6}
        )
    channel.shutdown()
    writer.close()
    answers.put(None)
