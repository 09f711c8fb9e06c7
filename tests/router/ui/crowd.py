"""The live page's feed over as many workers as a test likes, which exist for the router only."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from baton_proto.discovery import WorkerLoad, WorkerRecord
from baton_proto.generated import inference_pb2 as pb
from baton_proto.planner_control import Plan
from baton_proto.token_counts import TokenCounts
from baton_proto.worker import Handoff
from router.api.operators.guard import OperatorsGuard
from router.api.operators.ui_endpoints import ModelPage, UiEndpoints
from router.counters.metrics import RouterMetrics
from router.requests.admission import AdmissionQueue
from router.ui.feed import Feed
from router.ui.parts import PageParts
from router.ui.planner import PlannerWatch
from router.ui.requests import RequestViews
from router.ui.tree import TreePicture
from router.ui.workers import WorkerRows
from router.views.explain import Explainer
from router.workers.load import LoadLedger
from router.workers.pool import PooledWorker, WorkerPool
from runtime.errors import UnavailableError
from runtime.security.secret import Secret
from tests.router.operator_questions import NO_SIBLINGS

BLOCKS = 1000
LINK = cast(Any, SimpleNamespace(connected=True, failed=False))


class NoTree:
    async def listing(self, wanted: pb.TreeRequest) -> Any:
        yield pb.TreeChunk(summary=pb.TreeSummary(block_size=16))


class NothingExplained:
    def request(self, request_id: str) -> None:
        return None


class Crowd:
    def __init__(
        self, prefill: int, decode: int, explainer: Explainer | None = None, models: Sequence[str] = ("tiny",)
    ) -> None:
        """`models`: the one that it is of, and others."""
        self.model = models[0]
        self.metrics, self.queue = RouterMetrics(), AdmissionQueue(64)
        self.ledger = LoadLedger(16, 60.0)
        self.pool = WorkerPool("router-0", "tiny", 16, self.ledger)
        for role, count in (("prefill", prefill), ("decode", decode)):
            for number in range(count):
                self.add(f"{role}-{number + 1}", role)
        requests = RequestViews(self.metrics.recent, cast(Explainer, explainer))
        self.parts = PageParts("router-0", self.queue, self.metrics, requests, NO_SIBLINGS)
        about = {"router": "router-0", "model": self.model, "models": sorted(models), "block_size": 16, "layers": 2}
        self.feed = Feed(
            about | {"targets": {"ttft_ms": 1000.0, "itl_ms": 50.0}},
            self.pool,
            self.parts,
            self.metrics.recent,
            WorkerRows(self.pool, self.ledger, lambda worker: worker.misfit),
            PlannerWatch(self._plan),
        )
        self.plan: Plan | None = None
        self._dice = random.Random(1)

    def endpoints(self, operators: Sequence[Secret], *others: "Crowd") -> UiEndpoints:
        """`others`: of further models."""
        pages = {one.model: ModelPage(one.feed, one.parts, TreePicture(cast(Any, NoTree()))) for one in (self, *others)}
        return UiEndpoints(pages, OperatorsGuard(operators))

    def add(self, worker_id: str, role: str, state: str = "ready") -> PooledWorker:
        record = WorkerRecord(
            *(1, worker_id, 1, role, state, "127.0.0.1:1", None, "tiny", "hash", 16, BLOCKS, 4096, 0),
        )
        worker = self.pool.workers[worker_id] = PooledWorker(record, LINK, "")
        return worker

    def stir(self) -> None:
        """Every worker reports another load, and every decode worker has got KV."""
        dice, senders = self._dice, [key for key in self.pool.workers if key.startswith("prefill")]
        for worker in self.pool.workers.values():
            used = dice.randrange(BLOCKS)
            load = WorkerLoad(
                running=dice.randrange(64),
                waiting=dice.choice([0, 0, 0, 3]),
                blocks_used=used,
                blocks_cached=dice.randrange(BLOCKS - used),
                blocks_total=BLOCKS,
                step_ms=dice.uniform(5, 50),
            )
            self.ledger.report(worker.key, load)
            flow = self.metrics.flows.setdefault(worker.key, TokenCounts())
            flow.output_tokens += dice.randrange(1000)
            if worker.record.role == "decode" and senders:
                handoff = Handoff(dice.choice(senders), 40, 40_000_000, "nccl", TokenCounts())
                self.metrics.recent.handed_over(worker.key[0], handoff)

    async def _plan(self) -> Plan:
        if self.plan is None:
            raise UnavailableError("no planner runs here")
        return self.plan
