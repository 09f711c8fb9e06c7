import os

import numpy as np
import pytest

from kvtransfer.slab.head_plan import Shard, parts
from kvtransfer.slab.slab import Slab
from kvtransfer.transports.mapped import PeerSlabs
from runtime.device.host_memory import HostMemory
from runtime.errors import ProtocolError
from tests.kvtransfer.peers import LAYOUT
from tests.open_files import open_files
from tests.runtime.device.test_memory_range import num_mappings

PLAN = parts(Shard(), 2, LAYOUT.num_kv_heads)  # to two ranks


def test_each_slab_is_mapped_and_the_token_goes_after_them() -> None:
    files, mappings = open_files(), num_mappings()
    slabs = [Slab(LAYOUT), Slab(LAYOUT)]
    token, peers_end = os.pipe()
    peer = PeerSlabs(HostMemory(), [*(slab.export() for slab in slabs), peers_end], PLAN, LAYOUT.nbytes, "a peer")
    for number, memory in enumerate(peer.memories):
        np.asarray(memory.array)[3] = number + 1
    assert [slab.buffer[3] for slab in slabs] == [1, 2]
    os.set_blocking(token, False)
    with pytest.raises(BlockingIOError):
        os.read(token, 1)
    del memory
    peer.close()
    assert os.read(token, 1) == b""  # hung up
    os.close(token)
    for slab in slabs:
        slab.close()
    del peer, slabs, slab
    assert num_mappings() == mappings
    assert open_files() <= files


@pytest.mark.parametrize("sent", [[1, 1], [1, 1, 1, 1], [1, 2, 1]])
def test_descriptors_that_are_not_what_is_due_are_refused_and_closed(sent: list[int]) -> None:
    """Of files of so many pages; due are two slabs of one, and a token."""
    page = os.sysconf("SC_PAGESIZE")
    files, mappings = open_files(), num_mappings()
    driver = HostMemory()
    with pytest.raises(ProtocolError, match="a peer"):
        PeerSlabs(driver, [driver.create(pages * page) for pages in sent], PLAN, page, "a peer")
    assert num_mappings() == mappings
    assert open_files() <= files
