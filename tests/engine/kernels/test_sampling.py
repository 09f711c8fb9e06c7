from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels.sampling import MaskedRows, VocabularySplit, partial_buffer, sample
from engine.model.shard import vocabulary_share
from tests.engine.kernels.device import DEVICE, DTYPES, random
from tests.engine.kernels.references import sample_reference


def draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    rows, vocab = logits.shape
    out = torch.full((rows + 2,), -7, dtype=torch.int32, device=DEVICE)
    sample(logits, temperatures, seeds, positions, partial_buffer(rows, vocab, DEVICE), out)
    assert out[rows:].tolist() == [-7, -7]
    return out[:rows]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE).to(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [60, 512, 10_001])
def test_draws_are_those_of_the_reference(dtype: torch.dtype, vocab: int) -> None:
    rows = 12
    logits = random(rows, vocab, dtype=dtype, scale=3)
    temperatures = torch.tensor([0.0, 0.6, 1.0, 2.5] * 3, device=DEVICE)
    seeds = torch.randint(-(2**31), 2**31 - 1, (rows, 2), device=DEVICE).to(torch.int32)
    seeds[:, 1] &= 0x7FFFFFFF
    positions = torch.randint(0, 5000, (rows,), dtype=torch.int32, device=DEVICE)
    found = draw(logits, temperatures, seeds, positions)
    assert torch.equal(found, sample_reference(logits, temperatures, seeds, positions))
    assert torch.equal(found[::4], logits[::4].argmax(-1).int())


def test_a_token_does_not_depend_on_its_row() -> None:
    logits = random(1, 5000).expand(12, -1).contiguous()
    seeds = int32([5, 0, 9, 1] * 6).view(12, 2)
    positions = int32([3, 4, 3, 4, 3, 5, 6, 7, 8, 9, 10, 11])
    found = draw(logits, torch.full((12,), 1.0, device=DEVICE), seeds, positions).tolist()
    assert found[0] == found[2] == found[4]
    assert found[1] == found[3]
    assert len(set(found)) > 4  # of 9 draws


@pytest.mark.slow
def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1], device=DEVICE).log().expand(400, -1).contiguous()
    seeds = int32([7, 0] * 400).view(400, 2)
    found = draw(logits, torch.ones(400, device=DEVICE), seeds, torch.arange(400, device=DEVICE, dtype=torch.int32))
    shares = torch.bincount(found.long(), minlength=4).double() / 400
    assert (shares.cpu() - torch.tensor([0.5, 0.25, 0.15, 0.1])).abs().max() < 0.12


def test_rows_of_nan_still_give_a_token() -> None:
    logits = torch.full((1, 70), float("nan"), device=DEVICE)
    found = draw(logits, torch.zeros(1, device=DEVICE), int32([0, 0]).view(1, 2), int32([0]))
    assert 0 <= found.item() < 70


@pytest.mark.parametrize(("vocab", "ranks"), [(515, 1), (10_001, 1), (515, 2), (10_001, 4)])
def test_masked_rows_alone_are_drawn_among_their_tokens(vocab: int, ranks: int) -> None:
    """Also where a rank's part of the vocabulary begins in the middle of a word."""
    logits = random(6, vocab, scale=3.0)
    temperatures = torch.tensor([0.0, 0.6, 1.0, 0.0, 2.5, 0.9], device=DEVICE)
    seeds, positions = torch.arange(12, device=DEVICE).int().view(6, 2), int32([0, 1, 2, 3, 4, 5])
    chosen = [1, 3, 5]
    allowed = torch.rand(len(chosen), vocab, generator=torch.Generator().manual_seed(1)) < 0.1
    allowed[2] = False
    allowed[2, vocab - 1] = True
    bits = np.packbits(allowed.numpy(), axis=1, bitorder="little")
    words = np.zeros((len(chosen), -(-vocab // 32) * 4), dtype=np.uint8)
    words[:, : bits.shape[1]] = bits
    masked = MaskedRows(int32(chosen), torch.from_numpy(words.view(np.int32)).to(DEVICE))
    constrained = logits[chosen].masked_fill(~allowed.to(DEVICE), float("-inf"))
    expected = [-7] * 6
    drawn = sample_reference(constrained, temperatures[chosen], seeds[chosen], positions[chosen])
    for row, token_id in zip(chosen, drawn.tolist(), strict=True):
        expected[row] = token_id
    assert expected[5] == vocab - 1
    share = vocabulary_share(vocab, ranks)
    told: list[Tensor] = []

    def drawn_by(rank: int, gather: Callable[[Tensor], Tensor]) -> list[int]:
        part = logits[:, rank * share : (rank + 1) * share].contiguous()
        out = torch.full((6,), -7, dtype=torch.int32, device=DEVICE)
        split = VocabularySplit(rank * share, share, vocab, gather) if ranks > 1 else None
        sample(part, temperatures, seeds, positions, partial_buffer(6, share, DEVICE), out, split, masked)
        return out.tolist()

    def tell(best: Tensor) -> Tensor:
        told.append(best.clone())
        return best.expand(ranks, -1).contiguous()

    for rank in range(ranks):
        drawn_by(rank, tell)
    assert [drawn_by(rank, lambda best: torch.stack(told)) for rank in range(ranks)] == [expected] * ranks


@pytest.mark.parametrize(("vocab", "ranks"), [(515, 2), (10_001, 2), (10_001, 4)])
def test_ranks_that_share_the_vocabulary_draw_what_one_draws(vocab: int, ranks: int) -> None:
    rows = 6
    logits = random(rows, vocab, scale=2.0)
    logits[0, [3, vocab - 1]] = 100.0  # a tie: the first token wins
    temperatures = torch.tensor([0.0, 0.0, 0.7, 1.0, 1.5, 0.7], device=DEVICE)
    seeds, positions = torch.arange(2 * rows, device=DEVICE).int().view(rows, 2), int32([0, 1, 2, 3, 4, 5])
    expected = draw(logits, temperatures, seeds, positions).tolist()
    share = vocabulary_share(vocab, ranks)
    told: list[Tensor] = []

    def drawn_by(rank: int, gather: Callable[[Tensor], Tensor]) -> list[int]:
        part = logits[:, rank * share : (rank + 1) * share].contiguous()
        out = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        split = VocabularySplit(rank * share, share, vocab, gather)
        sample(part, temperatures, seeds, positions, partial_buffer(rows, share, DEVICE), out, split)
        return out.tolist()

    def tell(best: Tensor) -> Tensor:
        told.append(best.clone())
        return best.expand(ranks, -1).contiguous()

    for rank in range(ranks):
        drawn_by(rank, tell)
    assert [drawn_by(rank, lambda best: torch.stack(told)) for rank in range(ranks)] == [expected] * ranks
