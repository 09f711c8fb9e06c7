"""Workers spread over the GPUs of a host."""

from pathlib import Path

import pytest

from baton.service.gpu_places import GpuPlaces, visible_gpus
from runtime.errors import ConfigError


def test_workers_take_one_gpu_after_the_other_and_share_when_there_are_more_of_them() -> None:
    places = GpuPlaces(["0", "1", "2", "3"], workers=[1] * 6)
    assert [places.next()["CUDA_VISIBLE_DEVICES"] for _ in range(6)] == ["0", "1", "2", "3", "0", "1"]
    assert places.share == 2
    assert GpuPlaces(["0", "1", "2", "3"], workers=[1] * 4).share == 1


def test_without_gpus_workers_are_told_nothing() -> None:
    places = GpuPlaces([], workers=[1, 2])
    assert (places.next(), places.share) == ({}, 1)


def test_the_named_gpus_come_before_what_the_driver_has(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-a"}, tmp_path) == ["3", "GPU-a"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert visible_gpus({}, tmp_path / "nowhere") == []


def test_a_worker_of_several_ranks_takes_as_many_gpus() -> None:
    places = GpuPlaces(["0", "1", "2", "3", "4"], workers=[2] * 3)
    assert [places.next(2)["CUDA_VISIBLE_DEVICES"] for _ in range(3)] == ["0,1", "2,3", "0,1"]
    assert places.share == 2


def test_workers_of_different_sizes_take_as_many_gpus_as_each_needs() -> None:
    places = GpuPlaces([str(number) for number in range(8)], workers=[1, 1, 2, 4])
    assert [places.next(size)["CUDA_VISIBLE_DEVICES"] for size in (1, 1, 2, 4)] == ["0", "1", "2,3", "4,5,6,7"]
    assert places.share == 1
    assert places.next(4) == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    few = GpuPlaces(["0", "1", "2", "3"], workers=[1, 4])
    assert [few.next(size)["CUDA_VISIBLE_DEVICES"] for size in (1, 4)] == ["0", "0,1,2,3"]
    assert few.share == 2


def test_a_worker_that_takes_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel: a worker takes 4 GPUs, and 2 are here"):
        GpuPlaces(["0", "1"], workers=[1, 4])
    assert GpuPlaces([], workers=[4]).next(4) == {}


def test_a_place_that_was_given_back_is_taken_before_one_in_use() -> None:
    places = GpuPlaces(["0", "1", "2"], workers=[1, 1, 1])
    first, second, third = places.next(), places.next(), places.next()
    places.give_back(second)
    assert places.next() == second
    places.give_back(third)
    places.give_back(first)
    assert places.next() == first
    GpuPlaces([], workers=[1]).give_back({})


def test_there_is_room_while_a_gpu_has_fewer_workers_than_share_one() -> None:
    places = GpuPlaces(["0", "1"], workers=[1, 1, 1])
    first = places.next()
    assert places.has_room(2)
    places.next(), places.next(2)
    assert (places.share, places.has_room(1), places.has_room(0)) == (2, False, True)
    places.give_back(first)
    assert places.has_room(1)
    assert not places.has_room(2)
    assert GpuPlaces([], workers=[1]).has_room(1)


def test_models_that_sleep_have_a_gpu_to_themselves_while_they_are_awake() -> None:
    places = GpuPlaces(["0", "1"], workers=[1], sleepers=[(1, "a"), (1, "b"), (1, "b")])
    assert places.next() == {"CUDA_VISIBLE_DEVICES": "0"}
    asleep = [places.next(1, model)["CUDA_VISIBLE_DEVICES"] for model in ("a", "b", "b")]
    assert asleep == ["1", "1", "0"], "beside the one that never sleeps only when the other GPU is no better"
    assert places.share == 2
    assert GpuPlaces(["0", "1"], workers=[1], sleepers=[(1, "a"), (1, "b"), (1, "c")]).share == 1
