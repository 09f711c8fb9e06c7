"""The fast simulation beside the one that runs the router's placement and the engine's block manager themselves."""

from functools import partial

import numpy as np
import pytest

from benchmarks.quality import simulation
from benchmarks.quality.policies import Placed
from benchmarks.quality.trace import TraceRequest
from benchmarks.quality.worker import SimulatedEngine
from router.placement.weights import Weights
from runtime.config.step_times import StepTimes
from simulator.advice.traffic import RandomTraffic
from simulator.stepwise.fleet import Layout, WorkerKind, simulate

NONE = np.empty(0, np.uint64)  # hashes: nothing is cached
KIND = WorkerKind(StepTimes(), kv_tokens=1_000_000, max_running=1000, ahead=0)


@pytest.mark.parametrize(("prefill", "decode", "rate", "tolerance"), [(0, 4, 40.0, 0.05), (2, 2, 30.0, 0.1)])
def test_they_have_the_same_mean_time_to_the_first_token(
    prefill: int, decode: int, rate: float, tolerance: float
) -> None:
    requests = RandomTraffic((100, 3000), (20, 200), 400).requests(rate, 0)
    rows = zip(requests.arrival_s.tolist(), requests.prompt.tolist(), requests.output.tolist(), strict=True)
    coming = [(at_s, TraceRequest(n, 0.0, *lengths, NONE, NONE, exact=True)) for n, (at_s, *lengths) in enumerate(rows)]
    fleet = simulation.Fleet(workers=decode, prefill_workers=prefill, engine=SimulatedEngine())
    slow = simulation.simulate(coming, fleet, partial(Placed, Weights()), 0)
    fast = simulate(Layout(prefill, KIND, decode, KIND), requests, Weights())
    assert fast.ttft_ms.mean() == pytest.approx(slow.mean_ttft_ms, rel=tolerance)
