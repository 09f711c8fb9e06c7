"""All transports, one row each, and which of them two workers can use, from what they know before they connect."""

import contextlib
import difflib
from importlib.util import find_spec
from typing import Final

from baton_proto.discovery import TransferEndpoint
from kvtransfer.transports.transport import MakeIntake, MakeWriter, Transport
from runtime.device.driver import MemoryKind
from runtime.errors import BatonError, ConfigError
from runtime.security.cluster_key import TlsMode

AUTO: Final = "auto"  # the first row that both workers can use


def _shm() -> tuple[MakeWriter, MakeIntake]:
    from kvtransfer.transports.mapped import MappedIntake
    from kvtransfer.transports.shm import ShmWriter

    return ShmWriter, MappedIntake


def _cuda_ipc() -> tuple[MakeWriter, MakeIntake]:
    from kvtransfer.transports.cuda_ipc import CudaIpcWriter
    from kvtransfer.transports.mapped import MappedIntake

    return CudaIpcWriter, MappedIntake


def _nccl() -> tuple[MakeWriter, MakeIntake]:
    from kvtransfer.transports.nccl import NcclIntake, NcclWriter

    return NcclWriter, NcclIntake


def _nccl_obstacle() -> str:
    return "" if find_spec("nccl") else "nccl4py is not installed here"


def _tcp() -> tuple[MakeWriter, MakeIntake]:
    from kvtransfer.transports.tcp import TcpIntake, TcpWriter

    return TcpWriter, TcpIntake


# The fastest first. Because Triton and NCCL are installed only where there is a GPU, a row imports its files when used.
TRANSPORTS: tuple[Transport, ...] = (
    Transport("shm", ("host",), "unix", _shm),
    Transport("cuda_ipc", ("cuda",), "unix", _cuda_ipc),
    Transport("nccl", ("cuda",), "tcp", _nccl, _nccl_obstacle, plain=True),
    Transport("tcp", ("host", "cuda"), "tcp", _tcp),
)


def choices() -> list[str]:
    """The values that `transfer.transport` may have."""
    return [AUTO, *(transport.name for transport in TRANSPORTS)]


def check_choice(wanted: str) -> None:
    """Raises ConfigError when `wanted` is no value of `transfer.transport`."""
    if wanted not in choices():
        nearest = difflib.get_close_matches(wanted, choices(), n=1, cutoff=0.0)[0]
        raise ConfigError("transfer.transport", f"{wanted!r} is no transport; the nearest known one is {nearest!r}")


def _chosen(wanted: str) -> list[Transport]:
    return [transport for transport in TRANSPORTS if wanted in (AUTO, transport.name)]


def offered(wanted: str, memory: MemoryKind) -> tuple[Transport, ...]:
    """What a decode worker offers with this `transfer.transport`, its slab in this kind of memory."""
    return tuple(row for row in _chosen(wanted) if memory in row.memory and not row.obstacle())


def load_offered(wanted: str, memory: MemoryKind) -> None:
    """Imports what these transports need. One that cannot be loaded says so when it is to be used."""
    for row in offered(wanted, memory):
        with contextlib.suppress(OSError, BatonError):
            row.load()


def possible(
    wanted: str, memory: MemoryKind, endpoint: TransferEndpoint, our_host: str, tls: TlsMode = "off"
) -> list[Transport]:
    """What a prefill worker can try, the fastest first. `wanted`, `memory`, `our_host`, `tls`: of the prefill worker. A
    forced transport is tried whatever the hosts are, unless TLS forbids it."""
    away = endpoint.host_id != our_host
    rows = [row for row in _chosen(wanted) if not obstacle(row, memory, endpoint, away and tls == "on")]
    return [row for row in rows if row.socket == "tcp" or wanted != AUTO or not away]


def obstacle(row: Transport, memory: MemoryKind, endpoint: TransferEndpoint, needs_tls: bool = False) -> str:
    """Why a prefill worker whose slab lies in `memory` cannot use a transport; empty when nothing known prevents it."""
    if memory not in row.memory:
        return f"our KV lies in {memory} memory"
    if needs_tls and row.plain:
        remedy = "security.internal_tls: auto lets it pass, and tcp is encrypted"
        return f"it does not encrypt what goes to another machine, and security.internal_tls is `on` ({remedy})"
    return row.obstacle() if row.name in endpoint.transports else "the decode worker does not offer it"
