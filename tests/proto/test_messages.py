from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baton_proto import worker
from baton_proto.discovery import (
    LoadReport,
    TimedStep,
    TransferEndpoint,
    WorkerLoad,
    WorkerRecord,
    decode_load_report,
    decode_record,
)
from baton_proto.kv_events import DISK, HOST, Cleared, KvEventBatch, Moved, Removed, Stored, decode_batch, encode_batch
from baton_proto.routers.router_report import (
    RouterQueue,
    RouterReport,
    RouterTotals,
    decode_router_report,
    encode_router_report,
)
from baton_proto.sampling import SamplingParams, TokenLogprobs
from baton_proto.timeline import PromptChunk
from baton_proto.token_counts import TokenCounts
from baton_proto.version import VersionError, check_major

ENDPOINT = TransferEndpoint("boot-1", "/tmp/kv.sock", "127.0.0.1:7000")
SAMPLING = SamplingParams(
    max_tokens=9,
    seed=2**63 - 1,
    temperature=0.5,
    top_k=4,
    stop_token_ids=(1, 2),
    ignore_eos=True,
    logprobs=0,
    logit_bias={5: -1.5},
)
COUNTS = TokenCounts(100, 16)
LOGPROBS = TokenLogprobs(-0.25, [(7, -0.25), (8, -3.0)])
GRANT = worker.Grant("t1", "decode-0", 3, 1, [4, 5], 16, 1.5, ENDPOINT)
TOKENS = bytes(range(16))

GREETINGS = [worker.Hello(worker.MAJOR, "router-0", 3, worker.PREFILL), worker.Refused("too old")]
COMMANDS = [
    worker.Submit("r1", TOKENS, 3, SAMPLING, 2.5, 7, prefill=worker.PrefillTarget("prefill-0", 1, "127.0.0.1:1")),
    worker.Submit("r1", TOKENS, 3, SamplingParams(max_tokens=1), 2.5),
    worker.Cancel("r1"),
]
REPORTS = [
    worker.StepMessage(
        [
            worker.Delta("r1", [7], [LOGPROBS], COUNTS, worker.Handoff("prefill-0", 3, 4096, "shm", COUNTS)),
            worker.Delta("r2", [2], finish="stop", stop_token=2),
            worker.Delta("r3", failure=worker.Failure("prefill_lost", "gone", True, "prefill-0")),
        ],
        WorkerLoad(running=1, steps=5, step_ms=1.5),
    ),
]
PREFILL = [
    worker.PrefillRequest("r1", TOKENS, 3, SAMPLING, 2.5, grant=GRANT),
    worker.PrefillRequest("r1", TOKENS, 3, SAMPLING, 2.5, grant=None),
    worker.PrefillCancel("r1"),
]
PREFILL_REPORTS = [
    worker.PrefillFailed("r1", worker.Failure("x", "y", False)),
    worker.PrefillPassed("r1", b"{}", COUNTS, 7, [PromptChunk(1, 2, 3)]),
]
RUN = Stored(None, b"\x01" * 8, b"\x02" * 8)
UNARY = [
    worker.FirstToken(1, 7, LOGPROBS, COUNTS),
    worker.FirstToken(1, 7, None, TokenCounts()),
    worker.SnapshotRequest(1),
    worker.SnapshotChunk(3, 9, [RUN], True),
    worker.InspectRequest(1),
    worker.InspectReport("decode-0", 3, "ready", WorkerLoad(), ["a problem"], 1 << 40),
    worker.DrainRequest(1, 2.5),
    worker.DrainReport(2),
]
EVENTS = [RUN, Stored(2**64 - 1, b"", b"", HOST), Removed(b"\x03" * 8), Moved(b"\x04" * 8, DISK), Cleared()]
BATCH = KvEventBatch(2, "decode-0", 3, 9, 1e9, EVENTS)
RECORD = WorkerRecord(
    1,
    "decode-0",
    3,
    "decode",
    "ready",
    "127.0.0.1:1",
    ENDPOINT,
    "smollm2",
    "abc",
    16,
    100,
    1600,
    42,
    "127.0.0.1:2",
)
REPORT = LoadReport(
    version=1,
    worker_id="decode-0",
    incarnation=3,
    load=WorkerLoad(running=1, blocks_total=100),
    context_tokens=50,
    steps=[TimedStep(0, 0.0, 1, 50, 5.5)],
    host_token_ms=0.003,
    disk_token_ms=0.06,
)
ROUTER_REPORT = RouterReport(1, "router-1", 3, 12.5, RouterQueue(2, 300, 0.5), RouterTotals(arrivals=9, ttft=[0, 4]))


@pytest.mark.parametrize(
    ("message", "types"),
    [(message, worker.WorkerCommand) for message in COMMANDS]
    + [(message, worker.WorkerReport) for message in REPORTS]
    + [(message, worker.PrefillCommand) for message in PREFILL]
    + [(message, worker.PrefillReport) for message in PREFILL_REPORTS]
    + [(message, type(message)) for message in UNARY],
)
def test_worker_messages_survive_the_wire(message: msgspec.Struct, types: Any) -> None:
    assert worker.decoder(types)(worker.encode(message)) == message


def test_events_records_and_loads_survive_the_wire() -> None:
    assert decode_batch(encode_batch(BATCH)) == BATCH
    assert decode_record(msgspec.json.encode(RECORD)) == RECORD
    assert decode_load_report(msgspec.msgpack.encode(REPORT)) == REPORT
    assert decode_router_report(encode_router_report(ROUTER_REPORT)) == ROUTER_REPORT


@pytest.mark.parametrize(
    ("decode", "encode", "message"),
    [
        (decode_batch, msgspec.msgpack.encode, BATCH),
        (decode_record, msgspec.json.encode, RECORD),
        (decode_load_report, msgspec.msgpack.encode, REPORT),
        (decode_router_report, msgspec.msgpack.encode, ROUTER_REPORT),
    ],
)
def test_other_major_versions_and_garbage_are_refused(
    decode: Callable[[bytes], Any], encode: Callable[[Any], bytes], message: Any
) -> None:
    ours = message.version
    with pytest.raises(
        VersionError, match=f"major version {ours + 1} is not understood here; this build speaks {ours}"
    ):
        decode(encode(msgspec.structs.replace(message, version=ours + 1)))
    for garbage in (b"", b"\xc1", encode(message)[:-1], encode({"version": ours})):
        with pytest.raises(msgspec.DecodeError):
            decode(garbage)


def test_a_message_of_another_plane_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        worker.decoder(worker.WorkerCommand)(worker.encode(worker.PrefillCancel("r1")) + b"\x00")
    with pytest.raises(msgspec.DecodeError):
        worker.decoder(worker.WorkerCommand)(worker.encode(REPORTS[0]))


def test_a_newer_minor_version_may_have_more_fields() -> None:
    newer = msgspec.json.decode(msgspec.json.encode(RECORD))
    newer["colour"] = "red"
    assert decode_record(msgspec.json.encode(newer)) == RECORD


def test_the_version_that_this_build_speaks_passes() -> None:
    check_major("anything", 1, 1)
    with pytest.raises(VersionError, match="anything"):
        check_major("anything", 0, 1)


def test_stored_blocks_of_the_device_are_told_without_their_home() -> None:
    stored = Stored(None, b"\x01" * 8, b"\x02" * 8)
    told = {"type": "stored", "parent": None, "block_hashes": b"\x01" * 8, "sequence_hashes": b"\x02" * 8}
    assert msgspec.msgpack.encode(stored) == msgspec.msgpack.encode(told)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told | {"home": 1}), type=Stored).home == HOST


@pytest.mark.parametrize("home", [-1, 3, None, "host"])
def test_a_home_that_is_none_is_refused(home: object) -> None:
    hashes = b"\x02" * 8
    for event in (
        {"type": "moved", "sequence_hashes": hashes, "home": home},
        {"type": "stored", "parent": None, "block_hashes": hashes, "sequence_hashes": hashes, "home": home},
    ):
        batch = msgspec.structs.asdict(BATCH) | {"events": [event]}
        with pytest.raises(msgspec.DecodeError):
            decode_batch(msgspec.msgpack.encode(batch))
