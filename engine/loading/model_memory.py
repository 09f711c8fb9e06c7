"""The memory of a loaded model: its weights and its KV slab, given back for sleep and taken again.

A worker's engine thread calls it through LoadedModel when nothing runs. Tensors and captured CUDA graphs keep their
addresses. Levels and tags are those that users of vLLM know: level 1 keeps the weights in host memory, level 2 drops
them and reads them again; KV is dropped by both.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from kvtransfer.slab.slab import Slab
from runtime.device.memory_range import MemoryRange

if TYPE_CHECKING:  # the memory of a mock engine needs no torch
    import torch

    from engine.model.weights import TensorSource

WEIGHTS, KV_CACHE = TAGS = ("weights", "kv_cache")
LEVELS = (1, 2)


class ModelMemory:
    def __init__(self, source: "TensorSource | None", slab: Slab, *, prepare: bool = False) -> None:
        """source: of the weights; None, or one without memory of its own: there is nothing to give back, since a CPU
        computes on mapped files. prepare: takes the host memory for level 1 now, which is slow, and not when it is
        wanted."""
        self._source = source
        self._weights: MemoryRange | None = source.memory if source is not None else None
        self._slab = slab
        self._asleep: set[str] = set()
        self._kept = False  # the values of the sleeping weights, in `_host`
        self._host: torch.Tensor | None = None  # uint8, pinned where there is a GPU; kept from one sleep to the next
        if prepare and self._weights is not None:
            self._host = _host_copy(self._weights)

    @property
    def asleep(self) -> tuple[str, ...]:
        """Tags of what is given back."""
        return tuple(tag for tag in TAGS if tag in self._asleep)

    @property
    def weights_bytes(self) -> int:
        """What the weights take in memory of their own."""
        return self._weights.nbytes if self._weights is not None else 0

    def sleep(self, level: int) -> int:
        """Returns the bytes that came free. Raises UnavailableError and RuntimeError, having changed nothing, when the
        host has no room for the weights."""
        assert level in LEVELS
        freed = 0
        if self._weights is not None and WEIGHTS not in self._asleep:
            if level == 1:
                self._host = self._host if self._host is not None else _host_copy(self._weights)
                self._host.copy_(self._weights.bytes())  # in one piece, and waits for it
            self._weights.unmap()
            freed += self._weights.nbytes
        if KV_CACHE not in self._asleep:
            self._slab.suspend()
            freed += self._slab.layout.nbytes
        self._kept = level == 1 and (self._kept or WEIGHTS not in self._asleep)
        self._asleep = set(TAGS)
        return freed

    def wake(self, tags: tuple[str, ...] = TAGS) -> None:
        """What is awake stays so. Raises UnavailableError when there is no memory for a part, which then sleeps on."""
        if WEIGHTS in tags and WEIGHTS in self._asleep:
            self._wake_weights()
            self._asleep.discard(WEIGHTS)
        try:
            if KV_CACHE in tags and KV_CACHE in self._asleep:
                self._slab.resume()  # while the weights are copied
                self._asleep.discard(KV_CACHE)
        finally:
            self._await_copies()

    def _wake_weights(self) -> None:
        """On a GPU it is under way when this returns."""
        if self._weights is None or self._source is None:
            return
        if not self._weights.is_mapped:  # it is when reading them failed before
            self._weights.map()
        if self._kept and self._host is not None:
            with _beside(self._weights.bytes()):
                self._weights.bytes().copy_(self._host, non_blocking=True)
        else:
            self._source.reload()

    def _await_copies(self) -> None:
        if self._weights is not None and self._weights.is_mapped and self._weights.bytes().is_cuda:
            import torch

            torch.cuda.synchronize()


def _beside(memory: "torch.Tensor") -> "AbstractContextManager[object]":
    """On a GPU: a stream of its own, for zeroing the slab must not wait for a copy."""
    import torch

    if not memory.is_cuda:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(memory.device))  # type: ignore[no-untyped-call]


def _host_copy(weights: MemoryRange) -> "torch.Tensor":
    import torch

    return torch.empty(weights.nbytes, dtype=torch.uint8, pin_memory=weights.bytes().is_cuda)
