import pytest

from runtime.address import format_address, parse_address


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


@pytest.mark.parametrize("text", ["", "host", "host:", "host:http", "host:-1", "host: 80", "host:٣", "::1", "::1:80"])
def test_a_text_without_a_port_or_with_a_bare_ipv6_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no HOST:PORT"):
        parse_address(text)


def test_a_port_that_no_socket_has_is_refused() -> None:
    with pytest.raises(ValueError, match="above 65535"):
        parse_address("host:65536")
