"""Which transports a prefill worker can try with a decode worker, from what it knows before it connects. Pure."""

from importlib.util import find_spec
from typing import Final

from baton_proto.discovery import TransferEndpoint
from runtime.device.driver import MemoryKind

NCCL: Final = "nccl"
TCP: Final = "tcp"
MAPPED: Final[dict[MemoryKind, str]] = {"host": "shm", "cuda": "cuda_ipc"}  # the peer's slab is mapped and written


def takes_nccl(transport: str, memory: MemoryKind) -> bool:
    """Whether a worker with this `transfer.transport`, whose slab lies in this kind of memory, can take part in it."""
    return transport in ("auto", NCCL) and memory == "cuda" and find_spec("nccl") is not None


def ways(memory: MemoryKind, endpoint: TransferEndpoint, our_host: str, *, has_nccl: bool) -> list[str]:
    """The fastest first. `memory`, `our_host`, `has_nccl`: ours."""
    mapped = MAPPED[memory]
    possible = [way for way in (mapped, NCCL, TCP) if not obstacle(way, memory, endpoint, has_nccl=has_nccl)]
    return [way for way in possible if way != mapped or endpoint.host_id == our_host]


def obstacle(way: str, memory: MemoryKind, endpoint: TransferEndpoint, *, has_nccl: bool) -> str:
    """Why a transport cannot be; empty when nothing that we know of is in its way."""
    if way not in (TCP, NCCL, MAPPED[memory]) or (way == NCCL and memory != "cuda"):
        return f"our KV lies in {memory} memory"
    if way == MAPPED[memory]:
        is_offered = endpoint.memory == memory and bool(endpoint.unix_path)
    else:
        is_offered = bool(endpoint.tcp_address) and (way == TCP or endpoint.nccl)
    if not is_offered:
        return "the decode worker does not offer it"
    return "nccl4py is not installed here" if way == NCCL and not has_nccl else ""
