"""A model that sleeps and wakes answers as before, at the same addresses, and leaves nothing behind."""

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from baton_proto.sampling import SamplingParams
from engine.loading.model_memory import ModelMemory
from engine.model.checkpoint import Checkpoint
from engine.model.weights import Weights
from engine.runners.torch_runner import build_runner, slab_layout
from kvtransfer.slab.slab import Slab
from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.config.serving import EngineConfig
from runtime.device.host_memory import HostMemory
from runtime.errors import ModelError, UnavailableError
from tests.engine.engine_runs import run, sequences, small_engine
from tests.open_files import open_files, shared_bytes
from tests.tiny_model import write_tiny_model

CONFIG = EngineConfig(device="cpu", kv_memory="2MiB", threads=1)
GREEDY = [SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True) for _ in range(3)]


class Loaded:
    """As on a GPU: the weights lie in memory of their own."""

    def __init__(self, files: ModelFiles, driver: HostMemory) -> None:
        self.files = files
        self.weights = Weights(files.folder, torch.float32, driver)
        self.slab = Slab(slab_layout(files, CONFIG), driver)
        self.runner = build_runner(files, CONFIG, self.slab.tensor, self.weights)
        self.memory = ModelMemory(self.weights, self.slab)

    @property
    def nbytes(self) -> int:
        assert self.weights.memory is not None
        return self.weights.memory.nbytes + self.slab.layout.nbytes

    def answers(self) -> dict[str, list[int]]:
        engine = small_engine(self.files, self.runner, self.slab.layout.num_blocks, 64, 8)
        return run(engine, sequences(GREEDY, seed=3))


class FullMemory(HostMemory):
    """Has room for no more than it is told."""

    room = 1 << 40

    def create(self, nbytes: int) -> int:
        if nbytes > self.room:
            raise UnavailableError("out of memory")
        return super().create(nbytes)


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    return Loaded(resolve_model(str(write_tiny_model(tmp_path))), FullMemory())


@pytest.mark.parametrize("level", [1, 2])
def test_answers_are_the_same_before_and_after(loaded: Loaded, level: int) -> None:
    before, address, held = loaded.answers(), loaded.slab.tensor.data_ptr(), shared_bytes()
    assert loaded.memory.sleep(level) == loaded.nbytes
    assert loaded.memory.asleep == ("weights", "kv_cache")
    assert held - shared_bytes() > 0.9 * loaded.weights.memory.nbytes  # type: ignore[union-attr]
    loaded.memory.wake()
    assert loaded.memory.asleep == ()
    assert loaded.slab.tensor.data_ptr() == address
    assert not loaded.slab.tensor.any()
    assert loaded.answers() == before


def test_parts_wake_one_after_the_other(loaded: Loaded) -> None:
    before = loaded.answers()
    loaded.memory.sleep(1)
    loaded.memory.wake(("weights",))
    assert loaded.memory.asleep == ("kv_cache",)
    loaded.memory.wake(("weights",))
    loaded.memory.wake(("kv_cache",))
    assert loaded.answers() == before


def test_kept_weights_are_dropped_by_a_deeper_sleep_and_read_again(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, reads = loaded.answers(), list[str]()
    reload: Callable[[], None] = loaded.weights.reload
    monkeypatch.setattr(loaded.weights, "reload", lambda: (reads.append("read"), reload()))
    loaded.memory.sleep(1)
    loaded.memory.wake()
    assert reads == []
    loaded.memory.sleep(1)
    assert loaded.memory.sleep(2) == 0
    loaded.memory.wake()
    assert reads == ["read"]
    assert loaded.answers() == before


def test_weights_are_copied_to_host_memory_again_only_when_they_were_replaced(loaded: Loaded, tmp_path: Path) -> None:
    before, new = loaded.answers(), Loaded(resolve_model(str(write_tiny_model(tmp_path / "new", seed=1))), FullMemory())
    loaded.memory.sleep(1)
    loaded.memory.wake()
    loaded.weights.memory.bytes().zero_()  # type: ignore[union-attr]
    loaded.memory.sleep(1)
    loaded.memory.wake()
    assert loaded.answers() == before, "of the first sleep"
    for replace, expected in (
        (lambda: loaded.memory.read(loaded.memory.opened(new.files.folder)), new.answers()),
        (lambda: loaded.memory.update(Checkpoint(loaded.files.folder).tensors()), before),
    ):
        replace()
        loaded.memory.sleep(1)
        loaded.memory.wake()
        assert loaded.answers() == expected


def test_weights_that_have_no_room_in_host_memory_are_read_again_unless_they_cannot_be(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, reads = loaded.answers(), list[str]()
    reload: Callable[[], None] = loaded.weights.reload
    monkeypatch.setattr(loaded.weights, "reload", lambda: (reads.append("read"), reload()))
    needed = loaded.memory.weights_bytes
    monkeypatch.setattr("engine.loading.model_memory.available_bytes", lambda: needed)
    assert loaded.memory.sleep(1) == loaded.nbytes
    loaded.memory.wake()
    assert (reads, loaded.answers()) == (["read"], before)
    loaded.memory.update((name, tensor.clone()) for name, tensor in Checkpoint(loaded.files.folder).tensors())
    loaded.memory.sleep(1)
    loaded.memory.wake()
    assert (reads, loaded.answers()) == (["read"], before), "nobody could give them again"
    monkeypatch.setattr("engine.loading.model_memory.available_bytes", lambda: 2 * needed)
    assert loaded.memory.level_with_room(1, ranks=2) == 1, "the host memory is taken already"


def test_the_weights_of_all_ranks_need_room_in_host_memory(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loading.model_memory.available_bytes", lambda: 2 * loaded.memory.weights_bytes)
    assert [loaded.memory.level_with_room(1, ranks) for ranks in (1, 2)] == [1, 2]


def test_a_part_that_finds_no_memory_sleeps_on_and_can_be_woken_later(loaded: Loaded) -> None:
    before = loaded.answers()
    loaded.memory.sleep(1)
    FullMemory.room = loaded.slab.layout.nbytes // 2
    try:
        with pytest.raises(UnavailableError, match="out of memory"):
            loaded.memory.wake()
    finally:
        FullMemory.room = 1 << 40
    assert "kv_cache" in loaded.memory.asleep
    loaded.memory.wake()
    assert loaded.answers() == before


def test_fifty_cycles_leak_nothing(loaded: Loaded) -> None:
    loaded.memory.sleep(1)
    loaded.memory.wake()
    gc.collect()
    files, mappings = Counter(name for _, name in open_files()), Path("/proc/self/maps").read_text().count("\n")
    for level in [1, 2] * 25:
        loaded.memory.sleep(level)
        loaded.memory.wake()
    assert Counter(name for _, name in open_files()) <= files  # the last memory may have another number
    assert Path("/proc/self/maps").read_text().count("\n") <= mappings + 2  # the allocator may keep a piece


def test_mapped_files_have_nothing_to_give_back(tmp_path: Path) -> None:
    files = resolve_model(str(write_tiny_model(tmp_path)))
    slab = Slab(slab_layout(files, CONFIG))
    memory = ModelMemory(Weights(files.folder, torch.float32), slab)
    assert memory.sleep(1) == slab.layout.nbytes
    memory.wake()
    assert memory.asleep == ()


def write_weights(folder: Path, **arrays: np.ndarray) -> None:
    """As a download does it: another file takes the name."""
    save_file(arrays, folder / "new.safetensors")
    (folder / "new.safetensors").rename(folder / "model.safetensors")


def other_values(folder: Path) -> None:
    arrays = load_file(folder / "model.safetensors")
    write_weights(folder, **arrays | {"model.norm.weight": arrays["model.norm.weight"] * 2})


def other_shapes(folder: Path) -> None:
    arrays = load_file(folder / "model.safetensors")
    write_weights(folder, **arrays | {"model.norm.weight": np.ones(7, np.float32)})


def written_over(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\x01\x02\x03\x04")


def cut_short(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)


def gone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


REPLACEMENTS = {
    other_values: "model.safetensors: its tensors have other values. Put the loaded ones back, or restart the worker",
    other_shapes: "1 tensors are new, missing, or of another shape or dtype: model.norm.weight",
    written_over: "its tensors have other values",
    cut_short: "is truncated or not a safetensors file",
    gone: "model.safetensors is missing",
}


@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_weights_that_were_replaced_on_disk_are_not_woken_and_those_that_were_loaded_are(
    loaded: Loaded, replace: Callable[[Path], None]
) -> None:
    loaded.weights.start_hashing()
    before, file = loaded.answers(), loaded.files.folder / "model.safetensors"
    kept = file.read_bytes()
    loaded.memory.sleep(2)
    replace(loaded.files.folder)
    with pytest.raises(ModelError, match=REPLACEMENTS[replace]):
        loaded.memory.wake()
    assert loaded.memory.asleep == ("weights", "kv_cache")
    file.write_bytes(kept)
    loaded.memory.wake()
    assert loaded.answers() == before
    loaded.memory.sleep(1)
    replace(loaded.files.folder)
    loaded.memory.wake()  # from host memory
    assert loaded.answers() == before


def test_weights_that_were_written_again_are_mapped_anew(loaded: Loaded) -> None:
    loaded.weights.start_hashing()
    before = loaded.answers()
    loaded.memory.sleep(2)
    file = loaded.files.folder / "model.safetensors"
    again = file.with_name("again")
    again.write_bytes(file.read_bytes())
    again.rename(file)
    loaded.memory.wake()
    assert loaded.answers() == before
    gc.collect()
    assert f"{file} (deleted)" not in Path("/proc/self/maps").read_text()


def test_a_cpu_worker_whose_mapped_weights_were_replaced_does_not_wake(tmp_path: Path) -> None:
    files = resolve_model(str(write_tiny_model(tmp_path)))
    weights = Weights(files.folder, torch.float32)
    weights.start_hashing()
    memory = ModelMemory(weights, Slab(slab_layout(files, CONFIG)))
    memory.sleep(2)
    other_values(files.folder)
    with pytest.raises(ModelError, match="its tensors have other values"):
        memory.wake()
    assert memory.asleep == ("weights", "kv_cache")


def test_given_weights_are_kept_by_a_light_sleep_and_asked_for_after_a_deep_one(
    loaded: Loaded, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_tiny_model(tmp_path_factory.mktemp("other"), seed=1)
    given = [(name, torch.from_numpy(value)) for name, value in load_file(folder / "model.safetensors").items()]
    address = loaded.weights.memory.bytes().data_ptr()  # type: ignore[union-attr]
    loaded.memory.update(given)
    answers = loaded.answers()
    assert answers == Loaded(resolve_model(str(folder)), FullMemory()).answers()
    loaded.memory.sleep(1)
    with pytest.raises(UnavailableError, match="the weights sleep"):
        loaded.memory.update(given)
    loaded.memory.wake()
    assert loaded.memory.problem == ""
    assert loaded.answers() == answers
    loaded.memory.sleep(2)
    loaded.memory.wake(("weights",))
    assert loaded.memory.problem == "the weights that were given are gone with a sleep of level 2: give them again"
    loaded.memory.update(given)
    loaded.memory.wake()
    assert loaded.memory.problem == ""
    assert loaded.answers() == answers
    assert loaded.weights.memory.bytes().data_ptr() == address  # type: ignore[union-attr]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_checkpoint_is_read_in_place_or_when_the_weights_wake(loaded: Loaded, tmp_path: Path, level: int) -> None:
    new = Loaded(resolve_model(str(write_tiny_model(tmp_path / "new", seed=1))), FullMemory())
    memory, before, expected = loaded.memory, loaded.answers(), new.answers()
    if level:
        memory.sleep(level)
    memory.read(memory.opened(new.files.folder))
    assert memory.fingerprint == new.memory.fingerprint
    if level:
        memory.wake()
    assert loaded.answers() == expected != before
    memory.sleep(2)
    memory.wake()
    assert loaded.answers() == expected, "level 2 reads the new folder"


def test_a_checkpoint_that_does_not_fit_changes_nothing(loaded: Loaded, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "new", seed=1)
    before, name = loaded.answers(), "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    save_file({key: value for key, value in tensors.items() if key != name}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"model {folder}: 1 tensors are missing: {name}"):
        loaded.memory.opened(folder)
    save_file(tensors | {"more": np.zeros(1, np.float32)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"model {folder}: tensor more is not known to this architecture"):
        loaded.memory.opened(folder)
    (folder / "model.safetensors").write_bytes(bytes(7))
    with pytest.raises(ModelError, match="is truncated or not a safetensors file"):
        loaded.memory.opened(folder)
    assert loaded.memory.problem == ""
    assert loaded.answers() == before
