"""Ports that are taken, found before anything that takes long is started."""

import errno
import os
import random
import socket
from pathlib import Path

from runtime.address import format_address
from runtime.config.serving import RouterConfig
from runtime.errors import ConfigError

FIRST_PORT = 20_000  # of those given to processes that must be told theirs: Ray has those below for its workers
TRIES = 100
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")

_given: set[int] = set()  # by this process, whether they have been bound yet or not


def try_to_listen(host: str, port: int = 0, *, shared: bool = False) -> None:
    """Binds once; port 0 is a free one. `shared`: others of this user who share the port, too, may have it. Raises
    OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        listener.bind(address)


def free_port(host: str, in_a_row: int = 1) -> int:
    """The first of `in_a_row` ports that nobody has; for a process that must be told its port before it starts. None
    is one that the kernel gives to whoever asks for any, because another process could have it by then. Raises
    OSError."""
    first, last = map(int, EPHEMERAL_PORTS.read_text().split()) if EPHEMERAL_PORTS.exists() else (32_768, 65_535)
    allowed = range(FIRST_PORT, first) or range(last + 1, 65_536) or range(FIRST_PORT, 65_536)
    problem = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    for port in random.sample(allowed[: len(allowed) - in_a_row + 1], TRIES):
        row = range(port, port + in_a_row)
        if _given.isdisjoint(row):
            try:
                for one in row:
                    try_to_listen(host, one)
            except OSError as error:
                problem = error
            else:
                _given.update(row)
                return port
    raise problem


def check_router_ports(config: RouterConfig, *, shared: bool = False) -> None:
    """`shared`: other routers of the service may have them. Raises ConfigError naming the key of the port, or of the
    host, that cannot be listened on."""
    for field, port in (("router.http_port", config.http_port), ("router.grpc_port", config.grpc_port)):
        try:
            try_to_listen(config.host, port, shared=shared)
        except OSError as error:
            taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            remedy = "; choose another port, or 0 for a free one" if taken else ""
            problem = f"cannot listen on {format_address(config.host, port)}: {error.strerror or error}{remedy}"
            raise ConfigError(field if taken else "router.host", problem) from error
