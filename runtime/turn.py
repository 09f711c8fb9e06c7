"""A caller who waits for its turn in a FairQueue, where turns are counted. Event loop only."""

import asyncio


class Turn:
    priority = 0
    tokens = 1

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.come: asyncio.Future[None] = asyncio.get_running_loop().create_future()
