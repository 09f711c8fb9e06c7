"""Who falls asleep for a model that is to wake."""

from msgspec.structs import replace

from planner.policy.swap import Swap, Tenant, Wait, make_room

ROOM = {"": 2}
WANTED = Tenant("wanted", {"": 1})


def awake(name: str, idle_s: float = 0.0, priority: int = 0, gpus: int = 1, **more: bool | float) -> Tenant:
    fields = {"awake_s": 100.0} | more
    return Tenant(name, {"": gpus}, priority, is_awake=True, idle_s=idle_s, **fields)  # type: ignore[arg-type]


def slept(*others: Tenant, wanted: Tenant = WANTED) -> tuple[str, ...]:
    decision = make_room(wanted, others, ROOM)
    assert isinstance(decision, Swap), decision
    return decision.asleep


def test_nobody_falls_asleep_while_there_is_room() -> None:
    assert slept(awake("a", 50), replace(awake("b", 50), is_awake=False)) == ()


def test_the_lowest_priority_goes_first_and_then_who_has_been_idle_longest() -> None:
    assert slept(awake("a", 5), awake("b", 50)) == ("b",)
    assert slept(awake("a", 50, priority=1), awake("b", 5)) == ("b",)
    assert slept(awake("a", 5, priority=1), awake("b", priority=0)) == ("a",), "the other one is busy"


def test_as_many_fall_asleep_as_it_takes_and_no_more() -> None:
    wanted = Tenant("wanted", {"": 2})
    assert slept(awake("a", 5), awake("b", 50), wanted=wanted) == ("b", "a")
    assert slept(awake("a", 5, gpus=2), wanted=wanted) == ("a",)


def test_a_busy_one_drains_for_no_lower_priority() -> None:
    others = [awake("a"), awake("b", priority=1)]
    assert slept(*others) == ("a",)
    assert slept(*others, wanted=replace(WANTED, priority=2)) == ("a",)
    decision = make_room(replace(WANTED, priority=-1), others, ROOM)
    assert decision == Wait("its GPUs are held by a, b")


def test_a_model_stays_awake_ten_times_as_long_as_its_wake_took() -> None:
    others = [awake("a", 5, awake_s=9.0, wake_took_s=1.0), awake("b", 5, awake_s=9.0, wake_took_s=1.0)]
    assert isinstance(make_room(WANTED, others, ROOM), Wait)
    assert slept(replace(others[0], awake_s=10.0), others[1]) == ("a",)


def test_an_idle_one_need_not_stay_awake_once_it_has_served_and_a_busy_one_must() -> None:
    served = awake("a", 0.2, awake_s=2.0, wake_took_s=1.0, has_served=True)
    assert slept(served, replace(served, name="b", has_served=False)) == ("a",)
    assert isinstance(make_room(WANTED, [replace(served, idle_s=0.0), awake("b", sleeps=False)], ROOM), Wait)


def test_who_never_sleeps_keeps_its_gpus() -> None:
    assert slept(awake("a", 500, sleeps=False), awake("b")) == ("b",)
    assert isinstance(make_room(WANTED, [awake("a", 500, sleeps=False, gpus=2)], ROOM), Wait)


def test_only_those_on_the_same_gpu_fall_asleep() -> None:
    here, there = replace(awake("here", 1), holds={"0": 1}), replace(awake("there", 50), holds={"1": 1})
    decision = make_room(replace(WANTED, holds={"0": 1}), [here, there], {"0": 1, "1": 1})
    assert decision == Swap(("here",), "here was idle for 1.0 s")
