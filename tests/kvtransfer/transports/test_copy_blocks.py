import pytest
import torch

from kvtransfer.transports.copy_blocks import copy_blocks
from tests.engine.kernels.device import DEVICE


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, shape, device=DEVICE)


def table_of(*rows: torch.Tensor) -> torch.Tensor:
    return torch.stack(rows).to(torch.int32).to(DEVICE)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_blocks_go_where_the_table_says_in_every_layer_and_nothing_else_changes(layers: int) -> None:
    for block_words in (16, 1024, 2176):
        source, destination = words(layers, 12, block_words), words(layers, 20, block_words)
        before = destination.clone()
        chosen, places = torch.randperm(12)[:7], torch.randperm(20)[:7]
        copy_blocks(source, destination, table_of(chosen, places), num_programs=3)
        before[:, places] = source[:, chosen]
        assert torch.equal(destination, before)


def test_a_part_of_each_block_can_be_copied_between_some_layers_of_slabs_of_different_blocks() -> None:
    source, destination = words(4, 6, 4, 256), words(4, 6, 2, 256)
    before = destination.clone()
    table = torch.tensor([[5, 0, 3], [1, 4, 0]], dtype=torch.int32, device=DEVICE)
    heads = source.flatten(2)[:, :, 2 * 256 :]
    copy_blocks(heads[1:3], destination.flatten(2)[1:3], table)
    before[1:3, [1, 4, 0]] = source[1:3, [5, 0, 3], 2:4]
    assert torch.equal(destination, before)


@pytest.mark.parametrize(("layers", "count"), [(2, 0), (0, 2), (0, 0)])
def test_without_blocks_or_layers_nothing_is_copied(layers: int, count: int) -> None:
    source, destination = words(2, 2, 64), words(2, 2, 64)
    before = destination.clone()
    copy_blocks(source[:layers], destination[:layers], table_of(torch.arange(count), torch.arange(count)))
    assert torch.equal(destination, before)
