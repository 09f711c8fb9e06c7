"""The benchmark of a router's restart, small: that it still knows the parts it is made of."""

from benchmarks.router_restart import _measure


async def test_a_router_knows_all_blocks_again_after_a_restart() -> None:
    result = await _measure(num_blocks=2_000, num_workers=2, rounds=2)
    assert len(result.restarts) == 2
    assert 1_000 < result.blocks <= 2_000  # the workers share their system prompts
