"""The simulation that routing is judged by: small traces whose outcome is known."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality.simulation import Fleet, simulate
from benchmarks.quality.trace import TraceRequest, arrivals, load_trace
from benchmarks.routing_quality import OURS, Run, summary
from runtime.config.serving import MockConfig, PlacementConfig

BLOCK = 64


def write_trace(path: Path, lines: list[tuple[int, int, int, list[int]]]) -> Path:
    """(timestamp ms, input, output, hash ids) each."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    with gzip.open(path, "wt") as file:
        for line in lines:
            file.write(json.dumps(dict(zip(names, line, strict=True))) + "\n")
    return path


@pytest.fixture
def conversation(tmp_path: Path) -> list[TraceRequest]:
    """Four turns of each of four users, a system prompt of 512 tokens that all share."""
    lines = []
    for turn in range(4):
        for user in range(4):
            ids = [0, *range(100 * user + 1, 100 * user + 2 * turn + 3)]
            lines.append((30_000 * turn, 512 * len(ids) - 100, 40, ids))
    return load_trace(write_trace(tmp_path / "trace.gz", lines), BLOCK)


def test_requests_share_hashes_as_far_as_they_share_ids(conversation: list[TraceRequest]) -> None:
    first, again, other = conversation[0], conversation[4], conversation[1]
    shared = first.prompt_tokens // BLOCK
    assert np.array_equal(again.sequence_hashes[:shared], first.sequence_hashes)
    assert np.array_equal(other.sequence_hashes[:8], first.sequence_hashes[:8])
    assert other.sequence_hashes[8] != first.sequence_hashes[8]
    assert len(first.sequence_hashes) == shared


def test_arrivals_of_one_timestamp_are_spread_and_sped_up(conversation: list[TraceRequest]) -> None:
    times = [at_s for at_s, _ in arrivals(conversation, 2.0, seed=1)]
    assert times == sorted(times)
    assert 0 <= times[0] < times[3] < 1.5
    assert 15.0 <= times[4] < 16.5
    assert times != [at_s for at_s, _ in arrivals(conversation, 2.0, seed=2)]


def test_one_worker_finds_all_that_was_there_before(conversation: list[TraceRequest]) -> None:
    outcome = simulate(arrivals(conversation, 1.0, seed=0), Fleet(workers=1), PlacementConfig(), seed=0)
    assert len(outcome.ttft_s) == len(conversation)
    assert outcome.prompt_tokens == sum(request.prompt_tokens for request in conversation)
    found = 0
    for turn in range(1, 4):
        found += sum(request.prompt_tokens // BLOCK * BLOCK for request in conversation[4 * (turn - 1) : 4 * turn])
    assert found <= outcome.cached_tokens <= found + 3 * 512  # and the system prompt, for those who came second


def test_ours_finds_more_than_round_robin(conversation: list[TraceRequest]) -> None:
    def hits(config: PlacementConfig | None) -> float:
        return simulate(arrivals(conversation, 1.0, seed=3), Fleet(workers=3), config, seed=3).hit_rate

    assert hits(PlacementConfig()) > hits(None)


def test_the_first_token_comes_when_the_formula_says(tmp_path: Path) -> None:
    requests = load_trace(write_trace(tmp_path / "trace.gz", [(0, 1000, 10, [1, 2])]), BLOCK)
    engine = MockConfig(prefill_floor_ms=1.0, prefill_token_ms=0.1, prefill_pair_ms=1e-4)
    outcome = simulate(arrivals(requests, 1.0, seed=0), Fleet(workers=1, engine=engine), PlacementConfig(), seed=0)
    assert outcome.mean_ttft_ms == pytest.approx(0.1 * 1000 + 1e-4 * 1000 * 500)


def test_a_prompt_that_comes_in_mid_decode_begins_with_the_next_step(tmp_path: Path) -> None:
    lines = [(0, 100, 1000, [1]), (3000, 100, 10, [2])]
    requests = load_trace(write_trace(tmp_path / "trace.gz", lines), BLOCK)
    engine = MockConfig(decode_floor_ms=500.0)
    outcome = simulate(arrivals(requests, 1.0, seed=0), Fleet(workers=1, engine=engine), PlacementConfig(), seed=0)
    first, second = outcome.ttft_s
    assert first < 0.01
    assert 0.5 < second < 1.1  # the rest of one decode step, then its own with one decode beside it


def test_goals_compare_ours_with_the_best_of_the_others() -> None:
    def run(policy: str, hit_rate: float, ttft_ms: float) -> Run:
        return Run(1.0, policy, 0, hit_rate, ttft_ms, ttft_ms, ttft_ms)

    others = [run("round robin", 0.1, 300.0), run("another", 0.3, 200.0)]
    assert [row.goals_met for row in summary([*others, run(OURS, 0.29, 190.0)])] == [None, None, True]
    assert summary([*others, run(OURS, 0.29, 210.0)])[-1].goals_met is False
    assert summary([*others, run(OURS, 0.27, 190.0)])[-1].goals_met is False
