"""A serving cluster in simulated time: slots that hold a prefill or a decode worker, and the requests between them.

Owns the arrays that `kernel.py` works on. `fleet.py` opens and closes slots and reads what a planner may see.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton_proto.planner import PREFILL, Role
from runtime.config.serving import MockConfig
from simulator import kernel
from simulator.workload import Requests

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one worker is. A prompt is computed alone, so that its time is the formula's; steps are those of
    MockConfig."""

    engine: MockConfig
    kv_tokens: int = 524_288
    max_running: int = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """By which requests are counted as met."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Totals:
    """Since the beginning."""

    arrived: int
    first_tokens: int
    ttft_met: int
    finished: int
    met: int  # finished, with TTFT and ITL within the limits
    output_tokens: int


class ServingCluster:
    def __init__(self, requests: Requests, hardware: Hardware, limits: Limits, slots: int) -> None:
        self.requests = requests
        self.hardware = hardware
        self.now_s = 0.0
        self.counters = np.zeros(kernel.NUM_COUNTERS, np.int64)
        self.ttft_histogram = np.zeros(kernel.BUCKETS, np.int64)
        self.itl_histogram = np.zeros(kernel.BUCKETS, np.int64)
        self.first_s = np.zeros(len(requests.arrival_s))
        self._model = _model(hardware.engine, limits)
        self._clock = np.zeros(1)
        self._cursor = np.zeros(2, np.int64)
        self._p_open = np.zeros(slots, np.int64)
        self._p_busy_s = np.full(slots, kernel.IDLE)
        self._p_request = np.zeros(slots, np.int64)
        self._p_decode = np.zeros(slots, np.int64)
        self.p_work_s = np.zeros(slots)
        self._d_open = np.zeros(slots, np.int64)
        self._d_capacity = np.full(slots, hardware.kv_tokens, np.int64)
        self.d_reserved = np.zeros(slots, np.int64)
        self._d_sent = np.zeros(slots, np.int64)
        self.d_batch = np.zeros(slots, np.int64)
        self.d_context = np.zeros(slots)
        self._d_v = np.zeros(slots)
        self._d_at_s = np.zeros(slots)
        self._d_end_s = np.full(slots, kernel.IDLE)
        self._heap_v = np.zeros((slots, hardware.max_running))
        self._heap_request = np.zeros((slots, hardware.max_running), np.int64)

    def advance(self, until_s: float) -> None:
        """Times before now change nothing."""
        if until_s <= self.now_s:
            return
        kernel.advance(
            until_s, self._model, self._clock, self.requests.arrival_s, self.requests.uncached, self.requests.prompt,
            self.requests.output, self.first_s, self._cursor, self._p_open, self._p_busy_s, self._p_request,
            self._p_decode, self.p_work_s, self._d_open, self._d_capacity, self.d_reserved, self._d_sent, self.d_batch,
            self.d_context, self._d_v, self._d_at_s, self._d_end_s, self._heap_v, self._heap_request, self.counters,
            self.ttft_histogram, self.itl_histogram,
        )  # fmt: skip
        self.now_s = until_s

    def open(self, slot: int, role: Role) -> None:
        (self._p_open if role == PREFILL else self._d_open)[slot] = kernel.OPEN

    def close(self, slot: int) -> None:
        """Takes nothing new and finishes what it has."""
        self._p_open[slot] = self._d_open[slot] = kernel.CLOSED

    def idle(self, slot: int) -> bool:
        return bool(self._p_busy_s[slot] == kernel.IDLE and self.d_batch[slot] == 0 and self._d_sent[slot] == 0)

    def prompt_of(self, slot: int) -> int | None:
        """The request whose prompt runs there."""
        return int(self._p_request[slot]) if self._p_busy_s[slot] != kernel.IDLE else None

    def waiting(self) -> range:
        """Requests in the central queue."""
        return range(int(self._cursor[0]), int(self._cursor[1]))

    @property
    def num_arrived(self) -> int:
        return int(self._cursor[1])

    def totals(self) -> Totals:
        count = self.counters
        return Totals(
            self.num_arrived,
            int(count[kernel.FIRST_TOKENS]),
            int(count[kernel.TTFT_MET]),
            int(count[kernel.FINISHED]),
            int(count[kernel.BOTH_MET]),
            int(count[kernel.OUTPUT_TOKENS]),
        )


def percentile_ms(histogram: Ints, share: float) -> float | None:
    """To 4 %. None when nothing was counted."""
    total = histogram.sum()
    if not total:
        return None
    bucket = int(np.searchsorted(np.cumsum(histogram), share * total))
    return float(np.exp((bucket + 0.5) * kernel.BUCKET_LOG))


def _model(engine: MockConfig, limits: Limits) -> Floats:
    """In the order that the kernel reads."""
    times = (
        engine.prefill_floor_ms, engine.prefill_token_ms, engine.prefill_pair_ms,
        engine.decode_floor_ms, engine.decode_sequence_ms, engine.decode_token_ms,
    )  # fmt: skip
    return np.array([*(ms / 1e3 / engine.speed_up for ms in times), limits.ttft_s, limits.itl_s])
