"""What clients feel when one of two routers is killed: new requests, and streams that go on at the other one.

    python -m benchmarks.router_loss [--rounds 10] [--streams 20] [--routers 2] [--json FILE]

A service with a real NATS, routers on one address, and the mock engine with the step times of an 8B model. In each
round half of the streams read server-sent events (and come back with Last-Event-ID), half are AsyncClient's; each
answer has 2,000 tokens. Beside them a short request is asked every 20 ms over a connection of its own. In the middle a
router gets SIGKILL. A new request's wait runs from its beginning within the second after the kill to its first event,
with its client's attempts: it asks again at once when its connection is refused or breaks before an answer. A stream's
pause runs from its last event before the kill to its next one. Every answer is compared with the one that is expected.
"""

import argparse
import asyncio
import json
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from baton.client.async_client import AsyncClient
from baton.service.supervisor import Supervisor
from benchmarks.machine import describe, write_result
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig

TOKENS = 2000
BEFORE_S = 1.5  # until the kill
WATCHED_S = 1.0  # after it, in which the new requests begin that count
EVERY_S = 0.02
EVENTS = {"accept": "text/event-stream"}


@dataclass
class Heard:
    """When a client heard something, on time.monotonic()."""

    at_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def hear(self, token_ids: list[int]) -> None:
        self.at_s.append(time.monotonic())
        self.token_ids += token_ids

    def pause_ms(self, killed_s: float) -> float | None:
        """None: the stream had nothing left to tell."""
        before = max((at_s for at_s in self.at_s if at_s <= killed_s), default=killed_s)
        after = min((at_s for at_s in self.at_s if at_s > killed_s), default=None)
        return None if after is None else (after - before) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    waits, pauses = asyncio.run(_measure(options))
    figures = {"new request waits, ms": _quantiles(waits), "stream pauses, ms": _quantiles(pauses)}
    table = Table("", "p50", "p99", "most", "count")
    for name, row in figures.items():
        table.add_row(name, *(f"{row[key]:.4g}" for key in ("p50", "p99", "most", "count")))
    Console().print(table)
    if options.json:
        write_result(options.json, {"machine": describe(), "figures": figures, "waits": waits, "pauses": pauses})


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    p50, p99 = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
    return {"p50": p50, "p99": p99, "most": ordered[-1], "count": len(ordered)}


async def _measure(options: argparse.Namespace) -> tuple[list[float], list[float]]:
    sections: dict[str, Any] = {
        "model": "mock",
        "mock": {"answer_tokens": 4 * TOKENS},
        "router": {"http_port": 0, "grpc_port": 0, "replicas": options.routers},
        "workers": {"prefill": 1, "decode": 2},
    }
    waits, pauses = list[float](), list[float]()
    config = with_overrides(ServingConfig(), sections, "benchmark")
    with TemporaryDirectory(prefix="baton-loss-") as logs:
        async with Supervisor(config, Path(logs)) as service:
            for number in range(options.rounds):
                killed = f"router-{number % options.routers + 1}" if options.routers > 1 else "router-1"
                more_waits, more_pauses = await _round(service, killed, options.streams, number)
                waits += more_waits
                pauses += more_pauses
    return waits, pauses


async def _round(service: Supervisor, killed: str, streams: int, number: int) -> tuple[list[float], list[float]]:
    url, stop, began = f"http://{service.address('http')}/v1/completions", asyncio.Event(), list[tuple[float, float]]()
    heard = [Heard() for _ in range(streams)]
    async with asyncio.TaskGroup() as group:
        for index, one in enumerate(heard):
            prompt = [number % 250 + 1, *range(1, 200), index % 250 + 1]
            reads = _by_events(url, prompt, one) if index % 2 else _by_client(service.address("grpc"), prompt, one)
            group.create_task(reads)
        group.create_task(_short_ones(url, stop, began))
        await asyncio.sleep(BEFORE_S)
        killed_s = time.monotonic()
        service.children[killed].send_signal(signal.SIGKILL)
        await service.wait()
        await service.start_again(killed)
        await asyncio.sleep(WATCHED_S)
        stop.set()
    for one in heard:
        assert len(one.token_ids) == TOKENS, f"a stream told {len(one.token_ids)} tokens"
    waits = [wait_s * 1e3 for at_s, wait_s in began if killed_s <= at_s <= killed_s + WATCHED_S]
    return waits, [pause for one in heard if (pause := one.pause_ms(killed_s)) is not None]


async def _by_client(address: str, prompt: list[int], heard: Heard) -> None:
    async with AsyncClient(address) as client, client.stream(prompt, max_tokens=TOKENS, ignore_eos=True) as stream:
        async for piece in stream:
            heard.hear(list(piece.token_ids))


async def _by_events(url: str, prompt: list[int], heard: Heard) -> None:
    body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "return_token_ids": True}
    last, whole = "", False
    while not whole:
        headers = EVENTS | ({"last-event-id": last} if last else {})
        try:
            async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    name, _, value = line.decode().strip().partition(": ")
                    if name == "id":
                        last = value
                    elif value == "[DONE]":
                        whole = True
                    elif name == "data":
                        heard.hear([token for one in json.loads(value)["choices"] for token in one["token_ids"]])
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            continue


async def _short_ones(url: str, stop: asyncio.Event, began: list[tuple[float, float]]) -> None:
    """Notes of each request when it began and how long it waited."""
    async with asyncio.TaskGroup() as group:
        while not stop.is_set():
            group.create_task(_short_one(url, began))
            await asyncio.sleep(EVERY_S)


async def _short_one(url: str, began: list[tuple[float, float]]) -> None:
    body = {"prompt": "So?", "max_tokens": 4, "ignore_eos": True, "stream": True}
    at_s = time.monotonic()
    while True:
        try:
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
                if answer.status == 200 and await answer.content.readline():
                    began.append((at_s, time.monotonic() - at_s))
                    await answer.read()
                    return
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            await asyncio.sleep(0)


if __name__ == "__main__":
    main()
