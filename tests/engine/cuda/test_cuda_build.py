"""How much of a GPU the KV slab takes, in numbers alone, and whether graphs are captured, by a runner that computes
nothing."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from engine.cuda import cuda_build
from engine.cuda.cuda_build import kv_room
from engine.loading import loaded_model
from runtime.checkpoint.model_files import resolve_model
from runtime.config.serving import parse_config
from runtime.device.drivers import memory_of

GB = 10**9
TOTAL = 100 * GB


@pytest.mark.parametrize(
    ("free", "taken", "gpu_share", "memory_share", "room", "part"),
    [
        (80, 20, 1, 0.97, 75, 75),  # 97 less 20 of weights and 2 of a step
        (80, 20, 1, 0.5, 28, 28),
        (50, 20, 1, 0.5, -2, -2),  # others hold 30, which count
        (80, 20, 2, 0.97, 75, 25),  # half of 94: another process has 3 for itself
        (30, 20, 2, 0.97, 25, 25),
        (20, 20, 2, 0.97, 15, 15),  # the other one has taken more than its half
    ],
)
def test_the_slab_takes_what_is_left_of_the_share_of_the_gpu(
    free: int, taken: int, gpu_share: int, memory_share: float, room: int, part: int
) -> None:
    found = kv_room(TOTAL, free * GB, taken * GB, 2 * GB, gpu_share=gpu_share, memory_share=memory_share)
    assert found == (room * GB, part * GB)


def test_graphs_are_captured_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, host = Mock(), memory_of(torch.device("cpu"))
    runner.measure_peak.return_value = 0
    monkeypatch.setattr(loaded_model, "resolve_attention", lambda *_: "triton")
    monkeypatch.setattr(cuda_build, "build_cuda_runner", lambda *_, **__: runner)
    monkeypatch.setattr(cuda_build, "memory_of", lambda _: host)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (TOTAL, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    config = parse_config({"engine": {"device": "cpu", "kv_memory": "1MiB"}}).engine
    loaded = loaded_model.load_model(resolve_model(str(tiny_model)), config)
    loaded.close()
    runner.capture.assert_called_once()
    runner.attach.assert_called_once()
