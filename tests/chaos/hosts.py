"""Hosts that are none: network namespaces on one bridge, each with an address of its own, whose cable can be pulled."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

BRIDGE = "batonchaos"
SUBNET = "10.77.213"


@dataclass(frozen=True, slots=True)
class Host:
    """`namespace`: empty for this machine itself."""

    address: str = "127.0.0.1"
    namespace: str = ""

    @property
    def prefix(self) -> list[str]:
        """What stands before a command that is to run there."""
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []

    def cable(self, state: str) -> None:
        """`up` or `down`."""
        _run("ip", "link", "set", _link(self.namespace), state)

    def disturb(self, *netem: str) -> None:
        """Loses or delays what goes to this host and what comes from it; nothing: no longer."""
        for at in ([], self.prefix):
            device = "eth0" if at else _link(self.namespace)
            _run(*at, "tc", "qdisc", "del", "dev", device, "root", check=False)
            if netem:
                _run(*at, "tc", "qdisc", "add", "dev", device, "root", "netem", *netem)


HERE = Host()


def why_no_namespaces() -> str:
    """Empty when they can be made."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    if _run("ip", "netns", "add", "batonprobe", check=False):
        return "this kernel has no network namespaces"
    _run("ip", "netns", "del", "batonprobe")
    return ""


def why_no_netem() -> str:
    if why := why_no_namespaces():
        return why
    _run("ip", "netns", "add", "batonprobe")
    try:
        probe = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        failed = _run("ip", "netns", "exec", "batonprobe", *probe, check=False)
        return "this kernel has no netem (tc qdisc)" if failed else ""
    finally:
        _run("ip", "netns", "del", "batonprobe")


@contextlib.contextmanager
def network(count: int) -> Iterator[list[Host]]:
    """Hosts that reach each other and this machine. One at most: this machine."""
    if count <= 1:
        yield [HERE]
        return
    hosts = [Host(f"{SUBNET}.{10 + number}", f"batonhost{number}") for number in range(count)]
    _clear(hosts)
    try:
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "addr", "add", f"{SUBNET}.1/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
            _run(*f"ip link add {_link(host.namespace)} type veth peer name eth0 netns {host.namespace}".split())
            _run("ip", "link", "set", _link(host.namespace), "master", BRIDGE, "up")
            _run(*host.prefix, "ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _run(*host.prefix, "ip", "link", "set", device, "up")
        yield hosts
    finally:
        _clear(hosts)


def _clear(hosts: list[Host]) -> None:
    for host in hosts:
        _run("ip", "netns", "del", host.namespace, check=False)
        _run("ip", "link", "del", _link(host.namespace), check=False)
    _run("ip", "link", "del", BRIDGE, check=False)


def _link(namespace: str) -> str:
    """Our end of its cable."""
    return namespace.replace("batonhost", "batonlink")


def _run(*command: str, check: bool = True) -> int:
    return subprocess.run(command, check=check, capture_output=True).returncode
