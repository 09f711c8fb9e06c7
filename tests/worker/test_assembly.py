"""What a worker refuses to be put together from."""

import pytest

from runtime.config.serving import parse_config
from runtime.errors import ConfigError
from worker.assembly import build_engine


def test_a_mock_of_several_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel: the mock model"):
        build_engine(parse_config({"model": "mock", "engine": {"tensor_parallel": 4}}))
