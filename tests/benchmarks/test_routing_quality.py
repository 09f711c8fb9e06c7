"""The simulation that routing is judged by: small traces whose outcome is known."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from baton_proto.discovery import WorkerLoad
from benchmarks.quality import simulation
from benchmarks.quality.policies import LeastLoaded, LongestPrefix, MakePolicy, Turns
from benchmarks.quality.simulation import Fleet, simulate
from benchmarks.quality.trace import TraceRequest, arrivals, load_trace
from benchmarks.quality.traffic import GENERATORS, TOKENS_PER_S, generated
from benchmarks.quality.worker import SimulatedEngine
from benchmarks.routing_quality import OURS, POLICIES, Cell, Run, geometric_means, summary
from router.workers.account import LoadView

BLOCK = 64
BATON = POLICIES[OURS]


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
    outcome = simulate(arrivals(conversation, 1.0, seed=0), Fleet(workers=1), BATON, seed=0)
    assert len(outcome.ttft_s) == len(conversation)
    assert outcome.prompt_tokens == sum(request.prompt_tokens for request in conversation)
    found = 0
    for turn in range(1, 4):
        found += sum(request.prompt_tokens // BLOCK * BLOCK for request in conversation[4 * (turn - 1) : 4 * turn])
    assert found <= outcome.cached_tokens <= found + 3 * 512  # and the system prompt, for those who came second


def test_ours_finds_more_than_round_robin(conversation: list[TraceRequest]) -> None:
    def hits(policy: MakePolicy) -> float:
        return simulate(arrivals(conversation, 1.0, seed=3), Fleet(workers=3), policy, seed=3).hit_rate

    assert hits(BATON) > hits(Turns)


@pytest.mark.parametrize("policy", [Turns, LeastLoaded, LongestPrefix, BATON])
def test_a_split_fleet_serves_each_request_once(conversation: list[TraceRequest], policy: MakePolicy) -> None:
    fleet = Fleet(workers=2, prefill_workers=2, noise=0.1)
    outcome = simulate(arrivals(conversation, 1.0, seed=0), fleet, policy, seed=0)
    assert len(outcome.ttft_s) == len(conversation)
    assert min(outcome.ttft_s) > 0


def test_a_slow_worker_takes_longer(conversation: list[TraceRequest]) -> None:
    def ttft_ms(speed: float) -> float:
        fleet = Fleet(workers=1, speeds=(speed,))
        return simulate(arrivals(conversation, 1.0, seed=0), fleet, Turns, seed=0).mean_ttft_ms

    assert ttft_ms(0.5) > 1.9 * ttft_ms(1.0)


@pytest.mark.parametrize("kind", GENERATORS)
def test_generated_traffic_has_its_rate_and_comes_again_the_same(kind: str) -> None:
    requests = generated(GENERATORS[kind], 256, 1500)
    again = generated(GENERATORS[kind], 256, 1500)
    assert all(one.batch_s == two.batch_s for one, two in zip(requests, again, strict=True))
    assert all(len(one.block_hashes) == one.prompt_tokens // 256 for one in requests)
    rate = sum(one.prompt_tokens for one in requests) / requests[-1].batch_s
    assert rate == pytest.approx(TOKENS_PER_S, rel=0.3)


def test_half_of_the_tokens_of_long_documents_come_again() -> None:
    requests = generated(GENERATORS["documents"], 64, 1000)
    seen: set[int] = set()
    found = total = 0
    for request in requests:
        hashes = request.sequence_hashes.tolist()
        found += sum(one in seen for one in hashes)
        total += len(hashes)
        seen.update(hashes)
    assert 0.4 < found / total < 0.7


def test_the_first_token_comes_when_the_formula_says(tmp_path: Path) -> None:
    requests = load_trace(write_trace(tmp_path / "trace.gz", [(0, 1000, 10, [1, 2])]), BLOCK)
    engine = SimulatedEngine(prefill_floor_ms=1.0, prefill_token_ms=0.1, prefill_pair_ms=1e-4)
    outcome = simulate(arrivals(requests, 1.0, seed=0), Fleet(workers=1, engine=engine), BATON, seed=0)
    assert outcome.mean_ttft_ms == pytest.approx(0.1 * 1000 + 1e-4 * 1000 * 500)


def test_a_prompt_that_comes_in_mid_decode_begins_with_the_next_step(tmp_path: Path) -> None:
    lines = [(0, 100, 1000, [1]), (3000, 100, 10, [2])]
    requests = load_trace(write_trace(tmp_path / "trace.gz", lines), BLOCK)
    engine = SimulatedEngine(decode_sequence_ms=500.0)
    outcome = simulate(arrivals(requests, 1.0, seed=0), Fleet(workers=1, engine=engine), BATON, seed=0)
    first, second = outcome.ttft_s
    assert first < 0.01
    assert 0.5 < second < 1.1  # the rest of one decode step, then its own with one decode beside it


def test_where_blocks_run_out_the_last_one_gives_its_own_back_and_is_computed_again(tmp_path: Path) -> None:
    """Each takes 3 of 10 blocks for its prompt, and grows by 5."""
    lines = [(0, 3 * BLOCK, 5 * BLOCK, [n]) for n in range(2)]
    requests = load_trace(write_trace(tmp_path / "trace.gz", lines), BLOCK)
    run = simulation.Run(Fleet(workers=1, tokens_per_worker=10 * BLOCK, block_size=BLOCK), BATON, seed=0)
    (worker,) = run.workers.values()
    for request in requests:
        run.arrive(0.0, request)
    run.until(math.inf)
    assert len(run.outcome.ttft_s) == 2, "a first token comes once"
    assert run.outcome.cached_tokens == 0, "what is computed again was not found"
    assert worker.scheduler.num_preemptions == 1
    assert worker.load() == WorkerLoad(blocks_total=10)
    assert run.routers[0].ledger.view(("decode-0", 1)) == LoadView(0, 0, 0)


def test_a_pool_that_is_too_small_for_one_request_ends_the_run(tmp_path: Path) -> None:
    requests = load_trace(write_trace(tmp_path / "trace.gz", [(0, BLOCK, 3 * BLOCK, [1])]), BLOCK)
    run = simulation.Run(Fleet(workers=1, tokens_per_worker=2 * BLOCK, block_size=BLOCK), BATON, seed=0)
    run.arrive(0.0, requests[0])
    with pytest.raises(RuntimeError, match="too small for a single request"):
        run.until(math.inf)


def test_goals_compare_ours_with_the_best_of_the_others() -> None:
    cell = Cell("mixed", "conversation", 1.0)

    def run(policy: str, hit_rate: float, ttft_ms: float) -> Run:
        return Run(cell, policy, 0, hit_rate, ttft_ms, ttft_ms, ttft_ms)

    others = [run("round robin", 0.1, 300.0), run("static a", 0.3, 250.0), run("static b", 0.3, 200.0)]
    rows = summary([*others, run(OURS, 0.29, 203.0)])
    assert [(row.policy, row.goals_met) for row in rows] == [("round robin", None), ("static b", None), (OURS, True)]
    assert [row.mean_regret for row in rows] == [1.5, 1.0, 1.015]
    assert geometric_means(rows)["tuned", "static"] == (1.0, 1.0)
    assert summary([*others, run(OURS, 0.29, 210.0)])[-1].goals_met is False
    with_tail = structs.replace(others[1], p99_ttft_ms=100.0)
    *_, static, ours = summary([others[0], with_tail, others[2], run(OURS, 0.29, 203.0)])
    assert (static.policy, static.mean_regret, static.p99_regret) == ("static b | a", 1.0, 1.0)
    assert (ours.mean_regret, ours.p99_regret, ours.goals_met) == (1.015, 2.03, False)
    assert summary([*others, run(OURS, 0.27, 190.0)])[-1].goals_met is False
