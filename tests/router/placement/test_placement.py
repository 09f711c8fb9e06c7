"""Placement against a brute-force reading of its cost, and the rules for where a prompt runs."""

import operator
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from router.placement.candidates import Request
from router.placement.cost import (
    BUSY,
    EVICTED,
    FREE,
    FULL,
    FULLEST,
    KEEPS,
    MOST_DELAYED,
    NO_ROOM,
    NOBODY_SHIPS,
    QUEUE_FULL,
    SHIPPED,
    SHORT,
)
from router.placement.placement import Placement
from router.placement.weights import Weights
from runtime.config.step_times import StepTimes
from tests.router.candidates import NOW_MS, TIMES, Candidate, place

BLOCK_SIZE = 16
CONFIG = Weights()


def candidate(
    name: str, cached: int = 0, queued: int = 0, active: int = 0, requests: int = 0, pairs: int = 0, **more: Any
) -> Candidate:
    return Candidate((name, 1), cached, queued, active, requests, pairs, **more)


def request(num_tokens: int, *excluded: str) -> Request:
    return Request(num_tokens, BLOCK_SIZE, frozenset((name, 1) for name in excluded))


def candidates(prefix: str, min_size: int) -> st.SearchStrategy[list[Candidate]]:
    cached, queued, active = st.integers(0, 200), st.just(0) | st.integers(0, 20_000), st.integers(0, 2000)
    loads = st.tuples(cached, queued, active, st.integers(0, 10), st.integers(0, 10**9))
    times, began_ms = st.sampled_from([TIMES, StepTimes(12.0, 0.04, 2e-6, 9.0, 0.05, 1e-4)]), st.integers(-900, 0)
    rooms = st.tuples(st.integers(0, 3000), st.integers(0, 20_000), st.integers(0, 3000), st.integers(0, 300))
    rows = st.lists(st.tuples(loads, times, began_ms, rooms), min_size=min_size, max_size=8)
    return rows.map(
        lambda rows: [
            candidate(f"{prefix}{i}", *load, times=times, step_began_ms=NOW_MS + began_ms, room=room)
            for i, (load, times, began_ms, room) in enumerate(rows)
        ]
    )


configs = st.builds(
    Weights,
    decode_steps=st.sampled_from([0.0, 2.0, 16.0]),
    ship_ms=st.sampled_from([0.0, 2.0]),
    ship_token_ms=st.sampled_from([0.0, 0.003, 0.1]),
    delay_weight=st.sampled_from([0.0, 0.25, 1.0]),
    keep_steps=st.sampled_from([0.0, 12.0, 100.0]),
    crowd_weight=st.sampled_from([0.0, 1.5, 4.0]),
    local_prefill_tokens=st.sampled_from([0, 32, 2**31 - 1]),
    prefill_queue_tokens=st.sampled_from([1, 1000, 16384]),
)


@given(st.integers(1, 4000), candidates("d", 0), candidates("p", 0), configs, st.integers(0, 2**32), st.data())
def test_the_choice_is_the_cheapest_that_is_allowed(
    num_tokens: int,
    decode: list[Candidate],
    prefill: list[Candidate],
    config: Weights,
    seed: int,
    data: st.DataObject,
) -> None:
    excluded = data.draw(st.sets(st.sampled_from([c.worker[0] for c in decode + prefill]))) if decode + prefill else []
    facts = request(num_tokens, *excluded)
    placement = place(facts, decode, prefill, config, random.Random(seed))

    def uncached(c: Candidate) -> int:
        return num_tokens - BLOCK_SIZE * min(c.cached_blocks, (num_tokens - 1) // BLOCK_SIZE)

    def pairs(c: Candidate) -> float:
        return (num_tokens**2 - (num_tokens - uncached(c)) ** 2) / 2

    def prompts(c: Candidate) -> float:
        queued = c.times.prefill_ms(c.queued_prefill_tokens, c.queued_prefill_pairs)
        return queued if c.queued_prefill_tokens else 0.0

    def wait(c: Candidate) -> float:
        return abs(prompts(c) - (NOW_MS - c.step_began_ms)) if c.queued_prefill_tokens else 0.0

    def room(c: Candidate) -> float:
        unused, freed_us, _, kept = c.room
        return max(0, (c.queued_prefill_tokens + uncached(c)) / BLOCK_SIZE + kept - unused) * freed_us / 1e3

    def own(c: Candidate) -> float:
        return c.times.prefill_ms(uncached(c), pairs(c))

    def steps(c: Candidate) -> float:
        context = max(0, c.active_blocks * BLOCK_SIZE - c.queued_prefill_tokens)
        return c.times.decode_ms(c.requests, context) if c.requests else 0.0

    def run(c: Candidate, among: list[Candidate], free: list[Candidate]) -> tuple[float, float]:
        """(time to the first token without decode steps, what others wait)"""
        token_ms, pair_ms = (
            sum(getattr(one.times, name) for one in among) / len(among)
            for name in ("prefill_token_ms", "prefill_pair_ms")
        )
        whole = token_ms * num_tokens + pair_ms * num_tokens**2 / 2
        waits = [min(wait(one), prompts(one)) for one in free] or [0.0]
        speeds = [1 / one.times.prefill_token_ms for one in free] or [1.0]
        share = (token_ms * uncached(c) + pair_ms * pairs(c)) / whole
        mean = sum(map(operator.mul, waits, speeds)) / sum(speeds)
        later = min(mean, wait(c) + whole / 4)
        later += 3 * (1 - 1 / len(waits)) * min(*waits, whole)
        return max(wait(c), room(c)) + own(c), config.crowd_weight * share * later

    def evicted(c: Candidate, among: list[Candidate]) -> float:
        token_ms = sum(one.times.prefill_token_ms for one in among) / len(among)
        pair_ms = sum(one.times.prefill_pair_ms for one in among) / len(among)
        unused = max(1, c.room[0] - c.queued_prefill_tokens / BLOCK_SIZE)
        return EVICTED * min(FULLEST, c.room[2] / unused) * (token_ms * uncached(c) + pair_ms * pairs(c))

    def straight(c: Candidate) -> float:
        return c.times.prefill_token_ms * uncached(c) + c.times.prefill_pair_ms * pairs(c)

    def first_answer(p: Candidate) -> float:
        return 0.0 if p.requests else config.keep_steps * p.times.decode_ms(1, 0)

    alive = [p for p in prefill if p.worker[0] not in excluded]
    takers = [p for p in alive if p.queued_prefill_tokens < config.prefill_queue_tokens]
    ways = {
        p.worker[0]: sum(run(p, prefill, takers))
        + evicted(p, prefill)
        + config.delay_weight * straight(p) * min(MOST_DELAYED, p.requests)
        + config.decode_steps * steps(p)
        for p in takers
    }
    may_keep = [p for p in takers if uncached(p) <= config.local_prefill_tokens]
    kept = {p.worker[0]: ways[p.worker[0]] + first_answer(p) for p in may_keep}
    shipper = min(ways.values(), default=None)
    costs: dict[str, float] = {}
    local: set[str] = set()
    for d in decode:
        if d.worker[0] in excluded:
            continue
        here = sum(run(d, decode, [one for one in decode if one.worker[0] not in excluded]))
        if not alive:
            local.add(d.worker[0])
            costs[d.worker[0]] = here + config.decode_steps * steps(d) + evicted(d, decode)
            continue
        here += config.delay_weight * straight(d) * min(MOST_DELAYED, d.requests + 1)
        may = uncached(d) <= config.local_prefill_tokens
        there = room(d) + shipper + config.ship_ms + config.ship_token_ms * uncached(d) if shipper is not None else None
        if may and (here <= there if there is not None else d.queued_prefill_tokens == 0):
            local.add(d.worker[0])
            costs[d.worker[0]] = here + config.decode_steps * steps(d) + evicted(d, decode)
        elif there is not None:
            costs[d.worker[0]] = there + config.decode_steps * steps(d) + evicted(d, decode)
    if not costs and not kept:
        assert placement is None
        return
    assert placement is not None
    chosen = placement.decode[0]
    assert (costs | kept)[chosen] == pytest.approx(min((costs | kept).values()))
    assert (placement.reason == KEEPS) == (chosen in kept)
    assert (placement.prefill is None) == (chosen in local or chosen in kept)
    if placement.prefill is not None:
        assert shipper is not None
        assert ways[placement.prefill[0]] == pytest.approx(shipper)
    told = {cost.worker[0]: cost.total for cost in placement.costs if not cost.barred}
    assert told == pytest.approx(costs | (kept if chosen in kept else ways))
    assert all(cost.total == pytest.approx(sum(cost.terms), abs=1e-6) for cost in placement.costs)
    assert len(placement.costs) == len(decode) + len(prefill)


def placed(
    facts: Request,
    decode: list[Candidate],
    prefill: list[Candidate],
    config: Weights = CONFIG,
    rng: random.Random | None = None,
    **more: Any,
) -> Placement:
    placement = place(facts, decode, prefill, config, rng or random.Random(), **more)
    assert placement is not None
    return placement


def test_decode_workers_without_room_are_passed_over_and_say_so() -> None:
    decode = [candidate("full", cached=40, requests=8), candidate("roomy", active=500, requests=7)]
    placement = placed(request(640), decode, [], CONFIG, random.Random(), max_running=8)
    assert placement.decode == ("roomy", 1)
    assert [cost.barred for cost in placement.costs] == [NO_ROOM, FREE]
    assert place(request(640), decode, [], CONFIG, random.Random(), max_running=7) is None


def test_what_decode_steps_cost_does_not_change_when_the_first_token_is_expected() -> None:
    decode = [candidate("d", requests=40, active=500)]
    expected = []
    for steps in (0.0, 8.0):
        placement = placed(request(640), decode, [], replace(CONFIG, decode_steps=steps), random.Random())
        expected.append(placement.ttft_ms)
    own_ms = 640 * 0.02 + 1.2e-6 * 640**2 / 2
    readers_ms = TIMES.beside_ms(40, 500 * BLOCK_SIZE)
    beside_ms = 1.5 * TIMES.decode_ms(40, 500 * BLOCK_SIZE) + own_ms / (50 - readers_ms) * readers_ms
    assert expected == pytest.approx([own_ms + beside_ms] * 2)


@pytest.mark.parametrize("prefill", [[], [candidate("p")]])
def test_a_prompt_waits_until_there_is_room_for_its_blocks_or_goes_where_there_is_some(
    prefill: list[Candidate],
) -> None:
    """Of the 100 blocks that it needs, 47 are free, 7 of which it must leave; one more comes free every 5 ms."""
    full = candidate("full", requests=1, room=(47, 5000, 0, 7))
    config = replace(CONFIG, local_prefill_tokens=0)
    placement = placed(request(1600), [full, candidate("busy", requests=20)], prefill, config)
    assert placement.decode == ("busy", 1)
    only = placed(request(1600), [full._replace(requests=0)], prefill, config)
    free = placed(request(1600), [candidate("d")], prefill, config)
    assert only.ttft_ms == pytest.approx(free.ttft_ms + 60 * 5)


def test_the_time_until_the_first_token_is_expected_with_attention() -> None:
    placement = placed(request(32_000), [candidate("d", queued=1000)], [])
    assert placement.ttft_ms == pytest.approx(1000 * 0.02 + 32_000 * 0.02 + 1.2e-6 * 32_000**2 / 2)


def test_equal_workers_share_at_random() -> None:
    decode = [candidate(f"d{i}", active=7) for i in range(4)]
    prefill = [candidate(f"p{i}", cached=3) for i in range(4)]
    config = replace(CONFIG, local_prefill_tokens=0)
    rng = random.Random(1)
    chosen = Counter[str]()
    for _ in range(2000):
        placement = placed(request(640), decode, prefill, config, rng)
        assert placement.prefill is not None
        chosen.update((placement.decode[0], placement.prefill[0]))
    assert len(chosen) == 8
    assert all(400 < count < 600 for count in chosen.values())


@pytest.mark.parametrize(
    ("num_tokens", "cached", "queued", "requests", "reason"),
    [
        (32, 0, 0, 0, SHORT),
        (32, 0, 0, 8, SHORT),
        (32, 0, 0, 40, SHORT),
        (400, 0, 0, 0, SHORT),
        (900, 0, 0, 0, BUSY),
        (900, 0, 0, 4, BUSY),
        (900, 50, 0, 4, SHORT),
        (900, 0, 1000, 0, SHIPPED),
    ],
)
def test_a_prompt_runs_where_it_costs_less_and_the_reason_says_whom_that_spares(
    num_tokens: int, cached: int, queued: int, requests: int, reason: int
) -> None:
    decode = [candidate("d", cached=cached, queued=queued, requests=requests)]
    placement = placed(request(num_tokens), decode, [candidate("p")])
    assert placement.reason == reason
    assert (placement.prefill is None) == (reason == SHORT)
    (cost,) = [cost for cost in placement.costs if cost.role == "decode"]
    assert cost.reason == reason


def test_while_every_prefill_worker_has_its_fill_decode_workers_without_prompts_run_one_each() -> None:
    full = [candidate("p0", queued=16384), candidate("p1", queued=20000)]
    decode = [candidate("prompt", queued=1), candidate("busy", requests=64), candidate("free", active=500, requests=6)]
    config = replace(CONFIG, prefill_queue_tokens=16384)
    placement = placed(request(5000), decode, full, config)
    assert (placement.decode[0], placement.prefill, placement.reason) == ("free", None, FULL)
    assert [cost.barred for cost in placement.costs] == [QUEUE_FULL] * 2 + [NOBODY_SHIPS] + [FREE] * 2
    assert place(request(5000), decode[:1], full, config, random.Random()) is None


@pytest.mark.parametrize(
    "config", [replace(CONFIG, local_prefill_tokens=n, prefill_queue_tokens=16384) for n in (0, 100)]
)
def test_a_long_prompt_waits_for_a_prefill_worker_where_decode_workers_may_not_run_it(config: Weights) -> None:
    full = [candidate("p", queued=16384)]
    assert place(request(5000), [candidate("d")], full, config, random.Random()) is None
    short = place(request(20), [candidate("d")], full, config, random.Random())
    assert (short is not None) == (config.local_prefill_tokens > 0)


def test_a_prefill_worker_keeps_an_answer_where_that_spares_longer_steps_and_one_with_readers_sooner_keeps_more() -> (
    None
):
    """Steps take 10 ms and 0.02 for each request: 12 of the prefill worker's are as long as 8 beside 245 requests."""
    kept = []
    for answers in (0, 1):
        for requests in (40, 300):
            decode, prefill = [candidate("d", requests=requests)], [candidate("p", requests=answers)]
            placement = placed(request(5000), decode, prefill)
            kept.append((placement.decode[0], placement.prefill, placement.reason) == ("p", None, KEEPS))
    assert kept == [False, True, True, True]


def test_answers_are_kept_while_decode_workers_are_full_up_to_the_same_limit_and_where_they_fit() -> None:
    decode = [candidate("d", requests=8)]
    for answers, decodes in ((0, "p"), (7, "p"), (8, None)):
        prefill = [candidate("p", requests=answers)]
        placement = place(request(640), decode, prefill, CONFIG, random.Random(), max_running=8)
        assert (placement and placement.decode[0]) == decodes
        assert place(request(640), decode, prefill, CONFIG, random.Random(), max_running=8, may_keep=False) is None


def test_a_shared_prefix_does_not_draw_all_requests_to_one_worker() -> None:
    """One worker holds a system prompt of 100 blocks; each request adds load where it goes."""
    running = {f"d{i}": 0 for i in range(16)}
    config = replace(CONFIG, local_prefill_tokens=0)
    rng = random.Random(3)
    for _ in range(1600):
        decode = [
            candidate(name, cached=100 if name == "d0" else 0, active=102 * n, requests=n)
            for name, n in running.items()
        ]
        placement = placed(request(100 * BLOCK_SIZE + 20), decode, [candidate("p")], config, rng)
        running[placement.decode[0]] += 1
    assert max(running.values()) / (sum(running.values()) / len(running)) <= 1.3


def test_a_conversation_stays_where_it_is_cached_behind_a_short_queue() -> None:
    for queued, chosen in ((1000, "home"), (8000, "idle")):
        decode = [candidate("home", cached=90, queued=queued), candidate("idle")]
        placement = placed(request(100 * BLOCK_SIZE), decode, [])
        assert placement.decode[0] == chosen


def test_a_placement_tells_its_candidates_and_how_much_of_the_prompt_its_worker_holds() -> None:
    prefill = [candidate("p0", cached=40), candidate("p1")]
    config = replace(CONFIG, local_prefill_tokens=0)
    placement = placed(request(40 * BLOCK_SIZE), [candidate("d")], prefill, config)
    assert (placement.decode, placement.prefill, placement.reason) == (("d", 1), ("p0", 1), SHIPPED)
    assert (placement.cached_blocks, placement.held_blocks, placement.weighing.num_candidates) == (39, 40, 3)
    assert [cost.role for cost in placement.costs] == ["prefill", "prefill", "decode"]
