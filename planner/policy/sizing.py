"""The number of workers that a demand needs, by the step model and the targets.

Both roles are sized for the same demand: a rate in requests per second, with the measured lengths and hit rate.

Prefill workers are modelled as an M/G/N queue: Poisson arrivals, prompts of mean duration S and squared coefficient of
variation cv2, and N workers. A prompt waits longer than t with probability C(N, a) * exp(-2 / (1 + cv2) * (N - a) *
t / S), where a is the offered load (mean number of busy workers) and C Erlang's formula. The formula is exact for
exponential durations (cv2 = 1); for others it uses Allen's and Cunneen's scaling of the wait. For cv2 = 1.9 (prompts of
the Azure code trace), t = 1.1 S and one prompt in ten that waits longer, N = 1 2 4 8 16 32 64 workers carry the
utilisation .19 .42 .62 .77 .87 .93 .96.
"""

import math
from statistics import NormalDist

from msgspec import Struct

from runtime.config.planner import TargetsConfig
from runtime.config.step_times import StepTimes

MAX_WORKERS = 4096
LEAST_WAIT = 0.1  # least share of the TTFT target that is left for waiting


class Lengths(Struct, frozen=True):
    """Means over requests."""

    input_tokens: float
    input_tokens_squared: float
    output_tokens: float
    hit_rate: float  # share of prompt tokens that caches held
    local_share: float  # of requests whose prompt a decode worker runs although there are prefill workers
    context_tokens: float  # of one sequence that decodes


class PromptTime(Struct, frozen=True):
    mean_ms: float
    cv2: float  # squared coefficient of variation


def prompt_time(lengths: Lengths, times: StepTimes) -> PromptTime:
    """Time to compute one prompt alone. Its spread is taken to be that of the prompts' lengths."""
    miss = 1 - lengths.hit_rate
    tokens = lengths.input_tokens * miss
    pairs = lengths.input_tokens_squared * miss * (1 - miss / 2)  # n (p + n / 2) with n = miss * input, p the rest
    return PromptTime(times.prefill_ms(tokens, pairs), length_spread(lengths))


def length_spread(lengths: Lengths) -> float:
    """Squared coefficient of variation of the prompts' lengths."""
    return max(0.0, lengths.input_tokens_squared / max(lengths.input_tokens, 1.0) ** 2 - 1)


def prefill_workers(rate: float, prompt: PromptTime, targets: TargetsConfig) -> int:
    """The fewest workers that meet the TTFT target at `rate` requests/s. The wait is bounded by the part
    of the target that a prompt two standard deviations above the mean leaves, at least by the share LEAST_WAIT."""
    long_ms = prompt.mean_ms * (1 + 2 * math.sqrt(prompt.cv2))
    wait_ms = max(LEAST_WAIT * targets.ttft_ms, targets.ttft_ms - long_ms)
    return workers_for(rate * prompt.mean_ms / 1e3, wait_ms / prompt.mean_ms, prompt.cv2, 1 - targets.attainment)


def decode_workers(
    rate: float,
    lengths: Lengths,
    times: StepTimes,
    targets: TargetsConfig,
    prompt_ms: float,
    kv_tokens: float,
    max_running: float,
) -> int:
    """The fewest workers that meet the ITL target at `rate` requests/s and hold all sequences. `kv_tokens` and
    `max_running`: what one worker holds. `prompt_ms`: a decode worker's own time for each request's prompt, 0 where
    prefill workers run prompts.

    By Little's law L = rate * output * step sequences run in D workers. A step of a worker with L / D of them takes
    step = a + (e + f * context) * L / D, hence step = a / (1 - x / D) with x = rate * output * (e + f * context).
    Because prompts take the share y / D of a worker's time, y = rate * prompt_ms, a step takes a / (1 - (x + y) / D).
    The quantile `attainment` of L must meet the target. If steps were equally long, L would be Poisson, with variance
    L. Because more sequences make steps longer, and longer steps keep sequences longer, the variance is
    L / (1 - (x + y) / D), as in a processor-sharing queue. The spread of contexts adds to it.
    """
    if rate <= 0:
        return 0
    sequence_ms = times.decode_sequence_ms + times.decode_token_ms * lengths.context_tokens
    tokens_per_ms = rate * lengths.output_tokens / 1e3
    crowd = tokens_per_ms * sequence_ms  # x
    share = times.decode_token_ms * lengths.context_tokens / max(sequence_ms, 1e-9)  # of the context in sequence_ms
    spread = share**2 * length_spread(lengths)
    quantile = NormalDist().inv_cdf(targets.attainment)
    prompts = rate * prompt_ms / 1e3  # y
    for workers in range(math.floor(crowd + prompts) + 1, MAX_WORKERS):
        spare = 1 - (crowd + prompts) / workers
        running = tokens_per_ms * times.decode_floor_ms / spare
        running += quantile * math.sqrt(running * (1 + spread) / spare)
        step_ms = (times.decode_floor_ms + sequence_ms * running / workers) / (1 - prompts / workers)
        held = running * lengths.context_tokens <= workers * kv_tokens and running <= workers * max_running
        if step_ms <= targets.itl_ms and held:
            return workers
        if times.decode_floor_ms >= targets.itl_ms:  # no number of workers meets the target: half load
            return math.ceil(2 * (crowd + prompts))
    return MAX_WORKERS


def workers_for(load: float, wait: float, cv2: float, late: float) -> int:
    """The fewest workers with which at most the share `late` of prompts waits longer than `wait` mean durations."""
    if load <= 0:
        return 0
    blocked = 1.0
    for n in range(1, MAX_WORKERS):
        blocked = load * blocked / (n + load * blocked)
        if n > load and _tail(blocked, n, load, wait, cv2) <= late:
            return n
    return MAX_WORKERS


def _tail(blocked: float, workers: int, load: float, wait: float, cv2: float) -> float:
    idle = 1 - load / workers
    all_busy = blocked / (1 - (1 - idle) * (1 - blocked))  # Erlang C
    return all_busy * math.exp(-2 / (1 + cv2) * (workers - load) * wait)
