"""Ports that are taken, found before anything that takes long is started."""

import errno
import socket

from runtime.address import format_address
from runtime.config.serving import RouterConfig
from runtime.errors import ConfigError


def try_to_listen(host: str, port: int = 0, *, shared: bool = False) -> None:
    """Binds once; port 0 is a free one. `shared`: others of this user who share the port, too, may have it. Raises
    OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        listener.bind(address)


def free_port(host: str) -> int:
    """A port that nobody has; for a process that must be told its port before it starts."""
    with socket.socket(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


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
