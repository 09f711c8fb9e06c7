"""Placement against a brute-force reading of its cost, and the rules for where a prompt runs."""

import random
from collections import Counter

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from baton_proto.discovery import prefill_pairs
from router.placement.candidates import Request
from router.placement.cost import (
    ALONE,
    BUSY,
    CACHED,
    FREE,
    FULL,
    NO_ROOM,
    NOBODY_SHIPS,
    QUEUE_FULL,
    SHIPPED,
    SHORT,
)
from runtime.config.serving import PlacementConfig
from tests.router.candidates import Candidate, place

BLOCK_SIZE = 16
CONFIG = PlacementConfig()


def candidate(
    name: str, cached: int = 0, queued: int = 0, active: int = 0, requests: int = 0, stored: float = 0.0, pairs: int = 0
) -> Candidate:
    return Candidate((name, 1), cached, queued, active, requests, stored, pairs)


def request(num_tokens: int, *excluded: str) -> Request:
    return Request(num_tokens, BLOCK_SIZE, frozenset((name, 1) for name in excluded))


def candidates(prefix: str, min_size: int) -> st.SearchStrategy[list[Candidate]]:
    cached, queued, active = st.integers(0, 200), st.just(0) | st.integers(0, 20_000), st.integers(0, 500)
    pairs = st.integers(0, 10**9)
    loads = st.tuples(cached, queued, active, st.integers(0, 10), st.integers(0, 5000), pairs)
    return st.lists(loads, min_size=min_size, max_size=8).map(
        lambda rows: [candidate(f"{prefix}{i}", *row) for i, row in enumerate(rows)]
    )


weights = st.sampled_from([0.0, 0.5, 1.0, 2.0])
configs = st.builds(
    PlacementConfig,
    overlap_weight=weights,
    mixed_overlap_weight=weights,
    prefill_weight=weights,
    load_weight=weights,
    transfer_weight=weights,
    mixed_load_weight=weights,
    eviction_weight=st.sampled_from([0.0, 0.01]),
    attention_tokens=st.sampled_from([0, 1000, 16384]),
    local_prefill_tokens=st.sampled_from([0, 32, 500]),
    local_prefill_requests=st.sampled_from([1, 5, 64]),
    local_prefill_when_full=st.booleans(),
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

    def work(blocks: float, pairs: float) -> float:
        return blocks + (pairs / config.attention_tokens / BLOCK_SIZE if config.attention_tokens else 0)

    prompt_work = work(prompt, num_tokens**2 / 2)

    def prompt_cost(c: Candidate, overlap_weight: float) -> float:
        saved = work(usable(c), (usable(c) * BLOCK_SIZE) ** 2 / 2)
        queued = work(c.queued_prefill_tokens / BLOCK_SIZE, c.queued_prefill_pairs)
        return config.prefill_weight * (prompt_work - overlap_weight * saved + queued)

    def mixed_cost(c: Candidate) -> float:
        cost = prompt_cost(c, config.mixed_overlap_weight) + config.mixed_load_weight * c.active_blocks
        return cost + config.eviction_weight * c.stored_blocks

    alive = [p for p in prefill if p.worker[0] not in excluded]
    takers = [p for p in alive if p.queued_prefill_tokens < config.prefill_queue_tokens]
    costs: dict[str, float] = {}
    local: set[str] = set()
    for d in decode:
        if d.worker[0] in excluded:
            continue
        short = num_tokens - BLOCK_SIZE * usable(d) + d.queued_prefill_tokens <= config.local_prefill_tokens
        helps = config.local_prefill_when_full and config.local_prefill_tokens and not takers
        helps = helps and d.queued_prefill_tokens == 0
        if ((short or helps) and d.requests < config.local_prefill_requests) or not alive:
            local.add(d.worker[0])
            own = prompt_cost(d, config.overlap_weight) + config.load_weight * d.active_blocks
            costs[d.worker[0]] = own if alive else mixed_cost(d)
        elif takers:
            shipped = config.transfer_weight * (prompt - usable(d))
            costs[d.worker[0]] = config.prefill_weight * prompt_work + shipped + config.load_weight * d.active_blocks
    if not costs:
        assert placement is None
        return
    assert placement is not None
    chosen = placement.decode[0]
    assert costs[chosen] == pytest.approx(min(costs.values()))
    assert (placement.prefill is None) == (chosen in local)
    if placement.prefill is not None:
        cheapest = min(prompt_cost(p, config.overlap_weight) for p in takers)
        taken = next(p for p in takers if p.worker == placement.prefill)
        assert prompt_cost(taken, config.overlap_weight) == pytest.approx(cheapest)
    told = {cost.worker[0]: cost.total for cost in placement.costs if cost.role == "decode" and not cost.barred}
    assert told == pytest.approx(costs)
    assert all(cost.total == pytest.approx(sum(cost.terms), abs=1e-6) for cost in placement.costs)
    assert len(placement.costs) == len(decode) + len(prefill)


def test_decode_workers_without_room_are_passed_over_and_say_so() -> None:
    decode = [candidate("full", cached=40, requests=8), candidate("roomy", active=500, requests=7)]
    placement = place(request(640), decode, [], CONFIG, random.Random(), max_running=8)
    assert placement is not None
    assert placement.decode == ("roomy", 1)
    assert [cost.barred for cost in placement.costs] == [NO_ROOM, FREE]
    assert place(request(640), decode, [], CONFIG, random.Random(), max_running=7) is None


def test_of_two_queues_of_as_many_tokens_the_one_of_short_prompts_is_taken() -> None:
    short, long = 20 * prefill_pairs(0, 1000), prefill_pairs(0, 20_000)
    decode = [candidate("long", queued=20_000, pairs=long), candidate("short", queued=20_000, pairs=short)]
    placement = place(request(640), decode, [], CONFIG, random.Random())
    assert placement is not None
    assert placement.decode == ("short", 1)


def test_the_deeper_a_cached_prefix_reaches_the_more_each_of_its_blocks_is_worth() -> None:
    """Half a prompt of 64k tokens that is cached is worth a longer queue than half of one of 1k, block for block."""

    def worth(num_tokens: int) -> float:
        placement = place(request(num_tokens), [candidate("d", cached=num_tokens // 32)], [], CONFIG, random.Random())
        assert placement is not None
        (cost,) = placement.costs
        return -cost.terms[CACHED] / CONFIG.mixed_overlap_weight / cost.cached_blocks

    assert worth(1000) == pytest.approx(1.0, abs=0.02)
    assert worth(2 * CONFIG.attention_tokens) == pytest.approx(1.5)


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
    assert (placement.decode[0], placement.prefill, placement.reason) == ("warm", None, SHORT)
    assert placement.cached_blocks == 40


def test_a_decode_worker_that_runs_prompts_already_is_spared_another() -> None:
    busy = [candidate("d", queued=30)]
    placement = place(request(20), busy, [candidate("p")], CONFIG, random.Random())
    assert placement is not None
    assert placement.prefill == ("p", 1)


@pytest.mark.parametrize(
    ("num_tokens", "cached", "queued", "requests", "reason"),
    [
        (32, 0, 0, 0, SHORT),
        (33, 0, 0, 0, SHIPPED),
        (40 * BLOCK_SIZE + 32, 40, 0, 0, SHORT),
        (40 * BLOCK_SIZE + 33, 40, 0, 0, SHIPPED),
        (20, 0, 12, 0, SHORT),
        (20, 0, 13, 0, BUSY),
        (20, 0, 0, 63, SHORT),
        (20, 0, 0, 64, BUSY),
    ],
)
def test_a_prompt_is_shipped_beyond_a_threshold_each_and_the_reason_names_it(
    num_tokens: int, cached: int, queued: int, requests: int, reason: int
) -> None:
    decode = [candidate("d", cached=cached, queued=queued, requests=requests)]
    placement = place(request(num_tokens), decode, [candidate("p")], CONFIG, random.Random())
    assert placement is not None
    assert placement.reason == reason
    assert (placement.prefill is None) == (reason == SHORT)
    (cost,) = [cost for cost in placement.costs if cost.role == "decode"]
    assert cost.reason == reason


def test_a_busy_decode_worker_runs_the_prompt_when_nobody_else_can() -> None:
    busy = [candidate("d", queued=5000, requests=200)]
    placement = place(request(20), busy, [], CONFIG, random.Random())
    assert placement is not None
    assert placement.reason == ALONE


def test_of_equally_busy_decode_workers_the_one_that_holds_more_of_a_shipped_prompt_gets_it() -> None:
    decode = [candidate("cold", active=50), candidate("warm", cached=30, active=50), candidate("idle", active=45)]
    rng = random.Random()
    for config, chosen in ((CONFIG, "idle"), (replace(CONFIG, transfer_weight=0.5), "warm")):
        placement = place(request(1000), decode, [candidate("p")], config, rng)
        assert placement is not None
        assert (placement.decode[0], placement.reason) == (chosen, SHIPPED)
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
        assert (placement.prefill, placement.reason) == (None, ALONE)


def test_while_every_prefill_worker_has_its_fill_decode_workers_without_prompts_run_one_each() -> None:
    full = [candidate("p0", queued=16384), candidate("p1", queued=20000)]
    decode = [candidate("prompt", queued=1), candidate("busy", requests=64), candidate("free", active=500, requests=63)]
    placement = place(request(5000), decode, full, CONFIG, random.Random())
    assert placement is not None
    assert (placement.decode[0], placement.prefill, placement.reason) == ("free", None, FULL)
    assert [cost.barred for cost in placement.costs] == [QUEUE_FULL] * 2 + [NOBODY_SHIPS] * 2 + [FREE]
    assert place(request(5000), decode[:2], full, CONFIG, random.Random()) is None
    placement = place(request(5000), decode, [*full, candidate("p2", queued=16383)], CONFIG, random.Random())
    assert placement is not None
    assert placement.prefill == ("p2", 1)


@pytest.mark.parametrize(
    "config", [replace(CONFIG, local_prefill_when_full=False), replace(CONFIG, local_prefill_tokens=0)]
)
def test_a_long_prompt_waits_for_a_prefill_worker_where_decode_workers_are_to_run_none(config: PlacementConfig) -> None:
    full = [candidate("p", queued=16384)]
    assert place(request(5000), [candidate("d")], full, config, random.Random()) is None
    short = place(request(20), [candidate("d")], full, config, random.Random())
    assert (short is not None) == (config.local_prefill_tokens > 0)


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


def test_a_new_prompt_goes_where_the_least_was_stored_lately() -> None:
    decode = [candidate("busy", stored=900.0), candidate("quiet", stored=300.0)]
    placement = place(request(640), decode, [], CONFIG, random.Random())
    assert placement is not None
    assert placement.decode[0] == "quiet"


def test_a_conversation_stays_where_it_is_cached_behind_a_short_queue() -> None:
    decode = [candidate("home", cached=90, queued=100 * BLOCK_SIZE), candidate("idle")]
    placement = place(request(100 * BLOCK_SIZE), decode, [], CONFIG, random.Random())
    assert placement is not None
    assert placement.decode[0] == "home"
    decode = [candidate("home", cached=90, queued=800 * BLOCK_SIZE), candidate("idle")]
    placement = place(request(100 * BLOCK_SIZE), decode, [], CONFIG, random.Random())
    assert placement is not None
    assert placement.decode[0] == "idle"


def test_a_prefix_that_everybody_asks_for_binds_no_request() -> None:
    decode = [candidate("holds it", cached=60, active=40), candidate("idle")]
    chosen = {}
    for hits in (0.0, 2.0, 400.0):
        placement = place(request(64 * BLOCK_SIZE), decode, [], CONFIG, random.Random(), prefix_hits=hits)
        assert placement is not None
        chosen[hits] = placement.decode[0]
    assert chosen == {0.0: "holds it", 2.0: "holds it", 400.0: "idle"}


def test_only_reuse_that_was_counted_makes_a_prefix_worth_less() -> None:
    config = replace(CONFIG, mixed_overlap_weight=9.0)
    decode = [candidate("d0", cached=60), candidate("d1")]

    def overlap_weights(prefill: list[Candidate], **hits: float) -> set[float]:
        placement = place(request(64 * BLOCK_SIZE), decode, prefill, config, random.Random(), **hits)
        assert placement is not None
        return {cost.overlap_weight for cost in placement.costs if cost.role == "decode"}

    assert overlap_weights([]) == overlap_weights([], prefix_hits=0.1) == {9.0}
    assert overlap_weights([], prefix_hits=1.0) == {4.0}, "two workers, each asked twice"
    assert overlap_weights([], prefix_hits=8.0) == {0.5}
    assert overlap_weights([candidate("p")], prefix_hits=8.0) == {config.overlap_weight}


def test_a_placement_tells_its_candidates_and_how_much_of_the_prompt_its_worker_holds() -> None:
    prefill = [candidate("p0", cached=40), candidate("p1")]
    placement = place(request(40 * BLOCK_SIZE), [candidate("d")], prefill, CONFIG, random.Random())
    assert placement is not None
    assert (placement.decode, placement.prefill, placement.reason) == (("d", 1), ("p0", 1), SHIPPED)
    assert (placement.cached_blocks, placement.held_blocks, placement.num_candidates) == (39, 40, 3)
    assert [cost.role for cost in placement.costs] == ["prefill", "prefill", "decode"]
