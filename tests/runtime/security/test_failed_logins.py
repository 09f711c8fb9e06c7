"""What wrong keys cost who shows them, and what is said of it."""

from structlog.testing import capture_logs

from runtime.security.failed_logins import ADDRESSES_LOGGED, DELAY_S, FREE, FailedLogins


def test_wrong_keys_are_counted_slowed_and_logged_once_a_minute_for_an_address() -> None:
    now_s = 0.0
    logins = FailedLogins(lambda: now_s)
    with capture_logs() as lines:
        delays = [logins.failed("http", "API key", "10.0.0.1") for _ in range(FREE + 2)]
        assert delays == [0.0] * FREE + [DELAY_S] * 2
        assert logins.failed("grpc", "operator key", "10.0.0.2") == 0.0, "who comes from elsewhere does not wait"
        now_s = 61.0
        assert logins.failed("http", "API key", "10.0.0.1") == 0.0
    assert +logins.counts == {("http", "API key"): FREE + 3, ("grpc", "operator key"): 1}
    assert [(line["address"], line["more_in_the_minute_before"]) for line in lines] == [
        ("10.0.0.1", 0),
        ("10.0.0.2", 0),
        ("10.0.0.1", FREE + 1),
    ]


def test_addresses_of_one_network_are_one_and_all_together_write_few_lines() -> None:
    logins = FailedLogins(lambda: 0.0)
    with capture_logs() as lines:
        delays = [logins.failed("http", "API key", f"2001:db8::{number:x}") for number in range(FREE + 1)]
        for number in range(1000):
            logins.failed("http", "API key", f"10.0.{number // 250}.{number % 250}")
    assert delays[-1] == DELAY_S
    assert len(lines) == ADDRESSES_LOGGED
    assert lines[0]["address"] == "2001:db8::/64"
