from dataclasses import replace

import pytest

from baton_proto.discovery import TransferEndpoint
from kvtransfer.transports import table
from kvtransfer.transports.shm import ShmWriter
from kvtransfer.transports.table import TRANSPORTS, check_choice, choices, obstacle, offered, possible
from kvtransfer.transports.transport import MakeIntake, MakeWriter
from runtime.config.serving import TransferConfig
from runtime.device.driver import MemoryKind
from runtime.errors import ConfigError
from tests.kvtransfer.peers import TIMEOUT_S, Decode, Prefill, RawPeer, assert_arrived, pair

ON_GPU = ("cuda_ipc", "nccl", "tcp")
ON_CPU = ("shm", "tcp")


def endpoint(*transports: str, host: str = "here") -> TransferEndpoint:
    return TransferEndpoint(host, "/a/socket", "10.0.0.1:5", transports)


def names(rows: object) -> list[str]:
    return [row.name for row in rows]  # type: ignore[attr-defined]


@pytest.fixture
def has_nccl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "" if getattr(request, "param", True) else "nccl4py is not installed here"
    rows = [replace(row, obstacle=lambda: problem) if row.name == "nccl" else row for row in TRANSPORTS]
    monkeypatch.setattr(table, "TRANSPORTS", tuple(rows))


@pytest.mark.parametrize(
    ("memory", "theirs", "has_nccl", "expected"),
    [
        ("cuda", endpoint(*ON_GPU), True, ["cuda_ipc", "nccl", "tcp"]),
        ("cuda", endpoint(*ON_GPU, host="there"), True, ["nccl", "tcp"]),
        ("cuda", endpoint(*ON_GPU, host="there"), False, ["tcp"]),
        ("cuda", endpoint("cuda_ipc", "tcp", host="there"), True, ["tcp"]),
        ("cuda", endpoint(*ON_CPU), True, ["tcp"]),
        ("cuda", endpoint("cuda_ipc"), True, ["cuda_ipc"]),
        ("host", endpoint(*ON_CPU), False, ["shm", "tcp"]),
        ("host", endpoint(*ON_GPU), True, ["tcp"]),
        ("host", endpoint("one of tomorrow", "tcp"), True, ["tcp"]),
        ("host", endpoint(), False, []),
    ],
    indirect=["has_nccl"],
)
def test_the_fastest_transport_that_both_have_comes_first(
    memory: MemoryKind, theirs: TransferEndpoint, has_nccl: None, expected: list[str]
) -> None:
    assert names(possible("auto", memory, theirs, "here")) == expected


@pytest.mark.parametrize(
    ("name", "memory", "theirs", "has_nccl", "expected"),
    [
        ("nccl", "host", endpoint(*ON_GPU), True, "our KV lies in host memory"),
        ("cuda_ipc", "host", endpoint(*ON_GPU), True, "our KV lies in host memory"),
        ("shm", "cuda", endpoint(*ON_CPU), True, "our KV lies in cuda memory"),
        ("nccl", "cuda", endpoint("cuda_ipc", "tcp"), True, "the decode worker does not offer it"),
        ("nccl", "cuda", endpoint(*ON_GPU), False, "nccl4py is not installed here"),
        ("cuda_ipc", "cuda", endpoint(*ON_GPU, host="there"), True, ""),  # forced: it is tried
        ("tcp", "cuda", endpoint(*ON_CPU), False, ""),
    ],
    indirect=["has_nccl"],
)
def test_what_is_in_the_way_of_a_forced_transport_is_said(
    name: str, memory: MemoryKind, theirs: TransferEndpoint, has_nccl: None, expected: str
) -> None:
    (row,) = (row for row in table.TRANSPORTS if row.name == name)
    assert obstacle(row, memory, theirs) == expected
    assert names(possible(name, memory, theirs, "here")) == ([] if expected else [name])


def test_where_tls_is_a_must_nccl_stays_within_a_machine(has_nccl: None) -> None:
    near, far = endpoint(*ON_GPU), endpoint(*ON_GPU, host="there")
    assert names(possible("auto", "cuda", near, "here", "on")) == ["cuda_ipc", "nccl", "tcp"]
    assert names(possible("auto", "cuda", far, "here", "on")) == ["tcp"]
    assert names(possible("auto", "cuda", far, "here", "auto")) == ["nccl", "tcp"]
    assert names(possible("nccl", "cuda", far, "here", "on")) == []
    (nccl,) = (row for row in table.TRANSPORTS if row.name == "nccl")
    assert "security.internal_tls" in obstacle(nccl, "cuda", far, needs_tls=True)


@pytest.mark.parametrize(
    ("wanted", "memory", "expected"),
    [
        ("auto", "host", ["shm", "tcp"]),
        ("auto", "cuda", ["cuda_ipc", "nccl", "tcp"]),
        ("nccl", "cuda", ["nccl"]),
        ("nccl", "host", []),
        ("tcp", "cuda", ["tcp"]),
        ("shm", "host", ["shm"]),
    ],
)
def test_a_decode_worker_offers_what_its_memory_allows(
    wanted: str, memory: MemoryKind, has_nccl: None, expected: list[str]
) -> None:
    assert names(offered(wanted, memory)) == expected


def test_the_names_are_distinct_and_an_unknown_one_is_refused_by_name_at_either_end() -> None:
    assert len(set(choices())) == len(TRANSPORTS) + 1
    for name in choices():
        check_choice(name)
    for make in (Decode, Prefill):
        with pytest.raises(ConfigError, match=r"transfer\.transport: 'tpc' is no transport; the nearest .* is 'tcp'"):
            make(TransferConfig(transport="tpc"))


def test_a_transport_is_a_file_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file would hold its writer and its intake; here they are those of shared memory."""
    (shm,) = (row for row in TRANSPORTS if row.name == "shm")
    written = []

    class ToyWriter(ShmWriter):
        def write(self, shipment: object) -> bool:
            written.append(shipment)
            return super().write(shipment)  # type: ignore[arg-type]

    def load() -> tuple[MakeWriter, MakeIntake]:
        return ToyWriter, shm.load()[1]

    monkeypatch.setattr(table, "TRANSPORTS", (replace(shm, name="toy", load=load), *TRANSPORTS))
    for wanted in ("toy", "auto"):
        with pair(wanted) as (decode, prefill):
            grant = decode.receiver.reserve([3, 4], 0)
            assert grant.endpoint.transports[0] == "toy"
            result = prefill.push(grant, [1, 2]).get(timeout=TIMEOUT_S)
            assert (result.ok, result.transport) == (True, "toy")
            assert_arrived(decode.slab, [3, 4], prefill.slab, [1, 2])
    assert len(written) == 2 * decode.slab.layout.num_layers
    assert "toy" in choices()


@pytest.mark.parametrize(("transport", "unix"), [("shm", True), ("tcp", False)])
def test_a_prefill_worker_that_asks_for_what_was_not_offered_is_left(transport: str, unix: bool) -> None:
    with pair(transport) as (decode, prefill):
        grant = decode.receiver.reserve([1], 0)
        for name in ({"shm": "tcp", "tcp": "shm"}[transport], "nccl", "", "no such transport"):
            peer = RawPeer(grant, unix=unix, transport=name, expects_welcome=False)
            assert peer.closed_by_peer()
            peer.close()
        assert prefill.push(grant, [1]).get(timeout=TIMEOUT_S).ok
