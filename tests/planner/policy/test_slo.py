"""The policy `slo`: how it grows, when it shrinks, and that it neither oscillates nor takes silence for a gap."""

import pytest
from hypothesis import assume, given, settings, strategies as st
from msgspec.structs import replace

from baton_proto.planner import DECODE, PREFILL, Interval, Observation, Queue, WorkerView
from planner.planner import Planner
from planner.policy.demand import Sums, counted
from planner.policy.forecast import Forecast, Series, observed
from planner.policy.sizing import Lengths, decode_workers, prefill_workers, prompt_time
from planner.policy.slo import Peak, SloMemory, SloPolicy
from planner.policy.step_model import initial_model
from planner.policy.wanted import Wanted
from runtime.config.planner import LimitsConfig, PlannerConfig, TargetsConfig
from runtime.config.step_times import StepTimes
from tests.planner.observations import decode_step, interval, observation, starting, workers

SLOW = StepTimes(24.0, 0.08, 4.8e-6, 20.0, 0.08, 1.68e-4)
CONFIG = PlannerConfig(targets=TargetsConfig(1500, 60, 0.99), limits=LimitsConfig(gpu_budget=40))


def config(**changes: object) -> PlannerConfig:
    return replace(CONFIG, **changes)


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
    cluster = Cluster(Planner(config(), SLOW), 2, 2)
    cluster.live(10, 300)
    before = cluster.count(PREFILL)
    cluster.live(60, 5)
    lengths = Lengths(1000, 1e6, 200, 0.0, 0.0, 1200)
    needed = prefill_workers(60 * 1.25, prompt_time(lengths, SLOW), CONFIG.targets)
    assert cluster.count(PREFILL) >= needed > before + 3
    assert cluster.count(DECODE) > 3


def test_zero_traffic_is_zero_and_not_missing() -> None:
    cluster = Cluster(Planner(config(), SLOW), 4, 4)
    cluster.live(0, 400)
    assert (cluster.count(PREFILL), cluster.count(DECODE)) == (1, 1)


def test_a_load_between_one_and_two_workers_does_not_make_them_come_and_go() -> None:
    """Whatever the load: after it has settled, a steady one changes nothing any more."""
    for tenths in range(20, 200, 15):
        cluster = Cluster(Planner(config(), SLOW), 2, 2)
        cluster.live(tenths / 10, 600)
        settled = len(cluster.verbs)
        cluster.live(tenths / 10, 1200)
        assert cluster.verbs[settled:] == [], tenths


def test_what_is_starting_already_is_not_started_again() -> None:
    planner = Planner(config(), SLOW)
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


def test_a_planner_that_was_restarted_decides_as_the_one_before() -> None:
    cluster = Cluster(Planner(config(), SLOW), 2, 2)
    cluster.live(30, 400)
    heir = Planner(config(), SLOW)
    heir.restore(cluster.planner.saved())
    cluster.now_s += 5
    seen = cluster.seen(90)
    assert heir.decide(seen) == cluster.planner.decide(seen)
    assert heir.saved() == cluster.planner.saved()


TIMES = StepTimes(2.0, 0.1, 0.0, 20.0, 0.08, 1.68e-4)  # a prompt of 1,000 tokens takes 100 ms
POLICY = SloPolicy(CONFIG, TIMES)
LENGTHS = Lengths(1000, 1e6, 200, 0.0, 0.0, 1200)
SUMS = Sums(100, 1e5, 1e8, 0, 0, 100, 2e4)
NOW_S = 1000.0


def remembered(rate: float = 20.0, trend: float = 0.0, sums: Sums = SUMS, **changes: object) -> SloMemory:
    """The memory of a steady load. With a trend, the forecaster that sees it is believed."""
    series = {name: Series(rate, error=1.0, scored=900.0) for name in ("constant", "kalman")}
    if trend:
        series["holt"] = Series(rate, trend, error=0.1, scored=900.0)
    memory = SloMemory(0.0, Forecast(series), sums, initial_model(TIMES))
    return replace(memory, **changes)


def decided(
    views: list[WorkerView], memory: SloMemory, rate: float = 20.0, policy: SloPolicy = POLICY, **changes: object
) -> tuple[Wanted, SloMemory]:
    """Of one interval in which `rate` requests per second came."""
    return policy.decide(observation(NOW_S, views, interval(rate), gpu_budget=40, **changes), memory)


def needed(wanted: Wanted) -> tuple[float, float]:
    return wanted.figures["needed_prefill"], wanted.figures["needed_decode"]


def for_prompts(rate: float) -> int:
    return prefill_workers(rate, prompt_time(LENGTHS, TIMES), CONFIG.targets)


def for_answers(rate: float, prompt_ms: float = 0.0, kv_tokens: float = 1e9, max_running: float = 1e9) -> int:
    return decode_workers(rate, LENGTHS, TIMES, CONFIG.targets, prompt_ms, 0.9 * kv_tokens, max_running)


def test_what_the_policy_computed_with_is_told() -> None:
    wanted, _ = decided(workers(9, 9), remembered())
    assert wanted.figures == pytest.approx(
        {
            "rate_now_per_s": 20.0,
            "rate_expected_per_s": 20.0,
            "input_tokens": 1000,
            "output_tokens": 200,
            "hit_rate": 0.0,
            "prompt_ms": 100.0,
            "decode_floor_ms": 20.0,
            "decode_sequence_ms": 0.08,
            "decode_token_ms": 1.68e-4,
            "backlog_s": 0.0,
            "needed_prefill": for_prompts(20 * 1.25),
            "needed_decode": for_answers(20 * 1.1),
        }
    )
    sizes = f"{for_prompts(25)} prefill and {for_answers(22)} decode workers"
    reason = f"20.0 requests/s of 1000 + 200 tokens expected (constant), 0.0 s of backlog: {sizes}"
    assert wanted.reasons == (reason,)


@pytest.mark.parametrize("trend", [-0.2, 0.2])
def test_the_larger_of_the_rate_now_and_the_rate_expected_counts(trend: float) -> None:
    wanted, _ = decided([], remembered(trend=trend))
    now, expected = wanted.figures["rate_now_per_s"], wanted.figures["rate_expected_per_s"]
    assert (expected > now) == (trend > 0)
    assert abs(expected - now) > 5
    rate = max(now, expected)
    assert needed(wanted) == (for_prompts(rate * 1.25), for_answers(rate * 1.1))


def test_prompts_that_decode_workers_run_need_no_prefill_worker() -> None:
    sums = replace(SUMS, local_prefills=50)
    half = replace(interval(20), local_prefills=50)
    wanted, _ = POLICY.decide(observation(NOW_S, [], half, gpu_budget=40), remembered(sums=sums))
    assert needed(wanted) == (for_prompts(20 * 1.25 / 2), for_answers(20 * 1.1))
    whole = replace(interval(20), local_prefills=100)
    memory = remembered(sums=replace(SUMS, local_prefills=100))
    wanted, _ = POLICY.decide(observation(NOW_S, [], whole, gpu_budget=40), memory)
    assert needed(wanted) == (0, for_answers(20 * 1.1))


def test_the_smallest_known_memory_and_batch_of_a_decode_worker_count() -> None:
    small = [*workers(0, 1, kv_tokens=200_000), *workers(0, 1, kv_tokens=40_000), *workers(3, 1)]
    assert needed(decided(small, remembered())[0])[1] == for_answers(22, kv_tokens=40_000) > for_answers(22)
    short = [*workers(0, 1, max_running=30), *workers(0, 1, max_running=12), *workers(3, 1)]
    assert needed(decided(short, remembered())[0])[1] == for_answers(22, max_running=12) > for_answers(22)


def test_decode_workers_without_prefill_workers_run_the_prompts() -> None:
    limits = LimitsConfig(min_prefill=0, max_prefill=0, gpu_budget=40)
    alone = SloPolicy(replace(CONFIG, limits=limits), TIMES)
    wanted, _ = decided([], remembered(), policy=alone)
    assert needed(wanted) == (0, for_answers(22, prompt_ms=100.0))


FULL = {"kv_used": 0.9}


@pytest.mark.parametrize(
    ("decoders", "full"),
    [
        ([FULL], True),
        ([{"kv_used": 0.89}], False),
        ([FULL, {"kv_used": 0.5}], False),
        ([{"running": 8, "max_running": 8}], True),
        ([{"running": 7, "max_running": 8}], False),
        ([{"running": 1, "max_running": 1}], True),
        ([{"running": 0, "max_running": 0}], False),
        ([FULL, {"running": 8, "max_running": 8}], True),
        ([], False),
    ],
)
def test_requests_that_wait_for_full_decode_workers_are_served_in_fifteen_seconds(
    decoders: list[dict[str, float]], full: bool
) -> None:
    views = [*workers(3, 0), *(worker for of in decoders for worker in workers(0, 1, **of))]
    running = min((int(of["max_running"]) for of in decoders if of.get("max_running")), default=10**9)
    wanted, _ = decided(views, remembered(), queue=Queue(waiting=150, prefill_tokens=1_500_000))
    assert (wanted.figures["backlog_s"] == 0) == full
    if full:
        assert needed(wanted) == (for_prompts(25), for_answers_of(views, 22 + 10, running))


def for_answers_of(views: list[WorkerView], rate: float, max_running: float) -> int:
    """With the context that is measured."""
    running = sum(worker.running for worker in views)
    lengths = replace(LENGTHS, context_tokens=0.0) if running else LENGTHS
    return decode_workers(rate, lengths, TIMES, CONFIG.targets, 0.0, 0.9e9, max_running)


ages = st.lists(st.floats(0, 90), max_size=3)


@given(
    st.integers(0, 300_000), st.integers(0, 20_000), st.integers(0, 6), ages, st.integers(0, 100), st.integers(0, 90)
)
@settings(deadline=None)
def test_the_backlog_is_what_is_left_when_a_worker_that_is_started_now_is_ready(
    tokens: int, queued: int, serving: int, ages_s: list[float], rate: int, cached: int
) -> None:
    """In seconds of one worker that runs prompts."""
    sums = replace(SUMS, cached_tokens=1000 * cached)
    of = replace(interval(rate), cached_tokens=50 * cached * rate)
    views = workers(serving, 1, queued_prefill_tokens=queued)
    views += [starting(f"p-{number}", PREFILL, NOW_S - age_s) for number, age_s in enumerate(ages_s)]
    views += [starting("d-0", DECODE, NOW_S - 30), WorkerView("p-9", PREFILL, "draining", NOW_S - 30)]
    seen = observation(NOW_S, views, of, queue=Queue(prefill_tokens=tokens), gpu_budget=40)
    wanted, _ = POLICY.decide(seen, remembered(rate, sums=sums))
    prompt_s, hits = wanted.figures["prompt_ms"] / 1000, wanted.figures["hit_rate"]
    assert hits == pytest.approx(cached / 100)
    work_s = (tokens + serving * queued) / (1000 * (1 - hits)) * prompt_s
    assume(abs(work_s - 1.5 * serving) > 1e-9)
    left_s = work_s + 60 * rate * prompt_s - 60 * serving - sum(min(60.0, age_s) for age_s in ages_s)
    expected_s = max(0.0, left_s) if work_s > 1.5 * serving else 0.0
    assert wanted.figures["backlog_s"] == pytest.approx(expected_s, abs=1e-6)


def test_what_is_done_within_the_ttft_target_is_no_backlog() -> None:
    """Two workers do 30,000 tokens in 1.5 s."""
    for tokens, backlog_s in ((30_000, 0.0), (31_000, 3.1 + (50 * 0.1 - 2) * 60)):
        wanted, _ = decided(workers(2, 1), remembered(50.0, sums=Sums()), 50.0, queue=Queue(prefill_tokens=tokens))
        assert wanted.figures["backlog_s"] == pytest.approx(backlog_s)


def test_a_prompt_of_which_a_cache_holds_nearly_all_is_counted_as_a_token() -> None:
    sums = Sums(100, 100, 100, 50, 0, 100, 2e4)
    of = Interval(5.0, 100, 100, 100.0, 50, 100, 20_000)
    seen = observation(NOW_S, workers(1, 1), of, queue=Queue(prefill_tokens=70_000), gpu_budget=40)
    wanted, _ = POLICY.decide(seen, remembered(sums=sums))
    assert wanted.figures["backlog_s"] == pytest.approx(70_000 * 0.002 + (20 * 0.002 - 1) * 60)


def test_a_backlog_is_drained_in_fifteen_seconds_by_workers_whose_prompts_decode_workers_take() -> None:
    """29 s of work and 10 requests/s of 100 ms are nearly three busy workers."""
    queue = Queue(prefill_tokens=290_000)
    wanted, _ = decided(workers(1, 1), remembered(10.0), 10.0, queue=queue)
    assert wanted.figures["backlog_s"] == pytest.approx(29.0)
    assert needed(wanted) == (3, for_answers(10 + 29 / 1.5))
    queue = Queue(prefill_tokens=1_490_000)
    wanted, _ = decided(workers(1, 1), remembered(10.0), 10.0, queue=queue)
    assert needed(wanted) == (11, for_answers(10 + 149 / 1.5))
    few = SloPolicy(replace(CONFIG, limits=LimitsConfig(max_prefill=4, gpu_budget=40)), TIMES)
    wanted, _ = decided(workers(1, 1), remembered(10.0), 10.0, policy=few, queue=queue)
    assert needed(wanted) == (4, for_answers(40.0))
    queue = Queue(prefill_tokens=70_000)
    wanted, _ = decided(workers(2, 1), remembered(19.0), 19.0, queue=queue)
    assert wanted.figures["backlog_s"] == pytest.approx(1.0)
    assert needed(wanted) == (for_prompts(19 * 1.25), for_answers(19 * 1.1))


def test_large_clusters_are_sized_to_the_worker() -> None:
    wanted, _ = decided([], remembered(400.0), 400.0)
    assert needed(wanted) == (for_prompts(500.0), for_answers(440.0))
    queue = Queue(prefill_tokens=603_000)  # 60.3 s of work, of which 26 workers leave 300.3 s after a minute
    wanted, _ = decided(workers(26, 1), remembered(300.0), 300.0, queue=queue)
    assert wanted.figures["backlog_s"] == pytest.approx(300.3)
    assert needed(wanted) == (51, for_answers(300 + 300.3 / 1.5))


def test_a_role_shrinks_to_the_largest_size_of_the_last_two_minutes() -> None:
    before = [Peak(NOW_S - 120, 8), Peak(NOW_S - 119, 7), Peak(NOW_S - 50, 6)]
    memory = remembered(peaks={PREFILL: before, DECODE: [Peak(NOW_S - 10, 1)]})
    wanted, after = decided(workers(9, 9), memory)
    low = {PREFILL: for_prompts(22 * 1.25), DECODE: for_answers(22 * 1.1)}
    assert low[PREFILL] < 6
    assert (wanted.prefill, wanted.decode) == (7, low[DECODE])
    assert after.peaks == {
        PREFILL: [Peak(NOW_S - 119, 7), Peak(NOW_S - 50, 6), Peak(NOW_S, low[PREFILL])],
        DECODE: [Peak(NOW_S, low[DECODE])],
    }
    same = remembered(peaks={PREFILL: [Peak(NOW_S - 50, low[PREFILL])]})
    assert decided(workers(9, 9), same)[1].peaks[PREFILL] == [Peak(NOW_S, low[PREFILL])]


@pytest.mark.parametrize(("since_s", "settled"), [(NOW_S - 120, True), (NOW_S - 119.5, False)])
def test_nothing_shrinks_in_the_first_two_minutes(since_s: float, settled: bool) -> None:
    wanted, _ = decided(workers(9, 9), remembered(since_s=since_s))
    assert ((wanted.prefill, wanted.decode) == (9, 9)) == (not settled)


def test_the_first_observation_begins_the_time_of_the_policy() -> None:
    assert decided([], POLICY.initial())[1].since_s == NOW_S
    for since_s in (0.0, 0.5, 900.0):
        assert decided([], remembered(since_s=since_s))[1].since_s == since_s


def test_what_is_learned_is_remembered() -> None:
    steps = [decode_step(10, 1e4, 50.0)]
    _, after = decided(workers(1, 1), remembered(), 20.0, steps=steps)
    assert after.model.decode == [[1.0, 10, 1e4, 50.0]]
    assert after.sums == counted(SUMS, observation(NOW_S, [], interval(20)))
    assert after.forecast == observed(remembered().forecast, NOW_S, 20.0, 5.0, 65.0)
    assert decided(workers(1, 1), after)[1].model.decode == after.model.decode


@pytest.mark.parametrize(
    ("sums", "queue", "rate"),
    [(Sums(), Queue(waiting=1), 0.0), (Sums(), Queue(), 0.2), (Sums(requests=0.5), Queue(), 0.0)],
)
def test_before_the_first_answer_ends_requests_keep_the_counts(sums: Sums, queue: Queue, rate: float) -> None:
    of = replace(interval(rate), finished=0)
    memory = replace(POLICY.initial(), sums=sums)
    wanted, after = POLICY.decide(observation(NOW_S, workers(3, 2), of, queue=queue), memory)
    assert wanted == Wanted(3, 2, ("no answer has ended yet: nothing is known of the requests",))
    assert after.since_s == NOW_S


def test_without_any_request_no_worker_is_needed() -> None:
    wanted, _ = decided(workers(3, 2), replace(POLICY.initial(), since_s=0.0), 0.0)
    assert (wanted.prefill, wanted.decode) == (0, 0)
    assert needed(wanted) == (0, 0)
