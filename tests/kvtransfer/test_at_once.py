"""Transports that write a chunk's layers together: here shared memory does, as `cuda_ipc` does between GPUs."""

import random
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvtransfer.decode_side.events import Committed, Failed, LayerArrived, Released
from kvtransfer.transports import shm
from kvtransfer.transports.shm import ShmWriter
from tests.kvtransfer.peers import (
    LAYOUT,
    PREFILL_LAYOUT,
    TIMEOUT_S,
    assert_arrived,
    fill,
    pair,
    words,
)

LAST = LAYOUT.num_layers - 1


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShmWriter, "at_once", True)


@pytest.mark.parametrize("checksum", [False, True])
def test_each_chunk_leaves_with_its_last_layer(checksum: bool) -> None:
    layers = 1 if checksum else LAYOUT.num_layers  # of a message
    with pair("shm", checksum=checksum) as (decode, prefill):
        grant = decode.receiver.reserve([9, 20, 21], 0)
        push, results = prefill.begin(grant)
        for first, source in ((0, [40, 3]), (2, [17])):
            for layer in range(LAST):
                push.layer_ready(layer, first, source)
            arrived = len(decode.of(grant.transfer_id))
            push.layer_ready(LAST, first, source)
            expected = [
                LayerArrived(grant.transfer_id, layer, len(source), layers=layers)
                for layer in range(0, LAYOUT.num_layers, layers)
            ]
            decode.wait_for(LayerArrived, grant.transfer_id, layer=expected[-1].layer, blocks=len(source))
            assert decode.of(grant.transfer_id)[arrived:] == expected
        push.commit(b"")
        result = results.get(timeout=TIMEOUT_S)
        assert (result.ok, result.kv_bytes) == (True, 3 * LAYOUT.num_layers * LAYOUT.block_bytes)
        assert_arrived(decode.slab, [9, 20, 21], prefill.slab, [40, 3, 17])


@pytest.mark.parametrize("seed", range(10))
def test_chunks_of_several_pushes_in_any_order_of_layers_arrive_and_no_other_byte_changes(seed: int) -> None:
    shuffle = random.Random(seed)
    with pair("shm") as (decode, prefill):
        fill(decode.slab, seed=1)
        expected = words(decode.slab).copy()
        granted = shuffle.sample(range(LAYOUT.num_blocks), LAYOUT.num_blocks)
        pushes = []
        for begin in range(0, 24, 8):
            grant = decode.receiver.reserve(granted[begin : begin + 8], 0)
            source = shuffle.sample(range(PREFILL_LAYOUT.num_blocks), 8)
            expected[:, grant.block_ids] = words(prefill.slab)[:, source]
            ends = [0, *sorted(shuffle.sample(range(1, 8), 2)), 8]
            chunks = list(pairwise(ends))
            shuffle.shuffle(chunks)
            work: list[tuple[int, int, list[int]]] = []
            for first, end in chunks:
                layers = list(range(LAYOUT.num_layers))
                if shuffle.random() < 0.5:
                    shuffle.shuffle(layers)
                work += [(layer, first, source[first:end]) for layer in layers]
            pushes.append((grant, *prefill.begin(grant), work))
        while left := [entry for entry in pushes if entry[3]]:
            _, push, _, work = shuffle.choice(left)
            push.layer_ready(*work.pop(0))
        for grant, push, results, _ in pushes:
            push.commit(b"")
            assert results.get(timeout=TIMEOUT_S).kv_bytes == 8 * LAYOUT.num_layers * LAYOUT.block_bytes
            decode.wait_for(Committed, grant.transfer_id)
        assert np.array_equal(words(decode.slab), expected)
        assert decode.receiver.check_integrity() == []


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


def test_a_cancel_in_the_middle_of_a_chunk_stops_it_and_it_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    paired_runs = shm.paired_runs
    with pair("shm") as (decode, prefill):
        fill(decode.slab, seed=1)
        before = words(decode.slab).copy()
        grant = decode.receiver.reserve([5, 6], 0)
        push, results = prefill.begin(grant)

        def cancelled_at_layer_2(ours: Any, theirs: Any, layer: int, *blocks: Any) -> Any:
            if layer == 2:
                decode.receiver.cancel(grant.transfer_id, "why not")
                give_up_s = time.monotonic() + TIMEOUT_S
                while push.stop is None and time.monotonic() < give_up_s:
                    time.sleep(0.001)
            return paired_runs(ours, theirs, layer, *blocks)

        monkeypatch.setattr(shm, "paired_runs", cancelled_at_layer_2)
        for layer in range(LAYOUT.num_layers):
            push.layer_ready(layer, 0, [1, 2])
        push.commit(b"")
        result = results.get(timeout=TIMEOUT_S)
        assert (result.ok, result.reason, result.kv_bytes) == (False, "why not", 0)
        decode.wait_for(Released, grant.transfer_id)
        assert [type(event) for event in decode.of(grant.transfer_id)] == [Released]
        assert np.array_equal(words(decode.slab)[:2, [5, 6]], words(prefill.slab)[:2, [1, 2]])
        assert np.array_equal(words(decode.slab)[2:], before[2:])
