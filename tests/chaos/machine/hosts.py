"""Hosts that are none: network namespaces on one bridge, each with an address of its own, whose cable can be pulled."""

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.chaos.machine.slots import slot

FIRST_HOST = 10  # the last number of its address


@dataclass(frozen=True, slots=True)
class Host:
    """`variables`: what a process there has in its environment."""

    address: str = "127.0.0.1"
    variables: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def prefix(self) -> list[str]:
        """What stands before a command that is to run there."""
        return []

    def cable(self, state: str) -> None:
        """`up` or `down`."""
        raise NotImplementedError

    def lose(self, part: float) -> None:
        """Loses this share of what goes to the host and comes from it; 0: no longer."""
        raise NotImplementedError

    def delay(self, least_s: float, most_s: float) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class UsualHost(Host):
    """A host where programs begin with so few descriptors as on most systems, and may take more."""

    @property
    def prefix(self) -> list[str]:
        return ["prlimit", "--nofile=1024:", "--"]


@dataclass(frozen=True, slots=True)
class NamespaceHost(Host):
    namespace: str = ""

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace]

    def cable(self, state: str) -> None:
        _run("ip", "link", "set", _link(self.namespace), state)

    def lose(self, part: float) -> None:
        self._disturb("loss", f"{part:.0%}") if part else self._disturb()

    def delay(self, least_s: float, most_s: float) -> None:
        middle_ms, spread_ms = 500 * (least_s + most_s), 500 * (most_s - least_s)
        self._disturb("delay", f"{middle_ms:.0f}ms", f"{spread_ms:.0f}ms") if most_s else self._disturb()

    def _disturb(self, *netem: str) -> None:
        for at in ([], self.prefix):
            device = "eth0" if at else _link(self.namespace)
            _run(*at, "tc", "qdisc", "del", "dev", device, "root", check=False)
            if netem:
                _run(*at, "tc", "qdisc", "add", "dev", device, "root", "netem", *netem)


HERE = Host()


@functools.cache
def why_no_namespaces() -> str:
    """Empty when they can be made."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    try:
        with network(1):
            return ""
    except (OSError, subprocess.CalledProcessError):
        return "network namespaces cannot be made and connected here"


@functools.cache
def why_no_netem() -> str:
    if why := why_no_namespaces():
        return why
    try:
        with network(1) as (host,):
            host.delay(0.001, 0.001)
            return ""
    except (OSError, subprocess.CalledProcessError):
        return "this kernel has no netem (tc qdisc)"


@contextlib.contextmanager
def network(count: int) -> Iterator[list[NamespaceHost]]:
    """Hosts that reach each other and this machine."""
    number, bridge = slot(), f"batonchaos{slot()}"
    subnet = f"10.77.{number}"
    hosts = [
        NamespaceHost(f"{subnet}.{FIRST_HOST + index}", namespace=f"batonhost{number}-{index}")
        for index in range(count)
    ]
    _clear(hosts, bridge)
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{subnet}.1/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
            _run(*f"ip link add {_link(host.namespace)} type veth peer name eth0 netns {host.namespace}".split())
            _run("ip", "link", "set", _link(host.namespace), "master", bridge, "up")
            _run(*host.prefix, "ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _run(*host.prefix, "ip", "link", "set", device, "up")
        yield hosts
    finally:
        _clear(hosts, bridge)


def _clear(hosts: list[NamespaceHost], bridge: str) -> None:
    for host in hosts:
        _run("ip", "netns", "del", host.namespace, check=False)
        _run("ip", "link", "del", _link(host.namespace), check=False)
    _run("ip", "link", "del", bridge, check=False)


def _link(namespace: str) -> str:
    """Our end of its cable."""
    return namespace.replace("batonhost", "batonlink")


def _run(*command: str, check: bool = True) -> int:
    return subprocess.run(command, check=check, capture_output=True).returncode
