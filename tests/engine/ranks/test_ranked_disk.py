"""The disk tier of a worker of two ranks: a block counts when both have their part, and no answer changes."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import cast

import pytest

from engine.blocks.disk_copies import DiskBlock, Done
from engine.ranks.rank_commands import Command
from engine.ranks.ranked_disk import RankedDisk
from engine.ranks.ranks import Ranks
from engine.tiers.disk_kv import DiskKv
from tests.engine.tiers.disk_worker import conversations, worker

pytestmark = pytest.mark.slow

SIZE = 2
PROMPTS = conversations(25, 1)


@pytest.fixture(scope="module")
def answers(tiny_model: Path) -> list[list[int]]:
    """Of a worker of one rank without lower tiers."""
    with worker(tiny_model, None) as plain:
        return plain.answers(PROMPTS)


@pytest.fixture(scope="module")
def left(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, answers: list[list[int]]) -> tuple[Path, int]:
    """The folder with the files of both ranks that a worker left, and how many blocks are in them."""
    folder = tmp_path_factory.mktemp("left")
    with worker(tiny_model, folder, ranks=SIZE) as one:
        assert one.answers(PROMPTS) == answers
        assert one.engine.block_manager.tiers.num_read > 20
        assert one.engine.block_manager.tiers.num_disk_errors == 0
        while one.engine.block_manager.tiers.flush():
            one.until_written()
        return folder, one.engine.load().disk_blocks_used


@pytest.fixture
def files(tmp_path: Path, left: tuple[Path, int]) -> Path:
    """The worker's own folder in a copy of it, whose root is `tmp_path`."""
    shutil.copytree(left[0], tmp_path, dirs_exist_ok=True)
    (folder,) = tmp_path.glob("*/0")
    assert {path.name for path in folder.iterdir()} == {"blocks", "blocks-1", "index", "index-1"}
    return folder


def test_a_restart_finds_what_both_ranks_have_and_reads_it(
    tiny_model: Path, tmp_path: Path, files: Path, left: tuple[Path, int], answers: list[list[int]]
) -> None:
    with worker(tiny_model, tmp_path, ranks=SIZE) as again:
        assert again.engine.load().disk_blocks_used == left[1] > 0
        sequence, answer = again.answer(PROMPTS[-1])
        assert answer == answers[-1]
        assert sequence.num_cached_tokens > 0
        assert again.engine.block_manager.tiers.num_read == sequence.num_cached_tokens // 16
        assert again.engine.block_manager.tiers.num_disk_errors == 0


@pytest.mark.parametrize("name", ["blocks", "blocks-1"])
def test_a_block_that_one_rank_has_damaged_is_computed_again_on_all(
    tiny_model: Path, tmp_path: Path, files: Path, answers: list[list[int]], name: str
) -> None:
    size = (files / name).stat().st_size
    with (files / name).open("r+b") as file:
        for place in range(0, size, size // 16):
            file.seek(place)
            file.write(b"garbage")
    with worker(tiny_model, tmp_path, ranks=SIZE) as again:
        assert again.answers(PROMPTS) == answers
        assert again.engine.block_manager.tiers.num_disk_errors > 0


@pytest.mark.parametrize("name", ["blocks-1", "index-1", "index"])
def test_what_one_ranks_cut_file_lacks_is_not_found(
    tiny_model: Path, tmp_path: Path, files: Path, left: tuple[Path, int], answers: list[list[int]], name: str
) -> None:
    size = (files / name).stat().st_size
    with (files / name).open("r+b") as file:
        file.truncate(size // 2 + 5)
    with worker(tiny_model, tmp_path, ranks=SIZE) as again:
        assert again.engine.load().disk_blocks_used < left[1]
        assert again.answers(PROMPTS) == answers


def test_a_worker_serves_when_one_rank_cannot_open_its_files(
    tiny_model: Path, tmp_path: Path, files: Path, answers: list[list[int]]
) -> None:
    (files / "blocks-1").unlink()
    (files / "blocks-1").mkdir()
    with worker(tiny_model, tmp_path, ranks=SIZE) as again:
        assert again.answers(PROMPTS) == answers


def test_what_was_cleared_is_found_on_no_rank(tiny_model: Path, tmp_path: Path, files: Path) -> None:
    with worker(tiny_model, tmp_path, ranks=SIZE) as one:
        one.engine.clear_cache()
        assert one.engine.check_integrity() == []
    assert [path.stat().st_size for path in sorted(files.iterdir())] == [0] * 4


@dataclass
class ScriptedRanks:
    """One more rank, whose ends the test tells."""

    size: int = SIZE
    told: list[Command] = field(default_factory=list)
    end: Callable[[Done], None] = lambda done: None

    def tell(self, command: Command) -> int:
        self.told.append(command)
        return len(self.told)

    def listen_to_copies(self, on_copy_ended: Callable[[Done], None]) -> None:
        self.end = on_copy_ended


class ScriptedDisk:
    """Rank 0's own tier, whose ends the test tells."""

    num_slots, num_window_slots, num_errors, max_writes = 8, 0, 0, 4

    class files:  # noqa: N801
        folder = Path("folder")

    def __init__(self) -> None:
        self.wake: Callable[[], object] = lambda: None
        self.ended: list[Done] = []

    def write(self, slot: int, copy: int, block: DiskBlock) -> None: ...

    def read(self, copy: int, slot: int, block: DiskBlock) -> None: ...

    def read_s(self, num_blocks: int) -> float:
        return 0.0

    def done(self) -> list[Done]:
        ended, self.ended = self.ended, []
        return ended


BLOCK = DiskBlock(1, None, 1, 0, 0, b"")


def test_a_copy_has_ended_when_it_has_on_all_ranks_and_fails_when_it_does_on_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, own = ScriptedRanks(), ScriptedDisk()
    disk = RankedDisk(cast(DiskKv, own), cast(Ranks, ranks))
    wakes: list[None] = []
    disk.wake = lambda: wakes.append(None)
    for copy in (1, 2):
        disk.write(copy, copy, BLOCK)
    disk.read(3, 3, BLOCK)
    own.ended = [Done(1, True, True), Done(3, False, True)]
    assert disk.done() == []
    ranks.end(Done(1, True, True))
    assert len(wakes) == 1
    assert disk.done() == [Done(1, True, True)]
    ranks.end(Done(3, False, False))
    ranks.end(Done(2, True, False))
    assert disk.done() == [Done(3, False, False)], "the second write goes on here"
    assert (disk.num_errors, disk.max_writes) == (2, 0)
    own.ended = [Done(2, True, True)]
    assert disk.done() == [Done(2, True, False)]
    disk.read(3, 3, BLOCK)
    own.ended = [Done(3, False, True)]
    assert (disk.done(), disk.read_s(1)) == ([], 0.0)
    monkeypatch.setattr("engine.ranks.ranked_disk.LATE_S", -1.0)
    assert disk.read_s(1) == inf, "the other rank's disk does not answer"
    ranks.end(Done(3, False, True))
    assert (disk.done(), disk.read_s(1)) == ([Done(3, False, True)], 0.0)
