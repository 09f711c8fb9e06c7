"""Transports that write a chunk's layers together: here shared memory does, as `cuda_ipc` does between GPUs."""

import pytest

from kvtransfer.events import Failed, LayerArrived, Released
from kvtransfer.shm import ShmWriter
from tests.kvtransfer.peers import LAYOUT, TIMEOUT_S, assert_arrived, fill, pair, words

LAST = LAYOUT.num_layers - 1


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShmWriter, "at_once", True)


def test_each_chunk_leaves_with_its_last_layer() -> None:
    with pair("shm", checksum=True) as (decode, prefill):
        grant = decode.receiver.reserve([9, 20, 21], 0)
        push, results = prefill.begin(grant)
        for first, source in ((0, [40, 3]), (2, [17])):
            for layer in range(LAST):
                push.layer_ready(layer, first, source)
            arrived = len(decode.of(grant.transfer_id))
            push.layer_ready(LAST, first, source)
            decode.wait_for(LayerArrived, grant.transfer_id, layer=LAST, blocks=len(source))
            events = decode.of(grant.transfer_id)[arrived:]
            assert events == [LayerArrived(grant.transfer_id, layer, len(source)) for layer in range(LAYOUT.num_layers)]
        push.commit(b"")
        assert results.get(timeout=TIMEOUT_S).ok
        assert_arrived(decode.slab, [9, 20, 21], prefill.slab, [40, 3, 17])


def test_a_commit_takes_along_what_is_held() -> None:
    with pair("shm") as (decode, prefill):
        grant = decode.receiver.reserve([5, 6], 0)
        push, results = prefill.begin(grant)
        for layer in reversed(range(LAYOUT.num_layers)):  # the last one first: the others are held
            push.layer_ready(layer, 0, [1, 2])
        push.commit(b"")
        assert results.get(timeout=TIMEOUT_S).ok
        assert_arrived(decode.slab, [5, 6], prefill.slab, [1, 2])


def test_what_is_held_by_a_push_that_ends_is_never_written() -> None:
    with pair("shm") as (decode, prefill):
        fill(decode.slab, seed=1)
        before = words(decode.slab).copy()
        grant = decode.receiver.reserve([5, 6], 0)
        push, results = prefill.begin(grant)
        for layer in range(LAST):
            push.layer_ready(layer, 0, [1, 2])
        push.abort("why not")
        assert not results.get(timeout=TIMEOUT_S).ok
        decode.wait_for(Released, grant.transfer_id)
        push.layer_ready(LAST, 0, [1, 2])
        assert [type(event) for event in decode.of(grant.transfer_id)] == [Failed, Released]
        assert prefill.push(decode.receiver.reserve([7], 0), [3]).get(timeout=TIMEOUT_S).ok
        assert (words(decode.slab)[:, [5, 6]] == before[:, [5, 6]]).all()


def test_a_cancel_meets_a_push_that_holds_layers() -> None:
    with pair("shm") as (decode, prefill):
        grant = decode.receiver.reserve([5, 6], 0)
        push, results = prefill.begin(grant)
        for layer in range(LAST):
            push.layer_ready(layer, 0, [1, 2])
        decode.receiver.cancel(grant.transfer_id, "why not")
        assert not results.get(timeout=TIMEOUT_S).ok
        decode.wait_for(Released, grant.transfer_id)
        assert decode.receiver.lease_count() == 0
        assert decode.receiver.check_integrity() == []
