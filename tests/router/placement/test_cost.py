"""Every row of the table of terms counts: it has weights, a formula in the loop, and a column in explanations."""

import importlib
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.cli.events.explain import _candidates, _formula
from baton_proto.generated import inference_pb2 as pb
from router.placement import candidates, cost
from router.placement.candidates import Candidates, Request, Weighed
from router.placement.cost import TERMS, Term
from router.views import explain
from router.views.explain import _candidate, term_rules
from runtime.config.serving import PlacementConfig

CONFIG = PlacementConfig()
REQUEST = Request(1000, 16)


def weighed(kind: str, config: PlacementConfig = CONFIG) -> Weighed:
    """Two workers that have some of everything. The second decode worker runs the prompt, the others receive its KV."""
    load = np.array([[3, 0 if kind == "decode" else 400, 7, 9000]] * 2, dtype=np.int64)
    column = np.array([5, 62 if kind == "decode" else 5], dtype=np.int32)
    workers = Candidates((("a", 1), ("b", 1)), column, load, np.array([11.0, 11.0]))
    rules = candidates.cost.Rules(config)
    alone = kind != "decode"
    return Weighed(
        "decode", REQUEST, workers, rules, getattr(rules, kind), random.Random(1), alone=alone, can_ship=True
    )


def column(kind: str, term: Term, config: PlacementConfig = CONFIG) -> list[float]:
    return [one.terms[TERMS.index(term)] for one in weighed(kind, config).costs()]


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_a_term_grows_with_its_weight_wherever_it_has_one_and_is_0_elsewhere(term: Term) -> None:
    kinds = {"prefill": term.prefill, "decode": term.decode, "mixed": term.mixed}
    assert term.decode or term.mixed, "explanations show the weights of these two"
    for kind, key in kinds.items():
        values = column(kind, term)
        if not key:
            assert values == [0.0, 0.0]
        else:
            more = msgspec.structs.replace(CONFIG, **{key: 2 * getattr(CONFIG, key)})
            assert column(kind, term, more) == pytest.approx([2 * value for value in values])
    assert any(column(kind, term) != [0.0, 0.0] for kind in kinds), "no formula in the loop"


@pytest.mark.parametrize("kind", ["prefill", "decode", "mixed"])
def test_the_terms_add_up_to_the_cost(kind: str) -> None:
    for one in weighed(kind).costs():
        assert one.total == pytest.approx(sum(one.terms))


def test_explanations_show_every_term_and_every_weight() -> None:
    rows = [_candidate(REQUEST, one, 0.5, chosen=False) for one in weighed("mixed").costs()]
    rules = pb.PlacementRules(**term_rules(CONFIG))
    assert [term.name for term in rows[0].terms] == [rule.name for rule in rules.terms] == [row.name for row in TERMS]
    assert set(rules.weights) == {key for row in TERMS for key in (row.prefill, row.decode, row.mixed) if key}
    table = _candidates(pb.Decision(candidates=rows), rules)
    assert [str(header.header) for header in table.columns][3:-3] == [row.heading for row in TERMS]
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
