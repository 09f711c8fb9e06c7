"""The pure modules whose tests are judged by mutants, and the tests that have to notice them."""

from pathlib import Path
from typing import Final

PURE: Final = (
    "engine/blocks/block_manager.py",
    "engine/blocks/disk_prefixes.py",
    "engine/core/prefill_budget.py",
    "engine/blocks/prefix_cache.py",
    "engine/blocks/prefix_table.py",
    "engine/blocks/tier_traffic.py",
    "engine/blocks/kept.py",
    "engine/sequences/moves.py",
    "engine/blocks/resting.py",
    "engine/core/scheduler.py",
    "kvtransfer/decode_side/lease.py",
    "kvtransfer/decode_side/ledger.py",
    "kvtransfer/slab/byte_runs.py",
    "kvtransfer/slab/head_plan.py",
    "planner/policy/forecast.py",
    "planner/policy/guards.py",
    "planner/policy/ladder.py",
    "planner/policy/sizing.py",
    "planner/policy/slo.py",
    "planner/policy/step_model.py",
    "planner/policy/threshold.py",
    "prefill_worker/push_plan.py",
    "router/index/edge.py",
    "router/index/edge_table.py",
    "router/index/holders.py",
    "router/index/match.py",
    "router/index/radix_tree.py",
    "router/placement/candidates.py",
    "router/placement/cost.py",
    "router/placement/expected_prefixes.py",
    "router/placement/placement.py",
    "router/requests/drain_rate.py",
    "router/text/output_text.py",
    "router/text/stop_strings.py",
    "router/workers/account.py",
    "router/workers/step_speed.py",
    "runtime/blocks/block_hash.py",
    "runtime/config/step_fit.py",
    "runtime/fair_queue.py",
    "runtime/kv_events/feed.py",
)

ALSO: Final = {
    "engine/blocks/block_manager.py": (
        "tests/engine/blocks/test_lower_tier.py",
        "tests/engine/blocks/test_tier_calls.py",
        "tests/engine/blocks/test_cache_hints.py",
    ),
    "engine/blocks/disk_prefixes.py": (
        "tests/engine/core/test_disk_waits.py",
        "tests/engine/blocks/test_flush.py",
        "tests/engine/blocks/test_lower_tier.py",
    ),
    "engine/blocks/prefix_table.py": (
        "tests/engine/blocks/test_prefix_cache.py",
        "tests/engine/blocks/test_prefix_collisions.py",
        "tests/engine/blocks/test_disk_prefixes.py",
    ),
    "engine/blocks/tier_traffic.py": (
        "tests/engine/blocks/test_tier_calls.py",
        "tests/engine/blocks/test_lower_tier.py",
        "tests/engine/core/test_disk_waits.py",
    ),
    "engine/blocks/prefix_cache.py": (
        "tests/engine/blocks/test_block_manager.py",
        "tests/engine/blocks/test_disk_prefixes.py",
        "tests/engine/blocks/test_prefix_collisions.py",
        "tests/engine/blocks/test_lower_tier.py",
    ),
    "engine/sequences/moves.py": ("tests/engine/blocks/test_lower_tier.py",),
    "engine/blocks/kept.py": ("tests/engine/blocks/test_cache_hints.py",),
    "engine/blocks/resting.py": ("tests/engine/blocks/test_prefix_cache.py", "tests/engine/blocks/test_lower_tier.py"),
    "router/index/edge.py": ("tests/router/index/test_radix_tree.py",),
    "router/index/edge_table.py": ("tests/router/index/test_radix_tree.py",),
    "router/index/holders.py": ("tests/router/index/test_radix_tree.py",),
    "router/index/match.py": ("tests/router/index/test_radix_tree.py",),
    "router/placement/candidates.py": ("tests/router/placement/test_placement.py",),
    "router/placement/cost.py": ("tests/router/placement/test_placement.py",),
    "runtime/config/step_fit.py": ("tests/planner/policy/test_step_model.py",),
}
"""A part that is only reached through another module is judged by that module's tests too."""


def judges_of(module: str) -> list[str]:
    """The test files of a module. Raises FileNotFoundError when it has none."""
    path = Path(module)
    mirror = Path("tests") / path.parent / f"test_{path.name}"
    found = [str(test) for test in (mirror, *map(Path, ALSO.get(module, ()))) if test.exists()]
    if not found:
        raise FileNotFoundError(f"{module} has no tests: {mirror} is not there")
    return found
