"""Transfers between two GPUs, or on one, by every transport: what arrives, and what is left when one side dies."""

import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.freezing import freeze
from tests.kvtransfer.driven import (
    DECODE_GPU,
    FREED_WITHIN_S,
    any_blocks,
    arrive,
    decode_worker,
    on_gpus,
    prefill_worker,
)
from tests.kvtransfer.peers import PeerProcess
from tests.kvtransfer.slab_process import LAYOUT

BIG_BLOCKS = 24 * 1024  # 24 GiB
TRANSPORTS = [pytest.param(name, marks=on_gpus(name)) for name in ("cuda_ipc", "nccl", "tcp")]

pytestmark = pytest.mark.timeout(120)
by_any_transport = pytest.mark.parametrize("transport", TRANSPORTS)
by_any_end = pytest.mark.parametrize(
    "signal_number", [pytest.param(number, marks=on_gpus("nccl")) for number in (signal.SIGKILL, signal.SIGSTOP)]
)


def await_signal(process: PeerProcess) -> None:
    """Until it is stopped or dead."""
    os.waitid(os.P_PID, process.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


@by_any_transport
@pytest.mark.parametrize("checksum", [False, True])
def test_granted_blocks_arrive_and_no_other_byte_changes(transport: str, checksum: bool) -> None:
    with decode_worker(transport, checksum=checksum) as decode, prefill_worker(transport, checksum=checksum) as prefill:
        for count in (1, 17, 500):
            source, destination = any_blocks(count, seed=count), any_blocks(count, seed=count + 1)
            others = sorted({*range(LAYOUT.num_blocks)} - {*destination})
            before = decode.ask("digest", blocks=others)
            grant = decode.reserve(destination)
            result = prefill.push(grant, source)
            assert (result["ok"], result["transport"]) == (True, transport), result
            assert decode.has("Committed", grant)
            assert decode.ask("digest", blocks=destination)["digest"] == prefill.digest(source)
            assert decode.ask("digest", blocks=others) == before
        assert decode.is_well_and_empty()


@by_any_transport
def test_many_transfers_at_once_arrive(transport: str) -> None:
    with decode_worker(transport) as decode, prefill_worker(transport) as prefill:
        places = any_blocks(1000, seed=3)
        source = [any_blocks(100, seed=seed) for seed in range(10)]
        grants = [decode.reserve(places[begin : begin + 100]) for begin in range(0, 1000, 100)]
        for grant, blocks in zip(grants, source, strict=True):
            prefill.begin(grant, blocks, whole=True)
        assert all(prefill.end()["ok"] for _ in grants)
        for index, grant in enumerate(grants):
            assert decode.has("Committed", grant)
            arrived = decode.ask("digest", blocks=places[index * 100 : index * 100 + 100])["digest"]
            assert arrived == prefill.digest(source[index])
        assert decode.is_well_and_empty()


@pytest.mark.parametrize(
    ("offered", "taken"),
    [
        pytest.param("auto", "cuda_ipc", marks=on_gpus("cuda_ipc")),
        pytest.param("nccl", "nccl", marks=on_gpus("nccl")),  # it offers no Unix socket
    ],
)
def test_auto_is_the_mapping_between_gpus_of_one_host_and_nccl_where_the_slab_cannot_be_mapped(
    offered: str, taken: str
) -> None:
    with decode_worker(offered) as decode, prefill_worker("auto") as prefill:
        assert prefill.push(decode.reserve([5]), [7])["transport"] == taken


@by_any_transport
def test_killing_the_prefill_worker_in_mid_push_frees_the_blocks_and_the_decode_worker_serves_on(
    transport: str,
) -> None:
    with decode_worker(transport) as decode:
        for delay_s in (0.0, 0.001, 0.003, 0.01):
            with prefill_worker(transport) as prefill:
                arrive(prefill, decode, seed=5)
                half, whole = (
                    decode.reserve(any_blocks(200, seed=1)[:100]),
                    decode.reserve(any_blocks(200, seed=1)[100:]),
                )
                prefill.begin(half, any_blocks(50, seed=2))
                assert decode.has("LayerArrived", half)
                prefill.begin(whole, any_blocks(100, seed=3), whole=True)  # on its way when it dies
                time.sleep(delay_s)
                prefill.process.kill()
                assert decode.has("Released", half, FREED_WITHIN_S)
                decode.ask("cancel", transfer_id=whole["transfer_id"])  # it may not have begun
                assert decode.has("Released", whole, FREED_WITHIN_S) or decode.has("Committed", whole, 0.0)
                assert decode.is_well_and_empty()
        with prefill_worker(transport) as prefill:
            arrive(prefill, decode, seed=6)


@by_any_transport
def test_killing_the_decode_worker_in_mid_push_fails_the_push_and_the_prefill_worker_serves_on(transport: str) -> None:
    with prefill_worker(transport) as prefill:
        for delay_s in (0.0, 0.001, 0.003, 0.01):
            with decode_worker(transport) as decode:
                arrive(prefill, decode, seed=7)
                grant = decode.reserve(any_blocks(500, seed=1))
                prefill.begin(grant, any_blocks(400, seed=2))
                time.sleep(delay_s)
                decode.process.kill()
                assert not prefill.end()["ok"]
                assert prefill.computes()
        with decode_worker(transport) as decode:
            arrive(prefill, decode, seed=8)


@by_any_end
def test_a_decode_worker_that_ends_or_freezes_in_mid_set_up_of_nccl_fails_the_push(signal_number: int) -> None:
    with prefill_worker("nccl", connect_timeout_s=3.0) as prefill:
        with decode_worker("nccl", {"at_split": signal_number}) as decode:
            prefill.begin(decode.reserve([5]), [7], whole=True)
            await_signal(decode.process)
            assert not prefill.end()["ok"]
            assert prefill.computes()
            decode.process.kill()
        with decode_worker("nccl") as decode:
            arrive(prefill, decode, seed=11)


@by_any_end
def test_a_prefill_worker_that_ends_or_freezes_in_mid_set_up_of_nccl_holds_nothing(signal_number: int) -> None:
    with prefill_worker("nccl", {"at_split": signal_number}) as prefill:
        with decode_worker("nccl", connect_timeout_s=3.0) as decode:
            grant = decode.reserve([5])
            prefill.begin(grant, [7], whole=True)
            await_signal(prefill.process)
            decode.ask("cancel", transfer_id=grant["transfer_id"])
            assert decode.has("Released", grant, FREED_WITHIN_S)
            with prefill_worker("nccl") as another:
                arrive(another, decode, seed=12)
            assert decode.is_well_and_empty()
        prefill.process.kill()  # only now: the decode worker has ended without its help


@by_any_transport
def test_a_cancel_in_mid_push_frees_the_blocks(transport: str) -> None:
    with decode_worker(transport) as decode, prefill_worker(transport) as prefill:
        for seed in range(3):
            grant = decode.reserve(any_blocks(400, seed))
            prefill.begin(grant, any_blocks(300, seed + 10))
            assert decode.has("LayerArrived", grant)
            decode.ask("cancel", transfer_id=grant["transfer_id"])
            assert not prefill.end()["ok"]
            assert decode.has("Released", grant, FREED_WITHIN_S)
            arrive(prefill, decode, seed=20 + seed)
        assert decode.is_well_and_empty()


@by_any_transport
def test_a_lease_that_runs_out_is_freed_when_the_sender_has_stopped(transport: str) -> None:
    with decode_worker(transport) as decode, prefill_worker(transport) as prefill:
        arrive(prefill, decode, seed=9)
        grant = decode.reserve(any_blocks(100, seed=1), ttl_s=0.5)
        prefill.begin(grant, any_blocks(50, seed=2))
        assert decode.has("Failed", grant, 0.5 + FREED_WITHIN_S)
        assert not prefill.end()["ok"]
        assert decode.has("Released", grant, FREED_WITHIN_S)
        assert decode.is_well_and_empty()


@by_any_transport
def test_a_lease_that_runs_out_stays_in_quarantine_while_its_sender_is_frozen_and_is_freed_when_it_dies(
    transport: str,
) -> None:
    with decode_worker(transport) as decode, prefill_worker(transport) as prefill:
        arrive(prefill, decode, seed=9)
        grant = decode.reserve(any_blocks(100, seed=1), ttl_s=1.0)
        prefill.begin(grant, any_blocks(50, seed=2))
        assert decode.has("LayerArrived", grant)
        freeze(prefill.process.process.pid)
        assert decode.has("Failed", grant, 1.0 + FREED_WITHIN_S)
        assert not decode.has("Released", grant, 2.0)
        prefill.process.kill()
        assert decode.has("Released", grant, FREED_WITHIN_S)
        assert decode.is_well_and_empty()


@by_any_transport
def test_a_grant_of_before_the_decode_worker_slept_is_refused_and_a_new_one_works(transport: str) -> None:
    with decode_worker(transport) as decode, prefill_worker(transport) as prefill:
        arrive(prefill, decode, seed=1)
        grant = decode.reserve([1, 2, 3])
        assert decode.ask("nap") == {"awake": True}
        result = prefill.push(grant, [4, 5, 6])
        assert not result["ok"]
        assert "generation" in result["reason"], result
        arrive(prefill, decode, seed=2)
        assert decode.is_well_and_empty()


def used_mib(gpu: int) -> int:
    """As the driver tells a process that uses no GPU."""
    command = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def await_memory(condition: Callable[[int], bool], timeout_s: float = 30.0) -> None:
    give_up_s = time.monotonic() + timeout_s
    while not condition(used := used_mib(DECODE_GPU)):
        assert time.monotonic() < give_up_s, f"{used} MiB are in use"
        time.sleep(0.1)


@by_any_transport
@pytest.mark.parametrize("pushing", [False, True])
def test_a_killed_decode_workers_memory_comes_free_while_the_prefill_worker_lives(
    transport: str, pushing: bool
) -> None:
    """The slab is far larger than what tests beside this one take."""
    slab_mib = BIG_BLOCKS * LAYOUT.num_layers * LAYOUT.block_bytes >> 20
    with prefill_worker(transport) as prefill:
        with decode_worker(transport, {"num_blocks": BIG_BLOCKS}) as decode:
            arrive(prefill, decode, seed=1)
            with_slab = used_mib(DECODE_GPU)
            assert with_slab > slab_mib
            if pushing:
                grant = decode.reserve(any_blocks(500, seed=2))
                prefill.begin(grant, any_blocks(400, seed=3))
                assert decode.has("LayerArrived", grant)
            decode.process.kill()
            if pushing:
                assert not prefill.end()["ok"]
            await_memory(lambda used: used < with_slab - slab_mib // 2)
            assert prefill.computes()
        with decode_worker(transport) as decode:
            arrive(prefill, decode, seed=4)
