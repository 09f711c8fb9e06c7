"""What the planner sees and what it wants: the lines of its journal, and what it keeps in NATS for its next start.

Times are seconds of one clock, Unix time in a live service and simulated seconds in a simulation. Durations are in the
unit that the name says. A version is a major number: a field with a default may be added without raising it.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

MAJOR = 1

Role = Literal["prefill", "decode"]
State = Literal["starting", "ready", "draining", "sleeping"]
Verb = Literal["add", "remove", "drain", "sleep", "wake", "flip"]

Count = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]

PREFILL: Role = "prefill"
DECODE: Role = "decode"
ROLES: tuple[Role, Role] = (PREFILL, DECODE)
OTHER_ROLE: dict[Role, Role] = {PREFILL: DECODE, DECODE: PREFILL}
SOURCES = ("routers", "workers", "discovery")  # `workers`: the one heard last, since a single silent one is not all
ALL_VERBS: tuple[Verb, ...] = ("add", "remove", "drain", "sleep", "wake", "flip")


class WorkerView(Struct, frozen=True, omit_defaults=True):
    """One worker process, from the moment it was asked for until it is gone."""

    worker_id: str
    role: Role
    state: State
    since_s: float  # when it came into this state
    ready_since_s: float | None = None  # when it was ready for the first time
    gpus: Count = 1  # held in any state, asleep too
    effect: Verb | None = None  # the planner is doing this to it right now
    held: bool = False  # an operator has said to leave it alone
    running: Count = 0  # sequences
    max_running: Count = 0  # that can run together; 0: not known
    waiting: Count = 0  # requests in its own queue
    queued_prefill_tokens: Count = 0  # of prompts that it has not computed yet
    kv_used: Annotated[float, Meta(ge=0, le=1)] = 0.0  # fraction of its KV blocks that sequences and leases hold
    kv_tokens: Count = 0  # what its KV blocks hold in all
    context_tokens: Count = 0  # of its running sequences together


class StepSample(Struct, frozen=True, array_like=True):
    """One engine step. A step with a prompt and running sequences takes the sum of both formulas of `step_model.py`."""

    worker_id: str
    ready_for_s: float  # how long the worker had been ready
    prompt_tokens: Amount  # computed: sum of n
    prompt_pairs: Amount  # sum of n * (p + n / 2), p the tokens of the same sequence before them
    sequences: Amount  # that decoded: B
    context_tokens: Amount  # of these: K
    step_ms: Amount


class LoadSample(Struct, frozen=True, array_like=True):
    """The cluster at one moment within the interval, for rules that look at its course."""

    queue: Amount  # requests that wait for a prefill worker
    kv_load: Amount  # mean over decode workers of used fraction + 0.02 * waiting requests
    prefill: Count  # workers that serve
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
    local_prefills: Count = 0  # requests whose prompt a decode worker ran itself
    ttft_p50_ms: float | None = None  # None: no first token in this interval
    ttft_p90_ms: float | None = None
    itl_p50_ms: float | None = None  # None: no answer of two tokens ended
    itl_p90_ms: float | None = None
    samples: list[LoadSample] = []


class Queue(Struct, frozen=True):
    """The routers' central queue."""

    waiting: Count = 0  # requests
    prefill_tokens: Count = 0  # of their prompts, not cached
    oldest_s: Amount = 0.0  # how long the first one waits


class Holds(Struct, frozen=True):
    """Counts that an operator has set by hand (`baton scale`); None: the planner decides."""

    prefill: Count | None = None
    decode: Count | None = None

    def counts(self) -> dict[Role, int]:
        """Without the roles that the planner decides."""
        given: dict[Role, int | None] = {PREFILL: self.prefill, DECODE: self.decode}
        return {role: count for role, count in given.items() if count is not None}

    def sentence(self) -> str:
        """Such as "prefill 2, decode 3"; empty when nothing is set by hand."""
        return ", ".join(f"{role} {count}" for role, count in self.counts().items())


class Failure(Struct, frozen=True):
    """An effect that ended badly since the last observation."""

    verb: Verb
    worker_id: str
    role: Role
    reason: str


class Observation(Struct, frozen=True, omit_defaults=True):
    version: int
    time_s: float
    gpu_budget: Count  # GPUs that the workers may hold together
    workers: list[WorkerView]
    queue: Queue
    interval: Interval
    steps: list[StepSample] = []
    holds: Holds = Holds()
    failures: list[Failure] = []
    verbs: tuple[Verb, ...] = ALL_VERBS  # what the connector can do
    gpus_per_worker: dict[Role, Count] = {}  # that a new worker of each role takes
    ages_s: dict[str, float] = {}  # source of metrics -> seconds since it was last heard, see SOURCES


class Action(Struct, frozen=True):
    """One verb for one worker. `add` names the worker that is to be, so that doing it twice starts one."""

    verb: Verb
    worker_id: str
    role: Role  # that it has; of `add` and `flip`: that it shall have
    reason: str


class Target(Struct, frozen=True):
    version: int
    time_s: float
    policy: str
    prefill: Count  # workers wanted
    decode: Count
    actions: list[Action]
    reasons: list[str]  # sentences: the policy's, then one of each guard that changed something
    frozen: bool = False  # nothing is done because what is known is too old
    figures: dict[str, float] = {}  # what the policy reckoned with, unit in the name
