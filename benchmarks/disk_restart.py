"""How long a worker that starts again takes to know what its disk tier holds, and how fast a prefix comes back from it.

    python -m benchmarks.disk_restart --folder FOLDER [--size 100GB] [--readers 1,2,4,8] [--prefix 32768] [--json FILE]

An index of as many blocks as the size has room for is written, in conversations of 64 blocks. Their KV is a
hole in the file, because a start reads the index alone. Timed: until the block manager finds a prefix of 32k tokens,
and until the snapshot for the routers is made. Goal: 5 s.

Then a prefix of Qwen3-8B's shape is written with its KV. Timed, in turn, with the page cache warm and dropped: reading
the file's blocks by as many threads and nothing else, and a sequence that waits for its prefix in host memory, whose
checksums are computed. The quickest of `--rounds`. Goal: where plain reading goes at a disk's speed, so does the tier.
"""

import argparse
import os
import shutil
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from baton_proto.sampling import SamplingParams
from benchmarks.machine import describe, write_result
from engine.blocks.block_manager import BlockManager
from engine.blocks.disk_copies import DiskBlock
from engine.blocks.resting import prompt_kind
from engine.sequences.sequence import Sequence
from engine.tiers.block_files import BlockFiles
from engine.tiers.disk_kv import READERS, DiskKv
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
WARM, DROPPED = "in the page cache", "dropped from it"


class _Unwritten(BlockFiles):
    """Writes headers, and holes for blocks."""

    def extend(self, count: int) -> None:
        os.ftruncate(self._blocks, count * self._block_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", default="100GB")
    parser.add_argument("--readers", default=str(READERS), help="threads that read, in turn")
    parser.add_argument("--prefix", type=int, default=PREFIX, help="tokens; 0: no prefix is read")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measure(name, layout, arguments.folder, arguments.size) for name, layout in SHAPES.items()]
    reads = []
    if arguments.prefix:
        readers = [int(number) for number in arguments.readers.split(",")]
        reads = restoring(arguments.folder, arguments.prefix, readers, arguments.rounds)
    for row in rows + reads:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    if arguments.json:
        document = {"machine": describe(), "size": arguments.size, "rows": rows, "reads": reads}
        write_result(arguments.json, document)


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
    hits = manager.cache.table.hits(asks)
    assert len(hits) == len(prompts[0]) // layout.block_size - 1, "all but the last token's block"
    hit_s = time.perf_counter() - began_s
    runs = manager.cache.runs()
    snapshot_s = time.perf_counter() - began_s
    manager.tiers.close()
    slab.close()
    shutil.rmtree(folder)
    times = {"index read s": read_s, "booked s": booked_s, "hit found s": hit_s, "snapshot made s": snapshot_s}
    return {"shape": name, "blocks": len(found), "runs": len(runs)} | times


def fill(files: _Unwritten, block_size: int) -> list[list[int]]:
    """Writes conversations until the files are full. Returns their tokens; the first one is of 32k."""
    rng, prompts, slot = np.random.default_rng(0), [], 0
    while slot < files.num_slots:
        count = min(files.num_slots - slot, CONVERSATION if prompts else PREFIX // block_size)
        tokens = rng.integers(0, 100_000, count * block_size).tolist()
        prompts.append(tokens)
        write(files, tokens, block_size, memoryview(b""), slot)
        slot += count
    files.extend(slot)
    return prompts


def write(files: BlockFiles, tokens: list[int], block_size: int, kv: memoryview, slot: int = 0) -> None:
    """Writes a prompt's whole blocks to the slots from `slot` on, each with the same KV."""
    count, parent = len(tokens) // block_size, None
    sequence = Sequence("writes", tokens, len(tokens), SamplingParams(max_tokens=1, seed=0))
    sequence.hash_blocks(count, block_size)
    packed = np.array(tokens[: count * block_size], dtype="<u4").reshape(count, block_size)
    for i in range(count):
        name, seed = sequence.sequence_hashes[i], sequence.hash_seed if i == 0 else 0
        block = DiskBlock(name, parent, sequence.block_hashes[i], seed, prompt_kind(len(tokens)), packed[i].tobytes())
        files.write(slot + i, block, kv)
        parent = name


def restoring(folder: Path, num_tokens: int, readers: list[int], rounds: int) -> list[dict[str, Any]]:
    layout = SHAPES["Qwen3-8B, blocks of 64"]
    count = num_tokens // layout.block_size
    folder = folder / "disk-reading"
    shutil.rmtree(folder, ignore_errors=True)
    slab = Slab(layout)
    host = HostKv(slab, 2 * count * layout.num_layers * layout.block_bytes)
    nbytes = count * (host.slot_bytes + 1024)
    written = BlockFiles(folder, nbytes, host.slot_bytes, layout.block_size)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 100_000, count * layout.block_size + 1).tolist()
    write(written, tokens, layout.block_size, memoryview(rng.bytes(host.slot_bytes)))
    written.sync()
    path = written.folder / "blocks"
    written.close()
    for slot in range(count, 2 * count):  # those that are used first: their memory is there
        host.content(slot)[:] = bytes(host.slot_bytes)
    times: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        for num_readers in readers:
            for state in (WARM, DROPPED):
                for name, read in (("plain", plainly), ("tier", by_the_tier)):
                    set_page_cache(path, warm=state == WARM)
                    times[num_readers, state][name].append(read(folder, host, layout, tokens, num_readers))
    slab.close()
    shutil.rmtree(folder)
    gigabytes = count * host.slot_bytes / 1e9
    rows = []
    for (num_readers, state), by_name in times.items():
        took = {name: min(values) for name, values in by_name.items()}
        speeds = {f"{name} GB/s": gigabytes / seconds for name, seconds in took.items()}
        facts = {"file": state, "readers": num_readers, "GB": gigabytes, "tier s": took["tier"]}
        rows.append(facts | speeds | {"tier / plain time": took["tier"] / took["plain"], "all": dict(by_name)})
    return rows


def set_page_cache(path: Path, warm: bool) -> None:
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(8 << 20)
        while warm and file.readinto(buffer):
            pass


def plainly(folder: Path, host: HostKv, layout: SlabLayout, tokens: list[int], num_readers: int) -> float:
    """Seconds for the file's blocks by so many threads."""
    return plain_s(
        folder / "0" / "blocks",
        [host.content(slot) for slot in range(host.num_slots // 2, host.num_slots)],
        num_readers,
    )


def plain_s(path: Path, targets: list[memoryview], num_readers: int) -> float:
    """Seconds in which so many threads fill the targets with the file's bytes from its beginning on."""
    file = os.open(path, os.O_RDONLY)
    jobs = iter(list(enumerate(targets)))

    def work() -> None:
        for number, target in jobs:
            end = 0
            while end < len(target) and (num_bytes := os.preadv(file, [target[end:]], number * len(target) + end)):
                end += num_bytes

    threads = [threading.Thread(target=work) for _ in range(num_readers)]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - began_s
    os.close(file)
    return took_s


def by_the_tier(folder: Path, host: HostKv, layout: SlabLayout, tokens: list[int], num_readers: int) -> float:
    """Seconds until a sequence's prefix is in host memory."""
    files = BlockFiles(folder, (folder / "0" / "blocks").stat().st_size * 2, host.slot_bytes, layout.block_size)
    disk = DiskKv(host, files, num_readers)
    manager = BlockManager(layout.num_blocks, layout.block_size, host, disk, files.found())
    news = threading.Event()
    manager.tiers.on_copied(news.set)
    asks = Sequence("asks", tokens, len(tokens), SamplingParams(max_tokens=1, seed=0))
    began_s = time.perf_counter()
    while manager.tiers.num_read < len(tokens) // layout.block_size:
        manager.tiers.restores(asks)  # again after a read that took so long that nobody would wait for it
        news.wait(1.0)
        news.clear()
        manager.land()
        assert manager.tiers.num_disk_errors == 0
    took_s = time.perf_counter() - began_s
    manager.tiers.close()
    return took_s


if __name__ == "__main__":
    main()
