"""What a worker refuses to be put together from."""

import msgspec
import pytest
import torch

from baton.config import ServingConfig, parse_config
from baton.errors import ConfigError
from baton.worker.assembly import build_engine


def test_prefill_workers_on_a_gpu_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = ServingConfig()
    with pytest.raises(ConfigError, match=r"workers\.prefill: is 1, .*set it to 0 \(--prefill 0\), or engine\.device"):
        build_engine(config)
    on_cpu = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, device="cpu"))
    assert build_engine(on_cpu).slab.layout.num_blocks > 0


def test_prefill_workers_of_several_ranks_are_refused_with_the_way_out() -> None:
    config = parse_config({"engine": {"device": "cpu", "tensor_parallel": 2}})
    with pytest.raises(ConfigError, match=r"workers\.prefill: is 1, .*set it to 0 .*, or engine\.tensor_parallel to 1"):
        build_engine(config)


def test_a_mock_of_several_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel: the mock model"):
        build_engine(parse_config({"model": "mock", "engine": {"tensor_parallel": 4}}))
