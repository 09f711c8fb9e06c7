"""What the metrics of all processes have in common."""

import asyncio
import socket
import threading
import urllib.request
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from baton.service.local.nats_server import NatsServer
from runtime.nats.client import connect
from runtime.telemetry.metrics import ProcessMetrics


async def test_each_process_tells_whether_it_is_connected_to_nats(nats_server: NatsServer) -> None:
    nats = await connect(nats_server.url, "test", timeout_s=60)
    away = asyncio.Event()
    nats.on_disconnect(away.set)
    metrics = ProcessMetrics()
    metrics.watch(nats)
    shown = generate_latest(metrics.registry).decode()
    assert "baton_nats_connected 1.0" in shown
    assert "baton_nats_disconnects_total 0.0" in shown
    await nats_server.kill()
    await asyncio.wait_for(away.wait(), 60)
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


async def test_dripping_scrapers_cost_no_thread_and_strangers_are_not_told_what_serves() -> None:
    metrics = ProcessMetrics()
    host, port = metrics.serve("127.0.0.1").split(":")
    threads = threading.active_count()
    with ExitStack() as strangers:
        for _ in range(100):
            stranger = strangers.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        with socket.create_connection((host, int(port))) as scraper:
            scraper.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b"".join(iter(lambda: scraper.recv(65536), b""))
        assert threading.active_count() == threads
    metrics.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nserver:" not in head.lower()
    assert b"baton_build_info" in body


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"POST / HTTP/1.1\r\n\r\n", b"HTTP/1.1 405 Method Not Allowed\r\nAllow: GET"),
        (b"\r\n\r\n", b"HTTP/1.1 405"),
        (b"X" * 100_000, b""),
        (b"\xff" * 4, b""),
    ],
)
async def test_what_is_no_scrape_is_refused(said: bytes, answer: bytes) -> None:
    metrics = ProcessMetrics()
    host, port = metrics.serve("127.0.0.1").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        try:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            heard = b"".join(iter(lambda: stranger.recv(65536), b""))
        except OSError:  # the door has closed already
            heard = b""
        assert heard.startswith(answer)
    metrics.close()


def test_a_distribution_of_one_thread_reads_like_a_histogram_of_the_library() -> None:
    bounds, registry, metrics = (0.001, 0.02, 1.0, 30.0), CollectorRegistry(), ProcessMetrics()
    theirs = Histogram("baton_test_seconds", "Seconds", buckets=bounds, registry=registry)
    ours = metrics.distribution("baton_test_seconds", "Seconds", bounds)
    for seconds in (0.0, 0.001, 0.0010001, 0.5, 1.0, 29.9, 31.0):
        theirs.observe(seconds)
        ours.observe(seconds)
    assert generate_latest(registry) in generate_latest(metrics.registry)
