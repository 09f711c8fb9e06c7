import socket
from pathlib import Path

import pytest

from runtime.config.serving import RouterConfig
from runtime.errors import ConfigError
from runtime.processes import ports
from runtime.processes.ports import check_router_ports, free_port


def test_a_port_that_is_taken_is_named_with_its_key_and_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        problem = (
            rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use; choose another port, or 0 for a free one"
        )
        with pytest.raises(ConfigError, match=rf"router\.http_port: {problem}"):
            check_router_ports(RouterConfig(http_port=port, grpc_port=0))
        with pytest.raises(ConfigError, match=rf"router\.grpc_port: {problem}"):
            check_router_ports(RouterConfig(http_port=0, grpc_port=port))
    check_router_ports(RouterConfig(http_port=port, grpc_port=0))
    check_router_ports(RouterConfig(http_port=0, grpc_port=0))


def test_a_host_that_is_not_of_this_machine_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match=r"router\.host: cannot listen on 203\.0\.113\.1:0"):
        check_router_ports(RouterConfig(host="203.0.113.1", http_port=0, grpc_port=0))


@pytest.mark.parametrize("ephemeral", ["32768 60999", "1024 60999", "1024 65535"])
def test_a_port_for_later_is_none_that_others_are_given_by_the_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ephemeral: str
) -> None:
    monkeypatch.setattr(ports, "EPHEMERAL_PORTS", tmp_path / "range")
    ports.EPHEMERAL_PORTS.write_text(ephemeral)
    first, last = map(int, ephemeral.split())
    given = [one for port in (free_port("127.0.0.1", in_a_row=3) for _ in range(50)) for one in range(port, port + 3)]
    assert len(set(given)) == len(given)
    if (first, last) != (1024, 65535):
        assert not [port for port in given if first <= port <= last]


def test_a_host_of_another_machine_has_no_port_for_later() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        free_port("203.0.113.1")
