import math

import pytest
import torch

from engine.kernels.philox import philox4x32, uniform_at, uniform_rows

ONES = 0xFFFFFFFF

# Known answers of the reference implementation (Random123, kat_vectors, philox4x32 10).
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def scalar(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_the_reference_vectors_come_out(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    c0, c1, c2, c3 = map(scalar, counter)
    words = philox4x32((c0, c1, c2, c3), (scalar(key[0]), scalar(key[1])))
    assert tuple(word.item() for word in words) == expected


def test_noise_follows_the_documented_layout() -> None:
    seed, position, token_id = 0x1234_5678_9ABC_DEF0, 17, 4 * 1000 + 3
    zero = scalar(0)
    words = philox4x32((scalar(1000), scalar(position), zero, zero), (scalar(seed & ONES), scalar(seed >> 32)))
    expected = (words[3].float() + 0.5) * 2**-32
    assert torch.equal(uniform_at(scalar(seed), scalar(position), scalar(token_id)), expected)


def test_rows_and_single_tokens_give_the_same_numbers() -> None:
    seeds = torch.tensor([0, 1, 2**63 - 1, 5, 5])
    positions = torch.tensor([0, 0, 3, 3, 4])
    rows = uniform_rows(seeds, positions, 50_001)
    assert rows.shape == (5, 50_001)
    row = torch.randint(0, 5, (40_000,))
    token_ids = torch.randint(0, 50_001, (40_000,))
    assert torch.equal(uniform_at(seeds[row], positions[row], token_ids), rows[row, token_ids])
    assert not torch.equal(rows[3], rows[4])
    assert torch.equal(uniform_rows(seeds[2:3], positions[2:3], 50_001)[0], rows[2])


def test_noise_is_uniform_and_never_zero_or_one() -> None:
    noise = uniform_rows(torch.arange(20), torch.zeros(20, dtype=torch.int64), 100_000).double().flatten()
    assert noise.min() > 0
    assert noise.max() < 1
    counts = torch.histc(noise, bins=100, min=0, max=1)
    chi_square = ((counts - 20_000) ** 2 / 20_000).sum().item()
    assert abs(chi_square - 99) < 5 * math.sqrt(2 * 99)
