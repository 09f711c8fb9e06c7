"""Guards and ladder together: whatever a policy wants and whatever is observed, these things never happen."""

from itertools import pairwise

import msgspec
from hypothesis import given, settings, strategies as st

from baton_proto.planner import ALL_VERBS, DECODE, PREFILL, ROLES, Holds, Observation, Role, Target, WorkerView
from planner.planner import Planner
from planner.policy.guards import guarded
from planner.policy.history import RoleHistory
from planner.policy.ladder import actions_for
from planner.policy.observation import counts, gpus_held
from planner.policy.situation import Situation, situation
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
@settings(max_examples=400, deadline=None)
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


def test_a_budget_too_small_for_both_takes_from_both_alike() -> None:
    wanted = guarded(Wanted(6, 3), now([], 6), SloPolicy.guards)
    assert (wanted.prefill, wanted.decode) == (4, 2)


def test_counts_set_by_hand_go_before_the_policys_and_limits_before_these() -> None:
    views = [*workers(3, 3), WorkerView("mine", DECODE, "ready", 0.0, held=True)]
    seen = now(views, holds=Holds(prefill=2, decode=50))
    wanted = guarded(Wanted(5, 5), seen, ThresholdPolicy.guards)
    assert (wanted.prefill, wanted.decode) == (2, 6)
    assert wanted.reasons[0] == "2 prefill workers are set by hand; 5 were wanted"
    assert "left alone, held by hand: mine" in wanted.reasons


def test_a_role_that_has_just_grown_does_not_shrink() -> None:
    history = HISTORY | {PREFILL: RoleHistory(up_s=950.0)}
    seen = situation(observation(1000.0, workers(4, 4)), CONFIG, history)
    assert guarded(Wanted(2, 4), seen, SloPolicy.guards).prefill == 4


def test_a_role_that_turns_too_often_waits() -> None:
    history = HISTORY | {PREFILL: RoleHistory(down_s=970.0, reversals_s=[200.0, 900.0])}
    seen = situation(observation(1000.0, workers(2, 4)), CONFIG, history)
    assert guarded(Wanted(5, 4), seen, SloPolicy.guards).prefill == 2
    calmer = msgspec.structs.replace(seen, history=HISTORY | {PREFILL: RoleHistory(down_s=970.0, reversals_s=[200.0])})
    assert guarded(Wanted(5, 4), calmer, SloPolicy.guards).prefill == 5


def verbs_for(views: list[WorkerView], prefill: int, decode: int, **changes: object) -> list[tuple[str, str]]:
    return [(a.verb, a.worker_id) for a in actions_for(Wanted(prefill, decode), now(views, **changes), 100)]


def test_the_ladder_wakes_first_then_flips_then_starts() -> None:
    asleep = WorkerView("z", PREFILL, "sleeping", 0.0)
    views = [*workers(1, 4), asleep]
    found = verbs_for(views, 4, 3)
    assert found == [("wake", "z"), ("flip", "decode-0"), ("add", "prefill-100")]
    without = tuple(verb for verb in ALL_VERBS if verb not in ("wake", "flip"))
    found = verbs_for(views, 4, 3, verbs=without)
    assert [verb for verb, _ in found] == ["add", "add", "add", "drain"]


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
    assert [action.verb for action in actions_for(Wanted(1, 2), seen, 100)] == ["sleep", "drain"]


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


def test_a_pending_worker_of_one_role_does_not_stop_the_other() -> None:
    planner = Planner(CONFIG)
    pending = starting("decode-8", DECODE, 0.0)
    target = planner.decide(observation(100.0, [*workers(0, 2), pending]))
    assert [(action.verb, action.role) for action in target.actions] == [("add", PREFILL)]


def test_after_a_failed_start_a_sleeper_may_still_wake() -> None:
    history = HISTORY | {PREFILL: RoleHistory(failures=1, failure="no room", retry_s=1030.0)}
    views = [*workers(1, 2), WorkerView("z", PREFILL, "sleeping", 0.0)]
    seen = situation(observation(1000.0, views), CONFIG, history)
    wanted = guarded(Wanted(4, 2), seen, SloPolicy.guards)
    assert wanted.reasons == ("1 starts of prefill workers failed (no room): next one in 30 s",)
    assert [action.verb for action in actions_for(wanted, seen, 100)] == ["wake"]
