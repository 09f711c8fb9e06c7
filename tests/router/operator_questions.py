"""What operators may ask, answered by a router without workers: for tests of the gRPC server."""

from typing import cast

from baton.config import RouterConfig
from router.assignment import Assigner
from router.decisions import DecisionLog
from router.explain import Explainer
from router.grpc_admin import Questions, StatusSource
from router.indexer import Indexer
from router.load import LoadLedger
from router.prefix_hits import PrefixHits
from router.radix_tree import RadixTree
from router.sleep_control import SleepControl
from router.tree_diff import TreeDiff
from router.tree_view import TreeView
from router.worker_pool import WorkerPool
from tests.router.small_router import Holdings


def make_questions(status: StatusSource) -> Questions:
    ledger, config = LoadLedger(16, 300.0), RouterConfig()
    pool = WorkerPool("router-0", "tiny", 16, ledger)
    assigner = Assigner(pool, Holdings(), ledger, config)
    return Questions(
        status=status,
        tree=TreeView("router-0", 16, RadixTree(), PrefixHits()),
        diff=TreeDiff(cast(Indexer, None), pool.snapshot, list),  # never asked of a worker
        explain=Explainer(assigner, DecisionLog(), pool, config, 16),
        sleep=SleepControl(pool),
    )
