"""What a worker refuses to be put together from."""

import os
from pathlib import Path

import pytest

from runtime.config.serving import parse_config
from runtime.errors import ConfigError
from tests.tiny_model import write_tiny_model
from worker.assembly import build_engine


def test_a_mock_of_several_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel: the mock model"):
        build_engine(parse_config({"model": "mock", "engine": {"tensor_parallel": 4}}))


def test_workers_are_of_one_model_only_when_all_bytes_of_their_weights_are_equal(tmp_path: Path) -> None:
    names = {}
    for name, last_byte in (("one", b"\x01"), ("same", b"\x01"), ("other", b"\x02")):
        (tmp_path / name).mkdir()
        folder = write_tiny_model(tmp_path / name)
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(last_byte)
        config = parse_config({"model": str(folder), "engine": {"device": "cpu", "kv_memory": "2MiB", "threads": 1}})
        assembly = build_engine(config)
        names[name] = assembly.identity("worker", 1).model_hash
        assembly.close()
    assert names["one"] == names["same"] != names["other"]
