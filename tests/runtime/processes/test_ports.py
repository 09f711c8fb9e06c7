import socket

import pytest

from runtime.config.serving import RouterConfig
from runtime.errors import ConfigError
from runtime.processes.ports import check_router_ports


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
