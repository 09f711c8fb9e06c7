"""Placement against a brute-force reading of its cost, and the rules for where a prompt runs."""

import random
from collections import Counter

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from baton.config import PlacementConfig
from router.placement import Candidate, Request, place

BLOCK_SIZE = 16
CONFIG = PlacementConfig()


def candidate(name: str, cached: int = 0, queued: int = 0, active: int = 0, requests: int = 0) -> Candidate:
    return Candidate((name, 1), cached, queued, active, requests)


def request(num_tokens: int, *excluded: str) -> Request:
    return Request(num_tokens, BLOCK_SIZE, frozenset((name, 1) for name in excluded))


def candidates(prefix: str, min_size: int) -> st.SearchStrategy[list[Candidate]]:
    loads = st.tuples(st.integers(0, 200), st.integers(0, 20_000), st.integers(0, 500), st.integers(0, 10))
    return st.lists(loads, min_size=min_size, max_size=8).map(
        lambda rows: [candidate(f"{prefix}{i}", *row) for i, row in enumerate(rows)]
    )


weights = st.sampled_from([0.0, 0.5, 1.0, 2.0])
configs = st.builds(
    PlacementConfig,
    overlap_weight=weights,
    prefill_weight=weights,
    load_weight=weights,
    transfer_weight=weights,
    local_prefill_tokens=st.sampled_from([0, 32, 500]),
    local_prefill_requests=st.sampled_from([1, 5, 64]),
    prefill_queue_tokens=st.sampled_from([1, 1000, 16384]),
)


@given(st.integers(1, 4000), candidates("d", 0), candidates("p", 0), configs, st.integers(0, 2**32), st.data())
def test_the_choice_is_the_cheapest_that_is_allowed(
    num_tokens: int,
    decode: list[Candidate],
    prefill: list[Candidate],
    config: PlacementConfig,
    seed: int,
    data: st.DataObject,
) -> None:
    excluded = data.draw(st.sets(st.sampled_from([c.worker[0] for c in decode + prefill]))) if decode + prefill else []
    facts = request(num_tokens, *excluded)
    placement = place(facts, decode, prefill, config, random.Random(seed))

    def usable(c: Candidate) -> int:
        return min(c.cached_blocks, (num_tokens - 1) // BLOCK_SIZE)

    prompt = (num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE

    def run_cost(c: Candidate) -> float:
        blocks = prompt - config.overlap_weight * usable(c) + c.queued_prefill_tokens / BLOCK_SIZE
        return config.prefill_weight * blocks + config.load_weight * c.active_blocks

    alive = [p for p in prefill if p.worker[0] not in excluded]
    takers = [p for p in alive if p.queued_prefill_tokens < config.prefill_queue_tokens]
    costs: dict[str, float] = {}
    local: set[str] = set()
    for d in decode:
        if d.worker[0] in excluded:
            continue
        short = num_tokens - BLOCK_SIZE * usable(d) + d.queued_prefill_tokens <= config.local_prefill_tokens
        if (short and d.requests < config.local_prefill_requests) or not alive:
            local.add(d.worker[0])
            costs[d.worker[0]] = run_cost(d)
        elif takers:
            shipped = config.transfer_weight * (prompt - usable(d))
            costs[d.worker[0]] = config.prefill_weight * prompt + shipped + config.load_weight * d.active_blocks
    if not costs:
        assert placement is None
        return
    assert placement is not None
    chosen = placement.decode[0]
    assert costs[chosen] == pytest.approx(min(costs.values()))
    assert (placement.prefill is None) == (chosen in local)
    if placement.prefill is not None:
        cheapest = min(map(run_cost, takers))
        taken = next(p for p in takers if p.worker == placement.prefill)
        assert run_cost(taken) == pytest.approx(cheapest)
    told = {cost.worker[0]: cost.total for cost in placement.costs if cost.role == "decode" and not cost.barred}
    assert told == pytest.approx(costs)
    assert len(placement.costs) == len(decode) + len(prefill)


def test_equal_workers_share_at_random() -> None:
    decode = [candidate(f"d{i}", active=7) for i in range(4)]
    prefill = [candidate(f"p{i}", cached=3) for i in range(4)]
    rng = random.Random(1)
    chosen = Counter[str]()
    for _ in range(2000):
        placement = place(request(640), decode, prefill, CONFIG, rng)
        assert placement is not None
        assert placement.prefill is not None
        chosen.update((placement.decode[0], placement.prefill[0]))
    assert len(chosen) == 8
    assert all(400 < count < 600 for count in chosen.values())


def test_a_temperature_spreads_and_still_prefers_the_cheaper() -> None:
    config = replace(CONFIG, temperature=0.5)
    decode = [candidate("idle"), candidate("half", active=50), candidate("full", active=100)]
    rng = random.Random(2)
    placements = [place(request(640), decode, [candidate("p")], config, rng) for _ in range(2000)]
    chosen = Counter(placement.decode[0] for placement in placements if placement is not None)
    assert chosen["idle"] > chosen["half"] > chosen["full"] > 0


def test_a_short_uncached_rest_runs_on_the_decode_worker_that_holds_the_prefix() -> None:
    decode = [candidate("cold"), candidate("warm", cached=40, active=30)]
    placement = place(request(40 * BLOCK_SIZE + 5), decode, [candidate("p", cached=40)], CONFIG, random.Random())
    assert placement is not None
    assert (placement.decode[0], placement.prefill, placement.reason) == ("warm", None, "short prompt")
    assert placement.cached_blocks == 40


def test_a_decode_worker_that_runs_prompts_already_is_spared_another() -> None:
    busy = [candidate("d", queued=30)]
    placement = place(request(20), busy, [candidate("p")], CONFIG, random.Random())
    assert placement is not None
    assert placement.prefill == ("p", 1)


@pytest.mark.parametrize(
    ("num_tokens", "cached", "queued", "requests", "reason"),
    [
        (32, 0, 0, 0, "short prompt"),
        (33, 0, 0, 0, "shipped"),
        (40 * BLOCK_SIZE + 32, 40, 0, 0, "short prompt"),
        (40 * BLOCK_SIZE + 33, 40, 0, 0, "shipped"),
        (20, 0, 12, 0, "short prompt"),
        (20, 0, 13, 0, "shipped, decode worker busy"),
        (20, 0, 0, 63, "short prompt"),
        (20, 0, 0, 64, "shipped, decode worker busy"),
    ],
)
def test_a_prompt_is_shipped_beyond_a_threshold_each_and_the_reason_names_it(
    num_tokens: int, cached: int, queued: int, requests: int, reason: str
) -> None:
    decode = [candidate("d", cached=cached, queued=queued, requests=requests)]
    placement = place(request(num_tokens), decode, [candidate("p")], CONFIG, random.Random())
    assert placement is not None
    assert placement.reason == reason
    assert (placement.prefill is None) == (reason == "short prompt")
    (cost,) = [cost for cost in placement.costs if cost.role == "decode"]
    assert cost.reason == reason


def test_a_busy_decode_worker_runs_the_prompt_when_nobody_else_can() -> None:
    busy = [candidate("d", queued=5000, requests=200)]
    placement = place(request(20), busy, [], CONFIG, random.Random())
    assert placement is not None
    assert placement.reason == "no prefill worker"


def test_of_equally_busy_decode_workers_the_one_that_holds_more_of_a_shipped_prompt_gets_it() -> None:
    decode = [candidate("cold", active=50), candidate("warm", cached=30, active=50), candidate("idle", active=45)]
    rng = random.Random()
    for config, chosen in ((CONFIG, "idle"), (replace(CONFIG, transfer_weight=0.5), "warm")):
        placement = place(request(1000), decode, [candidate("p")], config, rng)
        assert placement is not None
        assert (placement.decode[0], placement.reason) == (chosen, "shipped")
    placement = place(request(1000), decode[:2], [candidate("p")], CONFIG, rng)
    assert placement is not None
    assert placement.decode[0] == "warm"


def test_a_decode_worker_that_holds_the_prompt_is_left_when_it_is_much_busier_than_that_saves() -> None:
    decode = [candidate("cold"), candidate("warm", cached=40, active=45)]
    placement = place(request(40 * BLOCK_SIZE + 5), decode, [candidate("p", cached=40)], CONFIG, random.Random())
    assert placement is not None
    assert (placement.decode[0], placement.prefill) == ("cold", ("p", 1))


def test_the_prompt_runs_on_the_decode_worker_when_no_prefill_worker_is_alive() -> None:
    for prefill, facts in (([], request(5000)), ([candidate("p")], request(5000, "p"))):
        placement = place(facts, [candidate("d")], prefill, CONFIG, random.Random())
        assert placement is not None
        assert (placement.prefill, placement.reason) == (None, "no prefill worker")


def test_a_long_prompt_waits_while_every_prefill_worker_has_its_fill() -> None:
    full = [candidate("p0", queued=16384), candidate("p1", queued=20000)]
    assert place(request(5000), [candidate("d")], full, CONFIG, random.Random()) is None
    short = place(request(20), [candidate("d")], full, CONFIG, random.Random())
    assert short is not None
    assert short.prefill is None


def test_without_a_decode_worker_everything_waits() -> None:
    assert place(request(20), [], [candidate("p")], CONFIG, random.Random()) is None
    assert place(request(20, "d"), [candidate("d")], [candidate("p")], CONFIG, random.Random()) is None


def test_nothing_runs_on_the_decode_worker_when_the_limit_is_zero() -> None:
    config = replace(CONFIG, local_prefill_tokens=0)
    placement = place(request(1), [candidate("d", cached=100)], [candidate("p")], config, random.Random())
    assert placement is not None
    assert placement.prefill == ("p", 1)


def test_a_shared_prefix_does_not_draw_all_requests_to_one_worker() -> None:
    """One worker holds a system prompt of 100 blocks; each request adds load where it goes."""
    active = {f"d{i}": 0 for i in range(16)}
    rng = random.Random(3)
    for _ in range(320):
        decode = [candidate(name, cached=100 if name == "d0" else 0, active=n) for name, n in active.items()]
        placement = place(request(100 * BLOCK_SIZE + 20), decode, [candidate("p")], CONFIG, rng)
        assert placement is not None
        active[placement.decode[0]] += 102
    assert max(active.values()) / (sum(active.values()) / len(active)) <= 1.3
