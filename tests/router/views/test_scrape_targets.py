"""Where Prometheus is sent, over a real NATS server."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

import router.views.scrape_targets
from baton.service.local.nats_server import NatsServer
from baton_proto.discovery import MAJOR, WorkerRecord
from baton_proto.planner import Holds
from baton_proto.planner_control import MAJOR as CONTROL_MAJOR, Answer, Plan, encode
from baton_proto.routers.router_report import RouterQueue, RouterReport, RouterTotals, encode_router_report
from router.views.scrape_targets import ScrapeTargets
from runtime.discovery.directory import Announcer, Directory
from runtime.nats.client import NatsClient
from runtime.nats.subjects import planner_subject, router_subject

WAIT_S = 30.0
RECORD = WorkerRecord(MAJOR, "decode-1", 1, "decode", "ready", "127.0.0.1:1", None, "tiny", "0", 16, 100, 1600, 1)


@pytest.fixture
async def directory(nats: NatsClient) -> AsyncIterator[Directory]:
    directory = Directory(nats, 5.0)
    await directory.start()
    yield directory
    await directory.close()


@pytest.fixture
async def scrape(nats: NatsClient, directory: Directory) -> ScrapeTargets:
    scrape = ScrapeTargets(nats, directory, nats.namespace)
    await scrape.start()
    return scrape


async def say(nats: NatsClient, router_id: str, address: str, leaving: bool = False) -> None:
    report = RouterReport(1, router_id, 7, 1.0, RouterQueue(), RouterTotals(), leaving, address)
    await nats.publish(router_subject(nats.namespace, router_id), encode_router_report(report))
    await nats.flush()


async def found(scrape: ScrapeTargets) -> dict[str, str]:
    """Process -> address."""
    return {target.labels["process"]: target.targets[0] for target in await scrape.targets()}


async def until(scrape: ScrapeTargets, expected: dict[str, str]) -> None:
    async with asyncio.timeout(WAIT_S):
        while await found(scrape) != expected:
            await asyncio.sleep(0.02)


async def test_a_router_is_listed_until_it_leaves_or_was_silent_for_long(
    nats: NatsClient, scrape: ScrapeTargets, monkeypatch: pytest.MonkeyPatch
) -> None:
    await say(nats, "router-1", "127.0.0.1:8000")
    await say(nats, "router-2", "127.0.0.1:9000")
    await until(scrape, {"router-1": "127.0.0.1:8000", "router-2": "127.0.0.1:9000"})
    await say(nats, "router-2", "127.0.0.1:9000", leaving=True)
    await until(scrape, {"router-1": "127.0.0.1:8000"})
    await nats.publish(router_subject(nats.namespace, "router-3"), b"nonsense")
    monkeypatch.setattr(router.views.scrape_targets, "SILENT_ROUTER_S", 0.0)
    await until(scrape, {})


async def test_workers_of_one_process_are_one_target_and_those_without_metrics_are_none(
    nats: NatsClient, directory: Directory, scrape: ScrapeTargets
) -> None:
    addresses = {"decode-1": "127.0.0.1:1", "decode-2": "127.0.0.1:2", "prefill-1": "127.0.0.1:1", "vllm-1": ""}
    records = [replace(RECORD, worker_id=name, metrics_address=address) for name, address in addresses.items()]
    announcers = [Announcer(nats, record, 1.0, 5.0) for record in records]
    await asyncio.gather(*(announcer.start() for announcer in announcers))
    await directory.wait_for(lambda workers: len(workers) == 4, WAIT_S)
    assert await found(scrape) == {"decode-1 and 1 more": "127.0.0.1:1", "decode-2": "127.0.0.1:2"}
    (target, _) = await scrape.targets()
    assert target.labels == {"namespace": "default", "component": "worker", "process": "decode-1 and 1 more"}
    await asyncio.gather(*(announcer.withdraw() for announcer in announcers))


async def test_the_planner_is_listed_until_it_is_known_to_be_gone(
    nats_server: NatsServer, nats: NatsClient, scrape: ScrapeTargets
) -> None:
    async def answer(data: bytes) -> bytes:
        return encode(Answer(CONTROL_MAJOR, Plan(None, None, None, [], Holds(), metrics_address="127.0.0.1:3")))

    assert await found(scrape) == {}
    subscription = await nats.answer(planner_subject(nats.namespace), answer)
    assert await found(scrape) == {"planner": "127.0.0.1:3"}
    await nats_server.kill()
    assert await found(scrape) == {"planner": "127.0.0.1:3"}, "nobody can be asked"
    await nats_server.start()
    await asyncio.wait_for(nats.wait_connected(), WAIT_S)
    await nats.unsubscribe(subscription)
    await until(scrape, {})
