import time

from runtime.discovery.worker_key import new_incarnation


def test_every_start_has_a_higher_incarnation() -> None:
    first = new_incarnation()
    time.sleep(2e-6)  # far less than a process takes to start
    assert first < new_incarnation() < 2**63
