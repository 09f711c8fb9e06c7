"""The host that others connect to, where a process listens on all addresses of its machine."""

import ipaddress
import socket
from urllib.parse import urlsplit

import msgspec

from runtime.address import is_wildcard
from runtime.config.serving import ServingConfig
from runtime.errors import ConfigError
from runtime.security.nats_login import split_url

ANY_PORT = 9  # nothing is sent there


def with_announced_workers(config: ServingConfig) -> ServingConfig:
    """Fills in `workers.announce`. `nats.url` is set. Raises ConfigError."""
    workers = config.workers
    if workers.announce is not None:
        return config
    host = reached_at(workers.host, config.nats.url or "", "workers.announce")
    return msgspec.structs.replace(config, workers=msgspec.structs.replace(workers, announce=host))


def reached_at(host: str, nats_url: str, key: str) -> str:
    """`host`, unless that is a wildcard: then this machine's address on its way to NATS, where all its peers are. No
    packet is sent. Raises ConfigError, which asks for `key`."""
    if not is_wildcard(host):
        return host
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    nats_host = urlsplit(split_url(nats_url)[0]).hostname
    try:
        *_, address = socket.getaddrinfo(nats_host, ANY_PORT, family, socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        problem = f"{host} is every address of this machine, and none of them leads to NATS at {nats_host}"
        raise ConfigError(key, f"{problem} ({error.strerror or error}): set the host that others connect to") from error
