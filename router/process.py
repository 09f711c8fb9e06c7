"""Builds the router from its parts and runs it until a signal ends it."""

import asyncio
import math
import os
import secrets
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

import structlog
from starlette.types import ASGIApp

from router.api.grpc.admin import Questions
from router.api.http.server import MAX_CONNECTIONS, HttpServer, serve_http
from router.api.http.web_pages import WebPages
from router.api.operators.guard import OperatorsGuard
from router.api.operators.sleep_endpoints import SleepEndpoints
from router.api.operators.ui_endpoints import UiEndpoints
from router.api.operators.weights_endpoint import weights_route
from router.api.pages.service import Metrics
from router.api.responses.shared_store import SharedResponseStore
from router.api.responses.store import ResponseStore
from router.api.serving.app import create_app
from router.api.serving.grpc_api import GrpcApi
from router.api.wishes.sampling_options import chosen_defaults
from router.counters.metrics import RouterMetrics
from router.fleet_view import FleetView, fleet_view, follow_workers, model_name, status_view
from router.leaving import Leaving
from router.parsing.parsing import model_families
from router.requests.body_budget import BodyBudget
from router.requests.frontend import Frontend
from router.requests.generation import Generator
from router.requests.rate_limits import RateLimits
from router.requests.shared_limits import LimitSharing
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
from router.views.explain import Explainer
from router.views.reports import Reporter
from router.views.scrape_targets import PLANNER_TIMEOUT_S, ScrapeTargets
from router.views.sleep_control import SleepControl
from router.views.status import StatusView
from router.views.tree_diff import TreeDiff
from router.views.tree_view import TreeView
from router.views.weights_control import WeightsControl
from router.views.whole_metrics import WholeMetrics
from router.views.whole_status import WholeStatus
from router.workers.left_answers import Recall, recall_from
from runtime.address import format_address, is_loopback, with_host
from runtime.calls.planner import ask_plan
from runtime.checkpoint.model_files import ModelFiles
from runtime.checkpoint.served_model import served_model
from runtime.compiled import load_compiled
from runtime.config.serving import ServingConfig
from runtime.end_task import end_tasks
from runtime.errors import ConfigError
from runtime.grammar.checker import GrammarChecker
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
    files, _ = await asyncio.gather(asyncio.to_thread(served_model, config), asyncio.to_thread(load_compiled))
    async with AsyncExitStack() as closing:
        keys = keys if keys.operator else replace(keys, operator=(_own_operator_key(closing),))
        nats = await connect(config.nats.url, router_id, config.namespace, config.workers.ready_timeout_s, keys.nats)
        closing.push_async_callback(nats.close)
        view = fleet_view(config, files, router_id, nats, keys)
        await follow_workers(view, closing)
        parts, status = view.parts, status_view(config, router_id, view, nats)
        generator = Generator(parts, min(files.max_position, config.engine.max_model_len or files.max_position))
        siblings = Siblings(nats, router_id, lambda: view.sharing.others.routers)
        questions = await _questions(router_id, view, status, siblings)
        grammars = GrammarChecker(files.folder, files.config.vocab_size, files.eos_token_ids)
        grammars.start()
        closing.callback(grammars.close)
        limits = await _rate_limits(keys, nats, siblings, router_id, closing)
        frontend = _frontend(config, files, generator, parts.metrics, grammars, limits, recall_from(nats))
        scrape_targets = ScrapeTargets(nats, view.directory, _scraped_by_https(config, keys, tls))
        await scrape_targets.start()
        page = _page(config, files, view, status, questions, nats, siblings) if config.router.ui else None
        traces = _traces(router_id, frontend.model, parts.metrics)
        if traces is not None:
            closing.push_async_callback(traces.close)
        store = await _response_store(config, nats, siblings)
        shown = WholeMetrics(router_id, parts.metrics.exposition, siblings)
        exposition = parts.metrics.exposition if config.router.replicas == 1 else shown.exposition
        app = _app(config, keys, frontend, questions, page, traces, scrape_targets, exposition, parts.metrics, store)
        addresses, grpc_api, http_server = await _open_apis(
            config, keys, tls, frontend, questions, app, traces, parts.metrics.logins, closing
        )
        if page is not None:
            await page[1].start()
            await page[0].start()
            closing.push_async_callback(page[0].close)
        scraped_at = with_host(addresses["http"], reached_at(config.router.host, config.nats.url, "router.host"))
        reporter = Reporter(nats, router_id, parts.queue, parts.metrics, scraped_at)
        await reporter.start()
        closing.push_async_callback(reporter.close)
        leaving = Leaving(config, scraped_at, siblings)
        await leaving.start()
        await shown.start(scraped_at)
        calm_collector()
        print_ready("router", router_id, addresses)
        closing.push_async_callback(end_tasks, asyncio.create_task(beat()))
        log.info("ready", **addresses)
        await stop.wait()
        await leaving.drain(generator, grpc_api, http_server)


def _app(
    config: ServingConfig,
    keys: Keys,
    frontend: Frontend,
    questions: Questions,
    page: tuple[Feed, PageParts, TreePicture] | None,
    traces: Traces | None,
    scrape_targets: ScrapeTargets,
    exposition: Metrics,
    metrics: RouterMetrics,
    store: ResponseStore,
) -> ASGIApp:
    guard = OperatorsGuard(keys.operator, metrics.logins)
    routes = [*SleepEndpoints(questions.sleep, guard).routes(), weights_route(questions.weights, guard)]
    routes += [] if page is None else UiEndpoints(*page, guard).routes()
    has_key = keys.api is not None
    return create_app(
        frontend,
        exposition,
        scrape_targets.targets,
        keys.api,
        routes,
        around=None if traces is None else partial(over_http, traces),
        pages=WebPages(config.router.host, config.router.cors_origins, has_key, config.security.insecure),
        logins=metrics.logins,
        store=store,
    )


async def _rate_limits(
    keys: Keys, nats: NatsClient, siblings: Siblings, router_id: str, closing: AsyncExitStack
) -> RateLimits:
    limits = RateLimits()
    if keys.api is not None:
        sharing = LimitSharing(nats, siblings, limits, router_id)
        await sharing.start()
        closing.push_async_callback(sharing.close)
    return limits


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


async def _questions(router_id: str, view: FleetView, status: StatusView, siblings: Siblings) -> Questions:
    parts, pool = view.parts, view.parts.pool
    whole = WholeStatus(status, siblings)
    recent = parts.metrics.recent
    explain = Explainer(parts.assigner, parts.decisions, recent, pool, parts.config, parts.block_size, siblings)
    await whole.start()
    await explain.start()
    return Questions(
        status=whole.status,
        tree=TreeView(router_id, parts.block_size, view.indexer.tree, view.hits),
        diff=TreeDiff(view.indexer, pool.snapshot, lambda: [worker.key for worker in pool.workers.values()]),
        sleep=SleepControl(pool),
        weights=WeightsControl(pool),
        explain=explain,
    )


def _page(
    config: ServingConfig,
    files: ModelFiles,
    view: FleetView,
    status: StatusView,
    questions: Questions,
    nats: NatsClient,
    siblings: Siblings,
) -> tuple[Feed, PageParts, TreePicture]:
    """What the live page shows."""
    parts, targets = view.parts, config.planner.targets
    about = {
        "router": status.router_id if config.router.replicas == 1 else f"{config.router.replicas} routers",
        "model": model_name(config, files),
        "block_size": config.engine.block_size,
        "layers": files.config.num_layers,
        "targets": {"ttft_ms": targets.ttft_ms, "itl_ms": targets.itl_ms},
    }
    recent = parts.metrics.recent
    page = PageParts(status.router_id, parts.queue, parts.metrics, RequestViews(recent, questions.explain), siblings)
    workers = WorkerRows(parts.pool, view.ledger, status.note)
    planner = PlannerWatch(lambda: ask_plan(nats, PLANNER_TIMEOUT_S))
    feed = Feed(about, parts.pool, page, recent, workers, planner)
    return feed, page, TreePicture(questions.tree)


def _frontend(
    config: ServingConfig,
    files: ModelFiles,
    generator: Generator,
    metrics: RouterMetrics,
    grammars: GrammarChecker,
    limits: RateLimits,
    recall: Recall,
) -> Frontend:
    tokenizer, wanted = generator.tokenizer, config.router
    template = tokenizer.chat_template, tokenizer.template_reads("tools")
    added = tokenizer.matched_tokens, tokenizer.hidden_token_ids
    families = model_families(wanted.tool_parser, wanted.reasoning_parser, *template, *added)
    told = "by the chat template" if families.tells_tools else "as text, because the chat template knows no tools"
    ends = [tokenizer.token_text(token_id) for token_id in sorted(files.eos_token_ids)]
    names = {"tool_calls": families.tool_name, "reasoning": families.reasoning_name}
    log.info("answers are taken apart", **names, tools_are_told=told, ends=ends)
    if not ends:
        log.warning(
            "the model's files name no token that ends an answer: answers go on up to max_tokens", model=files.name
        )
    return Frontend(
        model=model_name(config, files),
        created_s=int(time.time()),
        tokenizer=tokenizer,
        families=families,
        generator=generator,
        not_ready=generator.not_ready,
        request_timeout_s=config.router.request_timeout_s,
        reject_ttft_s=(config.router.reject_ttft_ms or math.inf) / 1e3,
        max_body_bytes=config.router.max_body_bytes,
        cache_salt=config.engine.cache_salt or "",
        cache_per_tenant=config.engine.cache_per_tenant,
        bodies=BodyBudget(config.router.max_buffered_bytes),
        sampling_defaults=chosen_defaults(wanted.generation_config, files.folder),
        max_priority=config.router.max_priority,
        grammars=grammars,
        unknown_fields=config.router.unknown_fields,
        rate_limits=limits,
        recall=recall,
        answered=metrics.answered,
    )


async def _open_apis(
    config: ServingConfig,
    keys: Keys,
    tls: Tls | None,
    frontend: Frontend,
    questions: Questions,
    app: ASGIApp,
    traces: Traces | None,
    logins: FailedLogins,
    closing: AsyncExitStack,
) -> tuple[dict[str, str], GrpcApi, HttpServer]:
    """Starts the gRPC and the HTTP server. Returns HOST:PORT by API, and both."""
    host = config.router.host
    innermost = [] if traces is None else [TraceCalls(traces)]
    places = _places()
    grpc_api = GrpcApi(frontend, questions, keys.api, tls, keys.operator, innermost, places.grpc, logins)
    grpc_port = await grpc_api.start(host, config.router.grpc_port)
    closing.push_async_callback(grpc_api.stop, END_GRACE_S)
    context = None if tls is None else tls.server_context()
    http_server = await serve_http(app, host, config.router.http_port, context, places.http)
    closing.push_async_callback(http_server.stop, END_GRACE_S)
    addresses = {"grpc": format_address(host, grpc_port), "http": format_address(host, http_server.port)}
    return addresses, grpc_api, http_server


def _places() -> Places:
    limit = raise_open_files()
    places = shared_out(limit, MAX_CONNECTIONS)
    if places.http < MAX_CONNECTIONS:
        reason = f"{limit} open files are allowed (ulimit -Hn)"
        told = {"wanted": MAX_CONNECTIONS, "http": places.http, "grpc": places.grpc}
        log.warning("fewer connections are served", **told, reason=reason)
    return places


def _traces(router_id: str, model: str, metrics: RouterMetrics) -> Traces | None:
    return Traces(router_id, model, metrics.recent) if wants_traces(os.environ) else None


def _scraped_by_https(config: ServingConfig, keys: Keys, tls: Tls | None) -> set[str]:
    """Components by `ScrapeTargets`. Metrics of workers and the planner stay plain on the loopback interface."""
    inside = keys.cluster is not None and keys.cluster.tls is not None and not is_loopback(config.workers.host)
    return ({"worker", "planner"} if inside else set()) | ({"router"} if tls is not None else set())
