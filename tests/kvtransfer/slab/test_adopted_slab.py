import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.slab.adopted_slab import AdoptedSlab
from kvtransfer.slab.slab import Slab
from runtime.device.host_memory import HostMemory
from runtime.device.memory_range import PeerRange
from runtime.errors import ProtocolError, UnavailableError
from tests.kvtransfer.peers import LAYOUT, fill, words
from tests.open_files import open_files
from tests.runtime.device.test_memory_range import num_mappings


@contextmanager
def exported(slab: Slab | AdoptedSlab) -> Iterator[int]:
    fd = slab.export()
    yield fd
    os.close(fd)


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab(LAYOUT)
    yield slab
    slab.close()


def test_what_is_written_here_is_in_the_ranks_slab_and_the_other_way_round(slab: Slab) -> None:
    with exported(slab) as fd:
        adopted = AdoptedSlab(LAYOUT, HostMemory(), fd, "rank 1")
    assert len(adopted.buffer) == LAYOUT.nbytes
    adopted.buffer[5] = 9
    assert slab.buffer[5] == 9
    fill(slab, seed=1)
    assert bytes(adopted.buffer) == words(slab).tobytes()
    adopted.close()


def test_a_third_process_can_be_handed_the_slab(slab: Slab) -> None:
    with exported(slab) as fd:
        adopted = AdoptedSlab(LAYOUT, HostMemory(), fd, "rank 1")
    with exported(adopted) as fd:
        writer = PeerRange(HostMemory(), fd, LAYOUT.nbytes, "a peer")
    np.asarray(writer.array)[7] = 3
    assert slab.buffer[7] == 3
    writer.close()
    adopted.close()


def test_it_lets_go_for_a_sleep_and_takes_the_new_memory_afterwards(slab: Slab) -> None:
    with exported(slab) as fd:
        adopted = AdoptedSlab(LAYOUT, HostMemory(), fd, "rank 1")
        before = os.fstat(fd).st_ino
    adopted.suspend()
    assert adopted.suspended
    with pytest.raises(UnavailableError, match="rank 1 is given back"):
        adopted.export()
    slab.suspend()
    slab.resume()
    with exported(slab) as fd:
        adopted.resume(fd)
    assert not adopted.suspended
    with exported(adopted) as fd:
        assert os.fstat(fd).st_ino != before
    adopted.buffer[5] = 9
    assert slab.buffer[5] == 9
    adopted.close()
    adopted.close()


def test_neither_descriptors_nor_mappings_are_left_when_it_is_closed_or_refused(slab: Slab) -> None:
    files, mappings = open_files(), num_mappings()
    with exported(slab) as fd:
        AdoptedSlab(LAYOUT, HostMemory(), fd, "rank 1").close()
        with pytest.raises(ProtocolError, match="rank 2"):
            AdoptedSlab(replace(LAYOUT, num_blocks=LAYOUT.num_blocks + 1), HostMemory(), fd, "rank 2")
    assert num_mappings() == mappings
    assert open_files() <= files
