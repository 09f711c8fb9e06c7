"""The files of the disk tier: what was written is found again, whole or not at all, whatever became of the process."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.blocks.disk_copies import DiskBlock
from engine.tiers.block_files import SUM_BYTES, BlockFiles, RankFiles, header_struct
from tests.chaos.machine.disk import Disk, why_no_small_disk

BLOCK_SIZE, BLOCK_BYTES = 4, 3000
SLOT_BYTES = BLOCK_BYTES + header_struct(BLOCK_SIZE).size + SUM_BYTES


def open_files(folder: Path, num_slots: int = 8) -> BlockFiles:
    return BlockFiles(folder, num_slots * SLOT_BYTES + SLOT_BYTES - 1, BLOCK_BYTES, BLOCK_SIZE)


def block(number: int) -> DiskBlock:
    tokens = np.arange(number, number + BLOCK_SIZE, dtype="<u4").tobytes()
    return DiskBlock(2**63 + number, number - 1 if number % 3 else None, 7 * number, number % 2, number % 5, tokens)


def kv(number: int) -> memoryview:
    return memoryview(np.random.default_rng(number).bytes(BLOCK_BYTES))


def read(files: BlockFiles, slot: int, expected: DiskBlock) -> bytes | None:
    into = bytearray(BLOCK_BYTES)
    return bytes(into) if files.read(slot, expected, memoryview(into)) else None


def written(folder: Path, *numbers: int) -> None:
    """By a process of the past."""
    files = open_files(folder)
    files.found()
    for number in numbers:
        files.write(number, block(number), kv(number))
    files.close()


def found(folder: Path) -> dict[int, DiskBlock]:
    files = open_files(folder)
    try:
        return dict(files.found())
    finally:
        files.close()


def test_a_restart_finds_what_was_written_the_youngest_first(tmp_path: Path) -> None:
    written(tmp_path, 5, 2)
    written(tmp_path, 7, 5)
    files = open_files(tmp_path)
    assert files.found() == [(number, block(number)) for number in (5, 7, 2)]
    assert all(read(files, number, block(number)) == kv(number) for number in (5, 7, 2))
    files.close()


def test_a_part_of_a_block_does_not_count_as_the_block_even_where_it_has_as_many_bytes(tmp_path: Path) -> None:
    written(tmp_path, 1)
    files = open_files(tmp_path)
    part = RankFiles(files.folder, 8, BLOCK_BYTES, BLOCK_SIZE, 0, "-windows")
    part.write(2, block(2), kv(2))
    assert files.found() == [(1, block(1))]
    assert part.found() == [(2, block(2))]
    for name in ("index", "blocks"):
        shutil.copy(files.folder / f"{name}-windows", files.folder / name)
    assert files.found() == []
    part.close()
    files.close()


@pytest.mark.parametrize("field", ["sequence_hash", "parent", "block_hash", "seed", "tokens"])
def test_another_block_than_the_expected_one_is_not_read(tmp_path: Path, field: str) -> None:
    files = open_files(tmp_path)
    files.write(1, block(1), kv(1))
    other = block(1)._replace(**{field: bytes(4 * BLOCK_SIZE) if field == "tokens" else 99})
    assert read(files, 1, other) is None
    assert read(files, 0, block(1)) is None
    assert read(files, 1, block(1)._replace(kind=9)) == kv(1), "how fast a block ages is not what it is"
    files.close()


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_damaged_block_is_known_and_not_read(tmp_path: Path) -> None:
    written(tmp_path, 0, 1, 2)
    for offset in (BLOCK_BYTES, 2 * BLOCK_BYTES - 1):
        flip(tmp_path / "0" / "blocks", offset)
        files = open_files(tmp_path)
        assert dict(files.found()).keys() == {0, 1, 2}
        assert [read(files, number, block(number)) is not None for number in range(3)] == [True, False, True]
        files.close()
        flip(tmp_path / "0" / "blocks", offset)


def test_a_garbled_header_costs_its_own_block(tmp_path: Path) -> None:
    written(tmp_path, 0, 1, 2)
    header_bytes = header_struct(BLOCK_SIZE).size + SUM_BYTES
    for offset in range(header_bytes, 2 * header_bytes):
        flip(tmp_path / "0" / "index", offset)
        assert found(tmp_path).keys() == {0, 2}
        flip(tmp_path / "0" / "index", offset)


@pytest.mark.parametrize(("name", "unit"), [("blocks", BLOCK_BYTES), ("index", SLOT_BYTES - BLOCK_BYTES)])
def test_what_a_truncated_file_has_lost_is_gone_and_nothing_else(tmp_path: Path, name: str, unit: int) -> None:
    written(tmp_path, 0, 1, 2)
    for num_bytes, kept in ((3 * unit - 1, 2), (unit, 1), (0, 0)):
        os.truncate(tmp_path / "0" / name, num_bytes)
        assert found(tmp_path) == {number: block(number) for number in range(kept)}


def test_a_missing_file_leaves_nothing_to_find(tmp_path: Path) -> None:
    for name in ("blocks", "index"):
        written(tmp_path, 0, 1)
        (tmp_path / "0" / name).unlink()
        assert found(tmp_path) == {}


def test_a_block_over_an_older_one_that_was_not_finished_is_not_read_as_either(tmp_path: Path) -> None:
    written(tmp_path, 1)
    files = open_files(tmp_path)
    with (tmp_path / "0" / "blocks").open("r+b") as file:
        file.seek(BLOCK_BYTES)
        file.write(kv(9)[: BLOCK_BYTES // 2])
    assert read(files, 1, block(1)) is None
    assert read(files, 1, block(9)) is None
    files.close()


def test_the_files_take_no_byte_more_than_they_may(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    assert files.num_slots == 8
    for number in range(8):
        files.write(number, block(number), kv(number))
    files.close()
    sizes = [path.stat().st_size for path in (tmp_path / "0").iterdir()]
    assert sum(sizes) == 8 * SLOT_BYTES
    files = open_files(tmp_path, num_slots=3)
    assert sum(path.stat().st_size for path in (tmp_path / "0").iterdir()) == 3 * SLOT_BYTES
    assert dict(files.found()).keys() == {0, 1, 2}
    files.close()


def test_workers_take_the_first_part_that_is_free(tmp_path: Path) -> None:
    first, second = open_files(tmp_path), open_files(tmp_path)
    assert [files.folder.name for files in (first, second)] == ["0", "1"]
    assert (tmp_path / "0").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "0" / "blocks").stat().st_mode & 0o777 == 0o600
    first.close()
    third = open_files(tmp_path)
    assert third.folder.name == "0"
    for files in (second, third):
        files.close()


def test_what_was_wiped_is_not_found(tmp_path: Path) -> None:
    written(tmp_path, 0, 1)
    files = open_files(tmp_path)
    files.wipe()
    assert read(files, 0, block(0)) is None
    files.write(1, block(1), kv(1))
    assert read(files, 1, block(1)) == kv(1)
    files.close()
    assert found(tmp_path).keys() == {1}


def test_files_that_move_leave_nothing_behind_and_disturb_nobody(tmp_path: Path) -> None:
    written(tmp_path / "old", 0, 1)
    written(tmp_path / "new", 2)
    files = open_files(tmp_path / "old")
    files.move(tmp_path / "new")
    assert files.folder == tmp_path / "new" / "1"
    assert not (tmp_path / "old").exists()
    assert read(files, 0, block(0)) is None
    files.write(1, block(1), kv(1))
    files.close()
    assert found(tmp_path / "new").keys() == {2}
    assert found(tmp_path / "old") == {}


def test_a_block_that_somebody_without_the_key_has_written_is_not_read(tmp_path: Path) -> None:
    """The KV of another block, with the header of either, and all that a folder of his own gives him."""
    written(tmp_path / "ours" / "name", 0, 1)
    files = open_files(tmp_path / "theirs" / "name")
    for number in range(2):
        files.write(number, block(number), kv(9 + number))
    files.close()
    ours, theirs = (tmp_path / whose / "name" / "0" for whose in ("ours", "theirs"))
    secret = tmp_path / "ours" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    (ours / "blocks").write_bytes((theirs / "blocks").read_bytes())
    files = open_files(tmp_path / "ours" / "name")
    assert files.found() == [(1, block(1)), (0, block(0))]
    assert [read(files, number, block(number)) for number in range(2)] == [None, None]
    files.close()
    (ours / "index").write_bytes((theirs / "index").read_bytes())
    assert found(ours.parent) == {}
    os.truncate(secret, 31)
    assert found(ours.parent) == {}
    assert secret.stat().st_size == 32, "a key that is cut off is made anew"


@pytest.mark.parametrize("place", ["name/0/index", "name/0/blocks", "secret"])
def test_nothing_is_written_through_a_link_that_lies_there(tmp_path: Path, place: str) -> None:
    (tmp_path / "name" / "0").mkdir(mode=0o700, parents=True)
    (tmp_path / "name").chmod(0o700)
    victim = tmp_path / "victim"
    victim.touch(0o600)
    (tmp_path / place).symlink_to(victim)
    with pytest.raises(PermissionError, match=f"/{place} is a symbolic link: remove it"):
        open_files(tmp_path / "name")
    assert victim.stat().st_size == 0
    (tmp_path / place).unlink()
    files = open_files(tmp_path / "name")
    assert files.folder.name == "0", "the refusal has given the lock back"
    files.close()


WRITER = """
import sys
from pathlib import Path
from tests.engine.tiers.test_block_files import block, kv, open_files
files = open_files(Path(sys.argv[1]))
files.found()
for number in range(10**9):
    files.write(number % 8, block(number), kv(number))
    if number % 8 == 7:
        print(number, flush=True)
"""


def test_a_writer_that_is_killed_at_any_moment_leaves_no_wrong_block(tmp_path: Path) -> None:
    """Each life overwrites what the former one left; whatever is read is one of the blocks that were written."""
    dice = np.random.default_rng(0)
    num_whole = 0
    for _ in range(8):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        for _ in range(dice.integers(1, 30)):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.communicate()
        files = open_files(tmp_path)
        assert files.folder.name == "0", "the lock has ended with the process"
        headers = files.found()
        assert len(headers) >= 7
        for slot, header in headers:
            number = header.sequence_hash - 2**63
            assert header == block(number)
            content = read(files, slot, header)
            assert content is None or content == kv(number)
            num_whole += content is not None
        files.close()
    assert num_whole >= 8 * 6


def test_where_a_file_may_not_grow_the_write_fails_and_the_others_stay(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.write(0, block(0), kv(0))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES + 100, limit[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            files.write(1, block(1), kv(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert read(files, 1, block(1)) is None
    assert read(files, 0, block(0)) == kv(0)
    files.write(1, block(1), kv(1))
    files.close()
    assert found(tmp_path).keys() == {0, 1}


@pytest.mark.skipif(bool(why_no_small_disk()), reason=why_no_small_disk())
def test_on_a_full_disk_the_write_fails_and_the_others_stay(tmp_path: Path) -> None:
    with Disk(tmp_path / "disk") as disk:
        written(disk.folder, 0)
        disk.fill()
        files = open_files(disk.folder)
        with pytest.raises(OSError, match="No space left"):  # noqa: PT012 - a few may fit into what is left of a page
            for number in range(1, 8):
                files.write(number, block(number), kv(number))
        assert read(files, 0, block(0)) == kv(0)
        disk.empty()
        files.write(7, block(7), kv(7))
        files.close()
        assert {0, 7} <= found(disk.folder).keys()
