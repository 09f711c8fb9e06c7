"""All that a router has of one model: its files, tokenizer, parsers and grammars, its view of the model's workers, its
queue, and what the APIs need of it. A request for one model uses nothing of another one's."""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog

from router.api.grpc.admin import Questions
from router.api.wishes.sampling_options import chosen_defaults
from router.counters.metrics import ApiMetrics, RouterMetrics
from router.fleet_view import FleetView, fleet_view, follow_workers, model_name, status_view
from router.parsing.parsing import model_families
from router.requests.body_budget import BodyBudget
from router.requests.frontend import FetchImage, Frontend
from router.requests.generation import Generator
from router.requests.rate_limits import RateLimits
from router.siblings import Siblings
from router.views.adapters_control import AdaptersControl
from router.views.explain import Explainer
from router.views.sleep_control import SleepControl
from router.views.status import StatusView
from router.views.tree_diff import TreeDiff
from router.views.tree_view import TreeView
from router.views.weights_control import WeightsControl
from router.views.whole_status import WholeStatus
from router.workers.left_answers import recall_from
from router.workers.waking import Waking, ask_supervisor
from runtime.checkpoint.model_files import ModelFiles
from runtime.config.model_entry import ModelConfig
from runtime.config.serving import ServingConfig
from runtime.grammar.checker import GrammarChecker
from runtime.nats.client import NatsClient
from runtime.security.keys import Keys
from runtime.side_lane import SideLane

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Shared:
    """What the requests for all models have together in one router."""

    router_id: str
    nats: NatsClient
    keys: Keys
    metrics: ApiMetrics  # with one model alone: also those of the model
    bodies: BodyBudget
    limits: RateLimits
    lane: SideLane
    fetch_image: FetchImage


@dataclass(frozen=True, slots=True)
class ServedModel:
    config: ServingConfig  # of this model alone
    files: ModelFiles
    nats: NatsClient  # for the model's namespace
    view: FleetView
    siblings: Siblings  # what the other routers say of the model
    status: StatusView
    questions: Questions
    generator: Generator
    frontend: Frontend


async def serve_model(
    config: ServingConfig, entry: ModelConfig, files: ModelFiles, shared: Shared, closing: AsyncExitStack
) -> ServedModel:
    """`config`: of this model alone. Raises BatonError, OSError."""
    router_id, nats, metrics = shared.router_id, shared.nats.within(config.namespace), shared.metrics
    of_model = metrics if isinstance(metrics, RouterMetrics) else RouterMetrics(of_process=False)
    waking = Waking(ask_supervisor(nats), entry.wake_timeout_s, until_asked=entry.sleeps)
    closing.push_async_callback(waking.close)
    view = fleet_view(config, files, router_id, nats, shared.keys, of_model, waking)
    await follow_workers(view, closing)
    status = status_view(config, router_id, view)
    siblings = Siblings(nats, router_id, lambda: view.sharing.others.routers)
    questions = await _questions(router_id, view, status, siblings, nats)
    generator = Generator(view.parts, min(files.max_position, config.engine.max_model_len or files.max_position))
    grammars = GrammarChecker(files.folder, files.config.vocab_size, files.eos_token_ids)
    grammars.start()
    closing.callback(grammars.close)
    frontend = _frontend(config, entry.aliases, files, generator, grammars, shared, nats)
    return ServedModel(config, files, nats, view, siblings, status, questions, generator, frontend)


async def _questions(
    router_id: str, view: FleetView, status: StatusView, siblings: Siblings, nats: NatsClient
) -> Questions:
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
        adapters=AdaptersControl(pool, nats),
        explain=explain,
    )


def _frontend(
    config: ServingConfig,
    aliases: Sequence[str],
    files: ModelFiles,
    generator: Generator,
    grammars: GrammarChecker,
    shared: Shared,
    nats: NatsClient,
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
        config=config.router,
        cache_salt=config.engine.cache_salt or "",
        cache_per_tenant=config.engine.cache_per_tenant,
        bodies=shared.bodies,
        sampling_defaults=chosen_defaults(wanted.generation_config, files.folder),
        grammars=grammars,
        rate_limits=shared.limits,
        lane=shared.lane,
        recall=recall_from(nats),
        state=generator.state,
        fetch_image=shared.fetch_image,
        answered=shared.metrics.answered,
        aliases=aliases,
        adapters=generator.adapters,
    )
