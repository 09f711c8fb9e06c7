"""Tells systemd how the service is where a unit of `Type=notify` has started it. Source: sd_notify(3)."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, MutableMapping

ADDRESS, LIMIT = "NOTIFY_SOCKET", "WATCHDOG_USEC"


class Systemd:
    """Does nothing elsewhere. `environ` loses the variables, so that no child takes itself for the service."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        address = environ.pop(ADDRESS, "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_s = int(environ.pop(LIMIT, 0)) / 1e6

    def hear(self, line: str, event: str) -> None:
        """Hears what happens to the service."""
        if event == "serving":
            self._tell("READY=1", f"STATUS={line}")
        elif event == "draining":
            self._tell("STOPPING=1", f"STATUS={line}")

    async def watch(self, answers: Callable[[float], Awaitable[bool]]) -> None:
        """Says again and again that the service lives while it answers within a third of the watchdog's time; it is
        asked as often. Never returns."""
        while self._watchdog_s:
            wait_s = self._watchdog_s / 3
            if await answers(wait_s):
                self._tell("WATCHDOG=1")
            await asyncio.sleep(wait_s)
        await asyncio.get_running_loop().create_future()

    def _tell(self, *lines: str) -> None:
        if self._address:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto("\n".join(lines).encode(), self._address)
