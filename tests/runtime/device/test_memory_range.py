import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.device.host_memory import HostMemory
from runtime.device.memory_range import MemoryRange, PeerRange
from runtime.errors import ProtocolError, UnavailableError
from tests.open_files import open_files, shared_bytes

NBYTES = 4 << 20


def num_mappings() -> int:
    """Of memory like ours: other threads of the process map and unmap what they like."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:baton-memory")


@pytest.fixture
def memory() -> Iterator[MemoryRange]:
    memory = MemoryRange(HostMemory(), NBYTES)
    yield memory
    if memory.is_mapped:
        memory.unmap()


def test_tensors_follow_each_other_aligned_and_zeroed(memory: MemoryRange) -> None:
    first = memory.tensor((3, 5), torch.bfloat16)
    second = memory.tensor((7,), torch.float32)
    assert second.data_ptr() - first.data_ptr() == 256
    assert not first.any()
    assert not second.any()
    second.fill_(1.0)
    assert memory.bytes()[256:284].view(torch.float32).tolist() == [1.0] * 7


def test_memory_comes_back_zeroed_at_the_same_addresses(memory: MemoryRange) -> None:
    tensor = memory.tensor((NBYTES // 4,), torch.float32)
    address, before = tensor.data_ptr(), shared_bytes()
    tensor.fill_(1.0)
    assert shared_bytes() - before >= NBYTES
    memory.unmap()
    assert shared_bytes() - before < NBYTES // 2
    memory.map()
    assert memory.bytes().data_ptr() == address
    assert not tensor.any()


def test_fifty_cycles_leak_neither_memory_nor_descriptors_nor_mappings(memory: MemoryRange) -> None:
    bytes_before, mappings, files = shared_bytes(), num_mappings(), Counter(name for _, name in open_files())
    for _ in range(50):
        memory.bytes().fill_(1)
        memory.unmap()
        memory.map()
    assert shared_bytes() - bytes_before < NBYTES
    assert num_mappings() <= mappings  # a thread of an earlier test may let go of one meanwhile
    assert Counter(name for _, name in open_files()) <= files  # the last memory may have another number


def test_the_addresses_go_with_the_last_tensor() -> None:
    mappings, files = num_mappings(), open_files()
    tensor = MemoryRange(HostMemory(), NBYTES).tensor((4,), torch.float32)
    gc.collect()
    tensor.fill_(1.0)
    assert num_mappings() > mappings
    del tensor
    assert num_mappings() == mappings
    assert open_files() <= files


def test_a_peer_writes_the_memory_and_keeps_what_it_maps(memory: MemoryRange) -> None:
    fd = memory.export()
    peer = PeerRange(HostMemory(), fd, NBYTES, "a peer")
    os.close(fd)
    theirs = np.asarray(peer.array)
    theirs[5] = 9
    assert memory.bytes()[5] == 9
    memory.unmap()
    assert theirs[5] == 9
    memory.map()
    assert memory.bytes()[5] == 0
    del theirs
    peer.close()
    peer.close()


def test_what_is_given_back_cannot_be_exported(memory: MemoryRange) -> None:
    memory.unmap()
    with pytest.raises(UnavailableError, match="given back"):
        memory.export()


@pytest.mark.parametrize(("size", "sealed"), [(NBYTES, False), (NBYTES - 1, True)])
def test_memory_that_could_shrink_or_is_of_another_size_is_not_adopted(size: int, sealed: bool) -> None:
    files, mappings = open_files(), num_mappings()
    driver = HostMemory()
    fd = driver.create(size) if sealed else os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    with pytest.raises(ProtocolError, match=f"expected {NBYTES}, sealed: True"):
        PeerRange(driver, fd, NBYTES, "a peer")
    os.close(fd)
    assert num_mappings() == mappings
    assert open_files() <= files


def test_touching_memory_that_was_given_back_ends_the_process() -> None:
    code = (
        "from runtime.device.host_memory import HostMemory; from runtime.device.memory_range import MemoryRange;"
        "import numpy as np; memory = MemoryRange(HostMemory(), 4096); view = memory.buffer();"
        "view[0] = 1; memory.unmap(); print('unmapped', flush=True); view[0] = 1"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert (child.stdout, child.returncode) == ("unmapped\n", -signal.SIGSEGV)


def test_more_than_there_are_addresses_for_is_refused() -> None:
    with pytest.raises(UnavailableError, match="no room"):
        MemoryRange(HostMemory(), 1 << 60)
