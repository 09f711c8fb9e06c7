"""One case of `planner_day`: one day, one seed, one policy, simulated in a process of its own, and its outcome."""

import logging
import time
from pathlib import Path

import numpy as np
import structlog
from msgspec import Struct
from numpy.typing import NDArray

from benchmarks.planner.day import Outcome, Setting, follow, simulate
from benchmarks.planner.fleet import Delays
from benchmarks.planner.oracle import Capacities, smallest
from benchmarks.planner.serving import Hardware, Limits
from benchmarks.planner.workload import BIN_S, Lengths, chat_lengths, day_of, read_rates, requests_of, trace_lengths
from planner.journal import Line
from runtime.config.planner import LimitsConfig, PlannerConfig, TargetsConfig
from runtime.config.step_times import StepTimes
from simulator.requests import Requests

SPEED = 0.25  # of the mock engine's defaults (8B on one H200): a worker is as fast as with a model of about 32B
TTFT_S, ITL_S = 1.5, 0.06
ATTAINMENT = 0.99
GPUS = 32
PEAK_GPUS = 26  # a day is scaled until the oracle takes this many for the day's highest rate
HARDWARE = Hardware(StepTimes().faster(SPEED))
LIMITS = Limits(TTFT_S, ITL_S)
DELAYS = Delays(start_s=60.0, wake_s=2.0, flip_s=5.0)
POLICIES = ("oracle", "slo", "threshold")
INTERVAL_S = {"slo": 5.0, "threshold": 10.0}


class Case(Struct, frozen=True):
    rates_path: str
    lengths: str  # `chat`, or the path of a trace
    day: int
    seed: int
    policy: str
    prefill_rates: list[float]  # rates that 1, 2, ... workers carry, see Capacities
    decode_rates: list[float]


class Result(Struct, frozen=True):
    day: int
    seed: int
    policy: str
    scale: float  # factor on the rates in the file
    requests: int
    attainment: float
    ttft_attainment: float
    gpu_hours: float
    oracle_gpu_hours: float
    actions: int
    reversals: int
    most_gpus: int
    seconds: float  # wall time of the simulation


def lengths_of(name: str) -> Lengths:
    return chat_lengths if name == "chat" else trace_lengths(Path(name))


def capacities(lengths: str) -> Capacities:
    """Finds by simulation what workers of each role carry. Takes a minute."""
    return Capacities(HARDWARE, LIMITS, lengths_of(lengths), ATTAINMENT, largest=PEAK_GPUS)


def planner_config(policy: str) -> PlannerConfig:
    """The default settings except for targets and budget. The profile stays that of an engine four times as fast."""
    return PlannerConfig(
        policy=policy,
        interval_s=INTERVAL_S[policy],
        limits=LimitsConfig(gpu_budget=GPUS),
        targets=TargetsConfig(TTFT_S * 1e3, ITL_S * 1e3, ATTAINMENT),
    )


def run_case(case: Case, lines: list[Line] | None = None) -> Result:
    """Runs one case. `lines` receives the planner's journal."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    began_s = time.perf_counter()
    scale, requests, schedule = _day(case)
    hours = sum(p + d for p, d in schedule) * BIN_S / 3600
    setting = Setting(HARDWARE, LIMITS, DELAYS, GPUS, len(schedule) * BIN_S, schedule[0])
    if case.policy == "oracle":
        outcome = follow(requests, setting, schedule, BIN_S)
    else:
        write = lines.append if lines is not None else lambda line: None
        outcome = simulate(requests, setting, planner_config(case.policy), case.seed, write)
    return _result(case, scale, hours, outcome, time.perf_counter() - began_s)


def _day(case: Case) -> tuple[float, Requests, list[tuple[int, int]]]:
    carried = (case.prefill_rates, case.decode_rates)
    rates = day_of(read_rates(Path(case.rates_path)), case.day)
    scale = _scale(rates, carried)
    requests = requests_of(rates * scale, lengths_of(case.lengths), case.seed)
    return scale, requests, [smallest(rate * scale, *carried) for rate in rates]


def _scale(rates: NDArray[np.float64], carried: tuple[list[float], list[float]]) -> float:
    """The largest factor with which the day's peak takes at most PEAK_GPUS."""
    low, high = 0.0, 1000.0 / float(rates.max())
    for _ in range(40):
        middle = (low + high) / 2
        if sum(smallest(float(rates.max()) * middle, *carried)) <= PEAK_GPUS:
            low = middle
        else:
            high = middle
    return low


def _result(case: Case, scale: float, oracle_hours: float, outcome: Outcome, seconds: float) -> Result:
    return Result(
        case.day, case.seed, case.policy, scale, outcome.requests, outcome.attainment, outcome.ttft_attainment,
        outcome.gpu_hours, oracle_hours, outcome.actions, outcome.reversals, outcome.most_gpus, seconds,
    )  # fmt: skip
