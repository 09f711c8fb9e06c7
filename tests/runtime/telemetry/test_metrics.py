"""What the metrics of all processes have in common."""

import asyncio
import urllib.request

from prometheus_client import generate_latest

from baton.service.nats_server import NatsServer
from runtime.nats.client import connect
from runtime.telemetry.metrics import ProcessMetrics


async def test_each_process_tells_whether_it_is_connected_to_nats(nats_server: NatsServer) -> None:
    nats = await connect(nats_server.url, "test", timeout_s=5)
    away = asyncio.Event()
    nats.on_disconnect(away.set)
    metrics = ProcessMetrics()
    metrics.watch(nats)
    shown = generate_latest(metrics.registry).decode()
    assert "baton_nats_connected 1.0" in shown
    assert "baton_nats_disconnects_total 0.0" in shown
    await nats_server.kill()
    await asyncio.wait_for(away.wait(), 10)
    shown = generate_latest(metrics.registry).decode()
    assert "baton_nats_connected 0.0" in shown
    assert "baton_nats_disconnects_total 1.0" in shown
    await nats.close()


async def test_an_endpoint_of_its_own_shows_the_process_and_what_is_read_at_the_scrape() -> None:
    metrics = ProcessMetrics()
    counts = {"shm": 1.0}
    metrics.counter("baton_test_things", "Things", lambda: [((kind,), count) for kind, count in counts.items()], "kind")
    address = metrics.serve("127.0.0.1")
    try:
        counts["tcp"] = 2.0
        with await asyncio.to_thread(urllib.request.urlopen, f"http://{address}/metrics") as answer:
            shown = answer.read().decode()
    finally:
        metrics.close()
    for line in ('baton_test_things_total{kind="shm"} 1.0', 'baton_test_things_total{kind="tcp"} 2.0'):
        assert line in shown
    for name in ("baton_build_info{", "process_resident_memory_bytes", "python_gc_collections_total"):
        assert name in shown
    assert "_created" not in shown
