import numpy as np
import pytest

from kvtransfer.host_window import HostWindow, StagedBlocks
from kvtransfer.layout import SlabLayout
from kvtransfer.slab import Slab
from tests.kvtransfer.peers import fill, words

LAYOUT = SlabLayout(num_layers=3, num_blocks=24, num_kv_heads=2, block_size=16, head_dim=16, dtype="bfloat16")
BLOCKS = [7, 8, 2, 23]


@pytest.fixture
def slab() -> Slab:
    slab = Slab(LAYOUT)
    fill(slab, 1)
    return slab


def test_a_window_onto_host_memory_copies_nothing(slab: Slab) -> None:
    pieces = HostWindow(slab).read(1, BLOCKS)
    assert [len(piece) // LAYOUT.block_bytes for piece in pieces] == [2, 1, 1]
    pieces[1][:4] = b"\1\2\3\4"
    assert words(slab)[1, 2, 0] == 0x04030201


def test_staged_blocks_are_read_in_the_order_of_the_list(slab: Slab) -> None:
    staged = StagedBlocks(slab).read(1, BLOCKS, None)
    assert bytes(staged) == b"".join(HostWindow(slab).read(1, BLOCKS))


def test_staged_blocks_land_where_they_belong_and_nowhere_else(slab: Slab) -> None:
    before = words(slab).copy()
    staged = StagedBlocks(slab)
    landing = np.frombuffer(staged.bytes(len(BLOCKS)), dtype=np.uint32)
    landing[:] = np.arange(len(landing))
    staged.write(2, BLOCKS)
    before[2, BLOCKS] = np.arange(len(landing)).reshape(len(BLOCKS), -1)
    assert np.array_equal(words(slab), before)
