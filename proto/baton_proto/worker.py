"""The request plane: the messages between routers, decode workers and prefill workers.

Each router has one stream (runtime/streams/message_stream.py) to each worker: commands one way, and a StepMessage per
engine step, or for several quick ones, the other way. Each decode worker has one to each prefill worker. Rare questions
are calls of the gRPC service `baton.worker.v1.Worker`. All messages are msgpack, encoded by msgspec.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from baton_proto.decoding import Count, Int32, Small, decoder
from baton_proto.discovery import TransferEndpoint, WorkerLoad
from baton_proto.kv_events import DEFAULT_HASH_SEED, HashSeed, Stored
from baton_proto.sampling import SamplingParams, TokenLogprobs

MAJOR = 1
SERVICE = "baton.worker.v1.Worker"

# The purpose of a stream, in the hello of the peer that dials.
STEPS = "steps"  # a router sends WorkerCommands, a worker WorkerReports
PREFILL = "prefill"  # a decode worker sends PrefillCommands, a prefill worker PrefillReports


class Hello(Struct, frozen=True, tag="hello"):
    """First message of every stream, both ways. A worker whose incarnation is not the expected one refuses."""

    version: Count
    sender: str  # router id or worker id
    incarnation: Count = 0  # of the worker: as the client knows it (0: any), or its own in its answer
    stream: str = STEPS


class Refused(Struct, frozen=True, tag="refused"):
    """Last message of a stream, either way: why the stream ends."""

    reason: str


# --- router -> worker -------------------------------------------------------------------------------------------------


class PrefillTarget(Struct, frozen=True):
    """The prefill worker that the router chose for a request."""

    worker_id: str
    incarnation: Count
    stream_address: str


class Submit(Struct, frozen=True, tag="submit"):
    """A request or its replay. Tokens beyond `num_prompt_tokens` are output that the client already has."""

    request_id: str
    token_ids: bytes  # u32 LE
    num_prompt_tokens: Small
    sampling: SamplingParams
    timeout_s: float  # what is left of the request's time
    prefill: PrefillTarget | None = None  # None: the decode worker runs the prompt itself
    priority: Int32 = 0
    hash_seed: HashSeed = DEFAULT_HASH_SEED


class Cancel(Struct, frozen=True, tag="cancel"):
    request_id: str


WorkerCommand = Submit | Cancel | Refused

# --- worker -> router -------------------------------------------------------------------------------------------------


class Handoff(Struct, frozen=True):
    """What a prefill worker shipped for a request."""

    prefill_worker: str
    kv_blocks: Small
    kv_bytes: Count
    transport: str
    cached_tokens: Small  # prefix hit on the prefill worker


class Failure(Struct, frozen=True):
    """Why a request ended without an answer. `retryable`: the router may replay it elsewhere."""

    code: str  # "prefill_lost" | "refused" | "deadline" | "internal"
    message: str
    retryable: bool
    worker_id: str = ""  # of the worker that failed


class Delta(Struct, frozen=True, omit_defaults=True):
    """News of one request. The last one has `finish` or `failure`; nothing follows it."""

    request_id: str
    token_ids: list[Small] = []
    logprobs: list[TokenLogprobs] = []
    cached_tokens: Small | None = None  # with the first token: prompt tokens that were cached
    handoff: Handoff | None = None  # with the first token of a remote prefill
    finish: str | None = None  # "stop" | "length" | "cancelled"
    stop_token: Small | None = None  # the EOS or stop token that ended it, which is the last of token_ids
    failure: Failure | None = None


class StepMessage(Struct, frozen=True, tag="step"):
    deltas: list[Delta]
    load: WorkerLoad


WorkerReport = StepMessage | Refused

# --- decode worker <-> prefill worker ---------------------------------------------------------------------------------


class Grant(Struct, frozen=True):
    """Leave to write into a decode worker's slab, for one transfer. Block i of the list holds the prompt's tokens from
    skip_tokens + i * block_size on."""

    transfer_id: str
    worker_id: str
    incarnation: Count
    generation: Count  # of the slab; it changes when the slab is suspended
    block_ids: list[Small]
    skip_tokens: Small  # multiple of the block size: the decode worker's own cached prefix
    ttl_s: float  # remaining time to live, never a clock reading
    endpoint: TransferEndpoint


class PrefillRequest(Struct, frozen=True, tag="prefill"):
    request_id: str
    token_ids: bytes  # u32 LE, prompt and replayed output
    num_prompt_tokens: Small
    sampling: SamplingParams
    timeout_s: float
    grant: Grant
    priority: Int32 = 0
    hash_seed: HashSeed = DEFAULT_HASH_SEED


class PrefillCancel(Struct, frozen=True, tag="cancel"):
    request_id: str


PrefillCommand = PrefillRequest | PrefillCancel | Refused


class PrefillFailed(Struct, frozen=True, tag="failed"):
    """The prompt is not finished. This message says nothing about the blocks: the transfer keeps them safe."""

    request_id: str
    failure: Failure


PrefillReport = PrefillFailed | Refused


class FirstToken(Struct, frozen=True):
    """Payload of the transfer's COMMIT: all that decoding needs beyond the KV blocks. The decode worker has the token
    list and the seed, from which penalty counts and noise follow."""

    version: Count
    token_id: Small
    logprobs: TokenLogprobs | None
    cached_tokens: Small  # prefix hit on the prefill worker


# --- questions --------------------------------------------------------------------------------------------------------


class SnapshotRequest(Struct, frozen=True):
    version: Count


class SnapshotChunk(Struct, frozen=True):
    """Part of a worker's block table as runs, parents before children. `event_id`: of the last batch it contains."""

    incarnation: Count
    event_id: Count
    runs: list[Stored]
    last: bool


class InspectRequest(Struct, frozen=True):
    version: Count


class InspectReport(Struct, frozen=True):
    """The worker's own view. `problems`: what check_integrity() found; empty when all is well."""

    worker_id: str
    incarnation: Count
    state: str
    load: WorkerLoad
    problems: list[str]
    rss_bytes: Count


class DrainRequest(Struct, frozen=True):
    version: Count
    timeout_s: float


class DrainReport(Struct, frozen=True):
    remaining: Small  # requests still in flight at the timeout


class SleepRequest(Struct, frozen=True):
    version: Count
    level: Small  # 1: the weights are kept in host memory; 2: they are dropped
    timeout_s: float  # for requests in flight, and the same again for peers that map the KV


class WakeRequest(Struct, frozen=True):
    version: Count
    tags: list[str]  # "weights", "kv_cache"; none: all


class SleepReport(Struct, frozen=True):
    """The answer to SleepRequest and to WakeRequest."""

    state: str  # of the worker now
    asleep: list[str]  # tags of the memory that is given back now
    freed_bytes: Count
    seconds: float
    problem: str  # why the worker refused; empty when it did not


Answer = TypeVar("Answer", bound=Struct)


@dataclass(frozen=True, slots=True)
class Question(Generic[Answer]):
    """A call of a worker's gRPC service. Its server is a row of worker/rpc_server.py, its client a method of
    runtime.calls.worker.WorkerClient with the same name in lower case."""

    name: str
    request: type[Struct]
    answer: type[Answer]
    streamed: bool = False  # the answer is a stream of messages

    @property
    def method(self) -> str:
        return f"/{SERVICE}/{self.name}"


SNAPSHOT = Question("Snapshot", SnapshotRequest, SnapshotChunk, streamed=True)
INSPECT = Question("Inspect", InspectRequest, InspectReport)
DRAIN = Question("Drain", DrainRequest, DrainReport)
SLEEP = Question("Sleep", SleepRequest, SleepReport)
WAKE = Question("Wake", WakeRequest, SleepReport)
QUESTIONS: tuple[Question[Any], ...] = (SNAPSHOT, INSPECT, DRAIN, SLEEP, WAKE)


_encoder = msgspec.msgpack.Encoder()


def encode(message: Struct) -> bytes:
    return _encoder.encode(message)


decode_greeting = decoder(Hello | Refused)
