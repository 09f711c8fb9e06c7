"""The smallest cluster that would have done: found by simulating each size at a constant rate, not by the planner's
formulas."""

import numpy as np
from numpy.typing import NDArray

from simulator.day import Setting, follow
from simulator.serving import Hardware, Limits
from simulator.workload import Lengths, requests_of

TRIAL_S = 1200.0
WARM_S = 120.0  # of a trial, not counted: the cluster begins empty
STEPS = 7  # of bisection, to about 1 %
PLENTY = 2  # workers of the other role for each of the one that is looked at, and at least as many as there are GPUs


class Capacities:
    """The rate [requests/s] that N workers of a role carry with the share `attainment` of requests within the
    limits."""

    def __init__(
        self, hardware: Hardware, limits: Limits, lengths: Lengths, hit_rate: float, attainment: float, largest: int
    ) -> None:
        self._trial = (hardware, limits, lengths, hit_rate)
        self._attainment = attainment
        self.prefill = self._rising(largest, prefill=True)
        self.decode = self._rising(largest, prefill=False)

    def smallest(self, rate: float) -> tuple[int, int]:
        """Prefill and decode workers, at least one each."""
        p, d = (int(np.searchsorted(carried, rate)) + 1 for carried in (self.prefill, self.decode))
        return p, d

    def _rising(self, largest: int, prefill: bool) -> NDArray[np.float64]:
        carried: list[float] = []
        while len(carried) < largest:
            count = len(carried) + 1
            low = carried[-1] if carried else 0.0
            high = low / max(1, count - 1) * (count + 0.8) if carried else 400.0
            for _ in range(STEPS if carried else 2 * STEPS):
                middle = (low + high) / 2
                met = self._met(middle, count, prefill) >= self._attainment
                low, high = (middle, high) if met else (low, middle)
            carried.append(low)
        return np.array(carried)

    def _met(self, rate: float, count: int, prefill: bool) -> float:
        hardware, limits, lengths, hit_rate = self._trial
        many = PLENTY * count + 8
        p, d = (count, many) if prefill else (many, count)
        requests = requests_of(np.full(1, rate), lengths, 0, hit_rate, TRIAL_S)
        return follow(requests, trial_setting(hardware, limits), [(p, d)], TRIAL_S).attainment


def trial_setting(hardware: Hardware, limits: Limits) -> Setting:
    from simulator.fleet import Delays

    return Setting(hardware, limits, Delays(), 0, TRIAL_S, (0, 0))
