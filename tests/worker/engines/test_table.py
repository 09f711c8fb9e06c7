"""Which engine a worker has, by its configuration."""

from typing import Any

import pytest

from runtime.config.serving import parse_config
from runtime.errors import ConfigError
from worker.engines.table import MOCK, OWN, row_of, rows_of


@pytest.mark.parametrize(
    ("workers", "key"),
    [
        ({"engine": "vlm"}, "workers.engine"),
        ({"decode": {"vlm": 1}}, "workers.decode.vlm"),
        ({"prefill": {"baton": 1, "vlm": 1}}, "workers.prefill.vlm"),
    ],
)
def test_an_engine_that_there_is_not_is_refused_with_those_that_there_are(workers: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no engine 'vlm'; there are baton, vllm; .* 'vllm'") as refused:
        rows_of(parse_config({"workers": workers}))
    assert refused.value.where == key


def test_the_mock_is_chosen_by_the_model_and_others_by_name() -> None:
    assert row_of(parse_config({"model": "mock"})) is MOCK
    assert row_of(parse_config({"model": "smollm2"})) is OWN
    assert row_of(parse_config({"model": "smollm2", "workers": {"engine": "vllm"}})).needs == "vLLM"


def test_a_service_has_the_rows_of_all_its_workers() -> None:
    mixed = parse_config({"workers": {"prefill": 0, "decode": {"baton": 1, "vllm": 2}}})
    assert [row.name for row in rows_of(mixed)] == ["baton", "vllm"]
