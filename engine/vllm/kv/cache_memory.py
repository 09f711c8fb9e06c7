"""vLLM's KV cache as a slab that the worker process maps: its bytes are those of `[layers, blocks, kv_heads, ...]`.

What is inside a head's bytes is vLLM's own affair: they are copied as they are, between caches of one form.
"""

from typing import TYPE_CHECKING, Any, Literal, Self

from engine.vllm.kv.messages import CacheMemory
from kvtransfer.slab.adopted_slab import AdoptedSlab
from kvtransfer.slab.layout import ITEM_BYTES, SlabLayout
from kvtransfer.slab.slab import Mark
from runtime.device.driver import MemoryDriver
from runtime.device.host_memory import HostMemory
from runtime.device.memory_range import MemoryRange

if TYPE_CHECKING:
    import torch


class OwnMemory:
    """In vLLM: memory that can be shared. Used as a context, in which vLLM allocates its KV cache, whole or layer by
    layer, on one thread."""

    def __init__(self, nbytes: int, device: "torch.device") -> None:
        """`nbytes`: of all layers."""
        self._nbytes = nbytes
        self._device = device
        self._memory: MemoryRange | None = None
        self._used = 0
        self._mode: Any = None

    def __enter__(self) -> Self:
        import torch
        from torch.overrides import TorchFunctionMode

        class ZerosAreShared(TorchFunctionMode):
            def __torch_function__(mode, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: N805
                nbytes = args[0] if function is torch.zeros and (kwargs or {}).get("dtype") is torch.int8 else None
                if isinstance(nbytes, int) and nbytes <= self._nbytes - self._used:
                    return self._take(nbytes)
                return function(*args, **(kwargs or {}))

        self._mode = ZerosAreShared()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(None, None, None)

    def _take(self, nbytes: int) -> "torch.Tensor":
        import torch

        from runtime.device.drivers import memory_of

        if self._memory is None:
            self._memory = MemoryRange(memory_of(self._device), self._nbytes)
        begin, self._used = self._used, self._used + nbytes
        return self._memory.bytes()[begin : self._used].view(torch.int8)

    def export(self) -> int:
        """A descriptor, the caller's own."""
        assert self._memory is not None
        return self._memory.export()

    def described(self, caches: dict[str, "torch.Tensor"], form: str) -> CacheMemory:
        """caches: by layer, in the order of the layers, each `[blocks, kv_heads, block_size, 2 * head_dim]`. Raises
        ValueError where they are not what a slab can be."""
        layers = list(caches.values())
        first = layers[0]
        dtype = str(first.dtype).removeprefix("torch.")
        if self._memory is None or first.dim() != 4 or dtype not in ITEM_BYTES:
            raise ValueError(f"vLLM's KV cache {tuple(first.shape)} of {dtype} cannot be shared")
        num_blocks, heads, block_size, width = first.shape
        layout = SlabLayout(len(layers), num_blocks, heads, block_size, width // 2, dtype)
        base = self._memory.bytes().data_ptr()
        for number, cache in enumerate(layers):
            at = cache.data_ptr() - base
            if cache.shape != first.shape or not cache.is_contiguous() or at != layout.offset(number, 0):
                raise ValueError(f"layer {number} of vLLM's KV cache lies elsewhere than in a slab")
        on: Literal["cpu", "cuda"] = "cuda" if self._device.type == "cuda" else "cpu"
        return CacheMemory(len(layers), num_blocks, heads, block_size, width // 2, dtype, form, on)


class VllmSlab(AdoptedSlab):
    """In the worker process: the cache, which vLLM computes on and our transfers read and write."""

    generation = 1  # this memory stays where it is when vLLM sleeps

    def __init__(self, memory: CacheMemory, fd: int) -> None:
        """The worker process and vLLM's see one GPU, the same. `fd` stays the caller's. Raises ProtocolError or
        UnavailableError."""
        layout = SlabLayout(
            memory.num_layers,
            memory.num_blocks,
            memory.num_kv_heads,
            memory.block_size,
            memory.head_dim,
            memory.dtype,
        )
        super().__init__(layout, _driver_of(memory), fd, "vLLM")

    def mark(self) -> Mark | None:
        """Always None: what vLLM says to be computed is computed."""
        return None

    def clear_behind(self, block: int, used: int) -> None:
        """Does nothing: vLLM reads its own blocks with whatever stands behind their used tokens."""


def _driver_of(memory: CacheMemory) -> MemoryDriver:
    if memory.device == "cpu":
        return HostMemory()  # without torch, whose import takes seconds
    import torch

    from runtime.device.drivers import memory_of

    return memory_of(torch.device(memory.device))
