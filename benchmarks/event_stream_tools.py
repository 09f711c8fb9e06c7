"""Cost per event of `baton events` tail, record and replay. A batch has one event with two blocks, the smallest size.
CPU seconds are those of the command's own process; the NATS server runs beside it.

    python benchmarks/event_stream_tools.py [--events 40000]
"""

import argparse
import asyncio
import contextlib
import io
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import numpy as np
import structlog

from baton.cli.events.tail import TailView
from baton.events.event_log import EventLog
from baton.events.recorder import Recorder
from baton.events.recording import Recording, RecordingWriter
from baton.events.replayer import Replayer
from baton.service.local.nats_server import NatsServer
from baton_proto.kv_events import Stored
from runtime.blocks.block_hash import sequence_hashes
from runtime.kv_events.publisher import EventPublisher
from runtime.nats.client import NatsClient, connect

WORKERS = 8
TTL_S = 4.0
TIMEOUT_S = 10.0


async def main(num_events: int) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    async with AsyncExitStack() as closing:
        nats = await _empty_nats(closing)
        await _publish(nats, num_events)
        for as_json in (False, True):
            await _tail(nats, num_events, as_json)
        folder = closing.enter_context(tempfile.TemporaryDirectory())
        await _record(nats, num_events, Path(folder) / "events")
        other = await _empty_nats(closing)
        replayer = Replayer(other, Recording(Path(folder) / "events"), None, "", TIMEOUT_S)
        with _measured("replay --max", num_events):
            await replayer.run()
        await replayer.close()


async def _tail(nats: NatsClient, num_events: int, as_json: bool) -> None:
    log, view = EventLog(nats), TailView(None, as_json, rates_s=5.0)
    await log.seek(1)
    with _measured("tail --json" if as_json else "tail", num_events), contextlib.redirect_stdout(io.StringIO()):
        while batches := await log.read():
            view.show(batches)


async def _record(nats: NatsClient, num_events: int, path: Path) -> None:
    with _measured("record", num_events), RecordingWriter(path, nats.namespace) as writer:
        recorder = Recorder(nats, writer, TIMEOUT_S)
        await recorder.start(1)
        await recorder.catch_up()
        await recorder.close()
    print(f"{'':<14} {writer.bytes_written / num_events:8.1f} bytes per event in the file")


async def _publish(nats: NatsClient, num_events: int) -> None:
    rng = np.random.default_rng(0)
    publishers = [EventPublisher(nats, f"worker-{number}", 1) for number in range(WORKERS)]
    for number in range(num_events):
        blocks = rng.integers(2**63, size=2, dtype=np.uint64)
        event = Stored(None, blocks.tobytes(), sequence_hashes(blocks).tobytes())
        publishers[number % WORKERS].publish([event])
        if number % 500 == 0:
            await asyncio.sleep(0)
    for publisher in publishers:
        await publisher.flush(60)
        await publisher.close()


async def _empty_nats(closing: AsyncExitStack) -> NatsClient:
    server = NatsServer()
    await server.start()
    closing.push_async_callback(server.stop)
    nats = await connect(server.url, "benchmark", timeout_s=TIMEOUT_S)
    closing.push_async_callback(nats.close)
    return nats


@contextmanager
def _measured(what: str, num_events: int) -> Iterator[None]:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    yield
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    print(f"{what:<14} {num_events / wall_s:8.0f} events/s, {cpu_s / num_events * 1e6:5.1f} us of CPU per event")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=40_000)
    asyncio.run(main(parser.parse_args().events))
