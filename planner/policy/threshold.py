"""The policy `threshold`: one worker more or less of each role per interval, by queue length and KV load, as in an
early planner of Dynamo.

Once per interval, in this order:
1. Counts changed within the interval, or a change is in flight: nothing changes.
2. Mean queue below QUEUE_LOW, more than the least prefill workers: one prefill worker less.
3. Mean KV load below KV_LOW, more than the least decode workers, no grace: one decode worker less.
4. Mean queue above QUEUE_HIGH, budget fits, and last + 3 * (last - first) still above it: one prefill worker more.
5. Mean KV load above KV_HIGH, budget fits: one decode worker more, and grace.

The KV load of a worker is its used fraction + 0.02 per waiting request. After an interval that adds a decode worker,
grace protects the next GRACE_INTERVALS judged intervals. (Dynamo's counter protected one interval less.)
"""

from statistics import fmean

from msgspec import Struct

from baton_proto.planner import DECODE, PREFILL, ROLES, Observation
from planner.policy.guards import LIMITS
from planner.policy.observation import counts, gpus_held, gpus_of_role
from planner.policy.policy import Policy
from planner.policy.wanted import Wanted

# As in that planner of Dynamo.
QUEUE_HIGH, QUEUE_LOW = 5.0, 0.2  # requests that wait, in the mean of an interval
KV_HIGH, KV_LOW = 0.9, 0.5
GRACE_INTERVALS = 3
LOOK_AHEAD = 3  # intervals by which the queue's trend is extrapolated


class ThresholdMemory(Struct, frozen=True):
    grace: int = 0  # coming intervals in which no decode worker is removed


class ThresholdPolicy(Policy[ThresholdMemory]):
    name = "threshold"
    memory = ThresholdMemory
    guards = LIMITS  # without CALM: the policy has its own grace

    def initial(self) -> ThresholdMemory:
        return ThresholdMemory()

    def decide(self, observation: Observation, memory: ThresholdMemory) -> tuple[Wanted, ThresholdMemory]:
        prefill, decode = (counts(observation, role).have for role in ROLES)
        samples = observation.interval.samples
        if not samples:
            return Wanted(prefill, decode, ("nothing was sampled in this interval",)), memory
        queue, kv_load = fmean(sample.queue for sample in samples), fmean(sample.kv_load for sample in samples)
        figures = {"queue": queue, "kv_load": kv_load}
        if busy := _busy(observation):
            return Wanted(prefill, decode, (busy,), figures), memory

        limits, reasons = self._config.limits, []
        gpus = gpus_held(observation)
        first, last = samples[0].queue, samples[-1].queue
        grace = memory.grace
        if queue < QUEUE_LOW and prefill > limits.min_prefill:
            prefill -= 1
            gpus -= gpus_of_role(observation, PREFILL)
            reasons.append(f"mean queue {queue:.2f} is below {QUEUE_LOW:g}: one prefill worker less")
        if kv_load < KV_LOW and decode > limits.min_decode and not grace:
            decode -= 1
            gpus -= gpus_of_role(observation, DECODE)
            reasons.append(f"mean KV load {kv_load:.2f} is below {KV_LOW:g}: one decode worker less")
        grace = max(0, grace - 1)
        trend = last + LOOK_AHEAD * (last - first)
        needed = gpus_of_role(observation, PREFILL)
        if queue > QUEUE_HIGH and gpus + needed <= observation.gpu_budget and trend > QUEUE_HIGH:
            prefill += 1
            gpus += needed
            reasons.append(f"mean queue {queue:.1f} is above {QUEUE_HIGH:g}: one prefill worker more")
        if kv_load > KV_HIGH and gpus + gpus_of_role(observation, DECODE) <= observation.gpu_budget:
            decode += 1
            grace = GRACE_INTERVALS
            reasons.append(f"mean KV load {kv_load:.2f} is above {KV_HIGH:g}: one decode worker more")
        return Wanted(prefill, decode, tuple(reasons), figures), ThresholdMemory(grace)


def _busy(observation: Observation) -> str:
    """The reason not to judge this interval; empty when there is none."""
    samples = observation.interval.samples
    if len({(sample.prefill, sample.decode) for sample in samples}) > 1:
        return "the number of workers changed within this interval"
    if any(worker.effect or worker.state in ("starting", "draining") for worker in observation.workers):
        return "a change is under way"
    return ""


POLICY = ThresholdPolicy
