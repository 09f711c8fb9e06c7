"""The ladder: from wanted counts to verbs, worker by worker."""

import msgspec
import pytest

from baton_proto.planner import ALL_VERBS, DECODE, PREFILL, ROLES, Action, Role, Verb, WorkerView
from planner.policy.history import RoleHistory, Situation, situation
from planner.policy.ladder import actions_for, given_up
from planner.policy.wanted import Wanted
from runtime.config.planner import LimitsConfig, PlannerConfig
from tests.planner.observations import observation, starting, workers

CONFIG = PlannerConfig(limits=LimitsConfig(min_prefill=1, max_prefill=6, min_decode=2, max_decode=6))
HISTORY = {role: RoleHistory() for role in ROLES}


def now(
    views: list[WorkerView], budget: int = 32, history: dict[str, RoleHistory] = HISTORY, **changes: object
) -> Situation:
    return situation(observation(1000.0, views, gpu_budget=budget, **changes), CONFIG, HISTORY | history)


def without(*verbs: Verb) -> tuple[Verb, ...]:
    return tuple(verb for verb in ALL_VERBS if verb not in verbs)


def verbs_for(views: list[WorkerView], prefill: int, decode: int, **changes: object) -> list[tuple[str, str]]:
    return [(a.verb, a.worker_id) for a in actions_for(Wanted(prefill, decode), now(views, **changes), 100)]


def test_a_worker_takes_its_roles_gpus_even_when_the_role_has_none_yet() -> None:
    decode = workers(0, 4, gpus=2)
    each: dict[Role, int] = {PREFILL: 4, DECODE: 2}
    assert verbs_for(decode, 2, 2, budget=9, gpus_per_worker=each) == [("drain", "decode-0"), ("drain", "decode-1")]
    found = verbs_for(decode, 2, 2, budget=12, gpus_per_worker=each)
    assert found == [("flip", "decode-0"), ("flip", "decode-1")]


def test_the_one_with_the_least_to_finish_is_drained() -> None:
    busy, free = WorkerView("a", DECODE, "ready", 0.0, context_tokens=9), WorkerView("b", DECODE, "ready", 0.0)
    assert verbs_for([*workers(1, 0), busy, free], 1, 1) == [("drain", "b")]


def test_as_many_as_wished_for_are_kept_asleep_instead_of_ended() -> None:
    keeping = msgspec.structs.replace(CONFIG, keep_asleep=1)
    seen = situation(observation(0.0, workers(1, 4)), keeping, HISTORY)
    asleep, drained = actions_for(Wanted(1, 2), seen, 100)
    assert asleep == Action("sleep", "decode-0", DECODE, "decode has more than it needs; kept for a burst")
    assert drained.verb == "drain"


def test_each_action_says_why() -> None:
    asleep = WorkerView("z", PREFILL, "sleeping", 0.0)
    assert actions_for(Wanted(4, 3), now([*workers(1, 4), asleep]), 100) == [
        Action("wake", "z", PREFILL, "prefill needs more: a sleeper wakes fastest"),
        Action("flip", "decode-0", PREFILL, "decode can spare it and prefill needs one"),
        Action("add", "prefill-100", PREFILL, "prefill needs more than it has"),
    ]
    without_them = now([*workers(1, 4), asleep], verbs=without("wake", "flip"))
    assert [action.verb for action in actions_for(Wanted(4, 3), without_them, 100)] == ["add", "add", "add", "drain"]
    assert actions_for(Wanted(1, 2), now(workers(1, 3)), 100) == [
        Action("drain", "decode-0", DECODE, "decode has more than it needs")
    ]
    assert actions_for(Wanted(1, 2), now([*workers(1, 2), starting("s", DECODE)]), 100) == [
        Action("remove", "s", DECODE, "decode has more than it needs; it serves nobody yet")
    ]


def test_only_as_many_wake_as_are_lacking_and_none_that_an_operator_holds() -> None:
    asleep = [WorkerView(name, DECODE, "sleeping", 0.0) for name in ("x", "y", "z")]
    assert verbs_for([*workers(1, 2), *asleep], 1, 4) == [("wake", "x"), ("wake", "y")]
    held = [msgspec.structs.replace(worker, held=worker.worker_id == "x") for worker in asleep]
    assert verbs_for([*workers(1, 2), *held], 1, 3) == [("wake", "y")]
    waking = [msgspec.structs.replace(worker, effect="wake") for worker in asleep[:1]]
    assert verbs_for([*workers(1, 2), *waking], 1, 3) == []


def test_a_worker_that_still_starts_is_not_turned() -> None:
    views = [*workers(1, 2), starting("s", DECODE)]
    assert verbs_for(views, 2, 2) == [("add", "prefill-100"), ("remove", "s")]


def test_a_flip_into_a_role_of_more_gpus_needs_them_free() -> None:
    each: dict[Role, int] = {PREFILL: 3, DECODE: 1}
    four = workers(0, 4)
    assert verbs_for(four, 1, 3, budget=6, gpus_per_worker=each) == [("flip", "decode-0")]
    assert verbs_for(four, 1, 3, budget=5, gpus_per_worker=each) == [("drain", "decode-0")]
    assert verbs_for(four, 2, 2, budget=7, gpus_per_worker=each) == [("flip", "decode-0"), ("drain", "decode-1")]


def test_a_flip_between_equals_takes_no_gpu_and_only_as_many_turn_as_are_lacking() -> None:
    assert verbs_for(workers(1, 3), 3, 2, budget=5) == [("flip", "decode-0"), ("add", "prefill-100")]
    assert verbs_for(workers(1, 4), 2, 2) == [("flip", "decode-0"), ("drain", "decode-1")]


def test_new_workers_go_first_to_the_role_that_lacks_the_larger_part() -> None:
    assert verbs_for([], 1, 3, budget=3) == [("add", "prefill-100"), ("add", "decode-101"), ("add", "decode-102")]
    assert verbs_for([], 2, 2, budget=3) == [("add", "prefill-100"), ("add", "decode-101"), ("add", "prefill-102")]
    assert verbs_for([], 2, 2, verbs=without("add")) == []


def test_a_role_that_does_not_fit_leaves_the_other_its_place() -> None:
    each: dict[Role, int] = {PREFILL: 4, DECODE: 1}
    assert verbs_for([], 1, 2, budget=3, gpus_per_worker=each) == [("add", "decode-100"), ("add", "decode-101")]
    assert verbs_for([], 1, 2, budget=4, gpus_per_worker=each) == [("add", "prefill-100")]


@pytest.mark.parametrize(("retry_s", "added"), [(1000.0, 1), (1000.1, 0)])
def test_a_role_whose_start_failed_waits_for_its_next_try(retry_s: float, added: int) -> None:
    history = {PREFILL: RoleHistory(failures=1, retry_s=retry_s)}
    actions = actions_for(Wanted(1, 1), now([], history=history), 100)
    assert sum(action.role == PREFILL for action in actions) == added
    assert sum(action.role == DECODE for action in actions) == 1


def test_sleepers_are_counted_over_both_roles() -> None:
    keeping = msgspec.structs.replace(CONFIG, keep_asleep=2)
    views = [*workers(3, 3), WorkerView("z", DECODE, "sleeping", 0.0)]
    seen = situation(observation(0.0, views), keeping, HISTORY)
    found = [(action.verb, action.role) for action in actions_for(Wanted(1, 2), seen, 100)]
    assert found == [("sleep", PREFILL), ("drain", PREFILL), ("drain", DECODE)]
    seen = situation(observation(0.0, views, verbs=without("sleep")), keeping, HISTORY)
    assert {action.verb for action in actions_for(Wanted(1, 2), seen, 100)} == {"drain"}


def test_those_that_start_leave_first_the_newest_before_the_others() -> None:
    views = [*workers(1, 1), starting("old", DECODE, 10.0), starting("new", DECODE, 20.0)]
    assert verbs_for(views, 1, 2) == [("remove", "new")]
    assert verbs_for(views, 1, 1) == [("remove", "new"), ("remove", "old")]
    assert verbs_for(views, 1, 1, verbs=without("remove")) == []
    assert verbs_for([*workers(1, 1), starting("a", DECODE, 10.0), starting("b", DECODE, 20.0)], 1, 2) == [
        ("remove", "b")
    ]


def test_among_those_that_are_ready_the_age_does_not_count() -> None:
    old, new = WorkerView("a", DECODE, "ready", 10.0), WorkerView("b", DECODE, "ready", 20.0, context_tokens=9)
    assert verbs_for([*workers(1, 0), old, new], 1, 1) == [("drain", "a")]


def test_a_starting_worker_that_is_removed_already_is_not_removed_instead_of_another() -> None:
    leaving = WorkerView("s", DECODE, "starting", 1.0, effect="remove")
    assert verbs_for([*workers(1, 3), leaving], 1, 2) == [("drain", "decode-0")]


def test_queued_prompts_count_as_work_and_equals_leave_by_name() -> None:
    a = WorkerView("a", DECODE, "ready", 0.0, context_tokens=5, queued_prefill_tokens=5)
    b = WorkerView("b", DECODE, "ready", 0.0, context_tokens=9)
    assert verbs_for([*workers(1, 0), a, b], 1, 1) == [("drain", "b")]
    c = WorkerView("c", DECODE, "ready", 0.0, context_tokens=9)
    assert verbs_for([*workers(1, 0), c, b], 1, 1) == [("drain", "b")]


def test_who_is_held_or_busy_does_not_leave() -> None:
    held = WorkerView("a", DECODE, "ready", 0.0, held=True)
    draining = WorkerView("b", DECODE, "ready", 0.0, effect="drain")
    free = WorkerView("c", DECODE, "ready", 0.0)
    assert verbs_for([*workers(1, 0), held, draining, free], 1, 1) == [("drain", "c")]
    assert verbs_for([*workers(1, 0), held, free], 1, 1, verbs=without("drain")) == []


def test_a_worker_whose_start_is_in_flight_leaves_when_it_is_ready() -> None:
    added = WorkerView("s", DECODE, "starting", 0.0, effect="add")
    assert verbs_for([*workers(1, 2), added], 1, 2) == []


def test_who_did_not_become_ready_is_removed_once() -> None:
    history = {DECODE: RoleHistory(failed=["late", "busy", "fine", "mine"])}
    views = [
        starting("late", DECODE),
        starting("young", DECODE),
        WorkerView("busy", DECODE, "starting", 0.0, effect="remove"),
        WorkerView("mine", DECODE, "starting", 0.0, held=True),
        WorkerView("fine", DECODE, "ready", 0.0),
    ]
    assert given_up(now(views, history=history)) == [
        Action("remove", "late", DECODE, "it was not ready by its deadline")
    ]
    assert given_up(now(views, history=history, verbs=without("remove"))) == []
    assert actions_for(Wanted(0, 2), now(views, history=history), 100) == []
    assert [action.worker_id for action in actions_for(Wanted(0, 1), now(views, history=history), 100)] == ["young"]
