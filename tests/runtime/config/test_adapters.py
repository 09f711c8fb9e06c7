"""The adapters of models in serving.yaml."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.config.models import models_of
from runtime.config.paths import with_absolute_paths
from runtime.config.serving import parse_config
from runtime.errors import ConfigError

SQL = {"sql": "/adapters/sql"}


def row(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "model": name, **more}


def test_each_model_has_the_adapters_of_its_row() -> None:
    config = parse_config({"models": [row("a", adapters=SQL), row("b")]})
    assert [one.adapters for one in models_of(config)] == [SQL, {}]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"models": [row("a", adapters=SQL), row("b", adapters=SQL)]}, "the name sql is given twice"),
        ({"models": [row("a", adapters=SQL), row("sql")]}, "the name sql is given twice"),
        ({"models": [row("a")], "adapters": SQL}, "adapters: models are given: name each in its model's adapters"),
        ({"adapters": {"": "/a"}}, "configuration: adapters: Expected `str` matching regex"),
        ({"adapters": {"sql": 1}}, "configuration: adapters.*: Expected `str`, got `int`"),
    ],
)
def test_what_two_would_share_or_nobody_can_ask_for_is_refused(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_config(data)


def test_a_folder_that_is_here_is_found_from_elsewhere_and_a_servers_own_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sql").mkdir()
    monkeypatch.chdir(tmp_path)
    config = with_absolute_paths(parse_config({"adapters": {"sql": "sql", "poem": "on/the/server"}}))
    assert msgspec.to_builtins(config)["adapters"] == {"sql": str(tmp_path / "sql"), "poem": "on/the/server"}
