"""Attention of a step with prompts whose layers share the memory of their queries and results, see PromptGraphs.

From layer to layer only the addresses of the cache and of the norms change then. So the first layer's launches are made
again with these, which spares the host the cutting of tensors and the look at some forty arguments, in each layer.
"""

from collections.abc import Mapping, Sequence as Run
from contextlib import nullcontext

from torch import Tensor

from engine.model.attention import HeadNorms, StepAttention
from engine.model.families.llama import Llama
from runtime.device.quick_launch import NotedLaunches


def layer_addresses(model: Llama, slab: Tensor) -> list[dict[int, int]]:
    """Maps, for each layer, the first layer's addresses of cache and norms to the layer's own. Empty when kernels of
    one layer are not compiled for another's alignment."""
    addresses = []
    for layer in model.layers:
        norms = [] if layer.head_norms is None else [layer.head_norms.query, layer.head_norms.key]
        addresses.append([tensor.data_ptr() for tensor in (slab[layer.index], *norms)])
    if any(address % 16 for layer in addresses for address in layer):
        return []
    return [dict(zip(addresses[0], layer, strict=True)) for layer in addresses]


class RepeatedAttention:
    """Implements `engine.model.families.llama.Attend` for one step. Invariant: every layer gives the same `qkv`."""

    def __init__(self, attend: StepAttention, mixed: Tensor, addresses: Run[Mapping[int, int]], *, whole: bool) -> None:
        """mixed: [num_tokens, heads, head_dim], takes each layer's result. addresses: see `layer_addresses`; without
        them nothing is launched again. whole: whether all that attends is launched by `QuickLaunch`; else only what
        stores is launched again."""
        self._attend = attend
        self._mixed = mixed
        self._addresses = addresses
        self._queries: Tensor | None = None
        self._stores = NotedLaunches() if addresses else None
        self._mixes = NotedLaunches() if addresses and whole else None

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        attend = self._attend
        attend.begin(layer)
        others = self._addresses[layer] if self._addresses else {}
        if self._stores is None or not self._stores.again(others):
            with self._stores or nullcontext():
                self._queries = attend.store(layer, qkv, norms)
        attend.tell(layer)
        if self._mixes is None or not self._mixes.again(others):
            assert self._queries is not None, "the first layer stores before it attends"
            with self._mixes or nullcontext():
                attend.mix(layer, self._queries, self._mixed)
        return self._mixed
