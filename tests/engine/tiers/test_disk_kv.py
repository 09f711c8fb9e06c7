"""The disk tier under a real model: prefixes go to the disk and come back, over restarts and faults of the disk, and no
answer changes."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace as replaced
from math import inf
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.tiers import disk_kv as module
from engine.tiers.block_files import BlockFiles
from engine.tiers.disk_kv import check_disk_kv, check_folder, fingerprint
from engine.tiers.read_times import ReadTimes
from kvtransfer.slab.layout import SlabLayout
from runtime.config.serving import DiskKvConfig, EngineConfig, ServingConfig
from runtime.errors import ConfigError
from tests.engine.kv_oracle import make_sequence
from tests.engine.tiers.disk_worker import TIMEOUT_S, conversations, prompt, worker
from worker.engines.own import build_engine


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Callable[[list[list[int]]], list[list[int]]]:
    """Answers of a worker without lower tiers."""

    def answers(prompts: list[list[int]]) -> list[list[int]]:
        with worker(tiny_model, None) as plain:
            return plain.answers(prompts)

    return answers


def written(model: Path, folder: Path) -> list[int]:
    """The answer to a prompt whose blocks a worker has left on the disk."""
    with worker(model, folder) as one:
        _, answer = one.answer(prompt(0))
        one.answers([prompt(seed) for seed in range(1, 10)])
    return answer


def test_answers_are_those_of_a_worker_without_a_disk_over_restarts(
    tiny_model: Path, tmp_path: Path, expected: Callable[[list[list[int]]], list[list[int]]]
) -> None:
    for life in range(3):
        prompts = conversations(25, life)
        with worker(tiny_model, tmp_path) as one:
            assert one.answers(prompts) == expected(prompts)
            assert one.engine.block_manager.tiers.num_read > 20
            load = one.engine.load()
            assert 0 < load.disk_blocks_used <= load.disk_blocks_total == 128


def test_a_restart_finds_prefixes_and_tells_of_them(tiny_model: Path, tmp_path: Path) -> None:
    with worker(tiny_model, tmp_path) as one:
        _, before = one.answer(prompt(0))
        one.answers([prompt(seed) for seed in range(1, 10)])
        kept = one.engine.load().disk_blocks_used
    with worker(tiny_model, tmp_path) as again:
        assert again.engine.block_manager.tiers.restoring_ms() == (0.0, 0.0), "nothing has come back yet"
        stored = again.engine.step().events
        assert sum(len(event.sequence_hashes) // 8 for event in stored) == kept  # type: ignore[union-attr]
        sequence, after = again.answer(prompt(0))
        assert after == before
        assert sequence.num_cached_tokens == 144
        assert again.engine.block_manager.tiers.num_read == 9
        host_ms, disk_ms = again.engine.block_manager.tiers.restoring_ms()
        assert 0 < host_ms < disk_ms, "both were measured"


def test_blocks_of_another_model_are_left_alone(tmp_path: Path) -> None:
    layout = SlabLayout(2, 100, 2, 16, 8, "float32")
    same = fingerprint(layout, "weights", 1)
    assert fingerprint(SlabLayout(2, 7, 2, 16, 8, "float32"), "weights", 1) == same
    shapes = (3, 2, 16, 8, "float32"), (2, 1, 16, 8, "float32"), (2, 2, 32, 8, "float32"), (2, 2, 16, 4, "float32")
    others = {fingerprint(SlabLayout(layers, 100, *shape), "weights", 1) for layers, *shape in shapes}
    others |= {fingerprint(layout, "other weights", 1), fingerprint(replaced(layout, dtype="bfloat16"), "weights", 1)}
    others.add(fingerprint(layout, "weights", 2))
    grouped = [replaced(layout, window_layers=frozenset(some), num_window_blocks=50) for some in ({0}, {1})]
    others |= {fingerprint(one, "weights", 1) for one in grouped}
    assert len(others - {same}) == 9
    assert fingerprint(replaced(grouped[0], num_window_blocks=7), "weights", 1) in others, "their number means nothing"
    assert same == "be51c453ef5d63fd1ed460c2bb424bf6", "a folder of an earlier release"


def test_a_damaged_disk_costs_time_and_no_answer(
    tiny_model: Path, tmp_path: Path, expected: Callable[[list[list[int]]], list[list[int]]]
) -> None:
    prompts = conversations(25, 1)
    with worker(tiny_model, tmp_path) as one:
        one.answers(prompts)
    (blocks,) = tmp_path.glob("*/0/blocks")
    size = blocks.stat().st_size
    with blocks.open("r+b") as file:
        for place in range(0, size, size // 8):
            file.seek(place)
            file.write(b"garbage")
    with worker(tiny_model, tmp_path) as one:
        assert one.answers(prompts) == expected(prompts)
        assert one.engine.block_manager.tiers.num_disk_errors > 0


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), ValueError("a fault of ours")], ids=repr)
def test_a_disk_that_refuses_is_left_alone_for_a_while(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    tried = 0

    def refuse(*arguments: object) -> None:
        nonlocal tried
        tried += 1
        raise problem

    write = BlockFiles.write
    monkeypatch.setattr(BlockFiles, "write", refuse)
    monkeypatch.setattr(module, "REST_S", inf)
    with worker(tiny_model, tmp_path) as one:
        one.answers(conversations(10, 2))
        assert tried == one.engine.block_manager.tiers.num_disk_errors == 1
        assert one.engine.load().disk_blocks_used == 0
        monkeypatch.setattr(BlockFiles, "write", write)
        monkeypatch.setattr(module, "REST_S", 0.0)
        one.engine.block_manager.tiers._disk._silent_until_s = 0.0  # type: ignore[union-attr]
        one.answers(conversations(10, 2))
        assert one.engine.load().disk_blocks_used > 0


@pytest.mark.parametrize("problem", [OSError(5, "Input/output error"), ValueError("a fault of ours")], ids=repr)
def test_a_block_whose_read_fails_is_computed_and_the_next_one_is_read(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    with worker(tiny_model, tmp_path) as one:
        _, before = one.answer(prompt(0))
        _, other = one.answer(prompt(1))
        one.answers([prompt(seed) for seed in range(2, 10)])
    read, failures = BlockFiles.read, [problem]

    def fail(*arguments: object) -> bool:
        if failures:
            raise failures.pop()
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockFiles, "read", fail)
    with worker(tiny_model, tmp_path) as again:
        assert again.answer(prompt(0))[1] == before
        assert again.engine.block_manager.tiers.num_disk_errors == 1
        sequence, after = again.answer(prompt(1))
        assert (after, sequence.num_cached_tokens) == (other, 144)


def test_what_was_written_would_outlive_the_machine_when_the_tier_has_closed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def recorded(name: str) -> None:
        function = getattr(os, name)

        def record(file: int, *arguments: object) -> object:
            path = Path(os.readlink(f"/proc/self/fd/{file}"))
            if path.is_relative_to(tmp_path):
                calls.append(f"{name} {path.name}")
            return function(file, *arguments)

        monkeypatch.setattr(os, name, record)

    with worker(tiny_model, tmp_path) as one:
        recorded("pwrite")
        recorded("fsync")
        one.answers([prompt(seed) for seed in range(10)])
        assert {"pwrite index", "pwrite blocks"} == set(calls)
    assert calls[-3:] == ["fsync blocks", "fsync index", "fsync 0"]


def test_several_blocks_are_read_at_a_time_and_all_end_before_the_tier_has_closed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = written(tiny_model, tmp_path)
    together = threading.Barrier(module.READERS)
    read, ended = BlockFiles.read, []

    def meet(*arguments: object) -> bool:
        if not ended:
            together.wait(TIMEOUT_S)
        ended.append(threading.current_thread())
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockFiles, "read", meet)
    with worker(tiny_model, tmp_path) as again:
        sequence, after = again.answer(prompt(0))
        assert (after, sequence.num_cached_tokens) == (before, 144)
        again.engine.add(make_sequence("is left behind", prompt(1), max_tokens=6))
        again.engine.step()
    assert len(ended) == 18
    assert not any(thread.is_alive() for thread in ended)


def test_nobody_waits_for_a_disk_that_does_not_answer(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = written(tiny_model, tmp_path)
    answers_again = threading.Event()
    read = BlockFiles.read

    def hang(*arguments: object) -> bool:
        answers_again.wait()
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockFiles, "read", hang)
    with worker(tiny_model, tmp_path, late_s=0.2) as again:
        again.engine.step()
        sequence, after = again.answer(prompt(0))
        assert (after, sequence.num_cached_tokens) == (before, 0)
        answers_again.set()
        while not again.engine.step().restored:
            again.disk_is_done.wait(0.1)
        assert again.engine.check_integrity() == []


def test_a_prompt_is_computed_where_that_is_sooner(tiny_model: Path, tmp_path: Path) -> None:
    with worker(tiny_model, tmp_path) as one:
        one.answers([prompt(seed) for seed in range(10)])
        one.engine.block_manager.tiers.compute_s = float  # a second a token
        for read_s, found in ((1e9, 0), (1e-9, 144)):
            times = one.engine.block_manager.tiers._disk._times = ReadTimes()  # type: ignore[union-attr]
            times.begin(0, 0.0)
            times.end(0, read_s)
            sequence, _ = one.answer(prompt(0))
            assert sequence.num_cached_tokens == found
            one.answers([prompt(seed) for seed in range(1, 10)])


def test_what_was_cleared_is_not_found_by_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    with worker(tiny_model, tmp_path) as one:
        one.answers([prompt(seed) for seed in range(10)])
        one.engine.clear_cache()
        assert one.engine.check_integrity() == []
    with worker(tiny_model, tmp_path) as again:
        assert again.engine.load().disk_blocks_used == 0


def test_a_worker_serves_without_the_tier_when_its_folder_cannot_be_used(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "open to all").mkdir()
    (tmp_path / "open to all").chmod(0o1777)
    for folder in ("file", "open to all"):
        with worker(tiny_model, tmp_path / folder) as one:
            assert one.engine.load().disk_blocks_total == 0
            one.answer(prompt(0))
    assert list((tmp_path / "open to all").iterdir()) == []


def test_what_cannot_be_is_refused_with_the_reason(tiny_model: Path, tmp_path: Path) -> None:
    disk = DiskKvConfig(folder=str(tmp_path / "kv"))
    with pytest.raises(ConfigError, match=r"come back through host memory: set engine\.host_kv_memory too"):
        check_disk_kv(EngineConfig(disk_kv=disk))
    with pytest.raises(ConfigError, match=r"engine\.disk_kv\.size: 'auto' is not a size"):
        check_disk_kv(EngineConfig(host_kv_memory="auto", disk_kv=replace(disk, size="auto")))
    small = EngineConfig(device="cpu", host_kv_memory="1MiB", disk_kv=replace(disk, size="1024"))
    with pytest.raises(ConfigError, match=r"engine\.disk_kv\.size: 1024 has no room for a KV block"):
        build_engine(ServingConfig(model=str(tiny_model), engine=small))
    check_folder(EngineConfig(disk_kv=disk))
    assert os.path.isdir(tmp_path / "kv")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"engine\.disk_kv\.folder: .*file/kv: Not a directory"):
        check_folder(EngineConfig(disk_kv=DiskKvConfig(folder=str(tmp_path / "file" / "kv"))))
    (tmp_path / "kv").chmod(0o1777)
    with pytest.raises(
        ConfigError, match=r"engine\.disk_kv\.folder: .*/kv lets others write it \(mode 1777\): name one"
    ):
        check_folder(EngineConfig(disk_kv=disk))
