import pytest

from baton_proto.discovery import TransferEndpoint
from kvtransfer.transports.ways import obstacle, takes_nccl, ways
from runtime.device.driver import MemoryKind


def endpoint(
    memory: str, *, host: str = "here", unix: bool = True, tcp: bool = True, nccl: bool = True
) -> TransferEndpoint:
    return TransferEndpoint(host, "/a/socket" if unix else "", "10.0.0.1:5" if tcp else "", memory, nccl)


@pytest.mark.parametrize(
    ("memory", "theirs", "has_nccl", "expected"),
    [
        ("cuda", endpoint("cuda"), True, ["cuda_ipc", "nccl", "tcp"]),
        ("cuda", endpoint("cuda", host="there"), True, ["nccl", "tcp"]),
        ("cuda", endpoint("cuda", host="there"), False, ["tcp"]),
        ("cuda", endpoint("cuda", host="there", nccl=False), True, ["tcp"]),
        ("cuda", endpoint("host", nccl=False), True, ["tcp"]),
        ("cuda", endpoint("cuda", tcp=False), True, ["cuda_ipc"]),
        ("host", endpoint("host", nccl=False), False, ["shm", "tcp"]),
        ("host", endpoint("cuda"), True, ["tcp"]),
        ("host", endpoint("host", unix=False, tcp=False, nccl=False), False, []),
    ],
)
def test_the_fastest_transport_that_both_have_comes_first(
    memory: MemoryKind, theirs: TransferEndpoint, has_nccl: bool, expected: list[str]
) -> None:
    assert ways(memory, theirs, "here", has_nccl=has_nccl) == expected


@pytest.mark.parametrize(
    ("way", "memory", "theirs", "has_nccl", "expected"),
    [
        ("nccl", "host", endpoint("cuda"), True, "our KV lies in host memory"),
        ("cuda_ipc", "host", endpoint("cuda"), True, "our KV lies in host memory"),
        ("shm", "cuda", endpoint("host"), True, "our KV lies in cuda memory"),
        ("nccl", "cuda", endpoint("cuda", nccl=False), True, "the decode worker does not offer it"),
        ("nccl", "cuda", endpoint("cuda"), False, "nccl4py is not installed here"),
        ("cuda_ipc", "cuda", endpoint("cuda", host="there"), True, ""),  # forced: it is tried
        ("tcp", "cuda", endpoint("host", nccl=False), False, ""),
    ],
)
def test_what_is_in_the_way_of_a_forced_transport_is_said(
    way: str, memory: MemoryKind, theirs: TransferEndpoint, has_nccl: bool, expected: str
) -> None:
    assert obstacle(way, memory, theirs, has_nccl=has_nccl) == expected


def test_a_worker_on_a_cpu_takes_no_part_in_nccl() -> None:
    assert not takes_nccl("nccl", "host")
    assert not takes_nccl("auto", "host")
    assert not takes_nccl("tcp", "cuda")
