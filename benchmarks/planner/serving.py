"""A serving cluster in simulated time: slots for prefill or decode workers, and the requests.

The class ServingCluster owns the arrays that `kernel.py` works on.
"""

from dataclasses import dataclass

import numpy as np

from baton_proto.planner import PREFILL, Role
from benchmarks.planner import kernel
from runtime.config.step_times import StepTimes
from simulator.compiled import BUCKET_LOG, BUCKETS, Ints
from simulator.requests import Requests


@dataclass(frozen=True, slots=True)
class Hardware:
    """Speed and capacity of one worker. Because a prompt runs alone, the formulas of StepTimes give its time."""

    engine: StepTimes
    kv_tokens: int = 524_288
    max_running: int = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """The TTFT and ITL within which a request counts as met."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts since the start. After `arrived` come the kernel's counters, in their order."""

    arrived: int
    ttft_met: int
    finished: int
    met: int  # finished, with TTFT and ITL within the limits
    output_tokens: int


class ServingCluster:
    def __init__(self, requests: Requests, hardware: Hardware, limits: Limits, slots: int) -> None:
        self.requests = requests
        self.hardware = hardware
        self.now_s = 0.0
        self._model = _model(hardware, limits)
        self.state = _empty(len(requests.arrival_s), slots, hardware.max_running)

    def advance(self, until_s: float) -> None:
        """Simulates up to `until_s`; does nothing when it is before now."""
        if until_s > self.now_s:
            kernel.advance(until_s, self._model, self.requests, self.state)
            self.now_s = until_s

    def open(self, slot: int, role: Role) -> None:
        self.state.workers["takes"][slot] = kernel.PROMPTS if role == PREFILL else kernel.SEQUENCES

    def close(self, slot: int) -> None:
        """The worker takes no new requests and finishes those that it has."""
        self.state.workers["takes"][slot] = kernel.NOTHING

    def idle(self, slot: int) -> bool:
        worker = self.state.workers[slot]
        return bool(self.state.prompt_end_s[slot] == kernel.IDLE and worker["batch"] == 0 and worker["sent"] == 0)

    def prompt_of(self, slot: int) -> int | None:
        """The request whose prompt runs in the slot."""
        running = self.state.prompt_end_s[slot] != kernel.IDLE
        return int(self.state.workers["prompt"][slot]) if running else None

    def decoding(self, slot: int) -> tuple[int, float]:
        """Sequences that decode in the slot, and their tokens of context."""
        worker = self.state.workers[slot]
        return int(worker["batch"]), float(worker["context"])

    def kv_used(self, slot: int) -> float:
        """Fraction of the worker's KV memory that is reserved."""
        return float(self.state.workers["reserved"][slot] / self.hardware.kv_tokens)

    def waiting(self) -> range:
        """Indices of the requests in the central queue."""
        return range(*self.state.cursor.tolist())

    def totals(self) -> Totals:
        return Totals(int(self.state.cursor[1]), *self.state.counters.tolist())


def percentile_ms(histogram: Ints, share: float) -> float | None:
    """The percentile of a histogram, to 4 %; None when nothing was counted."""
    total = histogram.sum()
    if not total:
        return None
    bucket = int(np.searchsorted(np.cumsum(histogram), share * total))
    return float(np.exp((bucket + 0.5) * BUCKET_LOG))


def _model(hardware: Hardware, limits: Limits) -> kernel.Model:
    def seconds(times_ms: tuple[float, float, float]) -> tuple[float, float, float]:
        a, b, c = (ms / 1e3 for ms in times_ms)
        return a, b, c

    engine = hardware.engine
    return kernel.Model(
        seconds(engine.prefill), seconds(engine.decode), limits.ttft_s, limits.itl_s, hardware.kv_tokens
    )


def _empty(requests: int, slots: int, max_running: int) -> kernel.State:
    return kernel.State(
        now_s=np.zeros(1),
        cursor=np.zeros(2, np.int64),
        workers=np.zeros(slots, kernel.WORKER),
        prompt_end_s=np.full(slots, kernel.IDLE),
        end_s=np.full(slots, kernel.IDLE),
        ends=np.zeros((slots, max_running)),
        ending=np.zeros((slots, max_running), np.int64),
        first_s=np.zeros(requests),
        counters=np.zeros(kernel.NUM_COUNTERS, np.int64),
        ttft=np.zeros(BUCKETS, np.int64),
        itl=np.zeros(BUCKETS, np.int64),
    )
