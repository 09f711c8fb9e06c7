"""Builds the router from its parts and runs it until a signal ends it."""

import asyncio
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

import structlog
from starlette.types import ASGIApp

from router.api.batches.service import BatchService
from router.api.http.server import MAX_CONNECTIONS, HttpServer, serve_http
from router.api.http.web_pages import WebPages
from router.api.operators.adapter_endpoints import AdapterEndpoints
from router.api.operators.guard import OperatorsGuard
from router.api.operators.sleep_endpoints import SleepEndpoints
from router.api.operators.ui_endpoints import ModelPage, UiEndpoints
from router.api.operators.weights_endpoint import weights_route
from router.api.pages.service import Metrics, Targets
from router.api.responses.shared_store import SharedResponseStore
from router.api.responses.store import ResponseStore
from router.api.serving.app import create_app
from router.api.serving.grpc_api import GrpcApi
from router.batches.room import Look, beside_others, in_all
from router.counters.metrics import ApiMetrics, RouterMetrics
from router.counters.usage import UsageLog
from router.leaving import Leaving, connection_age_s
from router.requests.body_budget import BodyBudget
from router.requests.frontend import FetchImage, Models, nobody_fetches
from router.requests.rate_limits import RateLimits
from router.requests.shared_limits import LimitSharing
from router.served_model import ServedModel, Shared, serve_model
from router.siblings import Siblings
from router.tracing.grpc_calls import TraceCalls
from router.tracing.sdk import wants_traces
from router.tracing.traces import Traces, over_http
from router.ui.feed import Feed
from router.ui.parts import PageParts
from router.ui.planner import PlannerWatch
from router.ui.requests import RequestViews
from router.ui.tree import TreePicture
from router.ui.workers import WorkerRows
from router.views.reports import Reporter
from router.views.scrape_targets import PLANNER_TIMEOUT_S, ScrapeTargets, Target
from router.views.sleep_control import SleepControl
from router.views.whole_metrics import WholeMetrics, labelled, merged
from runtime.address import format_address, is_loopback, with_host
from runtime.calls.planner import ask_plan
from runtime.checkpoint.served_model import served_model
from runtime.compiled import load_compiled
from runtime.config.models import entries_of, models_of
from runtime.config.serving import RouterConfig, ServingConfig
from runtime.end_task import end_tasks
from runtime.errors import ConfigError
from runtime.nats.client import NatsClient, connect
from runtime.processes.collector import calm_collector
from runtime.processes.open_files import Places, raise_open_files, shared_out
from runtime.processes.owned_folder import temporary_folder, write_private
from runtime.processes.ports import check_router_ports
from runtime.processes.reached_at import reached_at
from runtime.processes.serving import beat, print_ready, stop_signal
from runtime.security.failed_logins import FailedLogins
from runtime.security.keys import Keys, check_callers, check_reach, load_keys
from runtime.security.secret import Secret
from runtime.security.tls import Tls, load_tls
from runtime.side_lane import SideLane

OPERATOR_KEY = "operator.key"
END_GRACE_S = 2.0  # for the last messages of requests that were cut off at the drain timeout

log = structlog.get_logger()


async def run_router(config: ServingConfig, router_id: str, *, beside: bool = False) -> None:
    """Serves until SIGTERM or SIGINT, then drains. `beside`: other routers have its ports, too. The part built last is
    closed first. Raises BatonError, OSError."""
    if config.nats.url is None:
        raise ConfigError("nats.url", "a router needs the URL of a running NATS server")
    keys, tls = load_keys(config), load_tls(config.security)
    check_reach("router.host", config.router.host, keys)
    check_callers(config, keys)
    check_router_ports(config.router, shared=beside or config.router.replicas > 1)
    if not is_loopback(config.router.host) and (keys.api is None or tls is None):
        log.warning("the router is open to other machines", asks_for_keys=keys.api is not None, tls=tls is not None)
    stop = stop_signal()
    each = models_of(config)
    opening = asyncio.gather(*(asyncio.to_thread(served_model, one) for one in each))
    files, _ = await asyncio.gather(opening, asyncio.to_thread(load_compiled))
    async with AsyncExitStack() as closing:
        keys = keys if keys.operator else replace(keys, operator=(_own_operator_key(closing),))
        nats = await connect(config.nats.url, router_id, config.namespace, config.workers.ready_timeout_s, keys.nats)
        closing.push_async_callback(nats.close)
        shared = await _shared(config, router_id, nats, keys, closing)
        models = [await serve_model(*one, shared, closing) for one in zip(each, entries_of(config), files, strict=True)]
        if config.logging.usage is not None:
            _log_usage(UsageLog(config.logging.usage, router_id), models, closing)
        siblings = Siblings(nats, router_id, lambda: models[0].view.sharing.others.routers)
        if keys.api is not None:
            await _share_limits(shared.limits, nats, siblings, router_id, closing)
        names = [one.frontend.model for one in models]
        pages = {one.frontend.model: _page(one, names) for one in models} if config.router.ui else {}
        traces = _traces(router_id, models)
        if traces is not None:
            closing.push_async_callback(traces.close)
        store = await _response_store(config, nats, siblings)
        own = partial(_exposition, shared.metrics, models) if config.models else shared.metrics.exposition
        shown = WholeMetrics(router_id, own, siblings)
        exposition = own if config.router.replicas == 1 else shown.exposition
        targets = await _scrape_targets(config, models, _scraped_by_https(config, keys, tls))
        batches = _batches(config, keys, models)
        logins = shared.metrics.logins
        app = _app(config, keys, models, pages, traces, targets, exposition, logins, store, batches)
        addresses, grpc_api, http_server = await _open_apis(config, keys, tls, models, app, traces, logins, closing)
        for page in pages.values():
            await page.parts.start()
            await page.feed.start()
            closing.push_async_callback(page.feed.close)
        scraped_at = with_host(addresses["http"], reached_at(config.router.host, config.nats.url, "router.host"))
        for one in models:
            await _report(one, router_id, scraped_at, closing)
        leaving = Leaving(config, scraped_at, siblings)
        await leaving.start()
        await shown.start(scraped_at)
        calm_collector()
        print_ready("router", router_id, addresses)
        closing.push_async_callback(end_tasks, asyncio.create_task(beat()))
        log.info("ready", **addresses)
        batches.start()
        closing.push_async_callback(batches.close)
        await stop.wait()
        await batches.close()
        await leaving.drain([one.generator for one in models], grpc_api, http_server)


async def _shared(
    config: ServingConfig, router_id: str, nats: NatsClient, keys: Keys, closing: AsyncExitStack
) -> Shared:
    metrics = ApiMetrics() if config.models else RouterMetrics()
    metrics.watch(nats)
    limits, bodies = RateLimits(), BodyBudget(config.router.max_buffered_bytes)
    fetch_image = await _image_fetch(config.router, closing) if config.router.image_hosts else nobody_fetches
    return Shared(router_id, nats, keys, metrics, bodies, limits, SideLane(), fetch_image)


def _batches(config: ServingConfig, keys: Keys, models: Sequence[ServedModel]) -> BatchService:
    """Raises ConfigError."""

    def look(one: ServedModel) -> Look:
        each = min(one.config.router.max_running_per_worker, one.config.engine.max_running)
        return beside_others(one.view.parts.pool, one.view.ledger, one.view.parts.queue, each)

    room = in_all([look(one) for one in models])
    return BatchService(Models([one.frontend for one in models]), config.router.batch_folder, keys.api, room)


def _log_usage(usage: UsageLog, models: Sequence[ServedModel], closing: AsyncExitStack) -> None:
    closing.callback(usage.close)
    for one in models:
        one.view.parts.metrics.usage.log = usage


def _exposition(metrics: ApiMetrics, models: Sequence[ServedModel]) -> bytes:
    """The metrics of several models, each line with its model."""
    texts = [(one.frontend.model, one.view.parts.metrics.exposition()) for one in models]
    return merged([metrics.exposition(), *(labelled(text, "model", name) for name, text in texts)])


async def _report(model: ServedModel, router_id: str, scraped_at: str, closing: AsyncExitStack) -> None:
    parts = model.view.parts
    reporter = Reporter(model.nats, router_id, parts.queue, parts.metrics, scraped_at)
    await reporter.start()
    closing.push_async_callback(reporter.close)


async def _scrape_targets(config: ServingConfig, models: Sequence[ServedModel], tls: Collection[str]) -> Targets:
    names = [model.name for model in config.models] or [""]
    each = [
        ScrapeTargets(one.nats, one.view.directory, config.namespace, tls, name)
        for one, name in zip(models, names, strict=True)
    ]
    for one in each:
        await one.start()

    async def targets() -> list[Target]:
        """The workers of each model; the routers once, although they report to each."""
        first, *others = [await one.targets() for one in each]
        return first + [target for other in others for target in other if target.labels["component"] == "worker"]

    return targets


def _app(
    config: ServingConfig,
    keys: Keys,
    models: Sequence[ServedModel],
    pages: Mapping[str, ModelPage],
    traces: Traces | None,
    targets: Targets,
    exposition: Metrics,
    logins: FailedLogins,
    store: ResponseStore,
    batches: BatchService,
) -> ASGIApp:
    guard, named = OperatorsGuard(keys.operator, logins), Models([one.frontend for one in models])
    questions = {one.frontend.model: one.questions for one in models}
    sleep = SleepControl.over(one.questions.sleep for one in models)
    routes = [
        *SleepEndpoints(sleep, guard).routes(),
        weights_route(lambda name: questions[named.of(name).base].weights, guard),
        *AdapterEndpoints(lambda name: questions[named.of(name).base].adapters, guard).routes(),
    ]
    routes += UiEndpoints(pages, guard).routes() if pages else []
    has_key = keys.api is not None
    return create_app(
        models[0].frontend,
        exposition,
        targets,
        keys.api,
        routes,
        around=None if traces is None else partial(over_http, traces),
        pages=WebPages(config.router.host, config.router.cors_origins, has_key, config.security.insecure),
        logins=logins,
        store=store,
        others=[one.frontend for one in models[1:]],
        batches=batches,
    )


async def _share_limits(
    limits: RateLimits, nats: NatsClient, siblings: Siblings, router_id: str, closing: AsyncExitStack
) -> None:
    sharing = LimitSharing(nats, siblings, limits, router_id)
    await sharing.start()
    closing.push_async_callback(sharing.close)


async def _response_store(config: ServingConfig, nats: NatsClient, siblings: Siblings) -> ResponseStore:
    limit_bytes = config.router.response_store_bytes
    if not limit_bytes:
        return ResponseStore(limit_bytes)
    store = SharedResponseStore(nats, siblings, limit_bytes, config.router.replicas)
    await store.start()
    return store


def _own_operator_key(closing: AsyncExitStack) -> Secret:
    """A fresh key in a file that only this user can read, for a router that was told none. Raises OSError."""
    key, folder = Secret(secrets.token_hex(32)), temporary_folder()
    closing.callback(folder.close)
    file = folder.path / OPERATOR_KEY
    write_private(file, key.reveal())
    log.info("operators need the key in this file: --operator-key-file", file=str(file))
    return key


def _page(model: ServedModel, names: Sequence[str]) -> ModelPage:
    """`names`: of all models, which the page lets viewers choose from."""
    config, view, status, questions = model.config, model.view, model.status, model.questions
    parts, targets = view.parts, config.planner.targets
    about = {
        "router": status.router_id if config.router.replicas == 1 else f"{config.router.replicas} routers",
        "model": model.frontend.model,
        "models": names,
        "block_size": config.engine.block_size,
        "layers": model.files.config.num_layers,
        "targets": {"ttft_ms": targets.ttft_ms, "itl_ms": targets.itl_ms},
    }
    recent = parts.metrics.recent
    requests = RequestViews(recent, questions.explain)
    page = PageParts(status.router_id, parts.queue, parts.metrics, requests, model.siblings)
    workers = WorkerRows(parts.pool, view.ledger, status.note)
    planner = PlannerWatch(lambda: ask_plan(model.nats, PLANNER_TIMEOUT_S))
    feed = Feed(about, parts.pool, page, recent, workers, planner)
    return ModelPage(feed, page, TreePicture(questions.tree))


async def _open_apis(
    config: ServingConfig,
    keys: Keys,
    tls: Tls | None,
    models: Sequence[ServedModel],
    app: ASGIApp,
    traces: Traces | None,
    logins: FailedLogins,
    closing: AsyncExitStack,
) -> tuple[dict[str, str], GrpcApi, HttpServer]:
    """Starts the gRPC and the HTTP server. Returns HOST:PORT by API, and both."""
    host = config.router.host
    innermost = [] if traces is None else [TraceCalls(traces)]
    places = _places()
    (frontend, questions), *others = ((one.frontend, one.questions) for one in models)
    age_s = connection_age_s(config.workers.drain_timeout_s)
    grpc_api = GrpcApi(frontend, questions, keys.api, tls, keys.operator, innermost, places.grpc, logins, others, age_s)
    grpc_port = await grpc_api.start(host, config.router.grpc_port)
    closing.push_async_callback(grpc_api.stop, END_GRACE_S)
    context = None if tls is None else tls.server_context()
    http_server = await serve_http(app, host, config.router.http_port, context, places.http)
    closing.push_async_callback(http_server.stop, END_GRACE_S)
    addresses = {"grpc": format_address(host, grpc_port), "http": format_address(host, http_server.port)}
    return addresses, grpc_api, http_server


async def _image_fetch(config: RouterConfig, closing: AsyncExitStack) -> FetchImage:
    from router.api.dialects.image_fetcher import ImageFetcher  # here: aiohttp costs 0.3 s of CPU

    fetcher = ImageFetcher(config.image_hosts, config.max_body_bytes)
    return (await closing.enter_async_context(fetcher)).fetch


def _places() -> Places:
    limit = raise_open_files()
    places = shared_out(limit, MAX_CONNECTIONS)
    if places.http < MAX_CONNECTIONS:
        reason = f"{limit} open files are allowed (ulimit -Hn)"
        told = {"wanted": MAX_CONNECTIONS, "http": places.http, "grpc": places.grpc}
        log.warning("fewer connections are served", **told, reason=reason)
    return places


def _traces(router_id: str, models: Sequence[ServedModel]) -> Traces | None:
    requests = {one.frontend.model: one.view.parts.metrics.recent for one in models}
    return Traces(router_id, requests) if wants_traces(os.environ) else None


def _scraped_by_https(config: ServingConfig, keys: Keys, tls: Tls | None) -> set[str]:
    """Components by `ScrapeTargets`. Metrics of workers and the planner stay plain on the loopback interface."""
    inside = keys.cluster is not None and keys.cluster.tls is not None and not is_loopback(config.workers.host)
    return ({"worker", "planner"} if inside else set()) | ({"router"} if tls is not None else set())
