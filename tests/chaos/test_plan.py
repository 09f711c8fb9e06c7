"""The pure parts of chaos: plans, tables, timelines and verdicts."""

import asyncio
import itertools
import json
import random
from dataclasses import replace
from typing import Literal

import pytest

from baton_proto.grammar import Grammar
from tests.baton.random_schemas import instance_of
from tests.chaos import asking, grammars
from tests.chaos.__main__ import chosen
from tests.chaos.asking import WEIGHTS, Door
from tests.chaos.faults import BY_NAME, FAULTS, usable
from tests.chaos.judging.leaks import Look, growth, slope
from tests.chaos.judging.timeline import Timeline
from tests.chaos.judging.verdict import (
    FAILURES,
    Expected,
    Judged,
    Outcome,
    Verdict,
    is_crossed,
    judge,
    judge_any,
)
from tests.chaos.plan import Ask, plan_round
from tests.chaos.service.scenarios import SCENARIOS, STRETCH, scenario_of
from tests.chaos.service.upgrades import RollOut

ODDS = [fault.odds for fault in FAULTS]
ASK = Ask(0, 0.0, 0, "gRPC", (5, 6), {"max_tokens": 3})
RIGHT = Expected([1, 2, 3], "abc", "length")
LETTERS = Ask(0, 0.0, 0, "gRPC", (5, 6), {"max_tokens": 3}, grammar=Grammar("regex", "[abc]+"))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_same_seed_and_number_give_the_same_round(scenario) -> None:
    plan = plan_round(7, 3, scenario, ODDS, WEIGHTS)
    assert plan == plan_round(7, 3, scenario, ODDS, WEIGHTS)
    assert plan != plan_round(7, 4, scenario, ODDS, WEIGHTS)
    assert plan != plan_round(8, 3, scenario, ODDS, WEIGHTS)


def test_every_fault_and_every_way_to_ask_is_drawn_within_a_thousand_rounds() -> None:
    plans = [plan_round(1, number, SCENARIOS[0], ODDS, WEIGHTS) for number in range(1000)]
    assert {strike.fault for plan in plans for strike in plan.strikes} == set(BY_NAME)
    assert {ask.way for plan in plans for ask in plan.asks} == set(WEIGHTS)
    strikes = [strike for plan in plans for strike in plan.strikes]
    assert any(strike.hold_s > BY_NAME[strike.fault].odds.hold_s[1] for strike in strikes), "some last long"


def test_a_row_has_a_name_of_its_own_and_a_reason_where_it_cannot_be_done() -> None:
    assert len(BY_NAME) == len(FAULTS)
    for scenario in SCENARIOS:
        able, why_not = usable(scenario)
        fitting = {fault.odds.name for fault in FAULTS if fault.fits(scenario)}
        assert {one.name for one in able} | set(why_not) == fitting
        assert all(why_not.values())


def test_scenarios_with_vllm_are_played_where_they_are_asked_for_and_ask_for_greedy_answers_alone() -> None:
    names, _ = chosen(None, None, "cpu")
    with_vllm = [scenario for scenario in SCENARIOS if scenario.engine == "vllm"]
    assert with_vllm
    assert not {scenario.name for scenario in with_vllm} & {*names}
    asks = [ask for number in range(50) for ask in plan_round(1, number, with_vllm[0], ODDS, WEIGHTS).asks]
    assert {ask.sampling["temperature"] for ask in asks} == {0.0}
    fitting, _ = usable(with_vllm[0])
    assert {"kill", "kill engine", "stop"} <= {odds.name for odds in fitting}
    assert "little memory" not in {odds.name for odds in fitting}


def test_scenarios_take_turns() -> None:
    names = ("shm", "tcp")
    turns = [scenario_of(number, names).name for number in (0, STRETCH - 1, STRETCH, 2 * STRETCH)]
    assert turns == ["shm", "shm", "tcp", "shm"]


def test_who_ends_in_order_is_able_no_more_and_is_no_loss() -> None:
    timeline = Timeline()
    for name in ("a", "b"):
        timeline.back(name, 1.0)
    timeline.left("a", 2.0)
    timeline.lost("b", 3.0)
    timeline.left("b", 4.0)
    assert not timeline.able("a")
    assert timeline.losses(["a", "b"], 0.0, 5.0) == 1
    assert timeline.gap(["a"], 1.5, 2.5)


@pytest.mark.parametrize(
    ("code", "rows", "event", "errors", "may_fail", "fine"),
    [
        (0, ["router-1"], "rolled_out", "", False, True),
        (0, ["router-1"], "starts", "", True, False),
        (0, [], "plan", "", False, True),
        (1, ["router-1"], "failed", "error: decode-3 has ended again", True, True),
        (1, ["router-1"], "failed", "error: decode-3 has ended again", False, False),
        (1, ["router-1"], "failed", "Traceback (most recent call last):\nerror: x", True, False),
        (None, [], "plan", "", True, False),
    ],
)
def test_a_roll_out_ends_as_wanted_or_with_a_sentence(code, rows, event, errors, may_fail, fine) -> None:
    plan = {"event": "plan", "rows": [{"process": row} for row in rows]}
    end = RollOut(code, [plan, {"event": event, "rows": []}], errors)
    assert (end.problem(may_fail) == "") == fine


def test_a_gap_is_an_instant_at_which_nobody_was_able() -> None:
    timeline = Timeline()
    timeline.back("a", 1.0)
    timeline.back("b", 2.0)
    timeline.lost("a", 3.0)
    timeline.back("a", 4.0)
    timeline.lost("b", 5.0)
    timeline.lost("a", 6.0)
    assert not timeline.gap(["a", "b"], 1.5, 5.5)
    assert timeline.gap(["a"], 1.5, 5.5)
    assert timeline.gap(["a", "b"], 5.5, 6.0)
    assert timeline.gap(["a", "b"], 0.5, 1.5)
    assert timeline.losses(["a", "b"], 2.0, 6.0) == 3


def timeline() -> Timeline:
    known = Timeline()
    for name in ("router-1", "router-1>decode-1"):
        known.back(name, 0.0)
    return known


def judged(known: Timeline, expected: Expected = RIGHT, ask: Ask = ASK, **outcome: object) -> Judged:
    end = Outcome(ask, "router-1", 1.0, 2.0, **outcome)  # type: ignore[arg-type]
    return judge(end, expected, known, ["router-1>decode-1"], ["router-1>decode-1"])


def test_an_answer_is_compared_token_by_token() -> None:
    whole = {"end": "done", "finish": "length"}
    assert judged(timeline(), **whole, tokens=[1, 2, 3], text="abc").verdict is Verdict.EXACT
    assert judged(timeline(), end="done", finish="stop", tokens=[1, 2, 3], text="abc").verdict is Verdict.WRONG
    for tokens, text in (([1, 2, 4], "abc"), ([1, 2], "ab"), ([1, 2, 3, 3], "abcc"), ([1, 1, 2], "aab")):
        assert judged(timeline(), **whole, tokens=tokens, text=text).verdict is Verdict.WRONG
    assert judged(timeline(), end="left", tokens=[1, 2], text="ab").verdict is Verdict.LEFT
    assert judged(timeline(), end="left", tokens=[2], text="b").verdict is Verdict.WRONG
    assert judged(timeline(), end="error", tokens=[1, 3], text="ac", code="UNAVAILABLE").verdict is Verdict.WRONG
    assert judged(timeline(), end="hung").verdict is Verdict.HUNG


def test_an_answer_of_another_model_is_known_as_such() -> None:
    names = ("one", "two", "three")
    for scenario in (one for one in SCENARIOS if one.models):
        asks = [ask for number in range(20) for ask in plan_round(1, number, scenario, ODDS, WEIGHTS).asks]
        assert ({ask.model for ask in asks}, scenario.models) == ({*names}, names)
    outcome = Outcome(replace(ASK, model="one"), "router-1", 1.0, 2.0, "done", [4, 5, 6], "def", "length")
    others = [RIGHT, Expected([4, 5, 6], "def", "length")]
    assert is_crossed(outcome, others)
    assert not is_crossed(outcome, others[:1])
    assert Verdict.CROSSED in FAILURES


def test_an_answer_with_a_grammar_has_to_be_valid_too() -> None:
    right, wrong = Expected([1, 2], "ab", "stop"), Expected([1, 2], "ax", "stop")
    for expected, verdict in ((right, Verdict.VALID), (wrong, Verdict.WRONG)):
        said = {"end": "done", "finish": "stop", "tokens": [1, 2], "text": expected.text}
        assert judged(timeline(), expected, LETTERS, **said).verdict is verdict
    cut = Expected([1, 2, 3], "abx", "length")
    said = {"end": "done", "finish": "length", "tokens": [1, 2, 3], "text": "abx"}
    assert judged(timeline(), cut, LETTERS, **said).verdict is Verdict.VALID


def test_after_a_tie_an_answer_with_a_grammar_may_end_early_but_not_be_invalid() -> None:
    tie = Expected([1], "a", open=True)
    for text, verdict in (("ab", Verdict.VALID), ("ax", Verdict.WRONG), ("bb", Verdict.WRONG)):
        said = {"end": "done", "finish": "stop", "tokens": [1, 2], "text": text}
        assert judged(timeline(), tie, LETTERS, **said).verdict is verdict
    assert judged(timeline(), tie, end="done", finish="stop", tokens=[1, 2], text="ab").verdict is Verdict.WRONG


def test_a_share_of_the_requests_has_a_grammar_greedy_and_seeded_of_every_kind() -> None:
    asks = [ask for number in range(200) for ask in plan_round(1, number, SCENARIOS[0], ODDS, WEIGHTS).asks]
    constrained = [ask for ask in asks if ask.grammar is not None]
    assert 0.2 < len(constrained) / len(asks) < 0.4
    drawn = {
        (ask.grammar.kind, "seed" in ask.sampling, ask.sampling["ignore_eos"]) for ask in constrained if ask.grammar
    }
    assert drawn == set(itertools.product(grammars.WEIGHTS, (False, True), (False, True)))


def test_an_answer_that_does_not_match_its_grammar_is_told_from_one_that_does() -> None:
    chance = random.Random(1)
    for grammar in (grammars.draw(chance) for _ in range(100)):
        if grammar.kind == "json_schema":
            assert grammars.mismatch(grammar, json.dumps(instance_of(chance, json.loads(grammar.text)))) == ""
        elif grammar.kind == "choice":
            assert all(grammars.mismatch(grammar, text) == "" for text in grammar.choices)
        assert grammars.mismatch(grammar, "{") != ""


def test_an_error_is_warranted_by_the_loss_of_what_it_needs_alone() -> None:
    assert judged(timeline(), end="error", code="UNAVAILABLE").verdict is Verdict.UNWARRANTED
    for lost in ("router-1", "router-1>decode-1"):
        known = timeline()
        known.lost(lost, 1.5)
        assert judged(known, end="error", code="UNAVAILABLE").verdict is Verdict.WARRANTED
    assert judged(known, end="error", code="INTERNAL").verdict is Verdict.UNWARRANTED


def test_an_answer_is_right_when_it_is_wholly_of_one_generation_and_lost_with_its_own_workers_alone() -> None:
    rights = [(RIGHT, ["router-1>decode-1"]), (Expected([1, 5, 6], "axy", "length"), ["router-1>decode-2"])]
    known = timeline()
    known.back("router-1>decode-2", 0.0)

    def verdict(tokens: list[int], text: str, end: Literal["done", "error"] = "done") -> Verdict:
        outcome = Outcome(ASK, "router-1", 1.0, 2.0, end, tokens, text, "length", "UNAVAILABLE" * (end == "error"))
        return judge_any(outcome, rights, known, ["router-1>decode-1", "router-1>decode-2"]).verdict

    assert verdict([1, 2, 3], "abc") == verdict([1, 5, 6], "axy") == Verdict.EXACT
    assert verdict([1, 2, 6], "aby") == verdict([1, 5, 3], "axc") == Verdict.WRONG
    known.lost("router-1>decode-2", 1.5)
    assert verdict([1, 5], "ax", "error") is Verdict.WARRANTED
    assert verdict([1, 2], "ab", "error") is Verdict.UNWARRANTED


def test_growth_is_told_of_lives_that_grow() -> None:
    assert slope([0, 1, 2], [1, 3, 5]) == 2
    looks = [Look(("decode-1", 1), 10 * number, 20 + 5 * number, 4, 1 << 20) for number in range(5)]
    grown = growth(looks)
    assert grown.most_descriptors == 20
    assert len(grown.problems) == 1
    assert growth(looks[:2]).problems == []


async def test_a_request_without_an_end_has_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    async def for_ever(door: Door, what: Ask, outcome: Outcome) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(asking, "DEADLINE_S", 0.01)
    monkeypatch.setattr(asking, "HUNG_GRACE_S", 0.01)
    monkeypatch.setitem(asking.WAYS, "gRPC", (1, for_ever))
    door = Door("router-1", None, ("127.0.0.1", 1), "tiny")  # type: ignore[arg-type]
    assert (await asking.ask(door, ASK)).end == "hung"
