"""Attention of a step with prompts whose layers share the memory of their queries and results, see PromptGraphs.

Among layers that attend alike, only the addresses of the cache, the norms and the sinks change then. So the launches of
the first of them are made again with these, which spares the host the cutting of tensors and the look at some forty
arguments, in each layer.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence as Run
from contextlib import nullcontext
from typing import NamedTuple

from torch import Tensor

from engine.model.attention import Caches, HeadNorms, StepAttention
from engine.model.families.llama import Llama, LlamaLayer
from runtime.device.quick_launch import NotedLaunches


class LayerAddresses(NamedTuple):
    kind: int  # the first layer that attends alike
    others: Mapping[int, int]  # that layer's addresses, and this layer's in their place


def layer_addresses(model: Llama, caches: Caches) -> list[LayerAddresses]:
    """Of each layer. Empty when kernels of one layer are not compiled for another's alignment."""
    config = model.config
    addresses = [_addresses(layer, caches[layer.index]) for layer in model.layers]
    if any(address % 16 for layer in addresses for address in layer):
        return []
    first: dict[object, int] = {}
    kinds = [first.setdefault((config.rope_of(i), config.window(i)), i) for i in range(config.num_layers)]
    return [
        LayerAddresses(kind, dict(zip(addresses[kind], layer, strict=True)))
        for kind, layer in zip(kinds, addresses, strict=True)
    ]


def _addresses(layer: LlamaLayer, cache: Tensor) -> list[int]:
    norms = [] if layer.head_norms is None else [layer.head_norms.query, layer.head_norms.key]
    sinks = [] if layer.sinks is None else [layer.sinks]
    return [tensor.data_ptr() for tensor in (cache, *norms, *sinks)]


class RepeatedAttention:
    """Implements `engine.model.families.llama.Attend` for one step. Invariant: every layer gives the same `qkv`."""

    def __init__(self, attend: StepAttention, mixed: Tensor, addresses: Run[LayerAddresses], *, whole: bool) -> None:
        """mixed: [num_tokens, heads, head_dim], takes each layer's result. addresses: see `layer_addresses`; without
        them nothing is launched again. whole: whether all that attends is launched by `QuickLaunch`; else only what
        stores is launched again."""
        self._attend = attend
        self._mixed = mixed
        self._addresses = addresses
        self._whole = whole
        self._queries: Tensor | None = None
        self._stores: dict[int, NotedLaunches] = defaultdict(NotedLaunches)  # by kind of layer
        self._mixes: dict[int, NotedLaunches] = defaultdict(NotedLaunches)

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        attend = self._attend
        attend.begin(layer)
        kind, others = self._addresses[layer] if self._addresses else (0, {})
        stores = self._stores[kind] if self._addresses else None
        if stores is None or not stores.again(others):
            with stores or nullcontext():
                self._queries = attend.store(layer, qkv, norms)
        attend.tell(layer)
        mixes = self._mixes[kind] if self._addresses and self._whole else None
        if mixes is None or not mixes.again(others):
            assert self._queries is not None, "the first layer stores before it attends"
            with mixes or nullcontext():
                attend.mix(layer, self._queries, self._mixed)
        return self._mixed
