"""Who listens on the wire between the processes of a service learns nothing: a listener that hears every packet, in a
network namespace where everything is bound beyond the loopback interface."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECRETS = ["prompt", "tokens", "workers", "nats login", "metrics"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("mode", "heard"), [("off", SECRETS), ("auto", []), ("on", [])], ids=["without TLS", "by itself", "on"]
)
def test_a_listener_on_the_wire_learns_prompts_tokens_and_logins_only_without_tls(mode: str, heard: list[str]) -> None:
    assert overheard(mode)["heard"] == heard


def overheard(mode: str) -> dict[str, Any]:
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode != 0:
        pytest.skip("a network namespace of its own wants root")
    command = ["unshare", "--net", sys.executable, "-m", "tests.spine.overheard", mode]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said
