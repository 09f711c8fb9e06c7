"""Time in which a restarted router rebuilds its radix tree from the snapshots of all workers.

    python -m benchmarks.router_restart [--blocks 1000000] [--workers 8] [--rounds 3]

Each worker is a process with a real prefix cache behind real gRPC, and its time to list the blocks counts. This process
is the router's side, with a real NATS server, the real links and the real indexer. The time runs from the workers'
discovery until the tree holds every block and no snapshot is outstanding. The workers' blocks are invented:
conversations of some hundred blocks behind a few shared system prompts, stored turn by turn in random order.
"""

import argparse
import asyncio
import logging
import multiprocessing
import random
import statistics
import time
from array import array
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import grpc
import numpy as np
import structlog
from rich.console import Console
from rich.table import Table

from baton.service.local.nats_server import NatsServer
from baton_proto.decoding import decoder
from baton_proto.discovery import MAJOR, WorkerRecord
from baton_proto.sampling import SamplingParams
from baton_proto.worker import (
    SERVICE,
    STEPS,
    Hello,
    SnapshotChunk,
    SnapshotRequest,
    encode,
)
from engine.blocks.prefix_cache import PrefixCache
from engine.blocks.resting import MEDIUM
from engine.sequences.sequence import Sequence
from router.index.indexer import Indexer
from router.workers.load import LoadLedger
from router.workers.pool import WorkerPool
from runtime.discovery.directory import Change
from runtime.nats.client import connect
from runtime.streams.message_stream import MessageStream
from worker.snapshot import Snapshot, chunks
from worker.stream_server import StreamServer

BLOCK_SIZE = 16
GOAL_S = 2.0  # for a million blocks
SYSTEM_PROMPTS = 8
SYSTEM_BLOCKS = 64
TURN_BLOCKS = 48
TURNS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="distinct blocks of all workers together")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="restarts; the median counts")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    result = asyncio.run(_measure(options.blocks, options.workers, options.rounds))
    table = Table(title=f"router restart: {result.blocks:,} distinct blocks on {options.workers} workers")
    for column in ("restart", "seconds", "router CPU s", "blocks/s"):
        table.add_column(column, justify="right")
    for number, (wall_s, cpu_s) in enumerate(result.restarts, 1):
        table.add_row(str(number), f"{wall_s:.2f}", f"{cpu_s:.2f}", f"{result.blocks / wall_s:,.0f}")
    Console().print(table)
    median_s = statistics.median(wall_s for wall_s, _ in result.restarts)
    goal_s = GOAL_S * result.blocks / 1e6
    print(f"the workers, all together, took {result.workers_cpu_s:.2f} s of CPU time to list their blocks")
    print(f"median {median_s:.2f} s, goal {goal_s:.2f} s: {'reached' if median_s <= goal_s else 'MISSED'}")
    raise SystemExit(median_s > goal_s)


class Result(NamedTuple):
    restarts: list[tuple[float, float]]  # (seconds, CPU seconds of the router's process)
    blocks: int  # distinct, in the tree
    workers_cpu_s: float  # in one restart


async def _measure(num_blocks: int, num_workers: int, rounds: int) -> Result:
    processes, pipes = [], []
    context = multiprocessing.get_context("spawn")
    for number in range(num_workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve_worker, args=(theirs, number, num_blocks // num_workers), daemon=True)
        process.start()
        processes.append(process)
        pipes.append(ours)
    server = NatsServer()
    try:
        addresses = [await asyncio.to_thread(pipe.recv) for pipe in pipes]
        await server.start()
        restarts, blocks = [], 0
        for _ in range(rounds):
            wall_s, cpu_s, blocks = await _restart(server.url, addresses, num_blocks // num_workers)
            restarts.append((wall_s, cpu_s))
        for pipe in pipes:
            pipe.send("how long")
        spent_s = sum([await asyncio.to_thread(pipe.recv) for pipe in pipes]) / rounds
        return Result(restarts, blocks, spent_s)
    finally:
        await server.stop()
        for process in processes:
            process.terminate()
            process.join()


async def _restart(nats_url: str, addresses: list[tuple[str, str]], blocks_each: int) -> tuple[float, float, int]:
    nats = await connect(nats_url, "router", timeout_s=5)
    pool = WorkerPool("router", "model", BLOCK_SIZE, LoadLedger(BLOCK_SIZE, 300.0))
    indexer = Indexer(nats, pool.snapshot)
    await indexer.start()
    begin_s, cpu_begin_s = time.perf_counter(), time.process_time()
    for number, pair in enumerate(addresses):
        change = Change("added", _record(number, pair, blocks_each))
        pool.apply(change)
        indexer.apply(change)
    while not indexer.settled:
        await asyncio.sleep(0.002)
    wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_begin_s
    blocks = indexer.tree.num_blocks
    held = sum(indexer.tree.num_blocks_of((f"worker-{number}", 1)) for number in range(len(addresses)))
    assert held == blocks_each * len(addresses), f"the tree has {held} blocks"
    await indexer.close()
    await pool.close()
    await nats.close()
    return wall_s, cpu_s, blocks


def _record(number: int, addresses: tuple[str, str], blocks: int) -> WorkerRecord:
    return WorkerRecord(
        version=MAJOR,
        worker_id=f"worker-{number}",
        incarnation=1,
        role="decode",
        state="ready",
        rpc_address=addresses[0],
        stream_address=addresses[1],
        transfer=None,
        model="model",
        model_hash="",
        block_size=BLOCK_SIZE,
        num_blocks=blocks,
        max_model_len=1 << 20,
        pid=0,
    )


# --- a worker's process -----------------------------------------------------------------------------------------------


def _serve_worker(pipe: Connection, number: int, num_blocks: int) -> None:
    asyncio.run(_Worker(number, num_blocks).serve(pipe))


class _Worker:
    def __init__(self, number: int, num_blocks: int) -> None:
        self._hello = Hello(1, f"worker-{number}", 1)
        self._cache = _filled_cache(number, num_blocks)
        self._spent_s = 0.0

    async def serve(self, pipe: Connection) -> None:
        server = grpc.aio.server()
        methods = {
            "Snapshot": grpc.unary_stream_rpc_method_handler(self._snapshot, decoder(SnapshotRequest), encode),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        streams = StreamServer(self._hello, {STEPS: self._steps})
        pipe.send((f"127.0.0.1:{port}", await streams.start("127.0.0.1")))
        await asyncio.to_thread(pipe.recv)
        pipe.send(self._spent_s)
        await asyncio.to_thread(pipe.recv)

    async def _steps(self, stream: MessageStream, router_id: str) -> None:
        await stream.ended()

    async def _snapshot(self, request: SnapshotRequest, context: Any) -> AsyncIterator[SnapshotChunk]:
        begin_s = time.process_time()
        snapshot = Snapshot(event_id=0, runs=self._cache.runs())
        for chunk in chunks(snapshot, incarnation=1):
            yield chunk
        self._spent_s += time.process_time() - begin_s


def _filled_cache(number: int, num_blocks: int) -> PrefixCache:
    """Fills a worker's cache. All workers hold the same system prompts; the other blocks are the worker's own."""
    cache = PrefixCache(BLOCK_SIZE, num_blocks)
    rng = random.Random(number)
    own = np.random.default_rng(number)
    shared = np.random.default_rng(10**6)
    block = 0
    last_hashes: dict[int, int] = {}  # of the last block of each run, by block

    def store(hashes: np.random.Generator, parent: int | None, count: int) -> int:
        nonlocal block
        count = min(count, num_blocks - block)
        sequence = Sequence("", [0], 1, SamplingParams(max_tokens=1))
        above = [] if parent is None else [parent]
        sequence.block_table = [*above, *range(block, block + count)]
        sequence.block_hashes, sequence.sequence_hashes = (
            [*map(last_hashes.__getitem__, above), *row] for row in hashes.integers(1, 2**63, (2, count)).tolist()
        )
        sequence.hashed_tokens = array("I", bytes(4 * BLOCK_SIZE * len(sequence.block_table)))
        cache.insert(sequence, len(above), bytes([MEDIUM] * count))
        block += count
        last_hashes[block - 1] = sequence.sequence_hashes[-1]
        return block - 1

    systems = [store(shared, None, SYSTEM_BLOCKS) for _ in range(SYSTEM_PROMPTS)]
    # Each conversation: [its last block so far, turns to come].
    talking = [[rng.choice(systems), TURNS] for _ in range(64)]
    while block < num_blocks:
        at = rng.randrange(len(talking))
        end, turns = talking[at]
        talking[at] = [store(own, end, TURN_BLOCKS), turns - 1] if turns else [rng.choice(systems), TURNS]
    return cache


if __name__ == "__main__":
    main()
