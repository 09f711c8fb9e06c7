"""The adapters that a worker gets at its start: those of its configuration, as operators have changed them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from runtime.config.serving import parse_config
from runtime.discovery.wanted_adapters import UNLOADED, changed_adapters, keep_adapter
from runtime.errors import ConfigError, UnavailableError
from runtime.nats.client import NatsClient
from worker.changes.adapters import load_wanted
from worker.engines.base import EngineAssembly
from worker.engines.table import rows_of


class Adapters:
    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.folders: dict[str, str] = {}

    async def load(self, name: str, folder: str) -> None:
        if folder == "/sooner":  # another rank's worker had the server load it meanwhile
            self.names.append(name)
        if folder in ("/nowhere", "/sooner"):
            raise UnavailableError(f"{folder} cannot be loaded")
        self.names.append(name)
        self.folders[name] = folder

    async def unload(self, name: str) -> None:
        raise AssertionError("nothing is unloaded at a start")


def assembly(adapters: Adapters | None) -> EngineAssembly:
    return cast(EngineAssembly, SimpleNamespace(adapters=adapters, adapter_names=adapters.names if adapters else ()))


async def test_what_an_operator_changed_goes_before_the_configuration(nats: NatsClient) -> None:
    assert await changed_adapters(nats) == {}
    await keep_adapter(nats, "poem", "/adapters/poem")
    await keep_adapter(nats, "sql", UNLOADED)
    configured = {"sql": "/adapters/sql", "essay": "/nowhere", "mail": "/sooner", "there": "/elsewhere"}
    adapters = Adapters("there")
    told = await load_wanted(assembly(adapters), configured, nats)
    assert adapters.folders == {"poem": "/adapters/poem"}
    assert told == "no adapter essay: /nowhere cannot be loaded"
    assert await load_wanted(assembly(None), configured, nats) == ""


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        ({}, True),
        ({"model": "mock"}, True),
        ({"workers": {"decode": {"baton": 1, "vllm": 1}}}, True),
        ({"workers": {"engine": "vllm"}}, True),  # the folder is not there
        ({"workers": {"prefill": 0, "decode": 0}, "external_workers": [{"name": "a", "address": "http://a:1"}]}, False),
    ],
)
def test_adapters_that_a_worker_cannot_have_are_refused_by_name_before_anything_starts(
    data: dict[str, Any], refused: bool
) -> None:
    config = parse_config(data | {"adapters": {"sql": "/adapters/sql"}})
    where = []
    for row in rows_of(config):
        try:
            row.checked(config)
        except ConfigError as error:
            where.append(error.where)
    assert where == ["adapters.sql"] * len(where)
    assert bool(where) == refused
