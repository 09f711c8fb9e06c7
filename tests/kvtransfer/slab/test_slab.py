import os

import pytest
import torch

from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from runtime.errors import UnavailableError
from tests.kvtransfer.peers import LAYOUT


def committed_bytes(slab: Slab) -> int:
    fd = slab.export()
    try:
        return os.fstat(fd).st_blocks * 512
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("name", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_the_tensor_is_the_slab_zeroed_in_its_layout_and_dtype(name: str, dtype: torch.dtype) -> None:
    layout = SlabLayout(num_layers=2, num_blocks=5, num_kv_heads=3, block_size=16, head_dim=8, dtype=name)
    slab = Slab(layout)
    assert slab.tensor.dtype is dtype
    assert tuple(slab.tensor.shape) == layout.shape
    assert not slab.tensor.any()
    slab.tensor[1, 4] = 1.0
    begin = layout.offset(1, 4)
    assert any(slab.buffer[begin : begin + layout.block_bytes])
    assert not any(slab.buffer[:begin])
    assert begin + layout.block_bytes == layout.nbytes == len(slab.buffer)
    slab.close()


def test_pages_are_committed_when_they_are_touched() -> None:
    slab = Slab(SlabLayout(8, 1024, num_kv_heads=2, block_size=16, head_dim=64, dtype="float32"))
    assert committed_bytes(slab) == 0
    slab.tensor[0, 0] = 1.0
    assert 0 < committed_bytes(slab) <= slab.layout.nbytes // 64
    slab.close()


def test_suspend_gives_the_memory_back_and_keeps_the_addresses() -> None:
    slab = Slab(LAYOUT)
    slab.tensor.fill_(1.0)
    address = slab.tensor.data_ptr()
    slab.suspend()
    assert slab.suspended
    with pytest.raises(UnavailableError, match="given back"):
        slab.export()
    slab.resume()
    assert (slab.suspended, slab.generation) == (False, 2)
    assert slab.tensor.data_ptr() == address
    assert not slab.tensor.any()
    slab.tensor.fill_(2.0)
    assert committed_bytes(slab) >= LAYOUT.nbytes
    slab.close()


def test_a_mapped_slab_cannot_shrink_under_its_peer() -> None:
    slab = Slab(LAYOUT)
    fd = slab.export()
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    slab.close()


def test_closing_twice_is_closing() -> None:
    slab = Slab(LAYOUT)
    slab.close()
    slab.close()
    assert slab.suspended
