"""A recorded stream, published again, makes a router's tree what it was."""

import random
from pathlib import Path

import numpy as np
import pytest

from baton.events.recorder import Recorder
from baton.events.recording import Announced, Base, Batch, Ended, Frame, Left, Recording, RecordingWriter
from baton.events.replayer import Replayer
from baton.service.local.nats_server import NatsServer
from router.index.radix_tree import RadixTree
from runtime.errors import ConfigError
from runtime.nats.client import NatsClient, connect
from tests.baton.events.cluster import Cleared, KvEvent, Removed, Workers, running, stored
from tests.router.indexed_cluster import Cache


async def record(nats: NatsClient, path: Path, start: int | None) -> Recorder:
    with RecordingWriter(path, "default") as writer:
        recorder = Recorder(nats, writer, timeout_s=60)
        await recorder.start(start)
        await recorder.catch_up()
        await recorder.close()
    return recorder


def frames(path: Path) -> list[Frame]:
    return list(Recording(path).frames())


def random_batches(seed: int, count: int) -> list[list[KvEvent]]:
    cache, rng = Cache("any", 1), random.Random(seed)
    batches = (cache.random_event(rng) for _ in range(count))
    return [batch for batch in batches if batch]


async def replayed_equals(path: Path, nats: NatsClient, folder: Path) -> Replayer:
    """Replays into an empty NATS beside the one where it was recorded and compares two routers."""
    server = NatsServer(store_dir=folder)
    await server.start()
    other = await connect(server.url, "other", timeout_s=60)
    replayer = Replayer(other, Recording(path), None, "", timeout_s=60)
    try:
        async with running(nats) as original, running(other) as copy:
            await original.until(lambda: original.indexer.settled)
            expected = original.table
            assert any(expected.values())
            await replayer.run()
            await copy.until_table(expected)
    finally:
        await replayer.close()
        await other.close()
        await server.stop()
    return replayer


@pytest.mark.parametrize("start", [1, None])
async def test_a_replayed_recording_gives_the_same_tree(
    nats: NatsClient, workers: Workers, tmp_path: Path, start: int | None
) -> None:
    """From the beginning by its events; from now on by the blocks that the workers held."""
    for number in range(3):
        await workers.publish(f"w{number}", *random_batches(number, 300))
    recorder = await record(nats, tmp_path / "events", start)
    assert not recorder.without_base
    kinds = {type(frame) for frame in frames(tmp_path / "events")}
    assert (Batch in kinds, Base in kinds) == ((True, False) if start else (False, True))
    replayer = await replayed_equals(tmp_path / "events", nats, tmp_path / "other")
    assert replayer.num_batches == recorder.num_batches


async def test_a_worker_that_started_again_replays_as_its_last_incarnation(
    nats: NatsClient, workers: Workers, tmp_path: Path
) -> None:
    await workers.publish("w", [stored([1, 2, 3])])
    await workers.add("w")
    await workers.publish("w", [stored([7])], [stored([7, 8], known=1)])
    await record(nats, tmp_path / "events", 1)
    await replayed_equals(tmp_path / "events", nats, tmp_path / "other")


async def test_a_live_recording_notes_who_comes_and_goes(nats: NatsClient, workers: Workers, tmp_path: Path) -> None:
    first = await workers.publish("w0", [stored([1, 2])])
    with RecordingWriter(tmp_path / "events", "default") as writer:
        recorder = Recorder(nats, writer, timeout_s=60)
        await recorder.start(None)
        second = await workers.publish("w1", [stored([3])], [Cleared()])
        await recorder.catch_up()
        await second.close()
        async with running(nats) as router:
            await router.until(lambda: "w1" not in router.directory.workers)
        await recorder.close()
    seen = frames(tmp_path / "events")
    assert [frame.record.worker_id for frame in seen if isinstance(frame, Announced)] == ["w0", "w1"]
    bases = [frame for frame in seen if isinstance(frame, Base)]
    assert {(base.worker_id, base.incarnation) for base in bases} == {("w0", first.incarnation)}
    assert [run for base in bases for run in base.runs] == [stored([1, 2])]
    assert [(b.worker_id, b.event_id, b.events) for b in seen if isinstance(b, Batch)] == [
        ("w1", 1, [stored([3])]),
        ("w1", 2, [Cleared()]),
    ]
    assert [(left.worker_id, left.incarnation) for left in seen if isinstance(left, Left)] == [
        ("w1", second.incarnation)
    ]
    assert isinstance(seen[-1], Ended)


async def test_batches_that_a_base_contains_are_not_applied_twice(nats: NatsClient, tmp_path: Path) -> None:
    """A base may be taken later than the first batches that follow it in the file; ids that came in disorder too."""
    with RecordingWriter(tmp_path / "events", "default") as writer:
        writer.write(Base(1.0, "w", 5, 2, [stored([1]), stored([1, 2], known=1)], last=True))
        for event_id, event in ((2, stored([1, 2], known=1)), (4, stored([9])), (3, Cleared()), (4, stored([9]))):
            writer.write(Batch(1.0, "w", 5, event_id, 1.0, [event]))
    replayer = Replayer(nats, Recording(tmp_path / "events"), None, "copy-", timeout_s=60)
    async with running(nats) as router:
        await replayer.run()
        await router.until_table({"copy-w": {stored([9])}})
        assert router.indexer.refused_events == 0
    assert replayer.num_batches == 2
    await replayer.close()


async def test_the_pace_is_the_recorded_one_divided_by_the_speed(nats: NatsClient, tmp_path: Path) -> None:
    import time

    with RecordingWriter(tmp_path / "events", "default") as writer:
        for number in range(4):
            writer.write(Batch(100.0 + 20 * number, "w", 1, number + 1, 0.0, [Cleared()]))
    replayer = Replayer(nats, Recording(tmp_path / "events"), 200.0, "", timeout_s=60)
    began_s = time.monotonic()
    await replayer.run()
    assert 0.3 <= time.monotonic() - began_s < 30.0
    await replayer.close()


async def test_a_replay_does_not_take_the_name_of_a_live_worker(
    nats: NatsClient, workers: Workers, tmp_path: Path
) -> None:
    await workers.publish("w", [stored([1])])
    await record(nats, tmp_path / "events", 1)
    replayer = Replayer(nats, Recording(tmp_path / "events"), None, "", timeout_s=60)
    with pytest.raises(ConfigError, match="a worker 'w' lives there"):
        await replayer.run()
    await replayer.close()
    async with running(nats) as router:
        await router.until_table({"w": {stored([1])}})


async def test_the_workers_of_a_replay_leave_with_it(nats: NatsClient, tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "events", "default") as writer:
        writer.write(Batch(1.0, "w", 1, 1, 1.0, [stored([1, 2])]))
    replayer = Replayer(nats, Recording(tmp_path / "events"), None, "", timeout_s=60)
    async with running(nats) as router:
        await replayer.run()
        await router.until_table({"w": {stored([1, 2])}})
        await replayer.close()
        await router.until(lambda: not router.indexer.tree.workers)


def test_removed_events_of_the_random_batches_are_there() -> None:
    """What the tests above rely on."""
    events = [event for batch in random_batches(0, 300) for event in batch]
    assert {type(event).__name__ for event in events} == {"Stored", "Removed", "Cleared"}
    tree = RadixTree()
    for event in events:
        if isinstance(event, Removed):
            assert np.frombuffer(event.sequence_hashes, dtype="<u8").size
    assert not tree.workers
