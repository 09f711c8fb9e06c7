"""Which host others connect to."""

import pytest

from runtime.config.serving import parse_config
from runtime.errors import ConfigError
from runtime.processes.reached_at import reached_at, with_announced_workers


@pytest.mark.parametrize(
    ("host", "nats_url", "reached"),
    [
        ("10.0.0.7", "nats://127.0.0.1:4222", "10.0.0.7"),
        ("node-1", "nats://127.0.0.1:4222", "node-1"),
        ("0.0.0.0", "nats://127.0.0.1:4222", "127.0.0.1"),
        ("0.0.0.0", "tls://me:mine@localhost", "127.0.0.1"),
    ],
)
def test_behind_a_wildcard_it_is_the_address_on_the_way_to_nats(host: str, nats_url: str, reached: str) -> None:
    assert reached_at(host, nats_url, "workers.announce") == reached


def test_where_no_address_leads_to_nats_the_key_is_named_that_says_it() -> None:
    problem = (
        r"workers\.announce: :: is every address of this machine, and none .* NATS at 127\.0\.0\.1 \(.*\): set the"
    )
    with pytest.raises(ConfigError, match=problem):
        reached_at("::", "nats://127.0.0.1:4222", "workers.announce")


def test_what_is_configured_is_announced() -> None:
    told = {"workers": {"host": "::", "announce": "node-1"}, "nats": {"url": "nats://127.0.0.1:4222"}}
    assert with_announced_workers(parse_config(told)).workers.reached_at == "node-1"


@pytest.mark.parametrize("announce", ["0.0.0.0", "::", "node-1:8000", "http://node-1"])
def test_what_nobody_can_connect_to_is_refused(announce: str) -> None:
    with pytest.raises(ConfigError, match=r"announce: .* is no host that others can connect to"):
        parse_config({"workers": {"announce": announce}})
