"""Every mix of tensor-parallel sizes: every decode rank holds its share of the whole cache afterwards, bit by bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import pytest

from kvtransfer.decode_side.events import Committed, LayerArrived
from kvtransfer.slab.head_plan import Shard
from kvtransfer.wire.identity import SlabIdentity
from tests.kvtransfer.peers import TIMEOUT_S, Prefill
from tests.kvtransfer.ranks import LAYOUT, PREFILL_BLOCKS, SEED, DecodeRanks, PrefillRanks, RankProcesses, config_of
from tests.kvtransfer.reference import reference

both = pytest.mark.parametrize("transport", ["shm", "tcp"])
EVEN = [(senders, receivers, 8) for senders in (1, 2, 4) for receivers in (1, 2, 4)]
UNEVEN = [(1, 4, 2), (2, 4, 2), (4, 4, 2), (4, 2, 2), (4, 1, 2)]
EIGHT = [pytest.param(mix, marks=pytest.mark.slow) for mix in ((8, 2, 8), (1, 8, 8), (8, 4, 1))]
SOURCE = [30, 3, 4, 5, 17, 18, 39]
GRANTED = [9, 20, 21, 22, 1, 2, 11]


@contextmanager
def workers(
    processes: RankProcesses, mix: tuple[int, int, int], transport: str, **settings: Any
) -> Iterator[tuple[DecodeRanks, PrefillRanks]]:
    senders, receivers, num_kv_heads = mix
    config = config_of(transport, **settings)
    decode = DecodeRanks(processes.take("decode-rank", receivers - 1), num_kv_heads, config)
    prefill = PrefillRanks(processes.take("prefill-rank", senders), num_kv_heads, config)
    try:
        yield decode, prefill
    finally:
        prefill.close()
        decode.close()


@both
@pytest.mark.parametrize("mix", EVEN + UNEVEN + EIGHT, ids=lambda mix: "{}to{}of{}heads".format(*mix))
def test_every_decode_rank_gets_its_heads_and_no_other_byte_changes(
    processes: RankProcesses, mix: tuple[int, int, int], transport: str
) -> None:
    with workers(processes, mix, transport) as (decode, prefill):
        grant = decode.receiver.reserve(GRANTED, skip_tokens=0)
        results = prefill.push(grant, SOURCE, "payload")
        assert all(result["ok"] for result in results), results
        kv_bytes = len(GRANTED) * decode.layout.num_layers * decode.layout.block_bytes
        committed = decode.wait_for(Committed, grant.transfer_id)
        assert committed == Committed(grant.transfer_id, b"payload", transport, len(GRANTED), kv_bytes)
        assert sum(result["kv_bytes"] for result in results) == kv_bytes  # no head left a prefill worker twice
        decode.assert_holds(reference(prefill.layout, SEED), SOURCE, GRANTED)
        assert decode.receiver.check_integrity() == []
        assert decode.receiver.lease_count() == 0


@both
@pytest.mark.parametrize("mix", [(4, 1, 8), (1, 4, 8), (2, 4, 2), (4, 4, 2)])
def test_every_byte_is_proven_by_checksums_where_they_are_wanted(
    processes: RankProcesses, mix: tuple[int, int, int], transport: str
) -> None:
    with workers(processes, mix, transport, checksum=True) as (decode, prefill):
        grant = decode.receiver.reserve(GRANTED, skip_tokens=0)
        results = prefill.push(grant, SOURCE)
        assert all(result["ok"] for result in results), results
        decode.wait_for(Committed, grant.transfer_id)
        decode.assert_holds(reference(prefill.layout, SEED), SOURCE, GRANTED)


@both
def test_blocks_that_the_decode_worker_has_already_are_skipped(processes: RankProcesses, transport: str) -> None:
    """Its own first two blocks lie in blocks that are not granted; the prompt's third is the grant's first."""
    with workers(processes, (2, 4, 8), transport) as (decode, prefill):
        grant = decode.receiver.reserve(GRANTED[2:], skip_tokens=2 * LAYOUT.block_size)
        results = prefill.push(grant, SOURCE[2:])
        assert all(result["ok"] for result in results), results
        decode.assert_holds(reference(prefill.layout, SEED), SOURCE[2:], GRANTED[2:])


@both
def test_transfers_of_ranks_out_of_step_keep_apart(processes: RankProcesses, transport: str) -> None:
    """Four transfers at once; each rank goes through them in another order."""
    with workers(processes, (4, 2, 8), transport) as (decode, prefill):
        shuffle = np.random.default_rng(3)
        granted = shuffle.permutation(LAYOUT.num_blocks).reshape(4, -1).tolist()
        sources = shuffle.permutation(PREFILL_BLOCKS)[: LAYOUT.num_blocks].reshape(4, -1).tolist()
        grants = [decode.receiver.reserve(blocks, 0) for blocks in granted]
        for rank, child in enumerate(prefill.children):
            turn = np.roll(np.arange(4), rank).tolist()
            for number in turn:
                child.tell(do="begin", grant=grants[number])
            for layer in range(LAYOUT.num_layers):
                for number in turn:
                    name = grants[number].transfer_id
                    child.tell(do="layer", push=name, layer=layer, first=0, source=sources[number])
            for number in turn:
                child.tell(do="commit", push=grants[number].transfer_id, payload="" if rank else str(number))
        for _ in range(4):
            assert all(result["ok"] for result in prefill.results())
        for number, grant in enumerate(grants):
            assert decode.wait_for(Committed, grant.transfer_id).payload == str(number).encode()
        decode.assert_holds(reference(prefill.layout, SEED), [*chain(*sources)], [*chain(*granted)])


@both
def test_nothing_is_committed_before_the_last_rank_has_committed(processes: RankProcesses, transport: str) -> None:
    with workers(processes, (4, 1, 8), transport) as (decode, prefill):
        grant, other = decode.receiver.reserve([1, 2], 0), decode.receiver.reserve([3], 0)
        name = grant.transfer_id
        prefill.tell("begin", grant=grant)
        for layer in range(LAYOUT.num_layers):
            prefill.tell("layer", push=name, layer=layer, first=0, source=[5, 6])
        late, *early = reversed(prefill.children)
        for rank, child in enumerate(reversed(early)):
            child.tell(do="commit", push=name, payload="" if rank else "payload")
            assert child.hear()["ok"]
        decode.wait_for(LayerArrived, name, rank=3, layer=LAYOUT.num_layers - 1)
        assert not any(isinstance(event, Committed) for event in decode.of(name))
        assert decode.receiver.lease_count() == 2
        late.tell(do="commit", push=name, payload="")
        assert late.hear()["ok"]
        assert decode.wait_for(Committed, name).payload == b"payload"
        assert all(result["ok"] for result in prefill.push(other, [7]))


@both
def test_the_other_ranks_new_memory_is_written_after_a_sleep(processes: RankProcesses, transport: str) -> None:
    with workers(processes, (2, 4, 8), transport) as (decode, prefill):
        assert all(result["ok"] for result in prefill.push(decode.receiver.reserve([1, 2], 0), [1, 2]))
        decode.slab.suspend()
        decode.renew_others()
        decode.slab.resume()
        grant = decode.receiver.reserve(GRANTED, 0)
        assert grant.generation == 2
        assert all(result["ok"] for result in prefill.push(grant, SOURCE))
        decode.assert_holds(reference(prefill.layout, SEED), SOURCE, GRANTED, noise=False)


def test_a_rank_that_owns_no_head_ends_its_pushes_without_a_connection(processes: RankProcesses) -> None:
    config = config_of("shm")
    decode = DecodeRanks([], 2, config)
    idle = Prefill(config, SlabIdentity("prefill-0", 3, "model", decode.layout, Shard(1, 4)))
    grant = decode.receiver.reserve([1, 2], 0)
    result = idle.push(grant, [3, 4]).get(timeout=TIMEOUT_S)
    assert (result.ok, result.transport, result.kv_bytes) == (True, "", 0)
    aborted, results = idle.begin(grant)
    aborted.abort("why not")
    aborted.commit(b"")
    assert (results.get(timeout=TIMEOUT_S).reason, results.empty()) == ("why not", True)
    _, results = idle.begin(grant)
    idle.close()
    assert "closing" in results.get(timeout=TIMEOUT_S).reason
    decode.assert_untouched()
    assert decode.receiver.lease_count() == 1
    decode.close()
