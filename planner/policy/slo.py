"""The policy `slo`: as many workers as the latency targets need for the forecast demand.

In each interval the policy learns arrivals, lengths and step times, forecasts the arrivals for the moment at which a
worker that is started now will be ready, and sizes both roles for that rate with its headroom and for the backlog left
by then. A role grows at once, by as many workers as needed. A role shrinks only to the largest size needed at any time
in the last DOWN_AFTER_S, computed with the rate raised by DOWN_MARGIN.
"""

import math

from msgspec import Struct
from msgspec.structs import replace

from baton_proto.planner import DECODE, PREFILL, ROLES, Observation, Role, WorkerView
from planner.policy.demand import Sums, counted, lengths
from planner.policy.forecast import Forecast, observed
from planner.policy.guards import CALM, LIMITS
from planner.policy.observation import counts, of_role
from planner.policy.policy import Policy
from planner.policy.sizing import Lengths, PromptTime, decode_workers, prefill_workers, prompt_time
from planner.policy.step_model import StepModel, initial_model, learned
from planner.policy.wanted import Wanted
from runtime.config.step_times import StepTimes

# Capacity beyond what the forecast demand needs, as a share of it: what a step of the load asks for while workers start
# can only come from here. Decode workers need less, because with more sequences than planned they are only slower.
PREFILL_HEADROOM, DECODE_HEADROOM = 0.25, 0.1
# Workers are taken away only when the rest had this much more than the headroom, for so long: two starts of a worker.
DOWN_MARGIN, DOWN_AFTER_S = 0.1, 120.0
BACKLOG_DRAIN_S = 15.0  # a backlog shall be gone so soon after the workers for it are ready
KV_SHARE = 0.9  # of its blocks that a decode worker is planned to fill; beyond it answers are preempted
UNKNOWN_KV_TOKENS = 1e9  # of a worker, before one has reported its size
UNKNOWN_MAX_RUNNING = 1e9
NO_REQUEST = Lengths(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Peak(Struct, frozen=True, array_like=True):
    time_s: float
    count: int  # workers needed at this time


class SloMemory(Struct, frozen=True):
    since_s: float  # time of the first observation; negative: none yet
    forecast: Forecast
    sums: Sums
    model: StepModel
    peaks: dict[str, list[Peak]] = {}  # role -> falling counts of the last DOWN_AFTER_S


class SloPolicy(Policy[SloMemory]):
    name = "slo"
    memory = SloMemory
    guards = (*CALM, *LIMITS)

    def initial(self) -> SloMemory:
        return SloMemory(-1.0, Forecast(), Sums(), initial_model(self._step_times))

    def decide(self, observation: Observation, memory: SloMemory) -> tuple[Wanted, SloMemory]:
        memory = self._learn(observation, memory)
        known = lengths(memory.sums)
        have = {role: counts(observation, role) for role in ROLES}
        if known is None:
            if observation.queue.waiting or memory.sums.requests > 1e-6:
                reason = "no answer has ended yet: nothing is known of the requests"
                return Wanted(have[PREFILL].have, have[DECODE].have, (reason,)), memory
            known = NO_REQUEST  # the minimum of workers

        times = memory.model.times
        prompt = prompt_time(known, times)
        backlog = self._backlog(observation, known, prompt, memory.forecast.level)
        up = self._sizes(observation, memory.forecast, known, times, backlog, margin=0.0)
        down = self._sizes(observation, memory.forecast, known, times, backlog, margin=DOWN_MARGIN)
        wanted: dict[Role, int] = {}
        peaks: dict[str, list[Peak]] = {}
        for role in ROLES:
            peaks[role] = _with_peak(memory.peaks.get(role, []), observation.time_s, down[role])
            settled = observation.time_s - memory.since_s >= DOWN_AFTER_S
            keep = peaks[role][0].count if settled else have[role].have
            wanted[role] = max(up[role], min(have[role].have, keep))
        figures = _figures(memory.forecast, known, times, prompt, backlog, up)
        size = f"{known.input_tokens:.0f} + {known.output_tokens:.0f} tokens"
        reason = (
            f"{memory.forecast.rate:.1f} requests/s of {size} expected ({memory.forecast.believed}), "
            f"{backlog:.1f} s of backlog: {up[PREFILL]} prefill and {up[DECODE]} decode workers"
        )
        return Wanted(wanted[PREFILL], wanted[DECODE], (reason,), figures), replace(memory, peaks=peaks)

    def _learn(self, observation: Observation, memory: SloMemory) -> SloMemory:
        interval, config = observation.interval, self._config
        horizon_s = config.start_s + config.interval_s
        rate = interval.arrivals / interval.duration_s
        return SloMemory(
            observation.time_s if memory.since_s < 0 else memory.since_s,
            observed(memory.forecast, observation.time_s, rate, interval.duration_s, horizon_s),
            counted(memory.sums, observation),
            learned(memory.model, observation.steps, self._step_times),
            memory.peaks,
        )

    def _backlog(self, observation: Observation, known: Lengths, prompt: PromptTime, rate: float) -> float:
        """Seconds of one prefill worker's time that will be left in the queues when a worker that is started now is
        ready: the queued work and the work that will arrive, less what serving and starting workers will have done."""
        if _full(of_role(observation, DECODE)):
            return 0.0  # requests wait for decode workers
        tokens = observation.queue.prefill_tokens + sum(
            worker.queued_prefill_tokens for worker in of_role(observation, PREFILL)
        )
        uncached = max(1.0, known.input_tokens * (1 - known.hit_rate))
        work_s = tokens / uncached * prompt.mean_ms / 1e3
        serving = counts(observation, PREFILL).serving
        if work_s <= serving * self._config.targets.ttft_ms / 1e3:
            return 0.0  # done within the TTFT target
        ahead_s = self._config.start_s
        ages_s = sum(
            min(ahead_s, observation.time_s - worker.since_s)
            for worker in observation.workers
            if worker.role == PREFILL and worker.state == "starting"
        )
        return max(0.0, work_s + (rate * prompt.mean_ms / 1e3 - serving) * ahead_s - ages_s)

    def _sizes(
        self,
        observation: Observation,
        forecast: Forecast,
        known: Lengths,
        times: StepTimes,
        backlog_s: float,
        margin: float,
    ) -> dict[Role, int]:
        """Workers of each role for the forecast rate raised by the fraction `margin`, and for the backlog."""
        config = self._config
        prompt = prompt_time(known, times)
        rate = max(forecast.rate, forecast.level) * (1 + margin)
        roomy = rate * (1 + PREFILL_HEADROOM)
        catching_up = rate * prompt.mean_ms / 1e3 + backlog_s / BACKLOG_DRAIN_S
        prefill = max(
            prefill_workers(roomy * (1 - known.local_share), prompt, config.targets),
            math.ceil(catching_up) if backlog_s else 0,
        )
        prefill = min(prefill, config.limits.max_prefill)
        # Decode workers get no more requests than prefill workers complete.
        roomy = rate * (1 + DECODE_HEADROOM)
        if backlog_s:
            roomy = max(roomy, min(catching_up, prefill) / prompt.mean_ms * 1e3)
        decoders = of_role(observation, DECODE)
        kv_tokens = min((worker.kv_tokens for worker in decoders if worker.kv_tokens), default=UNKNOWN_KV_TOKENS)
        running = min((worker.max_running for worker in decoders if worker.max_running), default=UNKNOWN_MAX_RUNNING)
        own_ms = 0.0 if config.limits.max_prefill else prompt.mean_ms
        if _full(decoders):
            roomy += observation.queue.waiting / BACKLOG_DRAIN_S
        decode = decode_workers(roomy, known, times, config.targets, own_ms, KV_SHARE * kv_tokens, running)
        return {PREFILL: prefill, DECODE: decode}


def _full(decoders: list[WorkerView]) -> bool:
    """Whether no decode worker has room for one more sequence."""
    return bool(decoders) and all(
        worker.kv_used >= KV_SHARE or 0 < worker.max_running <= worker.running for worker in decoders
    )


def _with_peak(peaks: list[Peak], time_s: float, count: int) -> list[Peak]:
    """Peaks of the window that no later one reached, with the new one; the first is the largest of the window."""
    kept = [peak for peak in peaks if peak.time_s > time_s - DOWN_AFTER_S and peak.count > count]
    return [*kept, Peak(time_s, count)]


def _figures(
    forecast: Forecast,
    known: Lengths,
    times: StepTimes,
    prompt: PromptTime,
    backlog_s: float,
    up: dict[Role, int],
) -> dict[str, float]:
    return {
        "rate_now_per_s": forecast.level,
        "rate_expected_per_s": forecast.rate,
        "input_tokens": known.input_tokens,
        "output_tokens": known.output_tokens,
        "hit_rate": known.hit_rate,
        "prompt_ms": prompt.mean_ms,
        "decode_floor_ms": times.decode_floor_ms,
        "decode_sequence_ms": times.decode_sequence_ms,
        "decode_token_ms": times.decode_token_ms,
        "backlog_s": backlog_s,
        "needed_prefill": up[PREFILL],
        "needed_decode": up[DECODE],
    }


POLICY = SloPolicy
