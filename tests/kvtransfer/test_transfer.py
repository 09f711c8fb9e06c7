"""Whole transfers, in this process and between processes."""

import os
import queue
import random
import threading

import msgspec
import numpy as np
import pytest

from baton_proto.discovery import TransferEndpoint
from kvtransfer.decode_side.events import Committed, Failed, LayerArrived, Released
from kvtransfer.prefill_side import layer_writer
from kvtransfer.prefill_side.push import PushResult
from kvtransfer.wire.checksum import block_checksums
from runtime.errors import ProtocolError
from tests.kvtransfer.peers import (
    DECODE_IDENTITY,
    LAYOUT,
    PREFILL_LAYOUT,
    TIMEOUT_S,
    Decode,
    Prefill,
    assert_arrived,
    child,
    fill,
    pair,
    patient,
    words,
)
from tests.open_files import open_files

both = pytest.mark.parametrize("transport", ["shm", "tcp"])
SOURCE = [40, 3, 4, 5, 17]
GRANTED = [9, 20, 21, 22, 1]


@both
@pytest.mark.parametrize("checksum", [True, False])
def test_granted_blocks_arrive_and_no_other_byte_changes(transport: str, checksum: bool) -> None:
    with pair(transport, checksum=checksum) as (decode, prefill):
        fill(decode.slab, seed=1)
        before = words(decode.slab).copy()
        grant = decode.receiver.reserve(GRANTED, skip_tokens=32)
        assert grant.skip_tokens == 32
        assert grant.block_ids == GRANTED
        result = prefill.push(grant, SOURCE, b"payload").get(timeout=TIMEOUT_S)
        kv_bytes = 5 * LAYOUT.num_layers * LAYOUT.block_bytes
        assert (result.ok, result.transport, result.kv_blocks, result.kv_bytes) == (True, transport, 5, kv_bytes)
        committed = decode.wait_for(Committed, grant.transfer_id)
        assert committed == Committed(grant.transfer_id, b"payload", transport, 5, kv_bytes)
        assert_arrived(decode.slab, GRANTED, prefill.slab, SOURCE)
        others = [block for block in range(LAYOUT.num_blocks) if block not in GRANTED]
        assert np.array_equal(words(decode.slab)[:, others], before[:, others])
        assert decode.of(grant.transfer_id)[:-1] == [LayerArrived(grant.transfer_id, layer, 5) for layer in range(4)]
        assert decode.receiver.lease_count() == 0
        assert decode.receiver.check_integrity() == []


@both
def test_a_chunked_prompt_arrives_in_pieces_of_any_order(transport: str) -> None:
    with pair(transport, checksum=True) as (decode, prefill):
        grant = decode.receiver.reserve(GRANTED, 0)
        push, results = prefill.begin(grant)
        for first, end in ((2, 3), (0, 2), (3, 5)):
            for layer in range(LAYOUT.num_layers):
                push.layer_ready(layer, first, SOURCE[first:end])
        push.commit(b"")
        assert results.get(timeout=TIMEOUT_S).ok
        assert_arrived(decode.slab, GRANTED, prefill.slab, SOURCE)


@both
def test_layer_0_is_there_before_the_prefill_side_has_the_last_layer(transport: str) -> None:
    with child("prefill", config={"transport": transport}) as process, pair(transport) as (decode, twin):
        grant = decode.receiver.reserve(GRANTED, 0)
        process.tell(do="begin", grant=grant)
        process.tell(do="layer", push=grant.transfer_id, layer=0, source=SOURCE)
        decode.wait_for(LayerArrived, grant.transfer_id, layer=0)
        assert np.array_equal(words(decode.slab)[0, GRANTED], words(twin.slab)[0, SOURCE])
        assert not words(decode.slab)[1:].any()
        for layer in range(1, LAYOUT.num_layers):  # the other process does not know them before now
            process.tell(do="layer", push=grant.transfer_id, layer=layer, source=SOURCE)
        process.tell(do="commit", push=grant.transfer_id)
        decode.wait_for(Committed, grant.transfer_id)
        assert_arrived(decode.slab, GRANTED, twin.slab, SOURCE)
        done = {"done": grant.transfer_id, "ok": True, "reason": "", "transport": transport}
        assert process.hear() == done


@both
def test_many_pushes_of_several_senders_keep_apart(transport: str) -> None:
    config = patient(transport=transport, checksum=True)
    decode = Decode(config)
    senders = [Prefill(config, seed=seed) for seed in range(3)]
    shuffle = random.Random(5)
    blocks = shuffle.sample(range(LAYOUT.num_blocks), LAYOUT.num_blocks)
    grants = [decode.receiver.reserve(blocks[begin : begin + 4], 0) for begin in range(0, LAYOUT.num_blocks, 4)]
    sources = [shuffle.sample(range(PREFILL_LAYOUT.num_blocks), 4) for _ in grants]
    pushes = [senders[number % 3].begin(grant) for number, grant in enumerate(grants)]
    for layer in range(LAYOUT.num_layers):
        for number, (push, _) in enumerate(pushes):
            push.layer_ready(layer, 0, sources[number])
    for push, _ in pushes:
        push.commit(push.transfer_id.encode())
    for number, (_, results) in enumerate(pushes):
        assert results.get(timeout=TIMEOUT_S).ok
        assert decode.wait_for(Committed, grants[number].transfer_id).payload == grants[number].transfer_id.encode()
        assert_arrived(decode.slab, grants[number].block_ids, senders[number % 3].slab, sources[number])
    assert decode.receiver.check_integrity() == []
    for prefill in senders:
        prefill.close()
    decode.close()


def test_auto_takes_shared_memory_on_one_host_and_tcp_between_two() -> None:
    with pair("auto") as (decode, prefill):
        near, far, hidden = (decode.receiver.reserve([block], 0) for block in range(3))
        here = near.endpoint
        far = msgspec.structs.replace(
            far, endpoint=TransferEndpoint("another host", here.unix_path, here.tcp_address, here.transports)
        )
        assert prefill.push(near, [1]).get(timeout=TIMEOUT_S).transport == "shm"
        elsewhere = Prefill(patient())
        assert elsewhere.push(far, [1]).get(timeout=TIMEOUT_S).transport == "tcp"
        elsewhere.close()
        unreachable = TransferEndpoint(here.host_id, here.unix_path + ".gone", here.tcp_address, here.transports)
        hidden = msgspec.structs.replace(hidden, endpoint=unreachable)
        third = Prefill(patient())
        assert third.push(hidden, [1]).get(timeout=TIMEOUT_S).transport == "tcp"
        third.close()
        strict = Prefill(patient(transport="shm"))
        result = strict.push(hidden, [1]).get(timeout=TIMEOUT_S)
        assert (result.ok, result.transport) == (False, "")
        assert "No such file" in result.reason
        strict.close()


def test_the_engine_thread_never_waits_for_the_network() -> None:
    """The decode worker accepts no connection at all, and every call of the engine still returns."""
    with pair("tcp") as (decode, prefill):
        dead = TransferEndpoint("another host", "", "127.0.0.1:1", ("tcp",))
        grant = msgspec.structs.replace(decode.receiver.reserve(GRANTED, 0), endpoint=dead)
        result = prefill.push(grant, SOURCE).get(timeout=TIMEOUT_S)
        assert (result.ok, result.kv_blocks, result.kv_bytes) == (False, 0, 0)
        assert "refused" in result.reason


@both
def test_a_wrong_byte_is_found_by_the_checksums(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:

    def of_other_bytes(buffer: memoryview, *rest: object) -> bytes:
        sums = bytearray(block_checksums(buffer, *rest))
        sums[8] ^= 1
        return bytes(sums)

    monkeypatch.setattr(layer_writer, "block_checksums", of_other_bytes)
    with pair(transport, checksum=True) as (decode, prefill):
        grant = decode.receiver.reserve(GRANTED, 0)
        results = prefill.push(grant, SOURCE)
        assert "checksum of layer 0, granted block 1 differs" in results.get(timeout=TIMEOUT_S).reason
        decode.wait_for(Failed, grant.transfer_id)
        decode.wait_for(Released, grant.transfer_id)
        assert not any(isinstance(event, LayerArrived | Committed) for event in decode.of(grant.transfer_id))


def test_a_receiver_that_wants_checksums_refuses_a_sender_without() -> None:
    decode, prefill = Decode(patient(checksum=True)), Prefill(patient())
    result = prefill.push(decode.receiver.reserve([1], 0), [1]).get(timeout=TIMEOUT_S)
    assert "checksums are required" in result.reason
    prefill.close()
    decode.close()


def test_a_grant_outside_the_slab_is_never_written() -> None:
    with pair("shm") as (decode, prefill):
        grant = msgspec.structs.replace(decode.receiver.reserve([1], 0), block_ids=[LAYOUT.num_blocks])
        result = prefill.push(grant, [1]).get(timeout=TIMEOUT_S)
        assert "outside" in result.reason
        assert not words(decode.slab).any()


@both
def test_fifty_connections_leave_no_descriptor_and_no_thread_behind(transport: str) -> None:
    config = patient(transport=transport)

    def connect_push_close() -> None:
        prefill = Prefill(config)
        grant = decode.receiver.reserve([4, 5], 0)
        assert prefill.push(grant, [1, 2]).get(timeout=TIMEOUT_S).ok
        prefill.close()

    def settle() -> tuple[set[tuple[str, str]], int]:
        for thread in threading.enumerate():
            if thread.name.startswith("kv-receive"):
                thread.join(TIMEOUT_S)
        return open_files(), threading.active_count()

    decode = Decode(config)
    connect_push_close()
    files, threads = settle()
    for _ in range(50):
        connect_push_close()
    files_after, threads_after = settle()
    assert files_after <= files
    assert threads_after <= threads
    decode.close()


def test_closing_removes_the_socket_and_tells_of_every_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.decode_side.receiver.CLOSE_GRACE_S", TIMEOUT_S)
    decode, prefill = Decode(patient()), Prefill(patient())
    idle, open_one = decode.receiver.reserve([1], 0), decode.receiver.reserve([2], 0)
    assert os.stat(os.path.dirname(idle.endpoint.unix_path)).st_mode & 0o777 == 0o700
    push, results = prefill.begin(open_one)
    push.layer_ready(0, 0, [1])
    decode.wait_for(LayerArrived, open_one.transfer_id)
    decode.close()
    for grant in (idle, open_one):
        assert "closing" in decode.wait_for(Failed, grant.transfer_id).reason
        decode.wait_for(Released, grant.transfer_id)
    assert not results.get(timeout=TIMEOUT_S).ok
    assert not os.path.exists(os.path.dirname(idle.endpoint.unix_path))
    prefill.close()


def test_a_sender_that_closes_aborts_its_pushes_and_the_blocks_come_free() -> None:
    decode, prefill = Decode(patient()), Prefill(patient())
    grant = decode.receiver.reserve(GRANTED, 0)
    push, results = prefill.begin(grant)
    push.layer_ready(0, 0, SOURCE)
    decode.wait_for(LayerArrived, grant.transfer_id)
    prefill.close()
    assert "closing" in results.get(timeout=TIMEOUT_S).reason
    assert "closing" in decode.wait_for(Failed, grant.transfer_id).reason
    decode.wait_for(Released, grant.transfer_id)
    decode.close()


def test_an_owner_that_fails_on_an_event_harms_nobody() -> None:
    decode, prefill = Decode(patient(), DECODE_IDENTITY), Prefill(patient())
    seen: queue.Queue[PushResult] = queue.Queue()

    def fail_once(result: PushResult) -> None:
        seen.put(result)
        raise RuntimeError("the owner's fault")

    grant, other = decode.receiver.reserve([1], 0), decode.receiver.reserve([2], 0)
    prefill.sender.begin(grant, fail_once).abort("on purpose")
    assert seen.get(timeout=TIMEOUT_S).reason == "on purpose"
    assert prefill.push(other, [1]).get(timeout=TIMEOUT_S).ok
    prefill.close()
    decode.close()


def test_a_grant_is_good_for_one_push() -> None:
    with pair() as (decode, prefill):
        grant = decode.receiver.reserve([1], 0)
        _, results = prefill.begin(grant)
        with pytest.raises(ProtocolError, match="a second time"):
            prefill.begin(grant)
        assert results.empty()
