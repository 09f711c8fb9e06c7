"""What users of other KV-aware routers complain of does not happen here, shown with the real decision in simulated
time. Where a rule prevents it, the same run without that rule shows that the test would notice."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from router.placement.cost import BUSY, FULL, SHIPPED, SHORT
from tests.router.placement_simulation import Job, Simulation, Timing, random_tokens

SYSTEM_TOKENS = 1024
BALANCED = 1.3  # largest / mean


def shared_system_prompt(
    simulation: Simulation,
    per_s: float,
    until_s: float,
    unique: tuple[int, int],
    output: tuple[int, int],
    system_tokens: int = SYSTEM_TOKENS,
) -> None:
    """Requests with one system prompt and texts of their own, through any of the routers."""
    rng = random.Random(simulation.seed + 1)
    system = random_tokens(rng, system_tokens)
    time_s, number = 0.0, 0
    while (time_s := time_s + rng.expovariate(per_s)) < until_s:
        tokens = system + random_tokens(rng, rng.randint(*unique))
        job = Job(f"r{number}", tokens, random_tokens(rng, rng.randint(*output)))
        simulation.at(time_s, lambda job=job: simulation.submit(job))  # type: ignore[misc]
        number += 1


def steady_state(simulation: Simulation, from_s: float, until_s: float) -> None:
    simulation.run(from_s)
    simulation.reset_counts()
    simulation.run(until_s)
    for worker in simulation.workers.values():
        worker.count(simulation.now, 0)


def hit_rate(simulation: Simulation) -> float:
    jobs = simulation.finished
    return sum(job.cached_tokens for job in jobs) / sum(len(job.tokens) for job in jobs)


# --- a shared system prompt does not send all traffic to one worker ---------------------------------------------------


@pytest.mark.parametrize("num_routers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_shared_system_prompt_is_served_by_all_64_workers_alike(num_routers: int) -> None:
    simulation = Simulation(decode=64, num_routers=num_routers)
    shared_system_prompt(simulation, per_s=250, until_s=10, unique=(32, 256), output=(64, 192))
    steady_state(simulation, 4, 10)
    assert simulation.imbalance("decode", "request_seconds") <= BALANCED
    assert simulation.imbalance("decode", "placed") <= BALANCED
    assert hit_rate(simulation) > 0.8, "and the prompt is cached nevertheless"


@pytest.mark.slow
def test_a_shared_system_prompt_is_computed_by_most_of_64_prefill_workers_when_they_have_work() -> None:
    """At two thirds of what they can do, they wait less than the 0.7 s that computing the prompt anew takes."""
    timing = Timing(prefill_tokens_per_s=1500)
    simulation = Simulation(prefill=64, decode=8, num_routers=3, timing=timing)
    shared_system_prompt(simulation, per_s=250, until_s=17, unique=(200, 300), output=(8, 64))
    steady_state(simulation, 5, 17)
    assert simulation.imbalance("prefill", "request_seconds") <= 2
    assert simulation.imbalance("decode", "request_seconds") <= BALANCED
    assert hit_rate(simulation) > 0.7
    latest = simulation.finished[len(simulation.finished) // 2 :]
    waited = [job.first_token_s - (len(job.tokens) - job.cached_tokens) / 1500 for job in latest]
    assert sum(waited) / len(waited) < 0.7


# --- several routers do not herd --------------------------------------------------------------------------------------


def herd_on_an_empty_worker(sharing: bool) -> float:
    """Peak of requests on a worker that joins 16 busy ones, in units of what each of those has."""
    simulation = Simulation(decode=17, num_routers=3, sharing=sharing)
    latest = simulation.workers["decode-16"]
    pooled = [router.pool.workers.pop("decode-16") for router in simulation.routers]
    shared_system_prompt(simulation, per_s=400, until_s=4.5, unique=(200, 300), output=(100, 150), system_tokens=0)
    simulation.run(3)
    for router, worker in zip(simulation.routers, pooled, strict=True):
        router.pool.workers["decode-16"] = worker
        router.pool._changed()  # it remembers who is ready
    peak = 0.0
    while simulation.now < 4:
        simulation.run(simulation.now + 0.01)
        others = [worker.running for worker in simulation.workers.values() if worker is not latest]
        peak = max(peak, latest.running / (sum(others) / len(others)))
    assert peak > 0.5, "it has joined"
    return peak


def test_three_routers_that_share_their_charges_do_not_herd_onto_an_empty_worker() -> None:
    assert herd_on_an_empty_worker(sharing=True) <= BALANCED


def test_without_sharing_they_would_herd() -> None:
    assert herd_on_an_empty_worker(sharing=False) > 1.6


# --- a chat stays where its history is --------------------------------------------------------------------------------


def run_chats(simulation: Simulation, num_chats: int = 8, turns: int = 6) -> list[list[Job]]:
    """Turn by turn, each answered before the next one comes: all workers are idle whenever one has to be chosen. All
    chats begin with the same words."""
    rng = random.Random(simulation.seed + 2)
    system = random_tokens(rng, 160)
    chats: list[list[Job]] = [[] for _ in range(num_chats)]
    for turn in range(turns):
        for number, chat in enumerate(chats):
            history = chat[-1].tokens + chat[-1].output if chat else system
            tokens = history + random_tokens(rng, rng.randint(50, 150))
            job = Job(f"chat{number}.{turn}", tokens, random_tokens(rng, rng.randint(20, 60)))
            chat.append(job)
            simulation.submit(job)
            simulation.run(simulation.now + 2.0)
    assert len(simulation.finished) == num_chats * turns
    return chats


def moves(chats: list[list[Job]], role: int) -> float:
    """Turns that went elsewhere than the turn before, per turn that could."""
    pairs = [pair for chat in chats for pair in pairwise(chat)]
    return sum(before.placed_on[role] != after.placed_on[role] for before, after in pairs) / len(pairs)


def test_chats_stay_where_they_are_while_nobody_else_is_there() -> None:
    assert moves(run_chats(Simulation(decode=16)), role=0) == 0


def test_chats_stay_on_their_prefill_and_decode_workers_when_their_prompts_are_shipped() -> None:
    chats = run_chats(Simulation(prefill=8, decode=16, placement={"local_prefill_tokens": 0}))
    assert moves(chats, role=1) == 0
    assert moves(chats, role=0) == 0


def test_by_load_alone_decode_workers_would_score_alike_and_chats_bounce() -> None:
    chats = run_chats(Simulation(prefill=8, decode=16, placement={"local_prefill_tokens": 0, "ship_token_ms": 0}))
    assert moves(chats, role=0) > 0.8


# --- predict on route -------------------------------------------------------------------------------------------------


def burst_of_siblings(ttl_s: float, siblings: int = 6) -> tuple[set[str], int]:
    """(prefill workers that a new long prefix went to, tokens computed for it), events being slow."""
    timing = Timing(event_delay_s=0.9)
    simulation = Simulation(prefill=16, decode=4, timing=timing, expected_s=ttl_s)
    rng = random.Random(3)
    prefix = random_tokens(rng, 4096)
    jobs = [Job(f"s{n}", prefix + random_tokens(rng, 40), random_tokens(rng, 5)) for n in range(siblings)]
    for number, job in enumerate(jobs):
        # The first one has just begun to be computed when the others come: nobody has said that it is cached.
        simulation.at(number * 0.1, lambda job=job: simulation.submit(job))  # type: ignore[misc]
    simulation.run(20)
    assert len(simulation.finished) == siblings
    computed = sum(worker.prefilled_tokens for worker in simulation.workers.values() if worker.role == "prefill")
    return {job.placed_on[1] for job in jobs}, computed


def test_a_burst_with_a_new_prefix_lands_where_its_first_request_was_sent() -> None:
    workers, computed = burst_of_siblings(ttl_s=30.0)
    assert len(workers) == 1
    assert computed < 4096 + 6 * 48


def test_without_expectations_the_burst_would_be_spread_and_computed_again() -> None:
    workers, computed = burst_of_siblings(ttl_s=0.0)
    assert len(workers) > 3
    assert computed > 3 * 4096


# --- conditional disaggregation ---------------------------------------------------------------------------------------


def test_a_decode_worker_that_holds_most_of_the_prompt_runs_the_short_rest() -> None:
    simulation = Simulation(prefill=2, decode=4)
    rng = random.Random(4)
    first = Job("first", random_tokens(rng, 2000), random_tokens(rng, 100))
    simulation.submit(first)
    simulation.run(5)
    second = Job("second", first.tokens + first.output + random_tokens(rng, 10), random_tokens(rng, 5))
    simulation.submit(second)
    simulation.run(10)
    assert first.reason in (SHIPPED, BUSY)
    assert first.placed_on[1]
    assert second.reason == SHORT
    assert second.placed_on == (first.placed_on[0], "")
    assert second.cached_tokens == 2096, "question and answer, all that is in whole blocks"


@pytest.mark.slow
def test_while_the_prefill_worker_falls_behind_decode_workers_run_some_prompts_themselves() -> None:
    def waits(placement: dict[str, int]) -> tuple[float, float, Counter[int]]:
        """Median and 99th percentile of the time to the first token, s, and how often prompts ran where and why."""
        simulation = Simulation(prefill=1, decode=1, placement=placement)
        rng, now_s = random.Random(6), 0.0
        for number in range(400):
            now_s += rng.expovariate(1.7)  # 85 % of what the prefill worker can do
            job = Job(f"job-{number}", random_tokens(rng, 10_000), random_tokens(rng, 50))
            simulation.at(now_s, lambda job=job: simulation.submit(job))  # type: ignore[misc]
        simulation.run(now_s + 60)
        firsts = sorted(job.first_token_s for job in simulation.finished)
        return firsts[200], firsts[395], simulation.placements()

    alone, helped = waits({"local_prefill_tokens": 0}), waits({})
    full = waits({"prefill_queue_tokens": 16384, "keep_steps": 1_000_000})
    assert set(alone[2]) == {SHIPPED}
    assert 40 < helped[2][SHORT] < 200
    assert 8 < full[2][FULL] < 100
    assert helped[0] < 0.7 * alone[0]
    assert helped[1] < 0.5 * alone[1]
