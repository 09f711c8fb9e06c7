"""What the live page costs its router and a browser: CPU time of the router's process, by how many watch, and the
pictures per second that Chromium draws of it, where there is one.

    python -m benchmarks.ui_viewers [--workers 1000] [--viewers 0,1,5,10] [--seconds 20] [--json FILE]

The page's own feed and HTTP server run in this process, the viewers in another one. The workers are invented, and each
reports another load every second, which is the most that a message can hold. Goals: 2 % of a core for each viewer, 30
pictures per second.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette

from benchmarks.machine import describe, write_result
from router.api.http.server import serve_http
from tests.browser import CHROMIUM, browsing
from tests.router.ui.crowd import Crowd

GOAL = 0.02  # of a core
GOAL_FRAMES = 30  # per second
COUNT_FRAMES = """new Promise(done => {
  const end = performance.now() + %d
  let frames = 0
  const count = () => { frames++; performance.now() < end ? requestAnimationFrame(count) : done(frames) }
  requestAnimationFrame(count)
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--viewers", default="0,1,5,10", help="how many watch, one measurement each")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    numbers = [int(number) for number in options.viewers.split(",")]
    rows = asyncio.run(_measure(options.workers, numbers, options.seconds))
    table = Table(title=f"{options.workers} workers, all of which change every second")
    for column in ("viewers", "CPU, % of a core", "more than without, each", "kB/s to each"):
        table.add_column(column, justify="right")
    for row in rows:
        each = f"{row['each']:.2%}" if row["viewers"] else ""
        table.add_row(str(row["viewers"]), f"{row['cpu']:.2%}", each, f"{row['bytes_per_s'] / 1e3:.0f}")
    Console().print(table)
    drawn = asyncio.run(_draw(options.workers, options.seconds)) if CHROMIUM else None
    if drawn:
        print(f"{drawn['frames_per_s']:.0f} pictures/s; the page works {drawn['busy']:.0%} of the time")
    if options.json:
        write_result(options.json, {**describe(), "workers": options.workers, "rows": rows, "browser": drawn})
    raise SystemExit(any(row["each"] > GOAL for row in rows) or bool(drawn and drawn["frames_per_s"] < GOAL_FRAMES))


async def _measure(workers: int, numbers: list[int], seconds: float) -> list[dict[str, Any]]:
    crowd, rows = Crowd(workers * 3 // 10, workers - workers * 3 // 10), []
    app = Starlette(routes=crowd.endpoints().routes())
    async with await serve_http(app, "127.0.0.1", 0) as server:
        await crowd.feed.start()
        stirring = asyncio.create_task(_stir(crowd))
        for viewers in numbers:
            ours, theirs = multiprocessing.get_context("spawn").Pipe()
            url = f"http://127.0.0.1:{server.port}/ui/events"
            process = multiprocessing.get_context("spawn").Process(target=_watch, args=(theirs, url, viewers))
            process.start()
            await asyncio.to_thread(ours.recv)  # all of them watch
            began_s, cpu_s = time.monotonic(), time.process_time()
            await asyncio.sleep(seconds)
            spent, wall_s = time.process_time() - cpu_s, time.monotonic() - began_s
            ours.send("enough")
            received = await asyncio.to_thread(ours.recv)
            await asyncio.to_thread(process.join)
            cpu = spent / wall_s
            each = (cpu - rows[0]["cpu"]) / viewers if viewers and rows else 0.0
            rows.append(
                {"viewers": viewers, "cpu": cpu, "each": each, "bytes_per_s": received / wall_s / max(1, viewers)}
            )
        stirring.cancel()
        await crowd.feed.close()
    return rows


async def _draw(workers: int, seconds: float) -> dict[str, float]:
    """The page in a browser on this machine, which draws without a GPU and shares the cores with the router."""
    crowd = Crowd(workers * 3 // 10, workers - workers * 3 // 10)
    app = Starlette(routes=crowd.endpoints().routes())
    async with await serve_http(app, "127.0.0.1", 0) as server, browsing() as browser:
        await crowd.feed.start()
        stirring = asyncio.create_task(_stir(crowd))
        tab = await browser.open(f"http://127.0.0.1:{server.port}/ui", 1600, 1000)
        await tab.until("document.querySelectorAll('#pairs tr').length")
        busy_s = await tab.busy_s()
        frames = await tab.value(COUNT_FRAMES % (seconds * 1000))
        busy_s = await tab.busy_s() - busy_s
        stirring.cancel()
        await crowd.feed.close()
    return {"frames_per_s": frames / seconds, "busy": busy_s / seconds}


async def _stir(crowd: Crowd) -> None:
    while True:
        crowd.stir()
        await asyncio.sleep(1.0)


def _watch(pipe: Connection, url: str, viewers: int) -> None:
    asyncio.run(_watch_all(pipe, url, viewers))


async def _watch_all(pipe: Connection, url: str, viewers: int) -> None:
    received, begun = 0, asyncio.Semaphore(0)

    async def watch(http: httpx.AsyncClient) -> None:
        nonlocal received
        async with http.stream("GET", url) as answer:
            begun.release()
            async for data in answer.aiter_raw():
                received += len(data)

    async with httpx.AsyncClient(timeout=30) as http:
        tasks = [asyncio.create_task(watch(http)) for _ in range(viewers)]
        for _ in tasks:
            await begun.acquire()
        await asyncio.sleep(2.0)  # the first message, which has everything, is not meant
        received = 0
        pipe.send("watching")
        await asyncio.to_thread(pipe.recv)
        pipe.send(received)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    main()
