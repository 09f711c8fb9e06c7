import numpy as np
import pytest

from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from kvtransfer.transports.host_window import HostWindow, StagedBlocks
from tests.kvtransfer.peers import fill

LAYOUT = SlabLayout(num_layers=3, num_blocks=24, num_kv_heads=4, block_size=16, head_dim=16, dtype="bfloat16")
BLOCKS = [7, 8, 2, 23]
every_choice_of_heads = pytest.mark.parametrize("heads", [range(4), range(1, 3), range(3, 4)])


@pytest.fixture
def slab() -> Slab:
    slab = Slab(LAYOUT)
    fill(slab, 1)
    return slab


def half_words(slab: Slab) -> np.ndarray:
    """[layers, blocks, heads, half words of a head]"""
    words = np.frombuffer(slab.buffer, dtype=np.uint16)
    return words.reshape(LAYOUT.num_layers, LAYOUT.num_blocks, LAYOUT.num_kv_heads, -1)


def test_a_window_onto_host_memory_copies_nothing(slab: Slab) -> None:
    pieces = HostWindow(slab, range(4)).read(1, BLOCKS)
    assert [len(piece) // LAYOUT.block_bytes for piece in pieces] == [2, 1, 1]
    pieces[1][:2] = b"\1\2"
    assert half_words(slab)[1, 2, 0, 0] == 0x0201


@every_choice_of_heads
def test_staged_blocks_are_read_in_the_order_of_the_list(slab: Slab, heads: range) -> None:
    staged = bytes(StagedBlocks(slab, heads).read(1, BLOCKS, None))
    assert staged == b"".join(HostWindow(slab, heads).read(1, BLOCKS))
    assert staged == half_words(slab)[1, BLOCKS, heads.start : heads.stop].tobytes()


@every_choice_of_heads
def test_staged_blocks_land_where_they_belong_and_nowhere_else(slab: Slab, heads: range) -> None:
    before = half_words(slab).copy()
    staged = StagedBlocks(slab, heads)
    landing = np.frombuffer(staged.bytes(len(BLOCKS)), dtype=np.uint16)
    landing[:] = np.arange(len(landing), dtype=np.uint16)
    staged.write(2, BLOCKS)
    before[2, BLOCKS, heads.start : heads.stop] = landing.reshape(len(BLOCKS), len(heads), -1)
    assert np.array_equal(half_words(slab), before)
