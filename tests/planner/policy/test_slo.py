"""The policy `slo`: how it grows, when it shrinks, and that it neither oscillates nor takes silence for a gap."""

from msgspec.structs import replace

from baton_proto.planner import DECODE, PREFILL, Observation, Queue, WorkerView
from planner.planner import Planner
from planner.policy.sizing import Lengths, prefill_workers, prompt_time
from runtime.config.planner import LimitsConfig, PlannerConfig, SloConfig, TargetsConfig
from runtime.config.step_times import StepTimes
from tests.planner.observations import interval, observation, starting, workers

SLOW = StepTimes(24.0, 0.08, 4.8e-6, 20.0, 0.08, 1.68e-4)
CONFIG = PlannerConfig(targets=TargetsConfig(1500, 60, 0.99), limits=LimitsConfig(gpu_budget=40))


def config(**changes: object) -> PlannerConfig:
    return replace(CONFIG, slo=SloConfig(profile=SLOW), **changes)


class Cluster:
    """Does at once what the planner asks for, with nothing between prompt and answer."""

    def __init__(self, planner: Planner, prefill: int, decode: int) -> None:
        self.planner = planner
        self.now_s = 0.0
        self.workers: dict[str, WorkerView] = {worker.worker_id: worker for worker in workers(prefill, decode)}
        self.verbs: list[tuple[float, str, str]] = []

    def count(self, role: str) -> int:
        return sum(worker.role == role for worker in self.workers.values())

    def live(self, rate: float, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 5
            target = self.planner.decide(self.seen(rate))
            for action in target.actions:
                self.verbs.append((self.now_s, action.verb, action.role))
                if action.verb in ("drain", "remove"):
                    del self.workers[action.worker_id]
                else:
                    worker = WorkerView(action.worker_id, action.role, "ready", self.now_s, self.now_s)
                    self.workers[action.worker_id] = worker

    def seen(self, rate: float) -> Observation:
        return observation(self.now_s, list(self.workers.values()), interval(rate), gpu_budget=40)


def test_a_step_of_the_load_is_answered_at_once_and_by_as_many_as_it_takes() -> None:
    cluster = Cluster(Planner(config()), 2, 2)
    cluster.live(10, 300)
    before = cluster.count(PREFILL)
    cluster.live(60, 5)
    lengths = Lengths(1000, 1e6, 200, 0.0, 0.0, 1200)
    needed = prefill_workers(60 * 1.25, prompt_time(lengths, SLOW), CONFIG.targets)
    assert cluster.count(PREFILL) >= needed > before + 3
    assert cluster.count(DECODE) > 3


def test_the_count_falls_only_after_two_minutes_of_low_load() -> None:
    cluster = Cluster(Planner(config()), 2, 2)
    cluster.live(60, 300)
    high = cluster.count(PREFILL)
    cluster.live(10, 110)
    assert cluster.count(PREFILL) == high
    cluster.live(10, 60)
    assert cluster.count(PREFILL) < high / 2


def test_one_busy_moment_within_two_minutes_keeps_the_count() -> None:
    cluster = Cluster(Planner(config()), 2, 2)
    cluster.live(60, 300)
    high = cluster.count(PREFILL)
    for _ in range(4):
        cluster.live(20, 90)
        cluster.live(60, 10)
    assert cluster.count(PREFILL) >= high - 1


def test_zero_traffic_is_zero_and_not_missing() -> None:
    cluster = Cluster(Planner(config()), 4, 4)
    cluster.live(0, 400)
    assert (cluster.count(PREFILL), cluster.count(DECODE)) == (1, 1)


def test_traffic_that_ends_leaves_the_least() -> None:
    cluster = Cluster(Planner(config()), 4, 4)
    cluster.live(60, 300)
    cluster.live(0, 600)
    assert (cluster.count(PREFILL), cluster.count(DECODE)) == (1, 1)


def test_a_load_between_one_and_two_workers_does_not_make_them_come_and_go() -> None:
    """Whatever the load: after it has settled, a steady one changes nothing any more."""
    for tenths in range(20, 200, 15):
        cluster = Cluster(Planner(config()), 2, 2)
        cluster.live(tenths / 10, 600)
        settled = len(cluster.verbs)
        cluster.live(tenths / 10, 1200)
        assert cluster.verbs[settled:] == [], tenths


def test_what_is_starting_already_is_not_started_again() -> None:
    planner = Planner(config())
    views = workers(2, 8)
    for number in range(60):
        planner.decide(observation(5.0 * number, views, interval(20), gpu_budget=40))
    queue = Queue(waiting=300, prefill_tokens=300_000, oldest_s=10)
    first = planner.decide(observation(300.0, views, interval(60), queue=queue, gpu_budget=40))
    added = [action for action in first.actions if action.verb == "add" and action.role == PREFILL]
    assert len(added) >= 4
    views = views + [starting(action.worker_id, action.role, 300.0) for action in first.actions]
    again = planner.decide(observation(305.0, views, interval(60), queue=queue, gpu_budget=40))
    assert [action for action in again.actions if action.verb == "add" and action.role == PREFILL] == []


def test_a_backlog_behind_full_decode_workers_adds_decode_workers() -> None:
    planner = Planner(config())
    queue = Queue(waiting=200, prefill_tokens=200_000, oldest_s=10)
    views = [*workers(4, 0), *workers(0, 2, kv_used=1.0, running=50, context_tokens=60_000, kv_tokens=60_000)]
    for number in range(10):
        target = planner.decide(observation(5.0 * number, views, interval(20), queue=queue, gpu_budget=40))
    assert target.decode > 4
    assert target.prefill == 4


def test_without_prefill_workers_decode_workers_are_sized_for_the_prompts_too() -> None:
    mixed = config(limits=LimitsConfig(min_prefill=0, max_prefill=0, gpu_budget=40))
    alone, both = Cluster(Planner(config()), 1, 1), Cluster(Planner(mixed), 0, 1)
    alone.live(40, 300)
    both.live(40, 300)
    assert both.count(PREFILL) == 0
    assert both.count(DECODE) > alone.count(DECODE)


def test_a_planner_that_was_restarted_decides_as_the_one_before() -> None:
    cluster = Cluster(Planner(config()), 2, 2)
    cluster.live(30, 400)
    heir = Planner(config())
    heir.restore(cluster.planner.saved())
    cluster.now_s += 5
    seen = cluster.seen(90)
    assert heir.decide(seen) == cluster.planner.decide(seen)
    assert heir.saved() == cluster.planner.saved()


def test_headroom_adds_workers_of_its_role() -> None:
    def counts(prefill_headroom: float, decode_headroom: float) -> tuple[int, int]:
        slo = SloConfig(profile=SLOW, prefill_headroom=prefill_headroom, decode_headroom=decode_headroom)
        cluster = Cluster(Planner(replace(CONFIG, slo=slo)), 2, 2)
        cluster.live(30.0, 60)
        return cluster.count(PREFILL), cluster.count(DECODE)

    bare, roomy_prefill, roomy_decode = counts(0.0, 0.0), counts(1.0, 0.0), counts(0.0, 1.0)
    assert roomy_prefill[0] > bare[0]
    assert roomy_decode[1] > bare[1]
