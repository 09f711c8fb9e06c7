"""A rank that sums with others over memory that they share, in Triton's interpreter:
`TRITON_INTERPRET=1 python -m tests.engine.kernels.summing_rank RANK SEGMENT...`.

Each SEGMENT is a file of zeros, by rank. Ends with code 0 when every sum was right.
"""

import sys
from pathlib import Path

import torch

from engine.parallel.peer_sum import PeerSum, segment_bytes
from tests.engine.kernels.references import rms_norm_reference

SIZE = 64
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
BUFFER_BYTES, FLAGGED_BYTES = 40 * SIZE * 4, 3 * SIZE * 4


def segments_bytes(ranks: int) -> int:
    return len(DTYPES) * segment_bytes(ranks, BUFFER_BYTES, FLAGGED_BYTES)


def part(rank: int, turn: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(100 * turn + rank)).to(dtype)


def main() -> None:
    rank, *paths = sys.argv[1:]
    segments = [torch.from_file(path, True, Path(path).stat().st_size, dtype=torch.uint8) for path in paths]
    for index, dtype in enumerate(DTYPES):
        run(int(rank), dtype, [segment.chunk(len(DTYPES))[index] for segment in segments])


def run(rank: int, dtype: torch.dtype, segments: list[torch.Tensor]) -> None:
    addresses = torch.tensor([segment.data_ptr() for segment in segments])
    peer_sum = PeerSum(addresses, segments[rank], rank, BUFFER_BYTES, FLAGGED_BYTES)
    weights = part(98, 0, 1, dtype)[0]
    for turn, rows in enumerate((1, 3, 1, 40, 2, 1)):  # one program, several, fewer again
        hidden = part(99, turn, rows, dtype)
        parts = [part(other, turn, rows, dtype) for other in range(len(segments))]
        expected = torch.stack(parts).double().sum(0) + hidden.double()
        buffer = peer_sum.buffer(hidden)
        assert buffer is not None
        buffer.copy_(parts[rank])
        normed = peer_sum.finish(hidden, weights, 1e-6) if turn % 3 else peer_sum.finish(hidden)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(hidden.double(), expected, rtol=tolerance, atol=tolerance)
        assert (normed is None) == (turn % 3 == 0)
        if normed is not None:
            reference = rms_norm_reference(hidden, weights, 1e-6)
            torch.testing.assert_close(normed.double(), reference, rtol=tolerance, atol=tolerance)
    too_many = BUFFER_BYTES // SIZE // weights.element_size() + 1
    assert peer_sum.buffer(torch.empty(too_many, SIZE, dtype=dtype)) is None, "it does not fit"


if __name__ == "__main__":
    main()
