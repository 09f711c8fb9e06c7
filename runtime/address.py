"""HOST:PORT as text. An IPv6 host stands in brackets: `[::1]:8000`."""

import ipaddress
import re

MAX_PORT = 65535
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")


def format_address(host: str, port: int) -> str:
    """`host` may have its brackets already."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def parse_address(text: str) -> tuple[str, int]:
    """The host, without brackets, and the port. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not (port.isascii() and port.isdecimal()) or (":" in host and not bracketed):
        raise ValueError(f"{text!r} is no HOST:PORT; an IPv6 host stands in brackets")
    if int(port) > MAX_PORT:
        raise ValueError(f"{text!r} has a port above {MAX_PORT}")
    return host[1:-1] if bracketed else host, int(port)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_host(text: str) -> bool:
    """Whether it is an IP address, without brackets, or may be a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _NAME.fullmatch(text) is not None
    return True


def is_wildcard(host: str) -> bool:
    """Whether who listens there listens on every address of the machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def with_host(address: str, host: str) -> str:
    """The same port of another host. `address`: HOST:PORT."""
    return format_address(host, parse_address(address)[1])


def is_address(host: str) -> bool:
    """Whether `host` is an IP address, and no name that somebody has to look up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True
