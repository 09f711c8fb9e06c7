"""Images by address, over HTTP, from the hosts that an operator names and from nowhere else.

Invariant: of a host that is not named outright no address is connected to that is not public. Each socket is checked as
it is made, so that neither what a name resolves to nor a redirect gets past it.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from errno import EACCES
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from router.requests.body_budget import Hold
from runtime.errors import InvalidRequestError, shown

AT_ONCE: Final = 64  # images on their way to this router
MAX_REDIRECTS: Final = 3
REDIRECTS: Final = (301, 302, 303, 307, 308)
USUAL_PORTS: Final = (80, 443)
AS_IT_IS: Final = {"Accept-Encoding": "identity", "Accept": "image/*", "User-Agent": "baton"}
TYPE: Final = re.compile(r"image/[\w.+-]+")
WAY_OUT: Final = "send the image as a data URL"
GLOBAL_UNICAST: Final = ipaddress.ip_network("2000::/3")


class ImageFetcher:
    """Use it as a context. Event loop only."""

    def __init__(self, hosts: Sequence[str], max_bytes: int) -> None:
        """`hosts`: as router.image_hosts has them; `max_bytes`: of an image, router.max_body_bytes."""
        named = [urlsplit(f"//{host}") for host in hosts]
        self._hosts = [(one.hostname or "", USUAL_PORTS if one.port is None else (one.port,)) for one in named]
        self._max_bytes = max_bytes
        self._places = asyncio.Semaphore(AT_ONCE)
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by whether the host is named outright

    async def __aenter__(self) -> Self:
        self._sessions = {True: _session(None), False: _session(_public_socket)}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions.values():
            await session.close()

    async def fetch(self, where: str, address: str, held: Hold) -> tuple[str, bytes]:
        """(content type, bytes). `held` grows by twice as many. Raises InvalidRequestError, UnavailableError."""
        try:
            async with self._places:
                return await self._followed(where, URL(address), held)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise InvalidRequestError(where, f"cannot be fetched: {shown(str(error))}; {WAY_OUT}") from error

    async def _followed(self, where: str, url: URL, held: Hold) -> tuple[str, bytes]:
        for _ in range(1 + MAX_REDIRECTS):
            async with self._session(where, url).get(url, allow_redirects=False) as answer:
                if answer.status not in REDIRECTS:
                    return await self._read(where, answer, held)
                to = url.join(URL(answer.headers.get("location", "")))
            if to.host != url.host:
                raise InvalidRequestError(where, f"is redirected to another host, {shown(to.host)}: give its address")
            url = to
        raise InvalidRequestError(where, f"is redirected more than {MAX_REDIRECTS} times: {WAY_OUT}")

    def _session(self, where: str, url: URL) -> aiohttp.ClientSession:
        """Raises InvalidRequestError for a host that is not named."""
        host = url.host or ""
        fitting = [name for name, ports in self._hosts if _fits(name, host) and url.port in ports]
        if url.scheme not in ("http", "https") or url.user is not None or not fitting:
            problem = f"is at {shown(f'{host}:{url.port}')}, which router.image_hosts does not name: add it there, or"
            raise InvalidRequestError(where, f"{problem} {WAY_OUT}")
        return self._sessions[host in fitting]

    async def _read(self, where: str, answer: aiohttp.ClientResponse, held: Hold) -> tuple[str, bytes]:
        kind, coding = answer.content_type, answer.headers.get("content-encoding", "identity")
        if answer.status != 200:
            raise InvalidRequestError(where, f"cannot be fetched: its server answers {answer.status}; {WAY_OUT}")
        if coding != "identity" or not TYPE.fullmatch(kind):
            problem = f"must be sent as image/TYPE and not compressed, and comes as {shown(kind)}, {shown(coding)}"
            raise InvalidRequestError(where, f"{problem}; {WAY_OUT}")
        data = bytearray()
        self._check_size(where, answer.content_length or 0)
        async for part in answer.content.iter_any():
            self._check_size(where, len(data) + len(part))
            held.grow(2 * len(part))
            data += part
        return kind, bytes(data)

    def _check_size(self, where: str, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            limit = f"the {self._max_bytes} bytes of router.max_body_bytes"
            raise InvalidRequestError(where, f"is an image of more than {limit}: raise it, or send a smaller one")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet. IPv6 addresses that stand for IPv4 ones are not."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        return ip in GLOBAL_UNICAST and ip.is_global and ip.sixtofour is None and ip.teredo is None
    return ip.is_global and not ip.is_multicast


def _fits(name: str, host: str) -> bool:
    return name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:]))


def _session(make_socket: Any) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, force_close=True, use_dns_cache=False, socket_factory=make_socket)
    return aiohttp.ClientSession(
        connector=connector,
        headers=AS_IT_IS,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(),
    )


def _public_socket(info: Any) -> socket.socket:
    family, kind, protocol, _, address = info
    if not is_public(address[0]):
        raise PermissionError(EACCES, "not a public address, so router.image_hosts must name the host itself")
    return socket.socket(family, kind, protocol)
