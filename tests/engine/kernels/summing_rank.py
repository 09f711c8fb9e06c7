"""A rank that sums with others over memory that they share, in Triton's interpreter: `summing_rank RANK SEGMENT...`.

Each SEGMENT is a file of zeros, by rank. Ends with code 0 when every sum was right.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from engine.peer_sum import PeerSum


def part(rank: int, turn: int, shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * turn + rank))


def main() -> None:
    rank, *paths = sys.argv[1:]
    segments = [torch.from_file(path, True, Path(path).stat().st_size, dtype=torch.uint8) for path in paths]
    addresses = torch.tensor([segment.data_ptr() for segment in segments])
    peer_sum = PeerSum(addresses, segments[int(rank)], int(rank))
    for turn, rows in enumerate((1, 3, 1, 1, 40, 2, 7, 1)):  # one program, several, fewer again
        hidden = part(99, turn, (rows, 64))
        parts = [part(other, turn, (rows, 64)) for other in range(len(paths))]
        expected = torch.stack([*parts]).double().sum(0) + hidden
        buffer = peer_sum.buffer(hidden)
        assert buffer is not None
        buffer.copy_(parts[int(rank)])
        peer_sum.add_to(hidden)
        torch.testing.assert_close(hidden.double(), expected, rtol=1e-5, atol=1e-5)
    assert peer_sum.buffer(torch.empty(41, 64)) is None, "it does not fit"


if __name__ == "__main__":
    main()
