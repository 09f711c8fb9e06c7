"""NCCL with its gather and scatter kernels, without the rest of a push: one writer and one intake, connected.

`alone`: each transfer is answered before the next one begins. `in a row`: transfers follow each other, as the chunks of
prompts do when another prompt always waits, and one answer comes at the end. `host us` is the sending host's time per
transfer, its waits for buffers included. Two lines show a transfer's cost besides NCCL: 0 MiB is a message and its
answer, `gather` is the gather kernel on one piece.
"""

import socket
import statistics
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

from baton_proto import transfer as wire
from benchmarks.transfer.case import Case, gpu_median_s
from kvtransfer.slab.head_plan import WHOLE, Part, parts
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from kvtransfer.transports.transport import DecodeEnd, PrefillEnd, Shipment
from kvtransfer.wire.framing import Channel
from kvtransfer.wire.sockets import tune

TIMEOUT_S = 20.0
MIB = (0, 4, 64, 512)
ROW_MIB, IN_A_ROW = 64, 20  # the smallest transfer of `in a row`, and how many follow each other
LAYOUT = SlabLayout(num_layers=8, num_blocks=2048, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16")
PLAN: tuple[Part, ...] = parts(WHOLE, 1, LAYOUT.num_kv_heads)
LAYER_BLOCKS = 1024  # 64 MiB


def decode(case: Case, pipe: Connection, answers: Any) -> None:
    from kvtransfer.transports.nccl import NcclIntake

    slab = Slab(LAYOUT, case.start())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        sock, _ = listener.accept()
    tune(sock)
    channel: Channel[wire.ToDecode] = Channel(sock, wire.decode_to_decode, "the prefill side")
    intake = NcclIntake(DecodeEnd(channel, [slab], TIMEOUT_S))
    intake.welcome(wire.Welcome(wire.MAJOR, LAYOUT.num_blocks, 1), PLAN)
    blocks: list[int] = pipe.recv()
    while (message := channel.receive()) is not None:
        if isinstance(message, wire.Blocks):
            intake.take(message.layer_range, blocks[message.first : message.first + message.count])
        else:
            intake.settle()
            channel.send_now(wire.Committed(""))
    intake.close()


def prefill(case: Case, pipe: Connection, answers: Any) -> None:
    import torch

    from kvtransfer.transports.nccl import NcclWriter

    slab = Slab(LAYOUT, case.start())
    sock = socket.create_connection(("127.0.0.1", pipe.recv()))
    tune(sock)
    channel: Channel[wire.ToPrefill] = Channel(sock, wire.decode_to_prefill, "the decode side")
    welcome = channel.receive()
    assert isinstance(welcome, wire.Welcome)
    writer = NcclWriter(PrefillEnd(channel, slab, LAYOUT, PLAN, welcome, [], TIMEOUT_S))
    blocks = torch.randperm(LAYOUT.num_blocks).tolist()
    pipe.send(torch.randperm(LAYOUT.num_blocks).tolist())
    answers.put(_gather_row(slab, blocks[:LAYER_BLOCKS], case.rounds))
    for mib in MIB:
        num_blocks = min((mib << 20) // LAYOUT.block_bytes, LAYER_BLOCKS)
        num_layers = (mib << 20) // LAYOUT.block_bytes // max(1, num_blocks)
        source = blocks[:num_blocks]

        def write(count: int, source: list[int] = source, num_layers: int = num_layers) -> tuple[float, float]:
            """Seconds until all blocks are in place, and the part of them until all were enqueued."""
            begin_s = time.perf_counter()
            for _ in range(count):
                message = wire.Blocks("", 0, 0, len(source), num_layers)
                assert writer.write(Shipment(message, source, source, None, lambda: False))
            written_s = time.perf_counter()
            channel.send(wire.Commit("", b""))
            assert isinstance(channel.receive(), wire.Committed)
            return time.perf_counter() - begin_s, written_s - begin_s

        answers.put(_row("alone", mib << 20, *_medians(write(1 if source else 0) for _ in range(case.rounds + 1))))
        if mib >= ROW_MIB:
            seconds = _medians(write(IN_A_ROW) for _ in range(case.rounds // 4 + 1))
            answers.put(_row("in a row", mib << 20, *(s / IN_A_ROW for s in seconds)))
    channel.shutdown()
    writer.close()
    answers.put(None)


def _medians(times: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The medians without the first value."""
    whole, written = zip(*list(times)[1:], strict=True)
    return statistics.median(whole), statistics.median(written)


def _gather_row(slab: Slab, blocks: list[int], rounds: int) -> dict[str, Any]:
    import torch

    from kvtransfer.transports.copy_blocks import copy_blocks

    rows = slab.tensor[:1].view(torch.int64).view(1, LAYOUT.num_blocks, -1)
    buffer = torch.empty_like(rows[:, : len(blocks)])
    table = torch.tensor([blocks, list(range(len(blocks)))], dtype=torch.int32, device="cuda")
    device_s, host_s = gpu_median_s(lambda: copy_blocks(rows, buffer, table), rounds)
    return _row("gather", len(blocks) * LAYOUT.block_bytes, device_s, host_s)


def _row(way: str, nbytes: int, seconds: float, host_s: float) -> dict[str, Any]:
    row = {"way": way, "MiB": nbytes >> 20, "run KiB": 64, "GB/s": nbytes / seconds / 1e9}
    return row | {"us": seconds * 1e6, "host us": host_s * 1e6}
