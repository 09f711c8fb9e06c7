"""A service that listens on every address announces addresses that others can connect to."""

import httpx
import pytest

from runtime.discovery.directory import Directory
from tests.service import running_service

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("announce", "host"), [(None, "127.0.0.1"), ("localhost", "localhost")])
async def test_workers_behind_a_wildcard_are_found_by_routers_peers_and_scrapers(
    announce: str | None, host: str
) -> None:
    wide = {"workers": {"host": "0.0.0.0", "announce": announce, "per_process": 1}, "transfer": {"transport": "tcp"}}
    router = {"host": "0.0.0.0", "placement": {"local_prefill_tokens": 0}}
    async with running_service("mock", overrides=wide, router=router, security={"insecure": True}) as service:
        nats = await service.connect_nats("test")
        directory = Directory(nats, 4.0)
        await directory.start()
        await directory.wait_for(lambda workers: len(workers) == 2, 60)
        for record in directory.workers.values():
            transfer = [] if record.transfer is None else [record.transfer.tcp_address]
            for address in (record.rpc_address, record.stream_address, record.metrics_address, *transfer):
                assert address.startswith(f"{host}:"), record
        async with httpx.AsyncClient(base_url=service.http_url, timeout=60) as http:
            body = {"model": "mock", "prompt": "a" * 400, "max_tokens": 2}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            targets = (await http.get("/metrics/targets")).json()
        by_component = {target["labels"]["component"]: target["targets"][0] for target in targets}
        assert by_component["router"] == service.http_address.replace("0.0.0.0", "127.0.0.1")
        assert by_component["worker"].startswith(f"{host}:")
        await directory.close()
        await nats.close()
