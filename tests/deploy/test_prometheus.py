"""A real Prometheus watches a real service as deploy/prometheus.yml says, and every panel of the dashboard has data."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from baton_proto.generated import inference_pb2 as pb
from baton_proto.planner_control import Scale
from tests.deploy.folder import alerts, queries, rows
from tests.deploy.prometheus import Prometheus, needs_prometheus, promtool, running_prometheus
from tests.planner.live import Load, Planned, planned_service

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, needs_prometheus]

RATE = 3.0
LIMITS = {"limits": {"max_prefill": 1, "max_decode": 2}}  # so that the planner itself adds no other worker
PROCESSES = 5  # router, prefill worker, two decode workers, planner


@dataclass
class Watched:
    planned: Planned
    prometheus: Prometheus
    since_s: float  # Unix time

    async def targets(self) -> list[dict[str, Any]]:
        """As the router lists them."""
        async with httpx.AsyncClient(timeout=60) as http:
            found: list[dict[str, Any]] = (await http.get(f"{self.planned.service.http_url}/metrics/targets")).json()
        return found


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    """After some load, input that was refused, and a worker more by the planner's hand."""
    folder = tmp_path_factory.mktemp("watched")
    since_s = time.time()
    async with (
        planned_service(folder, 1, 1, LIMITS) as planned,
        running_prometheus(folder, planned.service.http_address) as prometheus,
        Load(planned.service.client, RATE),
    ):
        await prometheus.until("count(up == 1)", lambda up: up == PROCESSES - 1)
        await refuse(planned)
        await planned.tell(Scale(decode=2))
        await prometheus.until("count(up == 1)", lambda up: up == PROCESSES)
        await prometheus.until('sum(increase(baton_planner_effects_total{outcome="done"}[1m]))', lambda ends: ends > 0)
        await prometheus.until("min(count_over_time(up[1m]))", lambda samples: samples >= 5)
        yield Watched(planned, prometheus, since_s)


async def refuse(planned: Planned) -> None:
    """Requests that cannot be served, by both APIs."""
    async with httpx.AsyncClient(timeout=60) as http:
        url = f"{planned.service.http_url}/v1/completions"
        assert (await http.post(url, json={"prompt": "a", "temperature": -1})).status_code == 400
        assert (await http.post(url, json={"prompt": "a", "model": "another"})).status_code == 404
    with pytest.raises(grpc.aio.AioRpcError):
        await planned.service.client.generate(pb.GenerateRequest(text=""), 5)


async def test_every_process_is_found_by_its_role_and_scraped(watched: Watched) -> None:
    labels = [target["labels"] for target in await watched.targets()]
    assert {(one["component"], one["process"]) for one in labels} == {
        ("router", "router-1"),
        ("worker", "prefill-1"),
        ("worker", "decode-1"),
        ("worker", "decode-2"),
        ("planner", "planner"),
    }
    assert {one["namespace"] for one in labels} == {"default"}
    assert await watched.prometheus.value('count(baton_build_info{namespace="default"})') == PROCESSES
    assert await watched.prometheus.value("count(process_resident_memory_bytes)") == PROCESSES
    assert await watched.prometheus.value("sum(baton_nats_connected)") == PROCESSES


async def test_every_query_of_the_dashboard_has_data(watched: Watched) -> None:
    empty = []
    for panel, query in queries():
        values = await watched.prometheus.values(query, watched.since_s)
        if all(math.isnan(value) for value in values):
            empty.append(f"{panel}: {query}")
    assert empty == []


async def test_every_alert_is_evaluated_and_none_fires_while_all_is_well(watched: Watched) -> None:
    (group,) = (await watched.prometheus.get("rules"))["groups"]
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in alerts()]
    assert [rule["lastError"] for rule in group["rules"] if rule["health"] != "ok"] == []
    for rule in alerts():
        await watched.prometheus.get("query", query=rule["expr"])
    known = (await watched.prometheus.get("alerts"))["alerts"]
    assert [alert["labels"] for alert in known if alert["state"] == "firing"] == []


async def test_refused_input_is_counted_by_reason_and_status(watched: Watched) -> None:
    expected = {
        'baton_router_refusals_total{reason="unknown_model"}': 1,
        'baton_router_refusals_total{reason="invalid"}': 2,
        'baton_router_responses_total{api="http", code="400"}': 1,
        'baton_router_responses_total{api="http", code="404"}': 1,
        'baton_router_responses_total{api="grpc", code="INVALID_ARGUMENT"}': 1,
    }
    assert {query: await watched.prometheus.value(query) for query in expected} == expected


async def test_workers_tell_of_transfers_tokens_and_their_state(watched: Watched) -> None:
    for query in (
        'sum(baton_worker_transfers_total{role="prefill"}) > 0',
        'sum(baton_worker_transfer_bytes_total{role="decode", transport="shm"}) > 0',
        'sum(baton_worker_prompt_tokens_total{role="prefill"}) > 500',
        'sum(baton_worker_output_tokens_total{role="decode"}) > 0',
        'sum(baton_worker_state{role="decode", state="ready"}) == 2',
    ):
        assert await watched.prometheus.value(query) is not None, query


async def test_promtool_finds_nothing_to_mend_in_any_exposition(watched: Watched) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        for target in await watched.targets():
            (address,) = target["targets"]
            text = (await http.get(f"http://{address}/metrics")).content
            await asyncio.to_thread(promtool, "check", "metrics", stdin=text)


async def test_the_table_in_the_documentation_is_what_exists(watched: Watched) -> None:
    """Name, type, labels and meaning of each metric."""
    async with httpx.AsyncClient(timeout=60) as http:
        texts = [
            (await http.get(f"http://{address}/metrics")).text
            for target in await watched.targets()
            for address in target["targets"]
        ]
    assert {tuple(row) for row in rows("### Metrics")} == set(documented(texts))


def documented(expositions: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """(name, type, labels, meaning) of Baton's own metrics."""
    families = [one for text in expositions for one in text_string_to_metric_families(text)]
    labels: dict[str, set[str]] = {family.name: set() for family in families}
    for family in families:
        labels[family.name] |= {label for sample in family.samples for label in sample.labels} - {"le"}
    for family in families:
        if family.name.startswith("baton_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield name, family.type, ", ".join(sorted(labels[family.name])), family.documentation
