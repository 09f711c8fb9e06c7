"""The request plane: the messages between routers, decode workers and prefill workers.

Each router has one stream (runtime/streams/message_stream.py) to each worker: commands one way, and a StepMessage per
engine step, or for several quick ones, the other way. Each decode worker has one to each prefill worker. Rare questions
are calls of the gRPC service `baton.worker.v1.Worker`. All messages are msgpack, encoded by msgspec.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from baton_proto.decoding import Count, Int32, Name, Packed, Rows, Small, Text, decoder
from baton_proto.discovery import TransferEndpoint, WorkerLoad
from baton_proto.images import Image, Seen
from baton_proto.kv_events import DEFAULT_HASH_SEED, HashSeed, Stored
from baton_proto.pooling import Pooling
from baton_proto.sampling import PromptLogprobs, SamplingParams, TokenLogprobs
from baton_proto.timeline import Chunks, Timeline
from baton_proto.token_counts import TokenCounts

MAJOR = 1
SERVICE = "baton.worker.v1.Worker"

# The purpose of a stream, in the hello of the peer that dials.
STEPS = "steps"  # a router sends WorkerCommands, a worker WorkerReports
PREFILL = "prefill"  # a decode worker sends PrefillCommands, a prefill worker PrefillReports


class Hello(Struct, frozen=True, tag="hello"):
    """First message of every stream, both ways. A worker whose incarnation is not the expected one refuses."""

    version: Count
    sender: Name  # router id or worker id
    incarnation: Count = 0  # of the worker: as the client knows it (0: any), or its own in its answer
    stream: Name = STEPS
    process: Name = ""  # of the sender, see runtime/host.py


class Refused(Struct, frozen=True, tag="refused"):
    """Last message of a stream, either way: why the stream ends."""

    reason: Text


# --- router -> worker -------------------------------------------------------------------------------------------------


class PrefillTarget(Struct, frozen=True):
    """The prefill worker that the router chose for a request."""

    worker_id: Name
    incarnation: Count
    stream_address: Name


class CacheHint(Struct, frozen=True, array_like=True):
    """What the caller expects of the prompt's cached blocks."""

    keep_s: Small = 0  # they are to stay for so long
    drop: bool = False  # nobody asks for them again


NO_HINT = CacheHint()


class PromptJob(Struct, frozen=True):
    """A prompt to compute. Tokens beyond `num_prompt_tokens` are output that the client already has."""

    request_id: Name
    token_ids: Packed  # u32 LE
    num_prompt_tokens: Small
    sampling: SamplingParams
    timeout_s: float  # what is left of the request's time
    priority: Int32 = 0
    hash_seed: HashSeed = DEFAULT_HASH_SEED
    hint: CacheHint = NO_HINT
    due_ms: Small | None = None  # until the first token is due, from the moment of sending; None: at no time
    adapter: Name = ""  # of the model, which alone may answer; empty: the model without one


class Submit(PromptJob, frozen=True, tag="submit"):
    """A request or its replay."""

    prefill: PrefillTarget | None = None  # None: the decode worker runs the prompt itself
    weights: Count = 0  # see discovery.weights_tag: those that the output is of; 0: there is none
    images: Annotated[list[Image], Rows] = []  # of the prompt, in order
    pooling: Pooling | None = None  # asked for in the place of text: sampling.max_tokens is 0


class Cancel(Struct, frozen=True, tag="cancel"):
    request_id: Name


WorkerCommand = Submit | Cancel | Refused

# --- worker -> router -------------------------------------------------------------------------------------------------


class Handoff(Struct, frozen=True):
    """What a prefill worker shipped for a request."""

    prefill_worker: Name
    kv_blocks: Small
    kv_bytes: Count
    transport: Name
    prompt_counts: TokenCounts  # of the prefill worker


class Failure(Struct, frozen=True):
    """Why a request ended without an answer. `retryable`: the router may replay it elsewhere."""

    # "prefill_lost" (the prefill worker may have died of it) | "prefill_failed" (it lives, or never had it) | "refused"
    # | "unsupported" (by the worker's kind of engine) | "invalid" (a grammar, anywhere) | "deadline" | "internal"
    code: Name
    message: Text
    retryable: bool
    worker_id: Name = ""  # of the worker that failed


class Delta(Struct, frozen=True, omit_defaults=True):
    """News of one request. The last one has `finish` or `failure`; nothing follows it."""

    request_id: Name
    token_ids: Annotated[list[Small], Rows] = []
    logprobs: Annotated[list[TokenLogprobs], Rows] = []
    prompt_counts: TokenCounts | None = None  # with the first token
    handoff: Handoff | None = None  # with the first token of a remote prefill
    finish: Name | None = None  # "stop" | "length" | "repetition" | "cancelled"
    stop_token: Small | None = None  # the EOS or stop token that ended it, which is the last of token_ids
    failure: Failure | None = None
    timeline: Timeline | None = None  # with the first token
    prompt_logprobs: PromptLogprobs | None = None  # with the first token, where they are asked for
    weights: Count = 0  # with the first token: those that compute the answer, see discovery.weights_tag
    seen: Seen | None = None  # with the first token, where the prompt has images
    accepted_tokens: Small = 0  # with `finish`: output tokens that were guessed before they were computed
    pooled: Packed = b""  # f32 LE, with `finish`, where Submit.pooling asks for it

    @property
    def hurries(self) -> bool:
        """Whether it is the first or the last one, which a client waits for."""
        return self.prompt_counts is not None or self.finish is not None or self.failure is not None


class StepMessage(Struct, frozen=True, tag="step"):
    deltas: Annotated[list[Delta], Rows]
    load: WorkerLoad


WorkerReport = StepMessage | Refused

# --- decode worker <-> prefill worker ---------------------------------------------------------------------------------


class Grant(Struct, frozen=True):
    """Leave to write into a decode worker's slab, for one transfer. Block i of the list holds the prompt's tokens from
    skip_tokens + i * block_size on; its last `num_window_blocks` hold the prompt's end in layers with a window."""

    transfer_id: Name
    worker_id: Name
    incarnation: Count
    generation: Count  # of the slab; it changes when the slab is suspended
    block_ids: Annotated[list[Small], Rows]
    skip_tokens: Small  # multiple of the block size: the decode worker's own cached prefix
    ttl_s: float  # remaining time to live, never a clock reading
    endpoint: TransferEndpoint
    num_window_blocks: Small = 0  # where these layers have blocks of their own

    @property
    def num_blocks(self) -> int:
        """Blocks of the prompt."""
        return len(self.block_ids) - self.num_window_blocks


class PrefillRequest(PromptJob, frozen=True, tag="prefill", kw_only=True):
    grant: Grant | None  # None: what the prompt left is passed on by the engines' own connectors, see PrefillPassed


class PrefillCancel(Struct, frozen=True, tag="cancel"):
    request_id: Name


PrefillCommand = PrefillRequest | PrefillCancel | Refused


class PrefillFailed(Struct, frozen=True, tag="failed"):
    """The prompt is not finished. This message says nothing about the blocks: the transfer keeps them safe."""

    request_id: Name
    failure: Failure


class PrefillPassed(Struct, frozen=True, tag="passed"):
    """A server has computed the prompt, and its own connector offers the KV to another server."""

    request_id: Name
    transfer: Packed  # JSON that the other server takes as `kv_transfer_params`; empty: none is needed
    prompt_counts: TokenCounts  # of the prefill worker
    took_us: Count = 0  # since the prompt's arrival
    chunks: Chunks = []  # likewise


PrefillReport = PrefillFailed | PrefillPassed | Refused


class FirstToken(Struct, frozen=True):
    """Payload of the transfer's COMMIT: all that decoding needs beyond the KV blocks. The decode worker has the token
    list and the seed, from which penalty counts and noise follow."""

    version: Count
    token_id: Small
    logprobs: TokenLogprobs | None
    prompt_counts: TokenCounts  # of the prefill worker
    begun_us: Count = 0  # from the prompt's arrival to the begin of its push
    chunks: Chunks = []  # since the prompt's arrival
    prompt_logprobs: PromptLogprobs | None = None


# --- questions --------------------------------------------------------------------------------------------------------


class SnapshotRequest(Struct, frozen=True):
    version: Count


class SnapshotChunk(Struct, frozen=True):
    """Part of a worker's block table as runs, parents before children. `event_id`: of the last batch it contains."""

    incarnation: Count
    event_id: Count
    runs: Annotated[list[Stored], Rows]
    last: bool


class InspectRequest(Struct, frozen=True):
    version: Count


class InspectReport(Struct, frozen=True):
    """The worker's own view. `problems`: what check_integrity() found; empty when all is well."""

    worker_id: Name
    incarnation: Count
    state: Name
    load: WorkerLoad
    problems: Annotated[list[Text], Rows]
    rss_bytes: Count


class DrainRequest(Struct, frozen=True):
    version: Count
    timeout_s: float


class DrainReport(Struct, frozen=True):
    remaining: Small  # requests still in flight at the timeout


LAST_STEPS_S = 30.0  # of a vLLM whose requests have ended, until it can fall asleep


class SleepRequest(Struct, frozen=True):
    version: Count
    level: Small  # 1: the weights are kept in host memory; 2: they are dropped
    timeout_s: float  # for requests in flight, and the same again for peers that map the KV


WEIGHTS, KV_CACHE = TAGS = ("weights", "kv_cache")


class WakeRequest(Struct, frozen=True):
    version: Count
    tags: Annotated[list[Name], Rows]  # of TAGS; none: all


class SleepReport(Struct, frozen=True):
    """The answer to SleepRequest and to WakeRequest."""

    state: Name  # of the worker now
    asleep: Annotated[list[Name], Rows]  # tags of the memory that is given back now
    freed_bytes: Count
    seconds: float
    problem: Text  # why the worker refused; empty when it did not


class UpdateRequest(Struct, frozen=True):
    """New weights come in steps, because either all of several workers change or none. After "hold" the worker has
    drained and waits for "load", or for "release" to serve on; without either it serves on by itself."""

    version: Count
    folder: Text  # of the checkpoint, on the worker's machine
    step: Name  # "check" | "hold" | "load" | "release"
    timeout_s: float  # of "hold": for requests in flight, and again for peers


class UpdateReport(Struct, frozen=True):
    state: Name  # of the worker now
    model_hash: Name  # of its weights and configuration now
    seconds: float
    problem: Text  # why the worker refused; empty when it did not


class AdapterRequest(Struct, frozen=True):
    version: Count
    name: Name
    folder: Text  # that it is loaded from; empty: it is unloaded


class AdapterReport(Struct, frozen=True):
    adapters: Annotated[tuple[Name, ...], Rows]  # of the worker now
    problem: Text  # why nothing changed; empty when it did


Answer = TypeVar("Answer", bound=Struct)


@dataclass(frozen=True, slots=True)
class Question(Generic[Answer]):
    """A call of a worker's gRPC service. Its server is a row of worker/rpc_server.py, its client a method of
    runtime.calls.worker.WorkerClient with the same name in lower case."""

    name: Name
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
UPDATE = Question("Update", UpdateRequest, UpdateReport)
ADAPT = Question("Adapt", AdapterRequest, AdapterReport)
QUESTIONS: tuple[Question[Any], ...] = (SNAPSHOT, INSPECT, DRAIN, SLEEP, WAKE, UPDATE, ADAPT)


encode: Callable[[Struct], bytes] = msgspec.msgpack.Encoder().encode


decode_greeting = decoder(Hello | Refused)
