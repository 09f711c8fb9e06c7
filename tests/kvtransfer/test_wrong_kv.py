"""The five ways in which KV transfers are known to have given wrong KV to a request that then ended well, on every
transport, on our slab and on vLLM's cache: a transfer that failed after its lease was given, one that came late after a
cancel, blocks reused while they were written or read, one id in two lives of a worker, and preemption before delivery.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from kvtransfer.transports.table import TRANSPORTS
from tests.freezing import freeze
from tests.kvtransfer.driven import Decode, Prefill, any_blocks, arrive, decode_worker, on_gpus, prefill_worker

PLACES = [
    pytest.param((row.name, memory), id=f"{row.name}-{memory}", marks=on_gpus(row.name) if memory == "cuda" else ())
    for row in TRANSPORTS
    for memory in (*row.memory, *(("vllm",) if row.name == "shm" else ()))  # it lies alike whichever way bytes come
]
on_every_transport = pytest.mark.parametrize("place", PLACES, scope="module")
Place = tuple[str, str]  # transport, memory of both slabs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@contextmanager
def decoding(place: Place, **settings: Any) -> Iterator[Decode]:
    transport, memory = place
    on = {} if memory == "cuda" else {"memory": memory}
    with decode_worker(transport, {**on, **settings}, connect_timeout_s=60.0) as decode:
        yield decode


@contextmanager
def prefilling(place: Place, **settings: Any) -> Iterator[Prefill]:
    transport, memory = place
    on = {} if memory == "cuda" else {"memory": memory}
    with prefill_worker(transport, {**on, **settings}, connect_timeout_s=60.0) as prefill:
        yield prefill


class SharedPair:
    """Both workers of a place, for all tests that leave them well. After a test that fails there, the next one gets new
    workers."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._running: tuple[Decode, Prefill] | None = None
        self._ends = ExitStack()

    @contextmanager
    def using(self) -> Iterator[tuple[Decode, Prefill]]:
        try:
            if self._running is None:
                decode = self._ends.enter_context(decoding(self._place))
                self._running = decode, self._ends.enter_context(prefilling(self._place))
            self._running[0].ask("fill")  # nothing that an earlier test brought is taken for this one's
            yield self._running
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._running = None
        self._ends.close()


@pytest.fixture(scope="module")
def shared(place: Place) -> Iterator[SharedPair]:
    pair = SharedPair(place)
    yield pair
    pair.close()


@on_every_transport
@pytest.mark.parametrize("how", ["abort", "kill"])
def test_a_transfer_that_fails_after_its_lease_was_given_delivers_nothing(
    place: Place, shared: SharedPair, how: str
) -> None:
    with shared.using() as (decode, present), ExitStack() as stack:
        prefill = present if how == "abort" else stack.enter_context(prefilling(place, seed=3))
        blocks, source = any_blocks(200, seed=1), any_blocks(200, seed=2)
        others = sorted({*range(1024)} - {*blocks})
        before = decode.digest(others)
        grant = decode.reserve(blocks)
        prefill.begin(grant, source[:100])
        assert decode.has("LayerArrived", grant)
        if how == "abort":
            prefill.abort(grant)
            prefill.go_on(grant, source[100:], first=100)  # too late, commit and all
            assert not prefill.end()["ok"]
        else:
            prefill.process.kill()
            prefill = present
        assert decode.has("Released", grant)
        assert not decode.has("Committed", grant, 0.0)
        assert prefill.push(again := decode.reserve(blocks), source)["ok"]
        assert decode.has("Committed", again)
        assert decode.digest(blocks) == prefill.digest(source)
        assert decode.digest(others) == before
        assert decode.is_well_and_empty()


@on_every_transport
def test_what_comes_late_after_a_cancel_is_written_nowhere(shared: SharedPair) -> None:
    with shared.using() as (decode, prefill):
        arrive(prefill, decode, seed=1)
        blocks, source = any_blocks(200, seed=3), any_blocks(200, seed=4)
        grant = decode.reserve(blocks)
        prefill.begin(grant, source[:100])
        assert decode.has("LayerArrived", grant)
        freeze(prefill.process.process.pid)
        decode.cancel(grant)
        prefill.go_on(grant, source[100:], first=100)  # what it does first when it runs again
        assert not decode.has("Released", grant, 1.0), "it may still write"
        prefill.process.process.send_signal(signal.SIGCONT)
        assert decode.has("Released", grant)
        decode.ask("fill")  # the blocks are another's now
        before = decode.digest([*range(1024)])
        assert not prefill.end()["ok"]
        assert not prefill.push(grant, source)["ok"], "a grant is good for one transfer"
        assert decode.digest([*range(1024)]) == before
        assert not decode.has("Committed", grant, 0.0)
        assert decode.is_well_and_empty()


@on_every_transport
def test_blocks_that_are_granted_again_hold_what_the_second_transfer_brought(place: Place, shared: SharedPair) -> None:
    with shared.using() as (decode, first), prefilling(place, seed=3) as second:
        arrive(first, decode, seed=1)
        arrive(second, decode, seed=2)
        for seed in range(10, 16):
            blocks, source = any_blocks(400, seed), any_blocks(400, seed + 10)
            grant = decode.reserve(blocks)
            first.begin(grant, source[: 400 if seed % 2 else 300], whole=bool(seed % 2))  # in full flight
            decode.cancel(grant)
            if not decode.has("Released", grant, 0.0 if decode.has("Committed", grant, 0.0) else 60.0):
                first.end()
                continue
            again = decode.reserve(blocks)
            assert second.push(again, source)["ok"]
            assert decode.has("Committed", again)
            assert decode.digest(blocks) == second.digest(source)
            assert not first.end()["ok"]
            assert decode.digest(blocks) == second.digest(source)
        assert decode.is_well_and_empty()


@on_every_transport
def test_source_blocks_that_are_reused_as_soon_as_the_sender_lets_go_arrive_as_they_were(shared: SharedPair) -> None:
    with shared.using() as (decode, prefill):
        for seed in range(3):
            blocks, source = any_blocks(400, seed), any_blocks(400, seed + 10)
            before = prefill.digest(source)
            grant = decode.reserve(blocks)
            prefill.begin(grant, source, whole=True, reuse=True)
            assert prefill.end()["ok"]
            assert decode.has("Committed", grant)
            assert decode.digest(blocks) == before
            assert prefill.digest(source) != before
        assert decode.is_well_and_empty()


@on_every_transport
def test_a_grant_of_a_decode_workers_former_life_is_written_nowhere_in_its_next_one(place: Place) -> None:
    with prefilling(place) as prefill:
        blocks, source = any_blocks(100, seed=1), any_blocks(100, seed=2)
        with decoding(place) as decode:
            arrive(prefill, decode, seed=3)
            former = decode.reserve(blocks)
            decode.process.kill()
        with decoding(place, incarnation=2, seed=4) as decode:
            present = decode.reserve(blocks)
            before = decode.digest([*range(1024)])
            moved = former | {"endpoint": present["endpoint"]}
            result = prefill.push(moved, source)
            assert not result["ok"]
            assert "incarnation" in result["reason"]
            reborn = present | {"transfer_id": former["transfer_id"]}
            assert not prefill.push(reborn, source)["ok"]
            assert decode.digest([*range(1024)]) == before
            assert prefill.push(present, source)["ok"]
            assert decode.has("Committed", present)
            assert decode.digest(blocks) == prefill.digest(source)
            assert decode.is_well_and_empty()


@on_every_transport
def test_a_prefill_worker_that_was_restarted_cannot_go_on_with_its_former_lifes_grant(
    place: Place, shared: SharedPair
) -> None:
    with shared.using() as (decode, _):
        blocks, source = any_blocks(100, seed=1), any_blocks(100, seed=2)
        grant = decode.reserve(blocks)
        with prefilling(place) as prefill:
            prefill.begin(grant, source[:50])
            assert decode.has("LayerArrived", grant)
            prefill.process.kill()
        with prefilling(place, seed=5) as prefill:
            assert not prefill.push(grant, source)["ok"]
            assert decode.has("Released", grant)
            assert not decode.has("Committed", grant, 0.0)
            assert decode.is_well_and_empty()


@on_every_transport
def test_preemption_before_delivery_takes_no_block_that_a_transfer_reads_or_writes(shared: SharedPair) -> None:
    """On both sides the engine is short of blocks, and preempts what runs, in the middle of the transfer."""
    with shared.using() as (decode, prefill):
        source = prefill.prompt(20)
        before = prefill.digest(source)
        grant = decode.ask("reserve for a prompt", num_blocks=20)["grant"]
        prefill.begin(grant, source[:10])
        assert decode.has("LayerArrived", grant)
        assert decode.ask("crowd")["preemptions"] > 0
        assert prefill.crowd() > 0
        prefill.go_on(grant, source[10:], first=10)
        assert prefill.end()["ok"]
        assert decode.has("Committed", grant)
        assert decode.digest(grant["block_ids"]) == before
        assert decode.is_well_and_empty()
