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
from router.placement.candidates import NO_SHIPPER, Candidates, Request, Weighed, chances
from router.placement.cost import SHIPPED, TERMS, Term
from router.views import explain
from router.views.explain import KNOBS, _candidate, term_rules
from runtime.config.serving import PlacementConfig
from runtime.config.step_times import StepTimes

CONFIG = PlacementConfig()
REQUEST = Request(1000, 16)
TIMES = msgspec.structs.astuple(StepTimes())


def weighed(kind: str, config: PlacementConfig = CONFIG) -> Weighed:
    """Two workers that have some of everything; of what they hold, two blocks lie in host memory and one on disk. A
    decode worker receives the prompt's KV."""
    load = np.array([[3, 400, 70, 9000, 0, 60, 500]] * 2, dtype=np.int64)
    lower = np.array([[2, 2], [1, 1]], dtype=np.int32)
    workers = Candidates(
        (("a", 1), ("b", 1)), np.array([5, 7], dtype=np.int32), load, np.array([TIMES] * 2), lower, 2_000
    )
    shipper = (20.0, 15.0) if kind == "decode" else NO_SHIPPER
    return Weighed("decode", REQUEST, workers, config, random.Random(1), alone=kind != "decode", shipper=shipper)


class Dice(random.Random):
    """They fall as they are told."""

    def __init__(self, draw: float) -> None:
        super().__init__()
        self.draw = draw

    def random(self) -> float:
        return self.draw


def thrown(
    draw: float, running: list[int], config: PlacementConfig, excluded: frozenset[int] = frozenset(), **limits: int
) -> Weighed:
    """Workers that prefill and decode, named by their place, which differ in running requests alone."""
    n = len(running)
    load = np.array([[count, 0, 0, 0, 0, 999, 0] for count in running], dtype=np.int64)
    names = tuple((str(i), 1) for i in range(n))
    workers = Candidates(names, np.zeros(n, dtype=np.int32), load, np.array([TIMES] * n).reshape(n, 6))
    request = Request(1000, 16, frozenset((str(i), 1) for i in excluded))
    with np.errstate(all="raise"):
        return Weighed("decode", request, workers, config, Dice(draw), alone=True, **limits)


def column(kind: str, term: Term, config: PlacementConfig = CONFIG) -> list[float]:
    return [one.terms[TERMS.index(term)] for one in weighed(kind, config).costs()]


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_a_term_counts_somewhere_and_grows_with_its_weight_where_it_has_one(term: Term) -> None:
    config = msgspec.structs.replace(
        CONFIG, ship_ms=0.0, disk_token_ms=0.0001, host_token_ms=0.0001
    )  # below their limit
    kinds = [kind for kind in ("mixed", "decode") if all(column(kind, term, config))]
    assert kinds, "no formula in the loop"
    if term.key:
        more = msgspec.structs.replace(config, **{term.key: 2 * getattr(config, term.key)})
        fixed = 15.0 if term.name == "shipped" else 0.0  # what the prefill worker takes
        for kind in kinds:
            values = [2 * (value - fixed) for value in column(kind, term, config)]
            assert [value - fixed for value in column(kind, term, more)] == pytest.approx(values)


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_the_terms_add_up_to_the_cost_and_those_of_the_request_itself_to_the_time_of_its_first_token(kind: str) -> None:
    for one in weighed(kind).costs():
        assert one.total == pytest.approx(sum(one.terms))
        weighted = one.terms[cost.DECODE] * (1 - cost.STEPS_TO_FIRST / CONFIG.decode_steps)
        assert one.ttft_ms == pytest.approx(one.total - one.terms[cost.OTHERS] - weighted)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_draw_chooses_each_candidate_for_as_much_of_the_interval_as_its_chance(temperature: float) -> None:
    config = msgspec.structs.replace(CONFIG, temperature=temperature)
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


def restored(
    cached: int, host: int, disk: int, kind: str = "mixed", num_tokens: int = 1600, **changes: float
) -> Weighed:
    """A worker with blocks in host memory and on disk. A decode worker receives the prompt."""
    config = msgspec.structs.replace(CONFIG, local_prefill_tokens=0, **changes)
    lower = np.array([[host], [disk]], dtype=np.int32)
    column, load = np.array([cached], dtype=np.int32), np.array([[0, 0, 0, 0, 0, 9999, 0]], dtype=np.int64)
    workers = Candidates((("a", 1),), column, load, np.array([TIMES]), lower)
    shipper = (20.0, 15.0) if kind == "decode" else NO_SHIPPER
    return Weighed(
        *("decode", Request(num_tokens, 16), workers, config, Dice(0.0)), alone=kind != "decode", shipper=shipper
    )


def lower_terms(only: Weighed) -> tuple[float, float]:
    (one,) = only.costs()
    return one.terms[cost.HOST], one.terms[cost.DISK]


def test_restoring_costs_its_time_but_at_most_that_of_computing_or_receiving() -> None:
    slow = {"host_token_ms": 0.003, "disk_token_ms": 0.06}
    computed = 160 * 0.02 + 1.2e-6 * (800**2 - 640**2) / 2
    assert lower_terms(restored(50, 20, 10, **slow)) == pytest.approx((320 * 0.003, computed))
    received = 160 * CONFIG.ship_token_ms
    assert lower_terms(restored(50, 20, 10, "decode", **slow)) == pytest.approx((320 * 0.003, received))
    assert lower_terms(restored(50, 0, 0, **slow)) == (0.0, 0.0)


def test_a_block_from_disk_costs_more_behind_many_tokens_than_at_the_start() -> None:
    """Because it takes longer to compute there."""
    first = lower_terms(restored(10, 0, 10, num_tokens=160_000, disk_token_ms=0.1))
    last = lower_terms(restored(8_000, 0, 10, num_tokens=160_000, disk_token_ms=0.1))
    assert first[1] == pytest.approx(160 * 0.02 + 1.2e-6 * 160**2 / 2)
    assert last[1] == pytest.approx(160 * 0.1)


def test_the_last_block_of_a_whole_prompt_is_computed_and_not_restored() -> None:
    assert lower_terms(restored(100, 0, 3, disk_token_ms=0.005))[1] == pytest.approx(32 * 0.005)
    assert lower_terms(restored(100, 3, 0, host_token_ms=0.005))[0] == pytest.approx(32 * 0.005)
    assert lower_terms(restored(100, 3, 1, host_token_ms=0.005)) == pytest.approx((48 * 0.005, 0.0))


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_a_hit_in_a_lower_tier_is_never_dearer_than_none(kind: str) -> None:
    slow = {"host_token_ms": 5.0, "disk_token_ms": 5.0}
    for blocks in ((50, 0, 50), (50, 50, 0), (99, 30, 40)):
        hit, miss = restored(*blocks, kind, **slow), restored(0, 0, 0, kind, **slow)
        assert hit.costs()[0].total <= miss.costs()[0].total + 1e-9


def test_of_a_prompt_that_is_held_whole_the_last_token_is_computed() -> None:
    only = restored(100, 0, 0, "decode")
    assert (only.reason(0), only.cached_blocks(0)) == (SHIPPED, (99, 100))


def test_explanations_show_every_term_and_every_weight() -> None:
    rows = [_candidate(REQUEST, one, 0.5, chosen=False) for one in weighed("mixed").costs()]
    rules = pb.PlacementRules(**term_rules(CONFIG))
    assert [term.name for term in rows[0].terms] == [rule.name for rule in rules.terms] == [row.name for row in TERMS]
    assert set(rules.weights) == set(KNOBS) >= {row.key for row in TERMS if row.key}
    table = _candidates(pb.Decision(candidates=rows), rules)
    assert [str(header.header) for header in table.columns][3:-3] == [row.heading for row in TERMS]
    assert [(row.host_blocks, row.disk_blocks) for row in rows] == [(2, 1), (2, 1)]
    for row in rows:
        del row.terms[cost.DISK]
    assert "+ from disk" not in [header.header for header in _candidates(pb.Decision(candidates=rows), rules).columns]
    formula = " ".join(_formula(rules))
    assert all(row.meaning in formula for row in TERMS)


def test_a_term_is_added_in_one_file_beside_its_configuration_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe of docs/how-to.md in a copy of cost.py."""
    source = Path(cost.__file__).read_text(encoding="utf-8")
    row = '    Term("toy", "+ toy", "toys", ""),\n'
    others = '    Term("others"'
    for place, with_toy in (
        (others, row + others),
        ("HOST, DISK, OTHERS = range", "HOST, DISK, TOY, OTHERS = range"),
        ("        total = 0.0\n", "        costs[i, TOY] = requests\n        total = 0.0\n"),
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
    assert (rows[0].terms[-2].name, rows[0].terms[-2].value) == ("toy", 3.0)
    rules = pb.PlacementRules(**term_rules(CONFIG))
    assert "+ toys" in next(_formula(rules))
    assert _candidates(pb.Decision(candidates=rows), rules).columns[-5].header == "+ toy"
