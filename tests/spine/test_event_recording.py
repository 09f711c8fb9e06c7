"""A recording of a real service, replayed elsewhere, holds what the workers themselves hold."""

from pathlib import Path

import numpy as np

from baton.events.recorder import Recorder
from baton.events.recording import Base, Batch, Recording, RecordingWriter
from baton.events.replayer import Replayer
from baton.events.worker_snapshot import worker_snapshot
from baton.service.local.nats_server import NatsServer
from baton_proto.generated import inference_pb2 as pb
from runtime.discovery.directory import Directory
from runtime.nats.client import NatsClient, connect
from runtime.security.cluster_key import ClusterKey
from tests.baton.events.cluster import TTL_S, running
from tests.service import Service, running_service
from tests.spine.worker_view import until_idle, until_tree_is_right


async def ask(service: Service, *prompts: list[int]) -> None:
    for tokens in prompts:
        sampling = pb.SamplingOptions(temperature=0.0, max_tokens=20, ignore_eos=True)
        await service.client.generate(
            pb.GenerateRequest(tokens=pb.TokenIds(ids=tokens), sampling=sampling), timeout_s=30
        )
    await until_idle(service)
    await until_tree_is_right(service)


async def held_by_workers(nats: NatsClient, key: ClusterKey | None) -> dict[str, set[int]]:
    """Sequence hashes by worker id, from the workers' own block tables."""
    directory = Directory(nats, TTL_S)
    await directory.start()
    held = {}
    for worker_id, record in directory.workers.items():
        runs = [run async for chunk in worker_snapshot(nats, record, 5, key) for run in chunk.runs]
        held[worker_id] = hashes(b"".join(run.sequence_hashes for run in runs))
    await directory.close()
    return held


def hashes(data: bytes) -> set[int]:
    return set(np.frombuffer(data, dtype="<u8").tolist())


async def test_a_recorded_service_replays_as_its_workers_hold_it(tiny_model: Path, tmp_path: Path) -> None:
    """A small cache, so that blocks are evicted; the recording begins in the middle."""
    engine = {"kv_memory": "256KiB", "max_model_len": 256}
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 200, size=150).tolist() for _ in range(12)]
    async with running_service(tiny_model, engine=engine, router={"placement": {"local_prefill_tokens": 0}}) as service:
        nats = await service.connect_nats("recorder")
        key = service.supervisor.keys.cluster
        await ask(service, *prompts[:6])
        with RecordingWriter(tmp_path / "events", "default") as writer:
            recorder = Recorder(nats, writer, timeout_s=60, key=key)
            await recorder.start(None)
            await ask(service, *prompts[6:], prompts[0])
            await recorder.catch_up()
            await recorder.close()
        expected = await held_by_workers(nats, key)
        await nats.close()
    assert not recorder.without_base
    assert set(expected) == {"prefill-1", "decode-1"}
    assert all(expected.values())
    kinds = {type(frame) for frame in Recording(tmp_path / "events").frames()}
    assert {Base, Batch} <= kinds

    server = NatsServer(store_dir=tmp_path / "nats")
    await server.start()
    other = await connect(server.url, "other", timeout_s=60)
    replayer = Replayer(other, Recording(tmp_path / "events"), None, "", timeout_s=60)
    async with running(other) as router:
        await replayer.run()

        def table() -> dict[str, set[int]]:
            return {name: hashes(b"".join(r.sequence_hashes for r in runs)) for name, runs in router.table.items()}

        await router.until(lambda: router.indexer.settled and table() == expected)
        assert router.indexer.refused_events == 0
    await replayer.close()
    await other.close()
    await server.stop()
