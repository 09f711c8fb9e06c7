"""What operators may ask, answered by a router without workers: for tests of the gRPC server."""

from typing import cast

from baton_proto.generated import inference_pb2 as pb
from router.api.grpc.admin import Questions, StatusSource
from router.counters.recent import Recent
from router.index.indexer import Indexer
from router.index.prefix_hits import PrefixHits
from router.index.radix_tree import RadixTree
from router.placement.assignment import Assigner
from router.placement.decisions import DecisionLog
from router.siblings import Siblings
from router.views.adapters_control import AdaptersControl
from router.views.explain import Explainer
from router.views.sleep_control import SleepControl
from router.views.tree_diff import TreeDiff
from router.views.tree_view import TreeView
from router.views.weights_control import WeightsControl
from router.workers.load import LoadLedger
from router.workers.pool import WorkerPool
from runtime.config.serving import RouterConfig
from runtime.nats.client import NatsClient
from tests.router.small_router import Holdings

NO_SIBLINGS = Siblings(cast(NatsClient, None), "router-0", list)


async def _no_status() -> pb.StatusResponse:
    return pb.StatusResponse()


def make_questions(status: StatusSource = _no_status) -> Questions:
    ledger, config = LoadLedger(16, 300.0), RouterConfig()
    pool = WorkerPool("router-0", "tiny", 16, ledger)
    assigner = Assigner(pool, Holdings(), ledger, config)
    return Questions(
        status=status,
        tree=TreeView("router-0", 16, RadixTree(), PrefixHits()),
        diff=TreeDiff(cast(Indexer, None), pool.snapshot, list),  # never asked of a worker
        explain=Explainer(assigner, DecisionLog(), Recent(), pool, config, 16, NO_SIBLINGS),
        sleep=SleepControl(pool),
        weights=WeightsControl(pool),
        adapters=AdaptersControl(pool, cast(NatsClient, None)),
    )
