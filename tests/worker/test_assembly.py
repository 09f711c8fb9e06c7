"""What a worker refuses to be put together from."""

from pathlib import Path
from typing import Any

import pytest

from runtime.config.serving import parse_config
from runtime.errors import ConfigError
from tests.tiny_model import write_tiny_model
from worker.assembly import build_engine


def test_a_mock_of_several_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel: the mock model"):
        build_engine(parse_config({"model": "mock", "engine": {"tensor_parallel": 4}}))


def test_the_model_hash_tells_weights_and_configurations_apart_and_nothing_else(tmp_path: Path) -> None:
    def model_hash(name: str, **different: Any) -> str:
        folder = write_tiny_model(tmp_path / name, **different)
        config = parse_config({"model": str(folder), "engine": {"device": "cpu", "kv_memory": "2MiB", "threads": 1}})
        assembly = build_engine(config)
        assembly.close()
        return assembly.identity("worker", 1).model_hash

    first, same = model_hash("a"), model_hash("b")
    assert first == same
    assert len({first, model_hash("c", seed=1), model_hash("d", rope_theta=5e5)}) == 3
