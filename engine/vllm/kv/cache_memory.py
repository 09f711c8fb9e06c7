"""vLLM's KV cache as a slab that the worker process maps: its bytes are those of `[layers, blocks, kv_heads, ...]`.

What is inside a head's bytes is vLLM's own affair: they are copied as they are, between caches of one form.
"""

from typing import TYPE_CHECKING, Any

from baton_proto.vllm_kv import CacheMemory
from kvtransfer.slab.adopted_slab import AdoptedSlab
from kvtransfer.slab.layout import ITEM_BYTES, SlabLayout
from kvtransfer.slab.slab import Mark
from runtime.device.host_memory import HostMemory
from runtime.device.memory_range import MemoryRange
from runtime.errors import ModelError

if TYPE_CHECKING:
    import torch


class OwnMemory:
    """In vLLM: a context in which its one allocation of the KV cache takes memory that can be shared."""

    def __init__(self) -> None:
        self.memory: MemoryRange | None = None
        self._mode: Any = None

    def __enter__(self) -> None:
        import torch
        from torch.overrides import TorchFunctionMode

        class ZerosAreShared(TorchFunctionMode):
            def __torch_function__(mode, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: N805
                if function is torch.zeros and self.memory is None and isinstance(args[0], int):
                    self.memory = memory = MemoryRange(HostMemory(), args[0])
                    return memory.bytes()[: args[0]].view(torch.int8)
                return function(*args, **(kwargs or {}))

        self._mode = ZerosAreShared()
        self._mode.__enter__()

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)

    def described(self, caches: dict[str, "torch.Tensor"], form: str) -> CacheMemory:
        """caches: by layer, in the order of the layers, each `[blocks, kv_heads, block_size, 2 * head_dim]`. Raises
        ModelError where they are not what a slab can be."""
        layers = list(caches.values())
        first = layers[0]
        dtype = str(first.dtype).removeprefix("torch.")
        if self.memory is None or first.dim() != 4 or dtype not in ITEM_BYTES:
            raise ModelError("vllm", f"its KV cache {tuple(first.shape)} of {dtype} cannot be shared: {ADVICE}")
        num_blocks, heads, block_size, width = first.shape
        layout = SlabLayout(len(layers), num_blocks, heads, block_size, width // 2, dtype)
        base = self.memory.bytes().data_ptr()
        for number, cache in enumerate(layers):
            at = cache.data_ptr() - base
            if cache.shape != first.shape or not cache.is_contiguous() or at != layout.offset(number, 0):
                raise ModelError("vllm", f"layer {number} of its KV cache lies elsewhere than in a slab: {ADVICE}")
        return CacheMemory(len(layers), num_blocks, heads, block_size, width // 2, dtype, form)


ADVICE = "set workers.prefill: 0, so that workers with vLLM run their prompts themselves"


class VllmSlab(AdoptedSlab):
    """In the worker process: the cache, which vLLM computes on and our transfers read and write."""

    generation = 1  # vLLM on a CPU sleeps without giving memory back

    def __init__(self, memory: CacheMemory, fd: int) -> None:
        """`fd` stays the caller's. Raises ProtocolError or UnavailableError."""
        layout = SlabLayout(
            memory.num_layers,
            memory.num_blocks,
            memory.num_kv_heads,
            memory.block_size,
            memory.head_dim,
            memory.dtype,
        )
        super().__init__(layout, HostMemory(), fd, "vLLM")

    def mark(self) -> Mark | None:
        """None: what vLLM says to be computed is computed."""
        return None

    def clear_behind(self, block: int, used: int) -> None:
        """Nothing: vLLM reads its own blocks with whatever stands behind their used tokens."""
