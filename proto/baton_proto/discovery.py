"""What a worker says of itself in the discovery bucket, and how loaded it is on the metrics plane."""

import zlib
from typing import Annotated

from msgspec import Struct

from baton_proto.decoding import Count, Ms, Name, Rows, Small, Text, decoder, versioned
from baton_proto.pooling import GENERATE

MAJOR = 1

# A replayed recording: no request can be sent to it. Routers index its KV events, and learn its blocks from nothing but
# their stream.
EVENTS_ROLE = "events"

# What routers note of a worker that they leave out until a decode worker of its generation is there.
UNPAIRED = "not used: no decode worker has its weights, form of KV and version of Baton"


class TransferEndpoint(Struct, frozen=True):
    """Where a decode worker's KV receiver listens, and by what transports block bytes may come."""

    host_id: Name  # boot id of the kernel, see runtime/host.py; equal on both sides: they can share memory
    unix_path: Name  # empty: no offered transport needs it
    tcp_address: Name  # HOST:PORT, or empty
    transports: Annotated[tuple[Name, ...], Rows] = ()  # names of rows of kvtransfer/transports/table.py


class WorkerRecord(Struct, frozen=True):
    """One live worker. Key in the bucket: the worker id. Rewritten every heartbeat; gone when its time to live ends."""

    version: Count
    worker_id: Name
    incarnation: Count  # rises with every start of the same worker id
    role: Name  # "prefill" | "decode" | EVENTS_ROLE
    state: Name  # "ready" | "draining" | "sleeping"
    rpc_address: Name  # HOST:PORT of the worker's gRPC server; empty for EVENTS_ROLE
    transfer: TransferEndpoint | None  # decode workers only
    model: Text  # name that clients use
    model_hash: Name  # weights and configuration, see worker/engines/own.py
    block_size: Small
    num_blocks: Small
    max_model_len: Small  # tokens of prompt and output together, bounded by the pool
    pid: Count
    metrics_address: Name = ""  # HOST:PORT of the Prometheus endpoint
    stream_address: Name = ""  # HOST:PORT where it takes streams of messages; empty for EVENTS_ROLE
    tls: bool = False  # whether gRPC and streams speak it
    kv_form: Name = ""  # beside weights and configuration: workers with another one take none of its KV
    speaks: Name = ""  # versions of what it is told and tells, see spoken.py
    engine: Name = ""  # "baton" | "vllm" | "external"
    note: Text = ""  # what an operator should know about its engine; empty when all is well
    root: Text = ""  # of an external worker: where its server has the weights from, as it says
    greedy: Text = ""  # and the ids of its greedy answer to a fixed prompt, which the same weights give alike
    tasks: Annotated[tuple[Name, ...], Rows] = (GENERATE,)  # see pooling
    dimension: Small = 0  # of its embeddings
    adapters: Annotated[tuple[Name, ...], Rows] = ()  # that requests may name
    process: Name = ""  # see runtime/host.py
    adapter_places: Small = 0  # of these, so many take part in one step; 0: nobody knows
    adapter_folders: Annotated[tuple[Text, ...], Rows] = ()  # as many as `adapters`; empty where nobody knows it


class RecordHead(Struct, frozen=True):
    """What every version of a record has."""

    worker_id: Name
    role: Name = ""


def weights_tag(model_hash: str) -> int:
    """A short name of weights and configuration; never 0, which names none."""
    return zlib.crc32(model_hash.encode()) or 1


def prefill_pairs(start: int, end: int) -> int:
    """Attention computes pairs of a token and an earlier one: how many for the tokens [start, end) of a prompt."""
    return (end * end - start * start) // 2


class WorkerLoad(Struct, frozen=True):
    """A worker's load after an engine step; in StepMessages and, once a second, on `baton.<ns>.load.<worker_id>`."""

    running: Small = 0
    waiting: Small = 0
    blocks_used: Small = 0  # referenced by a sequence or a lease
    blocks_cached: Small = 0  # unreferenced, reusable
    blocks_total: Small = 0
    host_blocks_used: Small = 0  # prefixes in the host tier
    host_blocks_total: Small = 0
    disk_blocks_used: Small = 0  # prefixes with a copy in the disk tier
    disk_blocks_total: Small = 0
    queued_prefill_tokens: Small = 0  # prompt tokens not computed yet
    queued_prefill_pairs: Count = 0  # of these and the tokens before each
    leases: Small = 0  # not FREE, quarantined included
    last_event_id: Count = 0  # published
    steps: Count = 0
    step_ms: float = 0.0  # duration of the last step
    prompts: Small = 0  # of running and waiting: those of decode workers, which leave when their KV is shipped
    adapters: Annotated[tuple[Name, ...], Rows] = ()  # of running and waiting


class TimedStep(Struct, frozen=True, array_like=True):
    """One engine step: what it computed, and how long it took."""

    prompt_tokens: Small  # sum of n over its prompt chunks
    prompt_pairs: float  # sum of n * (p + n / 2), p the tokens of the same sequence before the chunk
    sequences: Small  # that decoded
    context_tokens: Count  # of these
    step_ms: float


class Pace(Struct, frozen=True):
    """How fast a worker computes and restores, as its steps tell."""

    context_tokens: Count = 0  # of the running sequences together
    steps: Annotated[list[TimedStep], Rows] = []  # a few of those since the last report
    host_token_ms: Ms = 0.0  # that a token's KV takes from host memory to the device, measured; 0: not known
    disk_token_ms: Ms = 0.0  # and from the disk


class LoadReport(Pace, frozen=True, kw_only=True):
    """A worker's pace and load, once a second."""

    version: Count
    worker_id: Name
    incarnation: Count
    load: WorkerLoad


decode_record = versioned(WorkerRecord, "worker record", MAJOR, json=True)
decode_head = decoder(RecordHead, json=True)
decode_load_report = versioned(LoadReport, "load report", MAJOR)
