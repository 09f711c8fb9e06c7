"""A worker's whole block table, for a router that has missed events: the answer to the question `Snapshot`.

Invariant: the table contains exactly the events up to the snapshot's `event_id`. The engine thread reads the runs
together with the events that are not published yet; the event loop publishes these events, then reads the id. Because
everything arrives in order (see worker/engine_bridge.py), no event falls between the two.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from baton_proto.kv_events import KvEvent, Stored
from baton_proto.worker import SnapshotChunk
from runtime.kv_events.publisher import EventPublisher
from worker.engine_bridge import EngineBridge

CHUNK_BYTES = 512 * 1024  # far below gRPC's 4 MiB limit for a message


@dataclass(frozen=True, slots=True)
class Snapshot:
    event_id: int
    runs: list[Stored]


async def take_snapshot(bridge: EngineBridge, publisher: EventPublisher) -> Snapshot:
    future: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()

    def on_event_loop(taken: tuple[list[KvEvent], list[Stored]]) -> None:
        events, runs = taken
        if events:
            publisher.publish(events)
        publisher.pack()
        if not future.done():
            future.set_result(Snapshot(publisher.last_event_id, runs))

    bridge.post(lambda engine: engine.snapshot(), on_event_loop)
    return await future


def chunks(snapshot: Snapshot, incarnation: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[SnapshotChunk]:
    """One message or more, of about `chunk_bytes` at most; the last one is marked."""
    pending: list[Stored] = []
    size = 0
    for run in (part for whole in snapshot.runs for part in whole.parts(chunk_bytes)):
        run_bytes = len(run.block_hashes) + len(run.sequence_hashes)
        if pending and size + run_bytes > chunk_bytes:
            yield SnapshotChunk(incarnation, snapshot.event_id, pending, last=False)
            pending, size = [], 0
        pending.append(run)
        size += run_bytes
    yield SnapshotChunk(incarnation, snapshot.event_id, pending, last=True)
