"""A server's /metrics, read."""

import pytest

from engine.vllm.server.gauges import Gauges, of_any
from tests.engine.vllm.server.imitation import METRICS


def only(page: bytes) -> Gauges:
    (gauges,) = Gauges.read(page).values()
    return gauges


def later(**numbers: float) -> bytes:
    """The page with other values."""
    lines = METRICS.splitlines()
    for name, value in numbers.items():
        lines = [f"{line.rpartition(' ')[0]} {value}" if line.startswith(f"vllm:{name}{{") else line for line in lines]
    return "\n".join(lines).encode()


def test_blocks_and_requests_are_read_and_buckets_are_not() -> None:
    gauges = only(METRICS.encode())
    assert (gauges.block_size, gauges.num_blocks, gauges.running, gauges.waiting) == (32, 728, 3, 1)
    assert gauges.numbers["inter_token_latency_seconds_count"] == 10


def test_each_rank_has_gauges_of_its_own_and_its_share_of_the_blocks_of_all() -> None:
    ranks = Gauges.read((METRICS + METRICS.replace('engine="0"', 'engine="1"').replace("} 3.0", "} 4.0")).encode())
    assert [(rank, of.running, of.num_blocks, of.block_size) for rank, of in ranks.items()] == [
        (0, 3, 364, 32),
        (1, 4, 364, 32),
    ]


def test_a_page_without_vllm_tells_nothing() -> None:
    assert (Gauges.read(b"up 1\n"), of_any({})) == ({}, Gauges())


@pytest.mark.parametrize("page", [b"vllm:num_requests_running{ nothing", b'vllm:num_requests_running{a="b"} x'])
def test_a_page_that_is_none_is_an_error(page: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        Gauges.read(page)


def test_a_step_is_as_long_as_tokens_are_apart() -> None:
    before = only(later(num_requests_waiting=0))
    page = {"num_requests_waiting": 0, "inter_token_latency_seconds_count": 30}
    now = only(later(**page, inter_token_latency_seconds_sum=0.8))
    details = now.stats(before).iteration_details
    assert details.elapsed_ms == pytest.approx(30)
    assert (details.num_generation_requests, details.num_ctx_tokens) == (3, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_tokens_total": 200},  # prompts were computed in between
        {"num_requests_waiting": 2},
        {"num_requests_running": 0},
        {"inter_token_latency_seconds_count": 4},  # it has started anew
        {"inter_token_latency_seconds_count": 10},  # no token
    ],
)
def test_a_step_is_not_guessed(changes: dict[str, float]) -> None:
    before = only(later(num_requests_waiting=0))
    page = {"num_requests_waiting": 0, "inter_token_latency_seconds_count": 30} | changes
    now = only(later(**page, inter_token_latency_seconds_sum=0.8))
    assert now.stats(before).iteration_details is None
    assert now.stats(None).iteration_details is None
