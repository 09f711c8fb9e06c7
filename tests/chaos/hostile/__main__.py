"""`python -m tests.chaos.hostile ATTACK WHO HTTP GRPC`: attacks until SIGTERM, and says what came of it, as JSON. The
variable KEY has a user's key. It takes little of the machine that the service runs on."""

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import sys

from runtime.address import parse_address
from tests.chaos.hostile.attacks import BY_NAME
from tests.chaos.hostile.stranger import COUNTED, Stranger, Who

MOST_MEMORY = 2 << 30
MOST_CPU_S = 120
DESCRIPTORS = 4096
NICE = 5
READY = b"attacking\n"


def main(attack: str, who: Who, http: str, grpc: str) -> None:
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(DESCRIPTORS, most), most))
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of what is written to who has closed
    stranger = Stranger(who, os.environ.get("KEY", ""), parse_address(http), parse_address(grpc))
    asyncio.run(attacked(attack, stranger))


async def attacked(attack: str, stranger: Stranger) -> None:
    work = asyncio.ensure_future(BY_NAME[attack].work(stranger))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    await asyncio.sleep(0.1)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    print(json.dumps(COUNTED), flush=True)
    os._exit(0)  # a thousand connections need not end in order


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
