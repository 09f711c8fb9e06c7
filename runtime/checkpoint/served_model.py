"""The model that serving.yaml names, mock or real."""

from runtime.checkpoint.mock_model import MOCK, mock_files
from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.config.serving import ServingConfig


def served_model(config: ServingConfig, progress: bool = False) -> ModelFiles:
    """The model, without its weights where no worker of ours computes. Raises ConfigError when there is no such model,
    ModelError when it cannot be used."""
    if is_mock(config):
        return mock_files(config.mock, progress)
    foreign = not config.uses("baton") or (bool(config.external_workers) and not config.workers.count("decode"))
    return resolve_model(config.model, progress, foreign=foreign, weights=config.computes)


def is_mock(config: ServingConfig) -> bool:
    return config.model == MOCK
