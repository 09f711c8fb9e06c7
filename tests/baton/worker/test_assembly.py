"""What a worker refuses to be put together from."""

import pytest

from baton.config import parse_config
from baton.errors import ConfigError
from baton.worker.assembly import build_engine


def test_prefill_workers_of_several_ranks_are_refused_with_the_way_out() -> None:
    config = parse_config({"engine": {"device": "cpu", "tensor_parallel": 2}})
    with pytest.raises(ConfigError, match=r"workers\.prefill: is 1, .*set it to 0 .*, or engine\.tensor_parallel to 1"):
        build_engine(config)


def test_a_mock_of_several_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel: the mock model"):
        build_engine(parse_config({"model": "mock", "engine": {"tensor_parallel": 4}}))
