"""The memory of a loaded model, its weights and its KV slab: returned to the device for sleep, and taken again.

Invariant: no step runs meanwhile. Tensors and captured CUDA graphs keep their addresses. Levels and tags are vLLM's:
level 1 keeps the weights in host memory, level 2 drops them and reads them again; both drop the KV. Where host memory
has no room for the weights, level 1 is level 2. A copy there is made once, because weights change by updates alone.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import structlog

from baton_proto.worker import KV_CACHE, TAGS, WEIGHTS
from engine.interface import LEVELS
from kvtransfer.slab.slab import Slab
from runtime.device.available_memory import available_bytes
from runtime.device.memory_range import MemoryRange
from runtime.errors import ModelError, UnavailableError

if TYPE_CHECKING:  # the memory of a mock engine needs no torch
    import torch

    from engine.model.checkpoint import Checkpoint
    from engine.model.weights import TensorSource

Tensors: TypeAlias = "Iterable[tuple[str, torch.Tensor]]"
"""Whole tensors under the checkpoint's names."""

HOST_SHARE: Final = 0.9  # of the host memory that is free, which sleeping weights may take

log = structlog.get_logger()


class ModelMemory:
    def __init__(self, source: "TensorSource | None", slab: Slab) -> None:
        """source: the weights'; None, or a source without memory of its own, has nothing to return, because a CPU
        computes on mapped files."""
        self._source = source
        self._weights: MemoryRange | None = source.memory if source is not None else None
        self._slab = slab
        self._asleep: set[str] = set()
        self._kept = False  # since a sleep of level 1, until the values are dropped or replaced: `_host` has them, too
        self._host: torch.Tensor | None = None  # uint8, pinned where there is a GPU; stays from one sleep to the next

    @property
    def asleep(self) -> tuple[str, ...]:
        """Tags of the parts that sleep."""
        return tuple(tag for tag in TAGS if tag in self._asleep)

    @property
    def fingerprint(self) -> str:
        """Names the values of the weights."""
        return self._source.fingerprint() if self._source is not None else ""

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights in memory of their own."""
        return self._weights.nbytes if self._weights is not None else 0

    def sleep(self, level: int) -> int:
        """Returns the bytes that came free. Raises UnavailableError or RuntimeError, with nothing changed, when the
        host has no room for weights that cannot be read again."""
        assert level in LEVELS
        level, freed = self.level_with_room(level), 0
        if self._weights is not None and WEIGHTS not in self._asleep:
            if level == 1 and not self._kept:
                self._host = self._host if self._host is not None else _host_copy(self._weights)
                self._host.copy_(self._weights.bytes())  # in one copy, and waits for it
            self._weights.unmap()
            freed += self._weights.nbytes
        if KV_CACHE not in self._asleep:
            self._slab.suspend()
            freed += self._slab.layout.nbytes
        self._kept = level == 1 and (self._kept or WEIGHTS not in self._asleep)
        self._asleep = set(TAGS)
        return freed

    def level_with_room(self, level: int, ranks: int = 1) -> int:
        """The level at which the host has room for the weights of so many ranks. Weights that could not be read again
        stay in host memory."""
        if level != 1 or self._source is None or WEIGHTS in self._asleep or self._host is not None:
            return level
        needed, free = ranks * self.weights_bytes, available_bytes()
        if needed <= HOST_SHARE * free or not self._source.can_reload:
            return level
        log.warning("no host memory for sleeping weights: they are read again to wake", needed=needed, free=free)
        return 2

    def wake(self, tags: tuple[str, ...] = TAGS) -> None:
        """Wakes the parts that sleep. Raises UnavailableError when there is no memory for a part, which sleeps on, and
        what check() raises."""
        self.check(tags)
        if WEIGHTS in tags and WEIGHTS in self._asleep:
            self._wake_weights()
            self._asleep.discard(WEIGHTS)
        try:
            if KV_CACHE in tags and KV_CACHE in self._asleep:
                self._slab.resume()  # meanwhile the weights are copied
                self._asleep.discard(KV_CACHE)
        finally:
            self._await_copies()

    def check(self, tags: tuple[str, ...]) -> None:
        """Raises ModelError, with nothing changed, when wake() would have to read weights that are not those that were
        loaded, because somebody has replaced them."""
        if WEIGHTS in tags and WEIGHTS in self._asleep and not self._kept and self._source is not None:
            self._source.check_unchanged()

    @property
    def problem(self) -> str:
        """Why nothing may be computed with the weights as they are; empty when it may."""
        return self._source.problem if self._source is not None else ""

    def update(self, tensors: "Tensors", share: "Callable[[str, torch.Tensor], torch.Tensor] | None" = None) -> None:
        """Replaces the values of all weights in place, one tensor after the other, on the calling thread. `share` hands
        a tensor that fits to the other ranks, and returns what to use here.

        Raises UnavailableError while the weights sleep, and ModelError at the first tensor that is unknown or does not
        fit, or at the end when some are missing; after that, `problem` stands until an update succeeds.
        """
        source = self._updatable()
        source.begin_update()
        for whole, given in tensors:
            for name, tensor in source.parts(whole, given):
                source.check(name, tensor)
                source.replace(name, tensor if share is None else share(name, tensor))
        source.end_update()
        self._await_copies()

    def opened(self, folder: Path) -> "Checkpoint":
        """A checkpoint that `read` can take, hashed. Any thread, while nobody changes the weights. Raises ModelError,
        which names what does not fit."""
        from engine.model.checkpoint import Checkpoint

        if self._source is None:
            raise ModelError("mock", "has no weights")
        checkpoint = Checkpoint(folder)
        self._source.check_checkpoint(checkpoint)
        checkpoint.fingerprint()
        return checkpoint

    def read(self, checkpoint: "Checkpoint") -> None:
        """Replaces all weights by those of a checkpoint that fits. Weights that sleep are read when they wake."""
        assert self._source is not None
        if WEIGHTS in self._asleep and self._weights is not None:
            self._source.adopt(checkpoint)
            self._kept = False
            return
        self._kept &= WEIGHTS in self._asleep
        self._source.read(checkpoint)
        self._await_copies()

    def replace(self, name: str, tensor: "torch.Tensor") -> None:
        """Replaces one tensor, which fits, in an update."""
        self._updatable().replace(name, tensor)

    def end_update(self) -> None:
        self._updatable().end_update()
        self._await_copies()

    def _updatable(self) -> "TensorSource":
        if WEIGHTS in self._asleep and self._weights is not None:
            raise UnavailableError("the weights sleep: wake them before they are replaced")
        if self._source is None:
            raise ModelError("mock", "has no weights")
        self._kept &= WEIGHTS in self._asleep
        return self._source

    def _wake_weights(self) -> None:
        """Puts the weights back. On a GPU the copy is under way when this returns."""
        if self._weights is None or self._source is None:
            return
        if not self._weights.is_mapped:  # mapped already when an earlier reload failed
            self._weights.map()
        if self._kept and self._host is not None:
            with _beside(self._weights.bytes()):
                self._weights.bytes().copy_(self._host, non_blocking=True)
        else:
            self._source.reload()

    def _await_copies(self) -> None:
        if self._weights is not None and self._weights.is_mapped and self._weights.bytes().is_cuda:
            import torch

            torch.cuda.synchronize(self._weights.bytes().device)  # the caller's own device may be another


def _beside(memory: "torch.Tensor") -> "AbstractContextManager[object]":
    """On a GPU a stream of its own, because zeroing the slab must not wait for the copy."""
    import torch

    if not memory.is_cuda:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(memory.device))  # type: ignore[no-untyped-call]


def _host_copy(weights: MemoryRange) -> "torch.Tensor":
    import torch

    return torch.empty(weights.nbytes, dtype=torch.uint8, pin_memory=weights.bytes().is_cuda)
