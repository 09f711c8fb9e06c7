"""Every row of the table of terms counts: it has weights, a formula in the loop, and a column in explanations."""

import importlib
import random
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.cli.events.explain import _candidates, _formula
from baton_proto.generated import inference_pb2 as pb
from router.placement import candidates, cost
from router.placement.candidates import Candidates, Request, Weighed, chances
from router.placement.cost import BUSY, SHIPPED, SHORT, TERMS, Term
from router.views import explain
from router.views.explain import _candidate, term_rules
from runtime.config.serving import PlacementConfig

CONFIG = PlacementConfig()
REQUEST = Request(1000, 16)


def weighed(kind: str, config: PlacementConfig = CONFIG) -> Weighed:
    """Two workers that have some of everything. The second decode worker runs the prompt, the others receive its KV. Of
    what they hold, two blocks lie in host memory and one on disk."""
    load = np.array([[3, 0 if kind == "decode" else 400, 7, 9000]] * 2, dtype=np.int64)
    column = np.array([5, 62 if kind == "decode" else 5], dtype=np.int32)
    lower = np.array([[2, 2], [1, 1]], dtype=np.int32)
    workers = Candidates((("a", 1), ("b", 1)), column, load, np.array([11.0, 11.0]), lower)
    rules = candidates.cost.Rules(config)
    alone = kind != "decode"
    return Weighed(
        "decode", REQUEST, workers, rules, getattr(rules, kind), random.Random(1), alone=alone, can_ship=True
    )


class Dice(random.Random):
    """They fall as they are told."""

    def __init__(self, draw: float) -> None:
        super().__init__()
        self.draw = draw

    def random(self) -> float:
        return self.draw


def thrown(
    draw: float, active: list[int], config: PlacementConfig, excluded: frozenset[int] = frozenset(), **limits: int
) -> Weighed:
    """Workers that prefill and decode, named by their place, which differ in active blocks alone."""
    n = len(active)
    load = np.array([[0, 0, blocks, 0] for blocks in active], dtype=np.int64)
    workers = Candidates(tuple((str(i), 1) for i in range(n)), np.zeros(n, dtype=np.int32), load, np.zeros(n))
    rules = candidates.cost.Rules(config)
    request = Request(1000, 16, frozenset((str(i), 1) for i in excluded))
    with np.errstate(all="raise"):
        return Weighed(
            *("decode", request, workers, rules, rules.mixed, Dice(draw)), alone=True, can_ship=False, **limits
        )


def column(kind: str, term: Term, config: PlacementConfig = CONFIG) -> list[float]:
    return [one.terms[TERMS.index(term)] for one in weighed(kind, config).costs()]


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_a_term_grows_with_its_weight_wherever_it_has_one_and_is_0_elsewhere(term: Term) -> None:
    config = msgspec.structs.replace(CONFIG, disk_restore_weight=0.02, host_restore_weight=0.02)  # far from their limit
    kinds = {"prefill": term.prefill, "decode": term.decode, "mixed": term.mixed}
    assert term.decode or term.mixed, "explanations show the weights of these two"
    for kind, key in kinds.items():
        values = column(kind, term, config)
        if not key:
            assert values == [0.0, 0.0]
        else:
            more = msgspec.structs.replace(config, **{key: 2 * getattr(config, key)})
            assert column(kind, term, more) == pytest.approx([2 * value for value in values])
    assert any(column(kind, term) != [0.0, 0.0] for kind in kinds), "no formula in the loop"


@pytest.mark.parametrize("kind", ["prefill", "decode", "mixed"])
def test_the_terms_add_up_to_the_cost(kind: str) -> None:
    for one in weighed(kind).costs():
        assert one.total == pytest.approx(sum(one.terms))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_draw_chooses_each_candidate_for_as_much_of_the_interval_as_its_chance(temperature: float) -> None:
    config = msgspec.structs.replace(CONFIG, temperature=temperature, mixed_load_weight=1.0)
    active, excluded = [30, 99, 10, 50, 10, 77], frozenset([1])
    shares = chances(thrown(0.0, active, config, excluded).costs(), temperature)
    assert sum(shares) == pytest.approx(1.0)
    assert shares[1] == 0.0
    ends = list(accumulate(shares))
    for i in (0, 2, 3, 4, 5):
        for draw in (ends[i] - shares[i] + 1e-6, ends[i] - 1e-6):
            assert thrown(draw, active, config, excluded).chosen == i


def test_equal_costs_halve_the_interval_of_the_draw() -> None:
    for temperature in (0.0, 1.0):
        config = msgspec.structs.replace(CONFIG, temperature=temperature)
        for draw, chosen in ((0.0, 1), (0.499, 1), (0.5, 3), (0.999, 3)):
            assert thrown(draw, [5, 5, 5, 5], config, frozenset([0, 2])).chosen == chosen


def test_without_temperature_the_dearer_are_never_chosen() -> None:
    for draw in (0.0, 0.5, 0.999999):
        assert thrown(draw, [7, 5, 6], CONFIG).chosen == 1


def test_nobody_is_chosen_of_nobody_and_of_those_that_are_all_barred() -> None:
    assert thrown(0.5, [], CONFIG).chosen == -1
    barred = thrown(0.5, [1, 2], CONFIG, frozenset([0, 1]))
    assert (barred.chosen, [one.barred for one in barred.costs()]) == (-1, [cost.EXCLUDED] * 2)
    for limits, reason in (({"max_requests": 0}, cost.NO_ROOM), ({"max_queued_tokens": 0}, cost.QUEUE_FULL)):
        barred = thrown(0.5, [1, 2], CONFIG, **limits)
        assert (barred.chosen, [one.barred for one in barred.costs()]) == (-1, [reason] * 2)


@pytest.mark.parametrize(
    ("num_tokens", "held", "queued", "reason"),
    [
        (16 + CONFIG.local_prefill_tokens, 1, 0, SHORT),
        (16 + CONFIG.local_prefill_tokens, 1, 1, BUSY),
        (17 + CONFIG.local_prefill_tokens, 1, 1, SHIPPED),
        (17, 1, 0, SHORT),
        (17, 1, CONFIG.local_prefill_tokens - 1, SHORT),
        (16, 1, CONFIG.local_prefill_tokens - 16, SHORT),
        (16, 1, CONFIG.local_prefill_tokens - 15, BUSY),
    ],
)
def test_what_is_left_to_compute_of_a_prompt_is_at_least_its_last_token_and_decides_where_it_runs(
    num_tokens: int, held: int, queued: int, reason: int
) -> None:
    load = np.array([[0, queued, 0, 0]], dtype=np.int64)
    workers = Candidates((("a", 1),), np.array([held], dtype=np.int32), load, np.zeros(1))
    rules = candidates.cost.Rules(CONFIG)
    only = Weighed(
        *("decode", Request(num_tokens, 16), workers, rules, rules.decode, Dice(0.0)), alone=False, can_ship=True
    )
    assert only.reason(0) == reason
    assert only.cached_blocks(0) == ((num_tokens - 1) // 16 and held, held)
    assert only.costs()[0].cached_blocks == only.cached_blocks(0)[0]


def restored(
    cached: int, host: int, disk: int, kind: str = "mixed", num_tokens: int = 1600, **changes: float
) -> tuple[float, float]:
    """What a worker's blocks in host memory and on disk cost. A decode worker receives the prompt."""
    config = msgspec.structs.replace(CONFIG, **changes)
    load = np.array([[0, 10**6 if kind == "decode" else 0, 0, 0]], dtype=np.int64)
    lower = np.array([[host], [disk]], dtype=np.int32)
    workers = Candidates((("a", 1),), np.array([cached], dtype=np.int32), load, np.zeros(1), lower)
    rules = candidates.cost.Rules(config)
    only = Weighed(
        *("decode", Request(num_tokens, 16), workers, rules, getattr(rules, kind), Dice(0.0)),
        alone=kind != "decode",
        can_ship=True,
    )
    (one,) = only.costs()
    assert (one.lower_blocks, one.cached_blocks) == ((host, disk), min(cached, (num_tokens - 1) // 16))
    return one.terms[cost.HOST], one.terms[cost.DISK]


def test_restoring_costs_its_time_but_at_most_that_of_computing_or_receiving() -> None:
    plain = {"attention_tokens": 0, "host_restore_weight": 0.07, "disk_restore_weight": 1.4}
    assert restored(50, 20, 10, **plain) == pytest.approx((20 * 0.07, 10 * 1.0))
    assert restored(50, 20, 10, kind="prefill", **plain) == pytest.approx((20 * 0.07, 10 * 1.0))
    assert restored(50, 20, 10, kind="decode", **plain) == pytest.approx((20 * 0.07, 10 * CONFIG.transfer_weight))
    assert restored(50, 0, 0, **plain) == (0.0, 0.0)


def test_a_block_from_disk_costs_more_behind_many_tokens_than_at_the_start() -> None:
    """Because it takes longer to compute there."""
    first, last = restored(10, 0, 10, num_tokens=16 * 10_000), restored(8_000, 0, 10, num_tokens=16 * 10_000)
    assert first[1] == pytest.approx(10 + 160 * 160 / 2 / 16384 / 16)
    assert last[1] == pytest.approx(10 * CONFIG.disk_restore_weight)


def test_the_last_block_of_a_whole_prompt_is_computed_and_not_restored() -> None:
    assert restored(100, 0, 3, disk_restore_weight=0.5)[1] == pytest.approx(2 * 0.5)
    assert restored(100, 3, 0, host_restore_weight=0.5)[0] == pytest.approx(2 * 0.5)
    assert restored(100, 3, 1, host_restore_weight=0.5) == pytest.approx((3 * 0.5, 0.0))


@pytest.mark.parametrize("kind", ["prefill", "decode", "mixed"])
@pytest.mark.parametrize("overlap", [0.0, 0.3, 1.0, 7.0])
def test_a_hit_in_a_lower_tier_is_never_dearer_than_none(kind: str, overlap: float) -> None:
    keys = {"overlap_weight": overlap, "mixed_overlap_weight": overlap, "disk_restore_weight": 5.0}
    for cached, host, disk in ((50, 0, 50), (50, 50, 0), (99, 30, 40)):
        costs = []
        for blocks in ((cached, host, disk), (0, 0, 0)):
            load = np.array([[0, 10**6 if kind == "decode" else 0, 0, 0]], dtype=np.int64)
            lower = np.array([blocks[1:]], dtype=np.int32).T.copy()
            config = msgspec.structs.replace(CONFIG, host_restore_weight=5.0, **keys)
            rules = candidates.cost.Rules(config)
            workers = Candidates((("a", 1),), np.array(blocks[:1], dtype=np.int32), load, np.zeros(1), lower)
            only = Weighed(
                *("decode", Request(1600, 16), workers, rules, getattr(rules, kind), Dice(0.0)),
                alone=kind != "decode",
                can_ship=True,
            )
            costs.append(only.costs()[0].total)
        assert costs[0] <= costs[1] + 1e-9


def test_explanations_show_every_term_and_every_weight() -> None:
    rows = [_candidate(REQUEST, one, 0.5, chosen=False) for one in weighed("mixed").costs()]
    rules = pb.PlacementRules(**term_rules(CONFIG))
    assert [term.name for term in rows[0].terms] == [rule.name for rule in rules.terms] == [row.name for row in TERMS]
    assert set(rules.weights) == {key for row in TERMS for key in (row.prefill, row.decode, row.mixed) if key}
    table = _candidates(pb.Decision(candidates=rows), rules)
    assert [str(header.header) for header in table.columns][3:-3] == [row.heading for row in TERMS]
    assert [(row.host_blocks, row.disk_blocks) for row in rows] == [(2, 1), (2, 1)]
    for row in rows:
        del row.terms[cost.DISK]
    assert "+ from disk" not in [header.header for header in _candidates(pb.Decision(candidates=rows), rules).columns]
    formula = " ".join(_formula(rules))
    assert all(row.amount in formula for row in TERMS)


def test_a_term_is_added_in_one_file_beside_its_configuration_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe of docs/how-to.md in a copy of cost.py, with a weight that is configured already."""
    source = Path(cost.__file__).read_text(encoding="utf-8")
    row = '    Term("toy", "+ toy", "toys", "load_weight", "load_weight", "load_weight"),\n'
    for place, with_toy in (
        ("\n)\nNUM_TERMS", f"\n{row})\nNUM_TERMS"),
        ("LOAD, EVICTION = range", "LOAD, EVICTION, TOY = range"),
        ("        total = weights", "        costs[i, TOY] = weights[TOY] * requests\n        total = weights"),
    ):
        assert source.count(place) == 1
        source = source.replace(place, with_toy)
    (tmp_path / "cost_with_a_toy.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    extended = importlib.import_module("cost_with_a_toy")
    plain = [one.total for one in weighed("mixed").costs()]
    for module in (candidates, explain):
        monkeypatch.setattr(module, "cost", extended)
    rows = [_candidate(REQUEST, one, 0.5, chosen=False) for one in weighed("mixed").costs()]
    assert [row.total for row in rows] == pytest.approx([total + 3.0 for total in plain])
    assert (rows[0].terms[-1].name, rows[0].terms[-1].value) == ("toy", 3.0)
    rules = pb.PlacementRules(**term_rules(CONFIG))
    assert "+ 1 * toys" in next(_formula(rules))
    assert _candidates(pb.Decision(candidates=rows), rules).columns[-4].header == "+ toy"
