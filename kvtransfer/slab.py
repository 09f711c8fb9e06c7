"""The memory that holds a worker's KV blocks: one contiguous array that another process can be allowed to write.

The worker creates it; the model runner computes on `tensor`, the transports move bytes of `buffer` or `export()` it.
"""

import fcntl
import mmap
import os
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from baton.errors import UnavailableError
from kvtransfer.layout import SlabLayout

if TYPE_CHECKING:
    import torch


class Slab(Protocol):
    """What transfers and engine need of a slab, wherever it lives."""

    layout: SlabLayout

    @property
    def generation(self) -> int:
        """Rises with every resume: who was allowed to write an earlier one has to ask again."""

    @property
    def suspended(self) -> bool: ...

    @property
    def tensor(self) -> "torch.Tensor":
        """`[layers, blocks, kv_heads, 2, block_size, head_dim]`, see SlabLayout."""

    @property
    def buffer(self) -> memoryview:
        """The slab's bytes, for transports that go through host memory."""

    def export(self) -> int:
        """A descriptor that another process maps to write the slab; it stays the slab's. Raises UnavailableError."""

    def suspend(self) -> None:
        """Gives the physical memory back and keeps the addresses. No lease may be open."""

    def resume(self) -> None:
        """Zeroed memory at the same addresses, under a new generation."""

    def close(self) -> None: ...


class MemfdSlab:
    """A slab in anonymous shared memory of this host. Pages are zero and are committed when first touched."""

    def __init__(self, layout: SlabLayout) -> None:
        self.layout = layout
        self._generation = 1
        self._suspended = False
        self._fd = os.memfd_create("baton-kv-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, layout.nbytes)
            # A peer that maps the slab may rely on its size: touching a page behind the end would kill the peer.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(self._fd, layout.nbytes)
        except BaseException:
            os.close(self._fd)
            raise
        self._buffer = memoryview(self._map)

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def suspended(self) -> bool:
        return self._suspended

    @cached_property
    def tensor(self) -> "torch.Tensor":
        import torch  # here, because moving bytes needs none of it

        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.layout.dtype]
        return torch.frombuffer(self._map, dtype=dtype).view(self.layout.shape)

    @property
    def buffer(self) -> memoryview:
        return self._buffer

    def export(self) -> int:
        if self._suspended:
            raise UnavailableError("the KV slab is suspended")
        return self._fd

    def suspend(self) -> None:
        self._suspended = True
        self._map.madvise(mmap.MADV_REMOVE)  # punches the pages out of the file, for every mapping of it

    def resume(self) -> None:
        assert self._suspended
        self._generation += 1
        self._suspended = False

    def close(self) -> None:
        """Idempotent. Whoever still holds the tensor keeps the mapping, but not the descriptor."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        self.__dict__.pop("tensor", None)
        self._buffer = memoryview(b"")
        del self._map  # it unmaps with its last holder: closing it would pull the memory from under a tensor
