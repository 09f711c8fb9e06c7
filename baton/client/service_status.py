"""The state of a service and its workers as plain dataclasses, with the fields of inference.proto."""

from dataclasses import dataclass, field

from runtime.calls.answer import PromptTokens


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    max_model_len: int  # tokens, prompt and answer together
    created_s: int  # seconds since 1970
    aliases: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus(PromptTokens):
    """Its PromptTokens: of the prompts that it ran."""

    worker_id: str
    role: str  # "prefill" | "decode"
    state: str  # "ready", "sleeping", "draining", ...
    incarnation: int
    blocks_used: int  # referenced by a sequence or a lease
    blocks_cached: int  # free, holding a prefix that may be reused
    blocks_total: int
    running: int
    waiting: int
    last_event_id: int
    address: str
    leases: int
    note: str  # what an operator should know
    blocks_in_tree: int
    event_batches: int
    output_tokens: int  # that it decoded
    queued_prefill_tokens: int
    step_ms: float  # duration of its last step
    host_blocks_used: int
    host_blocks_total: int  # 0: it has no host tier
    disk_blocks_used: int  # prefixes with a copy in its disk tier
    disk_blocks_total: int
    engine: str  # "baton" | "vllm" | "external"; empty: a worker of an earlier release
    used: bool  # the router sends it requests
    model: str = ""  # where several are served
    serves: str = ""  # such as "embed (1024), score"; empty: text


@dataclass(frozen=True, slots=True)
class QueueStatus:
    waiting: int = 0
    running: int = 0
    capacity: int = 0
    oldest_age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Totals(PromptTokens):
    """Counters since the routers started; two of them give rates."""

    clock_s: float = 0.0  # the router's clock; its zero means nothing
    requests: int = 0
    output_tokens: int = 0
    event_batches: int = 0
    events_refused: int = 0
    events_malformed: int = 0
    event_gaps: int = 0
    snapshots: int = 0
    tree_blocks: int = 0  # now
    tree_runs: int = 0  # now


@dataclass(frozen=True, slots=True)
class Status:
    router_id: str  # of the router that was asked
    workers: list[WorkerStatus]
    queue: QueueStatus = QueueStatus()
    totals: Totals = Totals()
    routers: list[str] = field(default_factory=list)  # those whose view this is


@dataclass(frozen=True, slots=True)
class WorkerWeights:
    """A worker after its weights were to be updated."""

    worker_id: str
    state: str  # "ready" | "sleeping" | "draining"
    model_hash: str  # of its weights and configuration; workers with different ones exchange no KV
    seconds: float  # that reading took
    problem: str  # why it failed; empty when it did not


@dataclass(frozen=True, slots=True)
class WorkerSleep:
    """A worker after it was asked to sleep or to wake."""

    worker_id: str
    state: str  # "ready" | "sleeping"
    asleep: list[str]  # what is given back now: "weights", "kv_cache"
    freed_bytes: int
    seconds: float
