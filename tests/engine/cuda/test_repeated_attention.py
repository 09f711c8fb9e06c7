"""The order and the addresses of a step's attention when layers repeat the first one's launches: with kernels that only
remember. What the real ones compute is compared on GPUs (test_cuda_runner, test_greedy_equality)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cuda.repeated_attention import LayerAddresses, RepeatedAttention
from engine.model.attention import HeadNorms, LayerAttention, StepAttention
from runtime.device.quick_launch import QuickLaunch
from tests.runtime.device.stand_ins import Kernel

LAYERS, TOKENS, HEADS, SIZE = 3, 5, 4, 16


class Backend:
    """Each call is one launch, of a kernel that is compiled already."""

    def __init__(self) -> None:
        self.kernels = {name: Kernel() for name in ("store", "prefill", "decode")}
        self.launches = {name: QuickLaunch(kernel) for name, kernel in self.kernels.items()}
        for launch in self.launches.values():
            launch[(1,)](torch.zeros(16), torch.zeros(16), torch.zeros(16), SIZE=1)
        self.calls = 0

    def _launch(self, name: str, *tensors: Tensor) -> None:
        self.calls += 1
        self.launches[name][(1,)](*tensors, SIZE=1)

    def store(self, qkv: Tensor, norms: HeadNorms, cache: Tensor, metadata: Any) -> Tensor:
        self._launch("store", cache, norms.query, norms.key)
        return qkv[:, :HEADS]

    def prefill(self, queries: Tensor, cache: Tensor, metadata: Any, out: Tensor) -> None:
        self._launch("prefill", queries, cache, out)

    def decode(self, queries: Tensor, cache: Tensor, metadata: Any, out: Tensor) -> None:
        self._launch("decode", queries, cache, out)

    def passed(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments[:3] for _, arguments in self.kernels[name].compiled.launches]


@pytest.mark.parametrize(
    ("with_addresses", "whole", "calls"), [(True, True, 3), (True, False, 1 + 2 * LAYERS), (False, True, 3 * LAYERS)]
)
def test_every_layer_uses_its_own_cache_and_norms_and_tells_between_storing_and_attending(
    with_addresses: bool, whole: bool, calls: int
) -> None:
    order: list[str] = []
    backend = Backend()
    slab = torch.zeros(LAYERS, 2, 2, 2, 8, SIZE)
    norms = [HeadNorms(torch.ones(SIZE), torch.ones(SIZE), torch.ones(2, SIZE), 1e-6) for _ in range(LAYERS)]
    qkv, mixed = torch.zeros(TOKENS, HEADS + 2, SIZE), torch.zeros(TOKENS, HEADS, SIZE)

    def told(layer: int) -> None:
        counts = [len(backend.passed(name)) for name in ("store", "prefill", "decode")]
        assert counts == [layer + 1, layer, layer]
        order.append(f"told {layer}")

    attend = StepAttention([LayerAttention(backend, None)] * LAYERS, slab, 3, told)
    addresses = [(slab[i].data_ptr(), norms[i].query.data_ptr(), norms[i].key.data_ptr()) for i in range(LAYERS)]
    others = [LayerAddresses(0, dict(zip(addresses[0], layer, strict=True))) for layer in addresses]
    repeated = RepeatedAttention(attend, mixed, others if with_addresses else [], whole=whole)
    assert all(repeated(layer, qkv, norms[layer]) is mixed for layer in range(LAYERS))
    assert order == ["told 0", "told 1", "told 2"]
    assert backend.calls == calls
    assert backend.passed("store") == addresses
    for name, rows in (("prefill", slice(0, 3)), ("decode", slice(3, TOKENS))):
        same = qkv[rows].data_ptr(), mixed[rows].data_ptr()
        assert backend.passed(name) == [(same[0], slab[i].data_ptr(), same[1]) for i in range(LAYERS)]
