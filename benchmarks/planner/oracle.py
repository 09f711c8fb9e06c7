"""The smallest cluster that meets the limits, found by simulating each size at constant rates, without the planner's
formulas."""

from collections.abc import Sequence

import numpy as np

from benchmarks.planner.day import Setting, follow
from benchmarks.planner.fleet import Delays
from benchmarks.planner.serving import Hardware, Limits
from benchmarks.planner.workload import Lengths, requests_of

TRIAL_S = 1200.0  # of simulated time, from an empty cluster
STEPS = 7  # of bisection, to about 1 %
FIRST_STEPS = 14  # of bisection for one worker, where no bounds are known
FIRST_HIGH = 400.0  # requests/s, more than one worker carries
GROWTH = 0.8  # one more worker adds at most the rate of 1 + GROWTH workers


class Capacities:
    """The rates in requests/s that 1, 2, ... `largest` workers of a role carry with the share `attainment` of requests
    within the limits, when the other role has more than enough workers."""

    def __init__(
        self,
        hardware: Hardware,
        limits: Limits,
        lengths: Lengths,
        attainment: float,
        largest: int,
        hit_rate: float = 0.0,
    ) -> None:
        self._setting = Setting(hardware, limits, Delays(), 0, TRIAL_S, (0, 0))
        self._lengths = lengths
        self._hit_rate = hit_rate
        self._attainment = attainment
        self.prefill = self._rising(largest, prefill=True)
        self.decode = self._rising(largest, prefill=False)

    def _rising(self, largest: int, prefill: bool) -> list[float]:
        carried: list[float] = []
        for count in range(1, largest + 1):
            low = carried[-1] if carried else 0.0
            high = low / (count - 1) * (count + GROWTH) if carried else FIRST_HIGH
            for _ in range(STEPS if carried else FIRST_STEPS):
                middle = (low + high) / 2
                low, high = (middle, high) if self._met(middle, count, prefill) else (low, middle)
            carried.append(low)
        return carried

    def _met(self, rate: float, count: int, prefill: bool) -> bool:
        many = 2 * count + 8
        requests = requests_of(np.full(1, rate), self._lengths, 0, self._hit_rate, TRIAL_S)
        outcome = follow(requests, self._setting, [(count, many) if prefill else (many, count)], TRIAL_S)
        return outcome.attainment >= self._attainment


def smallest(rate: float, prefill_rates: Sequence[float], decode_rates: Sequence[float]) -> tuple[int, int]:
    """The fewest prefill and decode workers that carry `rate` requests/s, at least one each. `prefill_rates` and
    `decode_rates`: as in Capacities."""
    return int(np.searchsorted(prefill_rates, rate)) + 1, int(np.searchsorted(decode_rates, rate)) + 1
