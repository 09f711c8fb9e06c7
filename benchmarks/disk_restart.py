"""How long a worker that starts again takes to know what its disk tier holds.

    python -m benchmarks.disk_restart --folder FOLDER [--size 100GB] [--json FILE]

An index of as many blocks as the size has room for is written, in conversations of 64 blocks. Their KV is a
hole in the file, because a start reads the index alone. Timed: until the block manager finds a prefix of 32k tokens,
and until the snapshot for the routers is made. Goal: 5 s.
"""

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from baton_proto.sampling import SamplingParams
from benchmarks.machine import describe, write_result
from engine.core.block_manager import BlockManager
from engine.core.disk_copies import DiskBlock
from engine.core.resting import prompt_kind
from engine.core.sequence import Sequence
from engine.tiers.block_files import BlockFiles
from engine.tiers.disk_kv import DiskKv
from engine.tiers.host_kv import HostKv
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from runtime.config.serving import parse_bytes

SHAPES = {
    "Qwen3-8B, blocks of 64": SlabLayout(36, 8, 8, 64, 128, "bfloat16"),
    "SmolLM2-135M in float32, blocks of 16": SlabLayout(30, 8, 3, 16, 64, "float32"),
}
CONVERSATION = 64  # blocks
PREFIX = 32768  # tokens


class _Unwritten(BlockFiles):
    """Writes headers, and holes for blocks."""

    def extend(self, count: int) -> None:
        os.ftruncate(self._blocks, count * self._block_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", default="100GB")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measure(name, layout, arguments.folder, arguments.size) for name, layout in SHAPES.items()]
    for row in rows:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    if arguments.json:
        write_result(arguments.json, {"machine": describe(), "size": arguments.size, "rows": rows})


def measure(name: str, layout: SlabLayout, folder: Path, size: str) -> dict[str, Any]:
    folder = folder / "disk-restart"
    shutil.rmtree(folder, ignore_errors=True)
    slab = Slab(layout)
    host = HostKv(slab, 64 * layout.num_layers * layout.block_bytes)
    nbytes = parse_bytes(size, "--size")
    written = _Unwritten(folder, nbytes, host.slot_bytes, layout.block_size)
    prompts = fill(written, layout.block_size)
    written.close()
    began_s = time.perf_counter()
    files = BlockFiles(folder, nbytes, host.slot_bytes, layout.block_size)
    found = files.found()
    read_s = time.perf_counter() - began_s
    disk = DiskKv(host, files)
    manager = BlockManager(layout.num_blocks, layout.block_size, host, disk, found)
    booked_s = time.perf_counter() - began_s
    asks = Sequence("asks", prompts[0], len(prompts[0]), SamplingParams(max_tokens=1, seed=0))
    hits = manager._hits(asks)
    assert len(hits) == len(prompts[0]) // layout.block_size - 1, "all but the last token's block"
    hit_s = time.perf_counter() - began_s
    runs = manager.runs()
    snapshot_s = time.perf_counter() - began_s
    manager.close()
    slab.close()
    shutil.rmtree(folder)
    times = {"index read s": read_s, "booked s": booked_s, "hit found s": hit_s, "snapshot made s": snapshot_s}
    return {"shape": name, "blocks": len(found), "runs": len(runs)} | times


def fill(files: _Unwritten, block_size: int) -> list[list[int]]:
    """Writes conversations until the files are full. Returns their tokens; the first one is of 32k."""
    rng, prompts, slot = np.random.default_rng(0), [], 0
    nothing = memoryview(b"")
    while slot < files.num_slots:
        count = min(files.num_slots - slot, CONVERSATION if prompts else PREFIX // block_size)
        tokens = rng.integers(0, 100_000, count * block_size).tolist()
        prompts.append(tokens)
        sequence = Sequence("writes", tokens, len(tokens), SamplingParams(max_tokens=1, seed=0))
        sequence.hash_blocks(count, block_size)
        parent, kind = None, prompt_kind(len(tokens))
        packed = np.array(tokens, dtype="<u4").reshape(count, block_size)
        for i in range(count):
            name, seed = sequence.sequence_hashes[i], sequence.hash_seed if i == 0 else 0
            block = DiskBlock(name, parent, sequence.block_hashes[i], seed, kind, packed[i].tobytes())
            files.write(slot, block, nothing)
            parent, slot = name, slot + 1
    files.extend(slot)
    return prompts


if __name__ == "__main__":
    main()
