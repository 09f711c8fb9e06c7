"""The number of prefill workers that one central queue needs.

The model is an M/G/N queue: Poisson arrivals, prompts of mean duration S and squared coefficient of variation cv2, and
N workers. A prompt waits longer than t with probability C(N, a) * exp(-2 / (1 + cv2) * (N - a) * t / S), where a is the
offered load (mean number of busy workers) and C Erlang's formula. The formula is exact for exponential durations
(cv2 = 1); for others it uses Allen's and Cunneen's scaling of the wait. For cv2 = 1.9 (prompts of the Azure code
trace), t = 1.1 S and one prompt in ten that waits longer, N = 1 2 4 8 16 32 64 workers carry the utilisation .19 .42
.62 .77 .87 .93 .96.
"""

import math

MAX_WORKERS = 4096


def waits_longer(workers: int, load: float, wait: float, cv2: float) -> float:
    """Probability that a prompt waits longer than `wait`, in mean durations. `load`: busy workers on average."""
    if load >= workers:
        return 1.0
    if load <= 0:
        return 0.0
    blocked = 1.0  # Erlang B, by its recursion
    for n in range(1, workers + 1):
        blocked = load * blocked / (n + load * blocked)
    return _tail(blocked, workers, load, wait, cv2)


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
