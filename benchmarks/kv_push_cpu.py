"""How fast KV blocks go from one process's slab into another's on one machine, beside a plain copy of as many.

    python benchmarks/kv_push_cpu.py [--blocks 64] [--rounds 20]

SmolLM2-135M's slab (30 layers, 3 KV heads of 64, block 16, float32: 24 KiB per block and layer). The decode side is
this process, the prefill side a child. `random` scatters the blocks on both sides, `runs` has them side by side. Slabs
are warm: pages that were never touched cost a fault each on top, once.
"""

import argparse
import multiprocessing
import queue
import time
from multiprocessing.connection import Connection

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from baton.config import TransferConfig
from kvtransfer.events import Committed, TransferEvent
from kvtransfer.identity import SlabIdentity
from kvtransfer.layout import SlabLayout
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.slab import Slab

LAYOUT = SlabLayout(num_layers=30, num_blocks=256, num_kv_heads=3, block_size=16, head_dim=64, dtype="float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=64, help="blocks of one push")
    parser.add_argument("--rounds", type=int, default=20, help="pushes per line; the median counts")
    options = parser.parse_args()
    kv_bytes = options.blocks * LAYOUT.num_layers * LAYOUT.block_bytes
    table = Table(title=f"{options.blocks} blocks x {LAYOUT.num_layers} layers = {kv_bytes / 1e6:.0f} MB per push")
    for column in ("way", "blocks", "GB/s", "ms per push", "of plain"):
        table.add_column(column, justify="left" if column in ("way", "blocks") else "right")
    plain_s = _plain_copy_s(kv_bytes, options.rounds)
    table.add_row("slab to slab by numpy", "runs", f"{kv_bytes / plain_s / 1e9:.2f}", f"{plain_s * 1e3:.2f}", "1.00")
    lines = [(transport, order) for transport in ("shm", "tcp") for order in ("runs", "random")]
    for transport, order in track(lines, "pushing", transient=True):
        seconds = _push_s(transport, order, options.blocks, options.rounds)
        share = f"{plain_s / seconds:.2f}"
        table.add_row(transport, order, f"{kv_bytes / seconds / 1e9:.2f}", f"{seconds * 1e3:.2f}", share)
    Console().print(table)


def _plain_copy_s(nbytes: int, rounds: int) -> float:
    source, destination = (np.frombuffer(Slab(LAYOUT).buffer, dtype=np.uint8)[:nbytes] for _ in range(2))
    times = []
    for _ in range(rounds + 1):
        begin_s = time.perf_counter()
        destination[:] = source
        times.append(time.perf_counter() - begin_s)
    return float(np.median(times[1:]))  # the first one touches the pages


def _block_ids(order: str, count: int, seed: int) -> list[int]:
    if order == "runs":
        return list(range(count))
    return [int(block) for block in np.random.default_rng(seed).permutation(LAYOUT.num_blocks)[:count]]


def _push_s(transport: str, order: str, blocks: int, rounds: int) -> float:
    """Median time from the first layer_ready to Committed on the decode side."""
    slab = Slab(LAYOUT)
    np.frombuffer(slab.buffer, dtype=np.uint8)[:] = 1
    events: queue.Queue[TransferEvent] = queue.Queue()
    config = TransferConfig(transport=transport)  # type: ignore[arg-type]
    receiver = Receiver(slab, SlabIdentity("decode", 1, "model", LAYOUT), config, "127.0.0.1", events.put)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=_prefill, args=(theirs, config, order, blocks), daemon=True)
    child.start()
    times = []
    for round_number in range(rounds + 1):
        ours.send(receiver.reserve(_block_ids(order, blocks, round_number), 0))
        while not isinstance(events.get(timeout=60), Committed):
            pass
        times.append(ours.recv())
    ours.send(None)
    child.join()
    receiver.close()
    slab.close()
    return float(np.median(times[1:]))  # the first one connects


def _prefill(pipe: Connection, config: TransferConfig, order: str, blocks: int) -> None:
    slab = Slab(LAYOUT)
    np.frombuffer(slab.buffer, dtype=np.uint8)[:] = 2
    sender = Sender(slab, SlabIdentity("prefill", 1, "model", LAYOUT), config)
    results: queue.Queue[object] = queue.Queue()
    source = _block_ids(order, blocks, 1000)
    while (grant := pipe.recv()) is not None:
        begin_s = time.perf_counter()
        push = sender.begin(grant, results.put)
        for layer in range(LAYOUT.num_layers):
            push.layer_ready(layer, 0, source)
        push.commit(b"")
        results.get()
        pipe.send(time.perf_counter() - begin_s)
    sender.close()


if __name__ == "__main__":
    main()
