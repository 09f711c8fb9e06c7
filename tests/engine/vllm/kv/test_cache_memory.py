"""What vLLM allocates for its KV cache lies in memory that another mapping of it sees, block by block."""

import os

import pytest
import torch

from engine.vllm.kv.cache_memory import OwnMemory, VllmSlab

LAYERS, BLOCKS, HEADS, BLOCK, WIDTH = 3, 5, 2, 4, 16
LAYER_BYTES = BLOCKS * HEADS * BLOCK * WIDTH * 4


def allocated(memory: OwnMemory, calls: int = 1) -> dict[str, torch.Tensor]:
    """As vLLM does: zeros, once or for each layer, and a view for each layer."""
    with memory:
        raw = [torch.zeros(LAYERS * LAYER_BYTES // calls, dtype=torch.int8, device="cpu") for _ in range(calls)]
        torch.zeros((2, 2)), torch.zeros(16), torch.zeros(16, dtype=torch.int8)  # others are left alone
    layers = [layer for part in raw for layer in part.view(torch.float32).view(-1, BLOCKS, HEADS, BLOCK, WIDTH)]
    return {f"layers.{number}": layers[number] for number in range(LAYERS)}


@pytest.mark.parametrize("calls", [1, LAYERS])
def test_what_vllm_writes_is_what_the_slab_shows_and_the_other_way_round(calls: int) -> None:
    memory = OwnMemory(LAYERS * LAYER_BYTES, torch.device("cpu"))
    caches = allocated(memory, calls)
    described = memory.described(caches, "form")
    fd = memory.export()
    slab = VllmSlab(described, fd)
    os.close(fd)
    caches["layers.1"][3, 1] = 7.0
    at = slab.layout.offset(1, 3, 1)
    assert slab.buffer[at : at + slab.layout.head_bytes].cast("f").tolist() == [7.0] * (BLOCK * WIDTH)
    slab.buffer[slab.layout.offset(2, 4) :][:4].cast("f")[0] = 9.0
    assert caches["layers.2"][4, 0, 0, 0] == 9.0
    assert slab.layout.nbytes == LAYERS * LAYER_BYTES
    slab.close()


@pytest.mark.parametrize("how", ["another order", "another layout", "memory of its own"])
def test_a_cache_that_is_no_slab_is_refused(how: str) -> None:
    memory = OwnMemory(LAYERS * LAYER_BYTES, torch.device("cpu"))
    caches = allocated(memory)
    if how == "another order":
        caches = dict(reversed(caches.items()))
    elif how == "another layout":
        caches = {name: cache.transpose(1, 2) for name, cache in caches.items()}
    else:
        caches = {name: cache.clone() for name, cache in caches.items()}
    with pytest.raises(ValueError, match="KV cache"):
        memory.described(caches, "form")
