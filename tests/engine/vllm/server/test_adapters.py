"""What a server says of its adapters, and what it is asked to change."""

import pytest

from engine.vllm.server.server import VllmServer
from engine.vllm.server.watch import ServerWatch
from runtime.errors import UnavailableError
from tests.engine.vllm.server.imitation import Imitation
from tests.engine.vllm.server.test_agreement import nothing


async def test_adapters_are_those_that_the_server_names_now() -> None:
    imitation = Imitation(nothing)
    imitation.models = {"data": [{"id": "m"}, {"id": "sql", "parent": "m"}, {"id": "also m", "parent": None}]}
    async with imitation.serving(), VllmServer(imitation.worker) as server, ServerWatch(server) as watch:
        await watch.look()
        adapters = watch.adapters
        assert adapters.names == ["sql"]
        await adapters.load("poem", "/adapters/poem")
        assert adapters.names == ["sql", "poem"]
        await adapters.unload("sql")
        assert adapters.names == ["poem"]
        with pytest.raises(UnavailableError, match="the server does not unload sql: cannot be found"):
            await adapters.unload("sql")
        imitation.models = {"data": [{"id": "m"}]}  # somebody else has unloaded it
        await watch.look()
        assert adapters.names == []
