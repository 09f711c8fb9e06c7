"""Two workers with one name: the later one is used, status says so, and when it goes the earlier one serves again."""

import asyncio
import signal

import pytest

from baton.service.children import Children
from baton.service.launches import Launches
from runtime.security.keys import handed_on
from tests.service import Service, running_service
from tests.spine.prompts import ask

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_the_survivor_is_given_back_and_no_router_is_restarted(how: signal.Signals) -> None:
    async with running_service("mock", 0, 1, workers={"per_process": 1}) as service:
        first = service.supervisor.ready["decode-1"].addresses["rpc"]
        launches = Launches(service.config, handed_on(service.supervisor.keys, {}), Children())
        later = service.supervisor.launcher.process(launches.worker("decode", "decode-1"))
        await later.start()
        try:
            second = (await later.wait_ready(60)).addresses["rpc"]
            same = f"announced twice: the process {service.pid('decode-1')} at {first} has the same name"
            await until_listed(service, second, same)
            assert len((await ask(service.client, [5] * 40, 4)).token_ids) == 4
        finally:
            later.send_signal(how)
            await later.wait()
        await until_listed(service, first, "")
        assert len((await ask(service.client, [5] * 40, 4)).token_ids) == 4


async def until_listed(service: Service, address: str, note: str) -> None:
    """Waits until status lists the worker at this address, with this note alone."""
    async with asyncio.timeout(60):
        while True:
            (worker,) = (await service.client.status(60)).workers
            if worker.address == address and (note in worker.note if note else not worker.note):
                return
            await asyncio.sleep(0.02)
