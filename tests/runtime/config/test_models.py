"""The section `models`: what becomes of it for each model, and what is refused."""

from typing import Any

import pytest
import yaml

from runtime.config.models import models_of
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig, dump_config, parse_config
from runtime.errors import ConfigError

ONE, TWO = {"name": "Org/One", "model": "/m/1"}, {"name": "two", "model": "/m/2"}


def server(name: str) -> dict[str, str]:
    return {"name": name, "address": "http://h:1", "events": "tcp://h:2", "replay": "tcp://h:3"}


def test_without_the_section_there_is_one_model_as_ever() -> None:
    config = ServingConfig(model="mock")
    assert models_of(config) == [config]


def test_each_model_has_a_namespace_workers_engine_and_parsers_of_its_own() -> None:
    one = ONE | {"decode": 3, "engine": {"block_size": 64}, "tool_parser": "pythonic", "weight": 3}
    config = parse_config({"models": [one, TWO], "engine": {"max_running": 8}, "workers": {"prefill": 2}})
    first, second = models_of(config)
    assert (first.namespace, second.namespace) == ("default--org-one", "default--two")
    assert (first.model, first.served_model_name) == ("/m/1", "Org/One")
    assert [(each.workers.prefill, each.workers.decode) for each in (first, second)] == [(2, 3), (2, 1)]
    assert (first.engine.block_size, first.engine.max_running) == (64, 8)
    assert second.engine == config.engine
    assert (first.router.tool_parser, second.router.tool_parser) == ("pythonic", "auto")
    assert (first.router.queue_limit, second.router.queue_limit) == (768, 256)
    assert not first.models, "a model's workers know nothing of the others"


def test_a_model_is_parsed_from_what_is_written_for_its_processes() -> None:
    config = parse_config({"models": [ONE | {"external_workers": [server("gpu-1")]}, TWO]})
    assert with_overrides(config, {}) == config
    for one in models_of(config):
        assert parse_config(yaml.safe_load(dump_config(one))) == one


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"models": [ONE, ONE]}, "Org/One is given twice"),
        ({"models": [ONE, TWO | {"aliases": ["Org/One"]}]}, "Org/One is given twice"),
        ({"models": [ONE, TWO | {"name": "org-one"}]}, "two names become org-one"),
        ({"models": [TWO | {"name": "x" * 60}]}, "more than 55 characters"),
        ({"models": [TWO | {"name": 'a"b'}]}, "is not a name of"),
        ({"models": [{"name": "a"}]}, "missing required field `model`"),
        ({"models": [TWO | {"decod": 1}]}, "'models[0].decode'"),
        ({"models": [TWO], "model": "mock"}, "model: models are given, too"),
        ({"models": [TWO], "external_workers": [server("a")]}, "name each in its model's external_workers"),
        ({"models": [m | {"external_workers": [server("a")]} for m in (ONE, TWO)]}, "a is named twice"),
        ({"models": [ONE, TWO | {"external_workers": [server("decode-org-one-1")]}]}, "decode-org-one-1 is a name"),
        ({"models": [ONE | {"external_workers": [server("a")], "asleep": "until_asked"}]}, "leave out `asleep`"),
        ({"models": [TWO | {"engine": {"blok_size": 16}}]}, "the nearest known one is 'engine.block_size'"),
    ],
)
def test_what_several_models_cannot_have_is_refused_with_a_way_out(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        models_of(parse_config(data))
    assert words in str(caught.value)
