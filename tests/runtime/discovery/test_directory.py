"""Workers that announce themselves and a directory that watches, over a real NATS server."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from baton.service.local.nats_server import HOST, NatsServer
from baton_proto.discovery import MAJOR, LoadReport, WorkerLoad, WorkerRecord
from baton_proto.spoken import SPOKEN
from runtime.discovery.directory import Announcer, Change, Directory
from runtime.discovery.load_board import LoadBoard, publish_load
from runtime.end_task import end_tasks
from runtime.errors import DeadlineError
from runtime.nats.client import NatsClient, connect
from runtime.nats.subjects import workers_key
from runtime.processes.ports import free_port
from tests.busy_core import busy_core
from tests.freezing import freeze

HEARTBEAT_S = 0.1
TTL_S = 1.6  # long enough that a live worker is heard in time on busy cores

SLOW_WORKER = """
import asyncio, signal, sys, time
from msgspec.structs import replace
from baton_proto.discovery import decode_record
from runtime.discovery.directory import Announcer
from runtime.nats.client import connect
from runtime.host import process_name

async def main():
    url, path, ttl_s = sys.argv[1:]
    record = replace(decode_record(open(path, "rb").read()), process=process_name())
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, compute)
    await Announcer(await connect(url, "slow", timeout_s=60), record, 0.1, float(ttl_s)).start()
    await asyncio.Event().wait()

def compute():
    until_s = time.process_time() + 0.15
    while time.process_time() < until_s: pass
    print("computed", flush=True)

asyncio.run(main())
"""


def record(worker_id: str = "decode-0", incarnation: int = 1, state: str = "ready") -> WorkerRecord:
    return WorkerRecord(
        version=MAJOR,
        worker_id=worker_id,
        incarnation=incarnation,
        role="decode",
        state=state,
        rpc_address="127.0.0.1:1",
        transfer=None,
        model="tiny",
        model_hash="0",
        block_size=16,
        num_blocks=8,
        max_model_len=128,
        pid=1,
    )


class Worker:
    """A connection of its own with an announcer, that can be cut off as a killed process is."""

    def __init__(self, nats: NatsClient, worker_record: WorkerRecord) -> None:
        self.nats = nats
        self.announcer = Announcer(nats, worker_record, HEARTBEAT_S, TTL_S)

    async def kill(self) -> None:
        await self.nats.close()


@asynccontextmanager
async def worker(server: NatsServer, worker_record: WorkerRecord) -> AsyncIterator[Worker]:
    started = Worker(await connect(server.url, worker_record.worker_id, timeout_s=60), worker_record)
    try:
        await asyncio.wait_for(started.announcer.start(), 30)
        yield started
    finally:
        await started.announcer.withdraw()
        await started.nats.close()


@pytest.fixture
async def directory(nats: NatsClient) -> AsyncIterator[Directory]:
    directory = Directory(nats, TTL_S)
    await directory.start()
    yield directory
    await directory.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(HEARTBEAT_S / 4)


def changes_of(directory: Directory) -> list[tuple[str, str, int]]:
    seen: list[tuple[str, str, int]] = []

    def note(change: Change) -> None:
        seen.append((change.kind, change.record.worker_id, change.record.incarnation))

    directory.on_change(note)
    return seen


async def test_a_worker_appears_changes_its_state_and_withdraws(nats_server: NatsServer, directory: Directory) -> None:
    changes = changes_of(directory)
    async with worker(nats_server, record()) as decode:
        await directory.wait_for(lambda workers: "decode-0" in workers, 30)
        await decode.announcer.set_state("draining")
        await directory.wait_for(lambda workers: workers["decode-0"].state == "draining", 30)
    await directory.wait_for(lambda workers: not workers, 30)
    assert changes == [("added", "decode-0", 1), ("changed", "decode-0", 1), ("removed", "decode-0", 1)]
    assert directory.lost == 0, "withdrawing does not wait for the record to expire"


@pytest.mark.parametrize("other", [{"version": MAJOR + 1, "num_blocks": "many"}, {"speaks": "worker 99, kv events 2"}])
async def test_a_worker_of_another_version_is_named_once_and_not_listed(
    nats_server: NatsServer, directory: Directory, other: dict[str, Any]
) -> None:
    foreign = msgspec.structs.replace(record("decode-9"), **other)
    with capture_logs() as logs:
        async with worker(nats_server, foreign), worker(nats_server, record()):
            await until(lambda: "decode-9" in directory.foreign)
            await directory.wait_for(lambda workers: "decode-0" in workers, 30)
            await asyncio.sleep(2 * TTL_S)  # heartbeats keep it there, and say nothing new
            (one,) = directory.foreign.values()
            assert (one.role, list(directory.workers)) == ("decode", ["decode-0"])
            assert one.why.endswith(("this build speaks 1", f"this build speaks {SPOKEN}"))
        await until(lambda: not directory.foreign)
    said = [line for line in logs if line.get("worker") == "decode-9" and line["log_level"] == "warning"]
    assert [line["event"] for line in said] == ["worker cannot be talked to"]


async def test_a_directory_that_starts_later_knows_the_workers_at_once(
    nats_server: NatsServer, nats: NatsClient
) -> None:
    async with worker(nats_server, record("a")), worker(nats_server, record("b")):
        directory = Directory(nats, TTL_S)
        await directory.start()
        assert set(directory.workers) == {"a", "b"}
        await directory.close()


async def test_what_the_bucket_held_is_no_news_of_a_worker_that_was_heard_of_while_it_was_read(
    nats_server: NatsServer, nats: NatsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(nats_server, record("a")) as changing, worker(nats_server, record("b")) as leaving:
        directory, stored_message = Directory(nats, TTL_S), nats.stored_message
        states: list[tuple[str, str, str]] = []
        directory.on_change(lambda change: states.append((change.kind, change.record.worker_id, change.record.state)))

        async def late(*arguments: Any) -> Any:
            message = await stored_message(*arguments)
            await changing.announcer.set_state("sleeping")
            await leaving.announcer.withdraw()
            await directory.wait_for(lambda workers: "a" in workers and workers["a"].state == "sleeping", 30)
            await until(lambda: "b" not in directory.workers)
            return message

        monkeypatch.setattr(nats, "stored_message", late)
        await directory.start()
        assert list(directory.workers) == ["a"]
        assert ("changed", "a", "ready") not in states
        await directory.close()


async def test_a_worker_that_falls_silent_is_gone_after_its_time_to_live(
    nats_server: NatsServer, directory: Directory
) -> None:
    async with worker(nats_server, record("silent")) as silent, worker(nats_server, record("alive")):
        await directory.wait_for(lambda workers: len(workers) == 2, 30)
        await silent.kill()
        await directory.wait_for(lambda workers: "silent" not in workers, 30)
        assert "alive" in directory.workers
        assert directory.lost == 1


async def test_a_worker_that_merely_waits_for_a_core_is_not_lost(
    nats_server: NatsServer, directory: Directory, tmp_path: Path
) -> None:
    """Until it hangs."""
    (tmp_path / "record.json").write_bytes(msgspec.json.encode(record("slow")))
    command = [sys.executable, "-c", SLOW_WORKER, nats_server.url, str(tmp_path / "record.json"), str(TTL_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            await directory.wait_for(lambda workers: "slow" in workers, 60)
            with busy_core(process.pid):
                process.send_signal(signal.SIGUSR1)
                computed = asyncio.create_task(asyncio.to_thread(process.stdout.readline))
                await asyncio.wait({computed}, timeout=2 * TTL_S)
                assert not computed.done(), "it was never without a core; this shows nothing"
                assert directory.lost == 0
            await computed
            assert directory.lost == 0
            freeze(process.pid)
            await directory.wait_for(lambda workers: not workers, 30)
            assert directory.lost == 1
        finally:
            process.kill()


@pytest.mark.parametrize("withdraws", [True, False])
async def test_of_two_processes_with_one_name_the_later_is_listed_and_the_other_again_when_it_goes(
    nats_server: NatsServer, directory: Directory, withdraws: bool
) -> None:
    changes = changes_of(directory)
    async with worker(nats_server, record(incarnation=1)):
        await directory.wait_for(lambda workers: bool(workers), 30)
        assert directory.namesake("decode-0") is None
        async with worker(nats_server, record(incarnation=2)) as later:
            await until(lambda: directory.namesake("decode-0") == record(incarnation=1))
            assert directory.workers["decode-0"].incarnation == 2
            if not withdraws:
                await later.kill()
                await directory.wait_for(lambda workers: workers["decode-0"].incarnation == 1, 30)
        await directory.wait_for(lambda workers: workers["decode-0"].incarnation == 1, 30)
        assert directory.namesake("decode-0") is None
    await directory.wait_for(lambda workers: not workers, 30)
    assert changes == [
        ("added", "decode-0", 1),
        ("removed", "decode-0", 1),
        ("added", "decode-0", 2),
        ("removed", "decode-0", 2),
        ("added", "decode-0", 1),
        ("removed", "decode-0", 1),
    ]


async def test_a_process_that_ends_before_its_later_namesake_is_not_listed_again(
    nats_server: NatsServer, directory: Directory
) -> None:
    async with worker(nats_server, record(incarnation=2)):
        async with worker(nats_server, record(incarnation=1)):
            await until(lambda: directory.namesake("decode-0") is not None)
        await until(lambda: directory.namesake("decode-0") is None)
    await directory.wait_for(lambda workers: not workers, 30)


async def test_a_worker_that_starts_again_while_its_clock_was_set_back_is_found_once_the_one_before_is_gone(
    nats_server: NatsServer, directory: Directory
) -> None:
    async with worker(nats_server, record(incarnation=9)) as before:
        await directory.wait_for(lambda workers: "decode-0" in workers, 30)
        await before.kill()
        async with worker(nats_server, record(incarnation=2)):
            await directory.wait_for(lambda workers: workers.get("decode-0") == record(incarnation=2), 30)


@pytest.mark.parametrize("lose_storage", [False, True])
async def test_nobody_is_lost_when_nats_is_away_for_longer_than_the_time_to_live(
    nats_server: NatsServer, directory: Directory, lose_storage: bool
) -> None:
    changes = changes_of(directory)
    async with worker(nats_server, record("a")) as decode, worker(nats_server, record("b")):
        await directory.wait_for(lambda workers: len(workers) == 2, 30)
        await nats_server.kill()
        await asyncio.sleep(2 * TTL_S)
        assert set(directory.workers) == {"a", "b"}
        await decode.announcer.set_state("draining")  # told when NATS is back
        await nats_server.restart(lose_storage)
        await directory.wait_for(lambda workers: workers["a"].state == "draining", 30)
        await asyncio.sleep(2 * TTL_S)
        assert set(directory.workers) == {"a", "b"}
        assert [kind for kind, _, _ in changes] == ["added", "added", "changed"]


async def test_a_worker_that_died_during_an_outage_is_gone_soon_after_it(
    nats_server: NatsServer, directory: Directory
) -> None:
    async with worker(nats_server, record("a")) as dead, worker(nats_server, record("b")):
        await directory.wait_for(lambda workers: len(workers) == 2, 30)
        await nats_server.kill()
        await dead.kill()
        await nats_server.start()
        await directory.wait_for(lambda workers: set(workers) == {"b"}, 30)


async def test_a_frozen_server_is_no_reason_to_drop_workers(nats_server: NatsServer, directory: Directory) -> None:
    async with worker(nats_server, record()):
        await directory.wait_for(lambda workers: bool(workers), 30)
        freeze(nats_server.pid)
        try:
            await asyncio.sleep(2 * TTL_S)
            assert "decode-0" in directory.workers
        finally:
            os.kill(nats_server.pid, signal.SIGCONT)
        await asyncio.sleep(TTL_S)
        assert "decode-0" in directory.workers


async def test_a_worker_is_known_while_nobody_stores_what_it_says() -> None:
    """One of three servers, of which two would have to agree."""
    server = NatsServer(routes=[f"{HOST}:{free_port(HOST)}" for _ in range(3)], name="nats-1")
    await server.start()
    nats, ours = await connect(server.url, "directory", timeout_s=60), await connect(server.url, "a", timeout_s=60)
    directory, decode = Directory(nats, TTL_S), Worker(ours, record("a"))
    await directory.start()
    changes = changes_of(directory)
    starting = asyncio.create_task(decode.announcer.start())
    try:
        await directory.wait_for(lambda workers: "a" in workers, 30)
        await asyncio.sleep(3 * TTL_S)
        assert [kind for kind, _, _ in changes] == ["added"]
        assert not starting.done()
    finally:
        await end_tasks(starting)
        await directory.close()
        await asyncio.gather(ours.close(), nats.close())
        await server.stop()


async def test_malformed_records_are_skipped(nats_server: NatsServer, nats: NatsClient, directory: Directory) -> None:
    newer = msgspec.structs.replace(record("newer"), version=MAJOR + 1)
    async with worker(nats_server, record("good")):
        await nats.publish(workers_key("default", "bad"), b"{not json")
        await nats.publish(workers_key("default", "newer"), msgspec.json.encode(newer))
        await nats.publish(workers_key("default", "thief"), msgspec.json.encode(record("good", incarnation=9)))
        await nats.publish(workers_key("default", "last"), msgspec.json.encode(record("last")))
        await directory.wait_for(lambda workers: workers.keys() >= {"good", "last"}, 30)
        assert set(directory.workers) == {"good", "last"}
        assert directory.workers["good"].incarnation == 1


async def test_waiting_for_workers_ends_with_the_deadline(directory: Directory) -> None:
    with pytest.raises(DeadlineError):
        await directory.wait_for(lambda workers: bool(workers), 0.05)


async def test_namespaces_do_not_see_each_other(nats_server: NatsServer, directory: Directory) -> None:
    other = await connect(nats_server.url, "other", namespace="staging", timeout_s=60)
    announcer = Announcer(other, record("elsewhere"), HEARTBEAT_S, TTL_S)
    await announcer.start()
    async with worker(nats_server, record("here")):
        await directory.wait_for(lambda workers: "here" in workers, 30)
        assert set(directory.workers) == {"here"}
    await announcer.withdraw()
    await other.close()


async def test_load_reports_arrive_and_malformed_ones_are_skipped(nats: NatsClient) -> None:
    board = LoadBoard(nats)
    arrived: asyncio.Queue[LoadReport] = asyncio.Queue()
    board.on_report(arrived.put_nowait)
    await board.start()
    report = LoadReport(version=MAJOR, worker_id="w", incarnation=7, load=WorkerLoad(running=3, last_event_id=5))
    with capture_logs() as logs:
        await nats.publish("baton.default.load.x", b"\xc1")
        for _ in range(5):
            await publish_load(nats, msgspec.structs.replace(report, version=MAJOR + 1))
        await publish_load(nats, report)
        assert await asyncio.wait_for(arrived.get(), 30) == report
    assert [line["subject"][-1] for line in logs] == ["x", "w"], "one line each, however many there are"
    assert f"major version {MAJOR + 1} is not understood here; this build speaks {MAJOR}" in logs[1]["error"]
    assert board.reports == {"w": report}
    board.discard("w")
    assert not board.reports


async def test_withdrawing_in_the_middle_of_a_heartbeat_ends(nats: NatsClient) -> None:
    for round_number in range(30):
        announcer = Announcer(nats, record(), heartbeat_s=1e-4, ttl_s=TTL_S)
        await announcer.start()
        await asyncio.sleep(round_number * 1e-4)
        await asyncio.wait_for(announcer.withdraw(), 30)
