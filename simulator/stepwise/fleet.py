"""A layout of workers, simulated over requests, and what its users see."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from msgspec.structs import astuple

from router.placement.weights import Weights
from runtime.config.planner import TargetsConfig
from runtime.config.step_times import StepTimes
from simulator.compiled import BUCKET_LOG, Floats, Ints
from simulator.requests import Requests
from simulator.stepwise.kernel import run
from simulator.stepwise.state import Fleet, new_state


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """What one worker can do."""

    times: StepTimes
    gpus: int = 1
    kv_tokens: int = 524_288
    max_running: int = 256
    max_batch_tokens: int = 8192  # of a step: a bound of memory
    ahead: int = 1  # steps that are submitted while one runs, see Runner.depth


@dataclass(frozen=True, slots=True)
class Layout:
    """`prefill` 0: the others run prompts and decode."""

    prefill: int
    prefill_kind: WorkerKind
    decode: int
    decode_kind: WorkerKind

    @property
    def cache_tokens(self) -> int:
        """KV memory of all workers, because all run prompts."""
        return self.prefill * self.prefill_kind.kv_tokens + self.decode * self.decode_kind.kv_tokens

    @property
    def gpus(self) -> int:
        return self.prefill * self.prefill_kind.gpus + self.decode * self.decode_kind.gpus


@dataclass(frozen=True)
class Answers:
    """What became of the requests, in order of arrival."""

    requests: Requests
    first_s: Floats  # [requests] time of the first token
    end_s: Floats  # [requests] of the last
    gaps: Ints  # histogram of the times between tokens, see `gap_ms`
    events: int

    @cached_property
    def ttft_ms(self) -> Floats:
        return (self.first_s - self.requests.arrival_s) * 1e3

    @cached_property
    def itl_ms(self) -> Floats:
        """[requests] mean time between the tokens of an answer; 0 for those of one token."""
        return (self.end_s - self.first_s) * 1e3 / np.maximum(1, self.requests.output - 1)

    def gap_ms(self, share: float) -> float:
        """The percentile of all times between two tokens of an answer, to 4 %; 0 without any."""
        total = self.gaps.sum()
        bucket = int(np.searchsorted(np.cumsum(self.gaps), share * total))
        return float(np.exp((bucket + 0.5) * BUCKET_LOG)) if total else 0.0


TARGETS = TargetsConfig()


def simulate(layout: Layout, requests: Requests, placement: Weights, targets: TargetsConfig = TARGETS) -> Answers:
    """Runs the requests to their end; `targets` rule how long steps last. Invariant: each request fits into a worker's
    KV memory alone."""
    fleet = fleet_of(layout, placement, targets)
    state = new_state(fleet, requests)
    run(requests.arrival_s, fleet, state)
    assert not state.workers["requests"].any(), "a request was left over"
    return Answers(requests, state.requests["first_s"], state.requests["end_s"], state.gaps, int(state.events[0]))


def fleet_of(layout: Layout, placement: Weights, targets: TargetsConfig = TARGETS) -> Fleet:
    kinds = (layout.prefill_kind, layout.decode_kind)
    return Fleet(
        np.array([astuple(kind.times) for kind in kinds]) / 1e3,
        np.array([kind.kv_tokens for kind in kinds]),
        np.array([kind.max_running for kind in kinds]),
        np.array([kind.max_batch_tokens for kind in kinds]),
        np.array([kind.ahead for kind in kinds]),
        np.array([layout.prefill, layout.decode]),
        targets.ttft_ms / 1e3,
        targets.of_steps(apart=layout.prefill > 0).itl_ms / 1e3,
        float(placement.decode_steps),
        placement.ship_ms / 1e3,
        placement.ship_token_ms / 1e3,
        float(placement.delay_weight),
        float(placement.crowd_weight),
        placement.local_prefill_tokens,
        float(placement.keep_steps),
    )
