"""The router's memory of its placements: found by either id, bounded by decisions and by candidates."""

import random

from router.placement.candidates import Request
from router.placement.decisions import Decision, DecisionLog
from router.placement.placement import Placement
from router.placement.weights import Weights
from tests.router.candidates import Candidate, place


def placement(num_candidates: int = 1) -> Placement:
    decode = [Candidate((f"d{i}", 1), 0, 0, 0) for i in range(num_candidates)]
    placed = place(Request(10, 16), decode, [], Weights(), random.Random(1))
    assert placed is not None
    return placed


def remember(log: DecisionLog, request_id: str, choice: int = 0, attempt: int = 1, num_candidates: int = 1) -> None:
    found = placement(num_candidates)
    log.add(Decision(request_id, choice, attempt, 0.0, 0.0, Request(10, 16), found.weighing, found, 1.0))


def test_a_request_is_found_by_its_callers_id_with_all_choices_and_attempts() -> None:
    log = DecisionLog()
    remember(log, "mine-0123abcd", choice=0)
    remember(log, "other-0123abcd")
    remember(log, "mine-0123abcd", choice=1)
    remember(log, "mine-0123abcd", choice=0, attempt=2)
    decisions, others = log.of("mine")
    assert [(d.request_id, d.choice, d.attempt) for d in decisions] == [
        ("mine-0123abcd", 0, 1),
        ("mine-0123abcd", 1, 1),
        ("mine-0123abcd", 0, 2),
    ]
    assert others == 0
    assert log.of("min") == ([], 0)


def test_of_requests_with_one_callers_id_the_latest_is_meant_and_each_has_a_name_of_its_own() -> None:
    log = DecisionLog()
    remember(log, "mine-00000001")
    remember(log, "mine-00000002")
    decisions, others = log.of("mine")
    assert ([d.request_id for d in decisions], others) == (["mine-00000002"], 1)
    decisions, others = log.of("mine-00000001")
    assert ([d.request_id for d in decisions], others) == (["mine-00000001"], 0)


def test_an_id_that_the_router_made_is_found_as_it_is() -> None:
    log = DecisionLog()
    remember(log, "0123456789abcdef01234567")
    assert len(log.of("0123456789abcdef01234567")[0]) == 1


def test_the_oldest_are_forgotten() -> None:
    log = DecisionLog(max_decisions=3)
    for i in range(5):
        remember(log, f"r{i}")
    assert [bool(log.of(f"r{i}")[0]) for i in range(5)] == [False, False, True, True, True]


def test_many_candidates_leave_room_for_fewer_decisions() -> None:
    log = DecisionLog(max_decisions=100, max_costs=10)
    for i in range(5):
        remember(log, f"r{i}", num_candidates=4)
    assert [bool(log.of(f"r{i}")[0]) for i in range(5)] == [False, False, False, True, True]
    remember(log, "large", num_candidates=50)
    assert len(log) == 1
    assert log.of("large")[0]
