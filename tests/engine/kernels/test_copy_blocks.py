import torch

from engine.kernels.copy_blocks import copy_blocks
from tests.engine.kernels.device import DEVICE


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, shape, device=DEVICE)


def test_blocks_go_where_the_table_says_and_nothing_else_changes() -> None:
    for block_words in (16, 1024, 2176):
        source, destination = words(12, block_words), words(20, block_words)
        before = destination.clone()
        chosen, places = torch.randperm(12)[:7], torch.randperm(20)[:7]
        copy_blocks(source, destination, torch.stack((chosen, places)).to(torch.int32).to(DEVICE), num_programs=3)
        before[places] = source[chosen]
        assert torch.equal(destination, before)


def test_a_part_of_each_block_can_be_copied_between_slabs_of_different_blocks() -> None:
    source, destination = words(6, 4, 256), words(6, 2, 256)
    before = destination.clone()
    table = torch.tensor([[5, 0, 3], [1, 4, 0]], dtype=torch.int32, device=DEVICE)
    copy_blocks(source[:, 2:4].flatten(1), destination.flatten(1), table)
    before[[1, 4, 0]] = source[[5, 0, 3], 2:4]
    assert torch.equal(destination, before)


def test_an_empty_table_copies_nothing() -> None:
    source, destination = words(2, 64), words(2, 64)
    before = destination.clone()
    copy_blocks(source, destination, torch.empty(2, 0, dtype=torch.int32, device=DEVICE))
    assert torch.equal(destination, before)
