"""HOST:PORT as text. An IPv6 host stands in brackets: `[::1]:8000`."""

import ipaddress

MAX_PORT = 65535


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


def is_address(host: str) -> bool:
    """Whether `host` is an IP address, and no name that somebody has to look up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True
