"""The policy `threshold`: one worker more or less of each role per interval, by queue length and KV load, as in an
early planner of Dynamo.

Once per interval, in this order:
1. Counts changed within the interval, or a change is in flight: nothing changes.
2. Mean queue below `queue_low`, more than the least prefill workers: one prefill worker less.
3. Mean KV load below `kv_low`, more than the least decode workers, no grace: one decode worker less.
4. Mean queue above `queue_high`, budget fits, and last + 3 * (last - first) still above it: one prefill worker more.
5. Mean KV load above `kv_high`, budget fits: one decode worker more, and grace.

The KV load of a worker is its used fraction + 0.02 per waiting request. After an interval that adds a decode worker,
grace protects the next `grace_intervals` judged intervals. (Dynamo's counter protected one interval less.)
"""

from statistics import fmean

from msgspec import Struct

from baton_proto.planner import DECODE, PREFILL, ROLES, Observation
from planner.policy.guards import LIMITS
from planner.policy.observation import counts, gpus_held, gpus_of_role
from planner.policy.policy import Policy
from planner.policy.wanted import Wanted

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

        config, limits, reasons = self._config.threshold, self._config.limits, []
        gpus = gpus_held(observation)
        first, last = samples[0].queue, samples[-1].queue
        grace = memory.grace
        if queue < config.queue_low and prefill > limits.min_prefill:
            prefill -= 1
            gpus -= gpus_of_role(observation, PREFILL)
            reasons.append(f"mean queue {queue:.2f} is below {config.queue_low:g}: one prefill worker less")
        if kv_load < config.kv_low and decode > limits.min_decode and not grace:
            decode -= 1
            gpus -= gpus_of_role(observation, DECODE)
            reasons.append(f"mean KV load {kv_load:.2f} is below {config.kv_low:g}: one decode worker less")
        grace = max(0, grace - 1)
        trend = last + LOOK_AHEAD * (last - first)
        needed = gpus_of_role(observation, PREFILL)
        if queue > config.queue_high and gpus + needed <= observation.gpu_budget and trend > config.queue_high:
            prefill += 1
            gpus += needed
            reasons.append(f"mean queue {queue:.1f} is above {config.queue_high:g}: one prefill worker more")
        if kv_load > config.kv_high and gpus + gpus_of_role(observation, DECODE) <= observation.gpu_budget:
            decode += 1
            grace = config.grace_intervals
            reasons.append(f"mean KV load {kv_load:.2f} is above {config.kv_high:g}: one decode worker more")
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
