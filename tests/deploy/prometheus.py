"""A real Prometheus, where Debian's package is installed, and what promtool says.

async with running_prometheus(tmp_path, service.http_address) as prometheus:
    await prometheus.until("sum(up)", lambda value: value == 4)
"""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.deploy.folder import DEPLOY

WAIT_S = 60.0
POLL_S = 0.1

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not here: apt-get install --no-install-recommends prometheus",
)


def promtool(*arguments: str, stdin: bytes = b"") -> None:
    """Fails with what it complains about."""
    done = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, timeout=WAIT_S, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said


@dataclass
class Prometheus:
    http: httpx.AsyncClient

    async def get(self, path: str, **parameters: Any) -> Any:
        """What it answers, or fails with what it says."""
        answer = (await self.http.get(f"/api/v1/{path}", params=parameters)).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    async def value(self, query: str) -> float | None:
        """Of a query with one sample; None: with none."""
        result = (await self.get("query", query=query))["result"]
        assert len(result) <= 1, f"{query} has {len(result)} samples"
        return float(result[0]["value"][1]) if result else None

    async def values(self, query: str, since_s: float) -> list[float]:
        """All of a query's from then (Unix time) on, NaN among them."""
        result = (await self.get("query_range", query=query, start=since_s, end=time.time(), step=1))["result"]
        return [float(value) for series in result for _, value in series["values"]]

    async def until(self, query: str, holds: Callable[[float], bool]) -> None:
        value: float | None = None
        deadline_s = time.monotonic() + WAIT_S
        while value is None or not holds(value):
            assert time.monotonic() < deadline_s, f"{query} is {value} after {WAIT_S:g} s"
            await asyncio.sleep(POLL_S)
            value = await self.value(query)


@asynccontextmanager
async def running_prometheus(folder: Path, router: str) -> AsyncIterator[Prometheus]:
    """With deploy/prometheus.yml; `router`: HOST:PORT in the place of the one there. It looks once a second."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text().replace("127.0.0.1:8000", router))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["http_sd_configs"][0]["refresh_interval"] = "1s"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = psutil.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=output,
            stderr=output,
            env={**os.environ, "GOMAXPROCS": "1"},
        )
    try:
        url = f"http://127.0.0.1:{await _port(process, log)}"
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
            while (await http.get("/-/ready")).status_code != 200:
                await asyncio.sleep(POLL_S)
            yield Prometheus(http)
    finally:
        process.kill()
        process.wait(WAIT_S)


async def _port(process: psutil.Popen, log: Path) -> int:
    """That it listens on: it was told to take a free one."""
    deadline_s = time.monotonic() + WAIT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                return int(connection.laddr.port)
        await asyncio.sleep(POLL_S)
    raise AssertionError(f"prometheus does not listen:\n{log.read_text()}")
