"""Block lists as runs of bytes. Neighbouring blocks become one run: a fresh pool is copied in few large pieces."""

from collections.abc import Sequence

from msgspec import Struct

from kvtransfer.layout import SlabLayout


class Run(Struct, frozen=True, gc=False):
    """Bytes of one layer: `[source, source + nbytes)` of our slab belong at `destination` of the peer's."""

    source: int
    destination: int
    nbytes: int


def byte_ranges(layout: SlabLayout, layer: int, blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) of blocks in one slab, in the order of the list, neighbours merged."""
    return [(run.source, run.source + run.nbytes) for run in paired_runs(layout, layout, layer, blocks, blocks)]


def paired_runs(
    source: SlabLayout,
    destination: SlabLayout,
    layer: int,
    source_blocks: Sequence[int],
    destination_blocks: Sequence[int],
) -> list[Run]:
    """Runs that are contiguous in both slabs. Both layouts have blocks of one shape, both lists are of one length."""
    block_bytes = source.block_bytes
    source_base, destination_base = source.offset(layer, 0), destination.offset(layer, 0)
    runs: list[Run] = []
    begin = 0
    for end in range(1, len(source_blocks) + 1):
        if (
            end < len(source_blocks)
            and source_blocks[end] == source_blocks[end - 1] + 1
            and destination_blocks[end] == destination_blocks[end - 1] + 1
        ):
            continue
        runs.append(
            Run(
                source_base + source_blocks[begin] * block_bytes,
                destination_base + destination_blocks[begin] * block_bytes,
                (end - begin) * block_bytes,
            )
        )
        begin = end
    return runs
