"""Block lists as runs of bytes. When all heads of both slabs move, neighbouring blocks become one run, so the blocks of
a fresh pool are copied in few large runs. Some heads of a block are a run of their own.
"""

from collections.abc import Sequence

from msgspec import Struct

from kvtransfer.slab.layout import SlabLayout


class Run(Struct, frozen=True, gc=False):
    """Bytes of one layer: `[source, source + nbytes)` of our slab belong at `destination` of the peer's slab."""

    source: int
    destination: int
    nbytes: int


def byte_ranges(layout: SlabLayout, layer: int, blocks: Sequence[int], heads: range) -> list[tuple[int, int]]:
    """(begin, end) of some heads of the blocks in one slab, in the order of the list, neighbours merged."""
    runs = paired_runs(layout, layout, layer, blocks, blocks, heads, heads)
    return [(run.source, run.source + run.nbytes) for run in runs]


def paired_runs(
    source: SlabLayout,
    destination: SlabLayout,
    layer: int,
    source_blocks: Sequence[int],
    destination_blocks: Sequence[int],
    source_heads: range,
    destination_heads: range,
) -> list[Run]:
    """Runs that are contiguous in both slabs. Invariant: a head has one shape in both; both lists are of one length,
    and so are both ranges."""
    whole = len(source_heads) == source.num_kv_heads == destination.num_kv_heads
    nbytes = len(source_heads) * source.head_bytes
    source_step, destination_step = source.block_bytes, destination.block_bytes
    source_base = source.offset(layer, 0, source_heads.start)
    destination_base = destination.offset(layer, 0, destination_heads.start)
    runs: list[Run] = []
    begin = 0
    for end in range(1, len(source_blocks) + 1):
        if (
            whole
            and end < len(source_blocks)
            and source_blocks[end] == source_blocks[end - 1] + 1
            and destination_blocks[end] == destination_blocks[end - 1] + 1
        ):
            continue
        runs.append(
            Run(
                source_base + source_blocks[begin] * source_step,
                destination_base + destination_blocks[begin] * destination_step,
                (end - begin) * nbytes,
            )
        )
        begin = end
    return runs
