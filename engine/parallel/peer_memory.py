"""GPU memory that all ranks of one host have mapped, and objects on it that all ranks build, or none does."""

from collections.abc import Callable
from typing import TypeVar

import msgspec
import structlog
import torch
from torch import Tensor

from engine.parallel.collective import Collective

SWITCH = "BATON_PEER_SUM"  # environment: 0 leaves all sums over ranks to NCCL, to compare the two
CHECK_TURNS = 1 << 20  # turns of a wait in a check: 1 to 2 s
Built = TypeVar("Built")

log = structlog.get_logger()


def mapped_by_all(own: Tensor, collective: Collective, name: str) -> list[Tensor]:
    """Every rank's `own`, by rank: uint8 zeros, of one size on all ranks, on this rank's device. Invariant: each `name`
    is used once. Raises RuntimeError when this device cannot reach another rank's memory."""
    torch.cuda.synchronize()  # because a peer that learns of the memory must find zeros
    everyone = collective.exchange(name, _shared(own))
    return [own if rank == collective.rank else _mapped(one, own.device) for rank, one in enumerate(everyone)]


def built_by_all(
    collective: Collective, build: Callable[[], Built], is_right: Callable[[Built], bool], what: str
) -> Built | None:
    """The result of `build` when `build` returns and `is_right` holds on every rank; else None on every rank."""
    built, problem = None, ""
    try:
        built = build()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    right = False
    if collective.smallest(built is not None) and built is not None:
        right = is_right(built)
    if not collective.smallest(right):
        log.warning(f"{what} are left to NCCL", problem=problem or "another rank's, or wrong sums")
        return None
    return built


def _shared(own: Tensor) -> bytes:
    """The handle with which another process of this host maps the memory; empty when it cannot be shared."""
    try:
        return msgspec.msgpack.encode(own.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        log.warning("GPU memory cannot be shared", problem=str(error))
        return b""


def _mapped(shared: bytes, device: torch.device) -> Tensor:
    """Another rank's memory, mapped on this device."""
    if not shared:
        raise RuntimeError("another rank's memory cannot be shared")
    _, *rest, _ = msgspec.msgpack.decode(shared)
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *rest, False)  # no event
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
