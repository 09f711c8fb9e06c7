import pytest

from runtime.address import format_address, is_host, is_wildcard, parse_address, with_host


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        ("127.0.0.1", 8000, "127.0.0.1:8000"),
        ("node-7.cluster", 0, "node-7.cluster:0"),
        ("::1", 65535, "[::1]:65535"),
        ("2001:db8::7", 1, "[2001:db8::7]:1"),
        ("", 80, ":80"),
    ],
)
def test_what_is_written_is_what_is_read(host: str, port: int, text: str) -> None:
    assert format_address(host, port) == text
    assert parse_address(text) == (host, port)


def test_brackets_are_not_doubled() -> None:
    assert format_address("[::1]", 80) == "[::1]:80"


def test_another_host_has_the_same_port() -> None:
    assert with_host("0.0.0.0:7", "node-1") == "node-1:7"
    assert with_host("[::]:7", "fd00::2") == "[fd00::2]:7"


@pytest.mark.parametrize("text", ["node-7.cluster", "10.0.0.7", "fd00::2", "localhost", "0.0.0.0", "::"])
def test_names_and_addresses_are_hosts(text: str) -> None:
    assert is_host(text)
    assert is_wildcard(text) == (text in ("0.0.0.0", "::"))


@pytest.mark.parametrize("text", ["", "10.0.0.7:80", "[fd00::2]", "node:80", "http://node", "a b", "-node"])
def test_what_has_a_port_a_scheme_or_brackets_is_no_host(text: str) -> None:
    assert not is_host(text)


@pytest.mark.parametrize("text", ["", "host", "host:", "host:http", "host:-1", "host: 80", "host:٣", "::1", "::1:80"])
def test_a_text_without_a_port_or_with_a_bare_ipv6_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no HOST:PORT"):
        parse_address(text)


def test_a_port_that_no_socket_has_is_refused() -> None:
    with pytest.raises(ValueError, match="above 65535"):
        parse_address("host:65536")
