"""Routers tell each other what they have charged, over a real NATS server."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from baton.service.local.nats_server import NatsServer
from baton_proto.discovery import prefill_pairs
from baton_proto.routers.charges import MAJOR, ChargeReport, WorkerCharge, decode_charges, encode_charges
from router.workers import charge_sharing
from router.workers.account import LoadView
from router.workers.charge_sharing import ChargeSharing, ForeignCharges
from router.workers.load import LoadLedger
from runtime.nats.client import NatsClient, connect
from runtime.nats.subjects import charges_subject

D, P = ("d", 1), ("p", 1)
IDLE = LoadView(0, 0, 0)
TTL_S = 0.6
SILENT_S = 300.0  # longer than a test


@dataclass
class Router:
    nats: NatsClient
    ledger: LoadLedger
    sharing: ChargeSharing


Join = Callable[..., Awaitable[Router]]


@pytest.fixture
async def join(nats_server: NatsServer) -> AsyncIterator[Join]:
    async with AsyncExitStack() as closing:

        async def join(router_id: str, ttl_s: float = TTL_S) -> Router:
            nats = await connect(nats_server.url, router_id, timeout_s=60)
            closing.push_async_callback(nats.close)
            news = asyncio.Event()
            ledger = LoadLedger(16, 300.0, has_news=news.set)
            sharing = ChargeSharing(nats, ledger, news, router_id, ttl_s)
            await sharing.start()
            closing.push_async_callback(sharing.close)
            return Router(nats, ledger, sharing)

        yield join


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def test_what_one_router_charges_the_others_see(join: Join) -> None:
    one, two, three = [await join(f"router-{number}") for number in range(3)]
    await until(lambda: all(len(router.sharing.others.routers) == 2 for router in (one, two, three)))
    with one.ledger.charge("r", D, P, num_tokens=160, prefill_tokens=100) as charge:
        for other in (two, three):
            await until(lambda other=other: other.ledger.view(D) == LoadView(1, 0, 10))  # type: ignore[misc]
            assert other.ledger.view(P) == LoadView(0, 100, 0, prefill_pairs(60, 160))
        with two.ledger.charge("s", D, P, num_tokens=16, prefill_tokens=16):
            await until(lambda: three.ledger.view(D) == LoadView(2, 0, 11))
            await until(lambda: one.ledger.view(D) == LoadView(2, 0, 11))
        charge.prefill_done()
        charge.grow(170)
        await until(lambda: two.ledger.view(D) == LoadView(1, 0, 11))
        assert two.ledger.view(P) == IDLE
    await until(lambda: two.ledger.view(D) == three.ledger.view(D) == IDLE)


@pytest.fixture
def no_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charge_sharing, "SIGN_OF_LIFE_S", SILENT_S)


@pytest.mark.usefixtures("no_signs_of_life")
async def test_a_router_that_comes_later_is_told_all_at_once(join: Join) -> None:
    one = await join("router-0", SILENT_S)
    with one.ledger.charge("r", D, P, num_tokens=160, prefill_tokens=100):
        late = await join("router-1", SILENT_S)
        await until(lambda: late.ledger.view(D) == LoadView(1, 0, 10))


async def test_a_router_that_leaves_takes_its_charges_with_it(join: Join) -> None:
    one, two = await join("router-0", SILENT_S), await join("router-1", SILENT_S)
    one.ledger.charge("r", D, P, num_tokens=160, prefill_tokens=100)
    await until(lambda: two.ledger.view(D) != IDLE)
    await one.sharing.close()
    await until(lambda: two.ledger.view(D) == two.ledger.view(P) == IDLE)


async def test_a_router_that_dies_is_forgotten_after_its_time_to_live(join: Join) -> None:
    one, two = await join("router-0", SILENT_S), await join("router-1", SILENT_S)
    one.ledger.charge("r", D, P, num_tokens=160, prefill_tokens=100)
    await until(lambda: two.ledger.view(D) != IDLE)
    await one.nats.close()
    await two.nats.flush()
    assert two.ledger.view(D) != IDLE
    two.sharing.others._clock = lambda: time.monotonic() + SILENT_S
    await until(lambda: two.ledger.view(D) == two.ledger.view(P) == IDLE)
    assert not two.sharing.others.routers


async def test_a_burst_of_charges_becomes_few_messages_and_a_lonely_router_sends_signs_of_life_only(
    join: Join, nats_server: NatsServer
) -> None:
    listener = await connect(nats_server.url, "listener", timeout_s=60)
    reports: list[ChargeReport] = []
    await listener.subscribe(charges_subject("default"), lambda s, payload, h: reports.append(decode_charges(payload)))
    await listener.flush()
    one = await join("router-0")

    async def charge_many() -> float:
        began_s = asyncio.get_running_loop().time()
        for number in range(500):
            with one.ledger.charge(f"r{number}", D, P, 16, 16):
                await asyncio.sleep(0)
            if number % 10 == 0:
                await asyncio.sleep(0.002)
        return asyncio.get_running_loop().time() - began_s

    took_s = await charge_many()
    assert len(reports) <= 2 + took_s / (TTL_S / 3)
    assert all(report.full for report in reports)
    await join("router-1")
    await until(lambda: bool(one.sharing.others.routers))
    reports.clear()
    took_s = await charge_many()
    mine = [report for report in reports if report.router_id == "router-0"]
    assert 5 < len(mine) <= 3 + took_s / charge_sharing.INTERVAL_S
    await listener.close()


async def test_charges_are_told_again_after_an_outage_of_nats(join: Join, nats_server: NatsServer) -> None:
    one, two = await join("router-0"), await join("router-1")
    await until(lambda: bool(one.sharing.others.routers))
    await nats_server.kill()
    with one.ledger.charge("r", D, P, num_tokens=160, prefill_tokens=100):
        await asyncio.sleep(0.05)
        await nats_server.restart()
        await until(lambda: two.ledger.view(D) == LoadView(1, 0, 10))
    await until(lambda: two.ledger.view(D) == IDLE)


async def test_malformed_reports_are_counted_and_change_nothing(join: Join) -> None:
    one, two = await join("router-0"), await join("router-1")
    subject = charges_subject("default", "evil")
    negative = ChargeReport(MAJOR, "evil", 1, [WorkerCharge("d", 1, -1, -1, -1)], full=True)
    another = ChargeReport(MAJOR + 1, "evil", 1, [WorkerCharge("d", 1, 1, 1, 1)], full=True)
    for payload in (b"\xc1", encode_charges(negative), encode_charges(another)):
        await two.nats.publish(subject, payload)
    await until(lambda: one.sharing.malformed_reports == 3)
    assert one.ledger.view(D) == IDLE
    assert "evil" not in one.sharing.others.routers


def test_a_full_report_takes_back_what_it_does_not_name() -> None:
    ledger = LoadLedger(16, 300.0)
    others = ForeignCharges(ledger, 3.0)
    told = [WorkerCharge("d", 1, 1, 0, 10), WorkerCharge("e", 1, 1, 0, 20)]
    assert others.apply(ChargeReport(MAJOR, "r", 1, told, full=True))
    assert not others.apply(ChargeReport(MAJOR, "r", 1, [WorkerCharge("d", 1, 2, 0, 15)], full=False))
    assert [ledger.view((name, 1)).active_blocks for name in "de"] == [15, 20]
    others.apply(ChargeReport(MAJOR, "r", 1, told[1:], full=True))
    assert [ledger.view((name, 1)).active_blocks for name in "de"] == [0, 20]


def test_a_router_that_was_restarted_is_another_one() -> None:
    ledger = LoadLedger(16, 300.0)
    others = ForeignCharges(ledger, 3.0)
    charge = WorkerCharge("d", 1, 1, 0, 10)
    for incarnation in (1, 2):
        assert others.apply(ChargeReport(MAJOR, "r", incarnation, [charge], full=True))
    assert ledger.view(D).active_blocks == 20
    others.apply(ChargeReport(MAJOR, "r", 1, [], full=True, leaving=True))
    assert ledger.view(D).active_blocks == 10
