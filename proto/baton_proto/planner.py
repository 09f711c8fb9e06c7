"""Observations and targets of the planner, for its journal, its memory in NATS and its answers to operators.

Times are in seconds of one clock: Unix time in a live service, simulated time in a simulation. A duration's name ends
in its unit. A version is a major number: a field with a default may be added without raising it.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from baton_proto.decoding import Count, Name, Rows, Text

MAJOR = 1

Role = Literal["prefill", "decode"]
State = Literal["starting", "ready", "draining", "sleeping"]
Verb = Literal["add", "remove", "drain", "sleep", "wake", "flip"]

Amount = Annotated[float, Meta(ge=0)]

PREFILL: Role = "prefill"
DECODE: Role = "decode"
ROLES: tuple[Role, Role] = (PREFILL, DECODE)
OTHER_ROLE: dict[Role, Role] = {PREFILL: DECODE, DECODE: PREFILL}
SOURCES = ("routers", "workers", "discovery")  # age of `workers`: that of the last report of any worker
ALL_VERBS: tuple[Verb, ...] = ("add", "remove", "drain", "sleep", "wake", "flip")


class WorkerView(Struct, frozen=True, omit_defaults=True):
    """One worker process, from its order until it is gone."""

    worker_id: Name
    role: Role
    state: State
    since_s: float  # when this state began
    ready_since_s: float | None = None  # when it was ready for the first time
    gpus: Count = 1  # held in every state, also asleep
    effect: Verb | None = None  # the verb in flight for this worker
    held: bool = False  # an operator wants it left alone
    running: Count = 0  # sequences
    max_running: Count = 0  # that can run together; 0: not known
    waiting: Count = 0  # requests in its own queue
    queued_prefill_tokens: Count = 0  # tokens of prompts not computed yet
    kv_used: Annotated[float, Meta(ge=0, le=1)] = 0.0  # fraction of its KV blocks that sequences and leases hold
    kv_tokens: Count = 0  # capacity of all its KV blocks
    context_tokens: Count = 0  # of its running sequences together


class StepSample(Struct, frozen=True, array_like=True):
    """One engine step. With prompts and sequences, it takes the sum of the formulas in runtime/config/step_times.py."""

    worker_id: Name
    ready_for_s: float  # how long the worker had been ready
    prompt_tokens: Amount  # computed in the step: the sum of n
    prompt_pairs: Amount  # sum of n * (p + n / 2), p the tokens of the same sequence before them
    sequences: Amount  # sequences that decoded: B
    context_tokens: Amount  # of these sequences: K
    step_ms: Amount


class LoadSample(Struct, frozen=True, array_like=True):
    """The load at one moment within the interval."""

    queue: Amount  # requests that wait for a prefill worker
    kv_load: Amount  # mean over decode workers of used fraction + 0.02 * waiting requests
    prefill: Count  # ready workers
    decode: Count


class Interval(Struct, frozen=True):
    """What happened since the last observation, in all routers together."""

    duration_s: Annotated[float, Meta(gt=0)]
    arrivals: Count  # requests
    input_tokens: Count  # of these requests' prompts
    input_tokens_squared: Amount  # sum of squares, for the spread of prompt lengths
    cached_tokens: Count  # part of input_tokens that a prefix cache held
    finished: Count  # answers that ended
    output_tokens: Count  # of these answers
    local_prefills: Count = 0  # requests whose prompt a decode worker ran
    ttft_p50_ms: float | None = None  # None: no first token in this interval
    ttft_p90_ms: float | None = None
    itl_p50_ms: float | None = None  # None: no answer of two tokens ended
    itl_p90_ms: float | None = None
    samples: Annotated[list[LoadSample], Rows] = []


class Queue(Struct, frozen=True):
    """The routers' central queue."""

    waiting: Count = 0  # requests
    prefill_tokens: Count = 0  # of their prompts, without cached tokens
    oldest_s: Amount = 0.0  # how long the first request has waited


class Holds(Struct, frozen=True):
    """Counts that an operator has set by hand (`baton scale`); None: the planner decides."""

    prefill: Count | None = None
    decode: Count | None = None

    def counts(self) -> dict[Role, int]:
        """The counts set by hand, without the roles that the planner decides."""
        given: dict[Role, int | None] = {PREFILL: self.prefill, DECODE: self.decode}
        return {role: count for role, count in given.items() if count is not None}

    def sentence(self) -> str:
        """A text such as "prefill 2, decode 3"; empty when nothing is set by hand."""
        return ", ".join(f"{role} {count}" for role, count in self.counts().items())


class Failure(Struct, frozen=True):
    """An effect that failed since the last observation."""

    verb: Verb
    worker_id: Name
    role: Role
    reason: Text


class Observation(Struct, frozen=True, omit_defaults=True):
    version: Count
    time_s: float
    gpu_budget: Count  # GPUs that the workers may hold together
    workers: Annotated[list[WorkerView], Rows]
    queue: Queue
    interval: Interval
    steps: Annotated[list[StepSample], Rows] = []
    holds: Holds = Holds()
    failures: Annotated[list[Failure], Rows] = []
    verbs: Annotated[tuple[Verb, ...], Rows] = ALL_VERBS  # what the connector can do
    gpus_per_worker: Annotated[dict[Role, Count], Rows] = {}  # GPUs of a new worker of each role
    ages_s: Annotated[dict[Name, float], Rows] = {}  # seconds since each of SOURCES was last heard
    gpu_share: Count | None = None  # what other models leave of gpu_budget; None: all of it


class Action(Struct, frozen=True):
    """One verb for one worker. Because `add` names the new worker, an `add` repeated starts one worker."""

    verb: Verb
    worker_id: Name
    role: Role  # the worker's role; for `add` and `flip` the new one
    reason: Text


class Target(Struct, frozen=True):
    version: Count
    time_s: float
    policy: Name
    prefill: Count  # workers wanted
    decode: Count
    actions: Annotated[list[Action], Rows]
    reasons: Annotated[list[Text], Rows]  # sentences of the policy, then of each guard that changed something
    frozen: bool = False  # nothing is changed because a source was silent for too long
    figures: Annotated[dict[Name, float], Rows] = {}  # what the policy computed with, unit in the name
