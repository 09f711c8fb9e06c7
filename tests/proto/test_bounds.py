"""What a peer says has bounds: numbers, text and depth."""

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

import baton_proto
from baton_proto import discovery, kv_events, planner_control, transfer, worker
from baton_proto.decoding import decoder
from baton_proto.routers import charges, rates, router_report, saved_response
from engine.vllm.kv import messages

MODULES = [
    importlib.import_module(row.name)
    for row in pkgutil.walk_packages(baton_proto.__path__, "baton_proto.")
    if "generated" not in row.name
]
MESSAGES = {
    thing
    for module in MODULES
    for thing in vars(module).values()
    if isinstance(thing, type) and issubclass(thing, msgspec.Struct) and thing is not msgspec.Struct
}
SIZED = (inspect.StrType, inspect.BytesType, inspect.ListType, inspect.VarTupleType, inspect.DictType)
UNSIGNED = {("Stored", "parent")}  # a hash; no msgpack integer is larger than a u64
DECODERS: dict[str, Callable[[bytes], Any]] = {
    "charges": charges.decode_charges,
    "load report": discovery.decode_load_report,
    "KV events": kv_events.decode_batch,
    "router report": router_report.decode_router_report,
    "rates": rates.decode_rates,
    "greeting": worker.decode_greeting,
    "command": decoder(worker.WorkerCommand),
    "to decode": transfer.decode_to_decode,
    "to prefill": transfer.decode_to_prefill,
    "from vLLM": messages.decode_from_vllm,
    "to vLLM": messages.decode_to_vllm,
}
JSON_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "worker record": discovery.decode_record,
    "planner question": planner_control.decode_question,
    "planner answer": planner_control.decode_answer,
    "saved response": saved_response.decode_saved_response,
}


def within(kind: Any) -> Iterator[Any]:
    """A type and all those in it, but for those of messages, which are looked at themselves."""
    yield kind
    if not isinstance(kind, inspect.StructType):
        for name in getattr(kind, "__struct_fields__", ()):
            for inner in value if isinstance(value := getattr(kind, name), tuple) else (value,):
                yield from within(inner)


@pytest.mark.parametrize("message", sorted(MESSAGES, key=lambda kind: kind.__name__))
def test_everything_that_has_a_length_has_bounds(message: type[msgspec.Struct]) -> None:
    kind = inspect.type_info(message)
    assert isinstance(kind, inspect.StructType)
    for field in kind.fields:
        for part in within(field.type):
            assert not isinstance(part, SIZED) or part.max_length is not None, field.name


@pytest.mark.parametrize("message", sorted(MESSAGES, key=lambda kind: kind.__name__))
def test_every_integer_of_a_message_has_bounds(message: type[msgspec.Struct]) -> None:
    kind = inspect.type_info(message)
    assert isinstance(kind, inspect.StructType)
    for field in kind.fields:
        for part in within(field.type):
            if isinstance(part, inspect.IntType):
                assert part.ge is not None, field.name
                assert part.le is not None or (message.__name__, field.name) in UNSIGNED, field.name


def test_a_load_beyond_what_can_be_sent_on_is_refused() -> None:
    for load in ({"running": 2**31}, {"steps": 2**63}, {"queued_prefill_pairs": 2**64 - 1}, {"leases": -1}):
        report = {"version": 1, "worker_id": "decode-0", "incarnation": 3, "load": load}
        with pytest.raises(msgspec.DecodeError):
            discovery.decode_load_report(msgspec.msgpack.encode(report))


@pytest.mark.parametrize("ms", [-0.1, math.inf, math.nan, 1e7])
def test_a_rate_that_is_none_is_refused(ms: float) -> None:
    report = {"version": 1, "worker_id": "decode-0", "incarnation": 3, "load": {}}
    discovery.decode_load_report(msgspec.msgpack.encode(report | {"disk_token_ms": 0.5}))
    with pytest.raises(msgspec.DecodeError):
        discovery.decode_load_report(msgspec.msgpack.encode(report | {"disk_token_ms": ms}))


@pytest.mark.parametrize("name", DECODERS)
def test_text_that_is_not_utf_8_and_endless_nesting_are_decode_errors(name: str) -> None:
    for data in (b"\x81\xa4type\xa1\xff", b"\x81\xa9worker_id\xa1\xff", b"\x81\xa1x" + b"\x91" * 100_000):
        with pytest.raises(msgspec.DecodeError):
            DECODERS[name](data)


@pytest.mark.parametrize("name", JSON_DECODERS)
def test_the_same_holds_in_json(name: str) -> None:
    for data in (b'{"worker_id": "\xff"}', b'{"body": {"type": "\xff"}}', b'{"x": ' + b"[" * 100_000):
        with pytest.raises(msgspec.DecodeError):
            JSON_DECODERS[name](data)
