"""Verbs on real child processes that the tests of the whole planner do not reach."""

import pytest

from planner.connector import ConnectorError
from planner.local_connector import LocalConnector
from tests.service import running_service

FAST = {"mock": {"speed_up": 100.0}, "workers": {"per_process": 1}}


async def test_a_worker_sleeps_and_wakes_and_is_used_again() -> None:
    async with running_service("mock", 0, 2, FAST) as service:
        connector = LocalConnector(service.supervisor)

        async def states() -> dict[str, str]:
            return {worker.worker_id: worker.state for worker in (await service.client.status(5)).workers}

        await connector.sleep("decode-2")
        await connector.sleep("decode-2")
        await service.client.sleep("decode-2")
        await connector.wake("decode-2")
        assert await states() == {"decode-1": "ready", "decode-2": "ready"}
        with pytest.raises(ConnectorError, match="decode-9"):
            await connector.wake("decode-9")
        await connector.close()
