"""Guards and ladder together: whatever a policy wants and whatever is observed, these things never happen."""

from itertools import pairwise

import msgspec
from hypothesis import given, settings, strategies as st

from baton_proto.planner import ALL_VERBS, DECODE, PREFILL, ROLES, Holds, Observation, Role, Target, WorkerView
from planner.planner import Planner
from planner.policy.guards import (
    cool_down,
    guarded,
    hold_by_hand,
    limit_reversals,
    tell_of_failures,
    within_budget,
    within_limits,
)
from planner.policy.history import RoleHistory, Situation, situation
from planner.policy.ladder import actions_for
from planner.policy.observation import counts, gpus_held
from planner.policy.slo import SloPolicy
from planner.policy.threshold import ThresholdPolicy
from planner.policy.wanted import Wanted
from runtime.config.planner import LimitsConfig, PlannerConfig
from tests.planner.observations import FRESH, interval, observation, starting, workers

CONFIG = PlannerConfig(limits=LimitsConfig(min_prefill=1, max_prefill=6, min_decode=2, max_decode=6))
HISTORY = {role: RoleHistory() for role in ROLES}

states = st.sampled_from(["starting", "ready", "draining", "sleeping"])
effects = st.sampled_from([None, None, None, "add", "drain", "sleep", "wake", "flip"])


@st.composite
def clusters(draw: st.DrawFn) -> list[WorkerView]:
    count = draw(st.integers(0, 12))
    return [
        WorkerView(
            f"w-{number}",
            draw(st.sampled_from(ROLES)),
            draw(states),
            draw(st.floats(0, 1000)),
            effect=draw(effects),
            held=draw(st.booleans()),
        )
        for number in range(count)
    ]


def now(views: list[WorkerView], budget: int = 32, **changes: object) -> Situation:
    return situation(observation(1000.0, views, gpu_budget=budget, **changes), CONFIG, HISTORY)


@given(clusters(), st.integers(0, 20), st.integers(0, 20), st.integers(2, 16), st.sets(st.sampled_from(ALL_VERBS)))
@settings(max_examples=150, deadline=None)
def test_no_cluster_and_no_wish_breaks_the_rules(
    views: list[WorkerView], prefill: int, decode: int, budget: int, verbs: set[str]
) -> None:
    seen = now(views, budget, verbs=tuple(verbs))
    wanted = guarded(Wanted(prefill, decode), seen, SloPolicy.guards)
    actions = actions_for(wanted, seen, next_number=100)
    by_id = {worker.worker_id: worker for worker in views}
    assert {action.verb for action in actions} <= verbs
    assert len({action.worker_id for action in actions}) == len(actions)
    for action in actions:
        if action.verb != "add":
            assert by_id[action.worker_id].effect is None
            assert not by_id[action.worker_id].held
            assert by_id[action.worker_id].state != "draining"
    added = sum(action.verb == "add" for action in actions)
    assert added == 0 or gpus_held(seen.observation) + added <= budget
    for role, least in ((PREFILL, 1), (DECODE, 2)):
        have = counts(seen.observation, role).have
        lost = sum(a.verb in ("drain", "sleep", "remove") and a.role == role for a in actions)
        lost += sum(a.verb == "flip" and a.role != role for a in actions)
        assert lost == 0 or have - lost >= least or budget < 3


@given(st.integers(0, 99), st.integers(0, 99), st.integers(3, 40))
def test_limits_and_budget_hold_whatever_is_wanted(prefill: int, decode: int, budget: int) -> None:
    wanted = guarded(Wanted(prefill, decode), now([], budget), SloPolicy.guards)
    assert 1 <= wanted.prefill <= 6
    assert 2 <= wanted.decode <= 6
    assert wanted.prefill + wanted.decode <= budget
    changed = (wanted.prefill, wanted.decode) != (prefill, decode)
    assert bool(wanted.reasons) == changed  # each change has its reason, and nothing else has one


def test_counts_set_by_hand_go_before_the_policys_and_limits_before_these() -> None:
    views = [*workers(3, 3), WorkerView("mine", DECODE, "ready", 0.0, held=True)]
    seen = now(views, holds=Holds(prefill=2, decode=50))
    wanted = guarded(Wanted(5, 5), seen, ThresholdPolicy.guards)
    assert (wanted.prefill, wanted.decode) == (2, 6)
    assert wanted.reasons[0] == "2 prefill workers are set by hand; 5 were wanted"
    assert "left alone, held by hand: mine" in wanted.reasons


def situated(views: list[WorkerView], history: dict[str, RoleHistory], **changes: object) -> Situation:
    return situation(observation(1000.0, views, **changes), CONFIG, HISTORY | history)


def test_a_role_that_has_just_shrunk_does_not_shrink_again_and_the_other_may() -> None:
    seen = situated(workers(4, 4), {PREFILL: RoleHistory(down_s=971.0), DECODE: RoleHistory(down_s=970.0)})
    assert cool_down(Wanted(3, 3), seen) == Wanted(4, 3, ("prefill shrank 29 s ago: not again yet",))
    assert cool_down(Wanted(4, 4), seen) == Wanted(4, 4)
    assert cool_down(Wanted(5, 5), seen) == Wanted(5, 5)
    uneven = situated(workers(4, 2), {PREFILL: RoleHistory(down_s=971.0)})
    assert cool_down(Wanted(5, 2), uneven) == Wanted(5, 2)


def test_growth_is_protected_for_a_minute() -> None:
    just, before = RoleHistory(up_s=941.0), RoleHistory(up_s=940.0)
    seen = situated(workers(4, 4), {PREFILL: just, DECODE: before})
    assert limit_reversals(Wanted(2, 3), seen) == Wanted(4, 3, ("prefill grew 59 s ago: it does not shrink yet",))
    assert limit_reversals(Wanted(4, 4), seen) == Wanted(4, 4)
    assert limit_reversals(Wanted(5, 5), seen) == Wanted(5, 5)


def test_turns_count_for_an_hour_and_bind_only_a_role_that_has_just_shrunk() -> None:
    time_s = 10_000.0
    hour_ago = time_s - 3600.0

    def grown(down_s: float, reversals_s: list[float], wanted: int = 5) -> Wanted:
        views, history = workers(2, 4), HISTORY | {PREFILL: RoleHistory(down_s=down_s, reversals_s=reversals_s)}
        return limit_reversals(Wanted(wanted, 4), situation(observation(time_s, views), CONFIG, history))

    often = "prefill shrank 59 s ago and turned 2 times this hour: it does not grow yet"
    assert grown(time_s - 59, [hour_ago + 1, hour_ago + 2]) == Wanted(2, 4, (often,))
    assert grown(time_s - 59, [hour_ago, hour_ago + 1]).prefill == 5
    assert grown(time_s - 60, [hour_ago + 1, hour_ago + 2]).prefill == 5
    assert grown(time_s - 59, [hour_ago + 1, hour_ago + 2], wanted=2) == Wanted(2, 4)
    assert grown(time_s - 59, [hour_ago + 1, hour_ago + 2], wanted=1) == Wanted(1, 4)


def test_limits_say_which_bound_was_met() -> None:
    assert within_limits(Wanted(0, 9), now([])) == Wanted(
        1, 6, ("1 prefill workers are the least; 0 were wanted", "6 decode workers are the most; 9 were wanted")
    )
    assert within_limits(Wanted(1, 2), now([])) == Wanted(1, 2)
    assert within_limits(Wanted(6, 6), now([])) == Wanted(6, 6)


def test_a_budget_takes_from_the_role_that_has_the_most_of_its_wish_left() -> None:
    short = (
        "6 GPUs are the budget: 4 prefill workers of 6 wanted",
        "6 GPUs are the budget: 2 decode workers of 3 wanted",
    )
    assert within_budget(Wanted(6, 3), now([], 6)) == Wanted(4, 2, short)
    assert within_budget(Wanted(3, 3), now([], 6)) == Wanted(3, 3)
    assert [(w.prefill, w.decode) for w in (within_budget(Wanted(1, 6), now([], b)) for b in (6, 4, 3))] == [
        (1, 5), (1, 3), (1, 2)
    ]  # fmt: skip


def test_a_role_at_its_least_is_spared_while_the_other_has_more() -> None:
    limits = LimitsConfig(min_prefill=1, max_prefill=6, min_decode=4, max_decode=6)
    seen = msgspec.structs.replace(now([], 5), config=PlannerConfig(limits=limits))
    wanted = within_budget(Wanted(3, 4), seen)
    assert (wanted.prefill, wanted.decode) == (1, 4)


def test_a_budget_below_the_least_takes_from_the_larger_role_until_nothing_is_left() -> None:
    assert [(w.prefill, w.decode) for w in (within_budget(Wanted(1, 2), now([], b)) for b in (2, 1, 0))] == [
        (1, 1), (0, 1), (0, 0)
    ]  # fmt: skip


def test_a_budget_counts_the_gpus_of_each_role() -> None:
    each: dict[Role, int] = {PREFILL: 4, DECODE: 1}
    assert within_budget(Wanted(2, 4), now([], 12, gpus_per_worker=each)).reasons == ()
    wanted = within_budget(Wanted(2, 4), now([], 11, gpus_per_worker=each))
    assert (wanted.prefill, wanted.decode) == (1, 4)


def test_a_failed_start_is_told_only_to_who_wants_more_before_the_next_try() -> None:
    failed = RoleHistory(failures=2, failure="no room", retry_s=1030.0)
    told = ("2 starts of prefill workers failed (no room): next one in 30 s",)
    seen = situated(workers(2, 2), {PREFILL: failed})
    assert tell_of_failures(Wanted(3, 3, ("more",)), seen).reasons == ("more", *told)
    assert tell_of_failures(Wanted(2, 3), seen).reasons == ()
    at_once = msgspec.structs.replace(failed, retry_s=1000.0)
    assert tell_of_failures(Wanted(3, 3), situated(workers(2, 2), {PREFILL: at_once})).reasons == ()
    soon = msgspec.structs.replace(failed, retry_s=1000.5)
    assert len(tell_of_failures(Wanted(3, 3), situated(workers(2, 2), {PREFILL: soon})).reasons) == 1


def test_workers_held_by_hand_are_all_named() -> None:
    views = [WorkerView(name, DECODE, "ready", 0.0, held=True) for name in ("x", "y")]
    assert hold_by_hand(Wanted(1, 2, ("so",)), now(views)).reasons == ("so", "left alone, held by hand: x, y")


def frozen(**changes: object) -> Target:
    return Planner(CONFIG).decide(observation(0.0, [], interval(500), **changes))


def test_stale_metrics_freeze_everything() -> None:
    for source in ("routers", "discovery"):
        target = frozen(ages_s=FRESH | {source: 15.1})
        assert target.frozen
        assert target.actions == []
        assert source in target.reasons[0]
    assert frozen(ages_s={}).frozen
    assert not frozen(ages_s=FRESH).frozen


def test_silent_workers_freeze_only_where_there_are_some() -> None:
    silent = FRESH | {"workers": 99.0}
    assert not frozen(ages_s=silent).frozen
    assert Planner(CONFIG).decide(observation(0.0, workers(1, 2), ages_s=silent)).frozen


class Started:
    """A cluster in which workers that are added never become ready."""

    def __init__(self) -> None:
        self.planner = Planner(CONFIG)
        self.views = workers(1, 0)
        self.added: list[float] = []
        self.targets: list[Target] = []

    def live(self, until_s: float, begin_s: float = 0.0) -> None:
        time_s = begin_s
        while time_s < until_s:
            time_s += 5
            seen: Observation = observation(time_s, self.views)
            target = self.planner.decide(seen)
            self.targets.append(target)
            for action in target.actions:
                if action.verb == "add":
                    self.added.append(time_s)
                    self.views = [*self.views, starting(action.worker_id, action.role, time_s)]
                elif action.verb == "remove":
                    self.views = [view for view in self.views if view.worker_id != action.worker_id]


def test_a_worker_that_never_becomes_ready_is_given_up_and_retried_ever_later() -> None:
    """And freezes nothing: decode is at its least of 2, with none there."""
    cluster = Started()
    cluster.live(3000)
    times = sorted(set(cluster.added))
    assert times[0] == 5
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps[0] > 300 + 30
    assert gaps == sorted(gaps)
    assert len(cluster.views) <= 1 + 2
    assert any("is not ready after 300 s" in reason for target in cluster.targets for reason in target.reasons)


def test_after_a_failed_start_a_sleeper_may_still_wake() -> None:
    history = HISTORY | {PREFILL: RoleHistory(failures=1, failure="no room", retry_s=1030.0)}
    views = [*workers(1, 2), WorkerView("z", PREFILL, "sleeping", 0.0)]
    seen = situation(observation(1000.0, views), CONFIG, history)
    wanted = guarded(Wanted(4, 2), seen, SloPolicy.guards)
    assert wanted.reasons == ("1 starts of prefill workers failed (no room): next one in 30 s",)
    assert [action.verb for action in actions_for(wanted, seen, 100)] == ["wake"]
