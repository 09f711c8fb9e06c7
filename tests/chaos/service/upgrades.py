"""`baton rollout`, asked of a service while faults strike it: to other settings, and back."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.chaos.service.member import ROOT

LIMIT_S = 240.0  # several processes start one after the other, each in up to a minute, on cores that others use too
SETTINGS = ("engine.max_running=32", "router.queue_limit=1000")  # one of all workers, one of all routers


@dataclass(frozen=True, slots=True)
class RollOut:
    """What the command has said. `code`: None when it did not end."""

    code: int | None
    events: list[dict[str, Any]]
    errors: str

    @property
    def done(self) -> bool:
        return any(event["event"] == "rolled_out" for event in self.events)

    @property
    def planned(self) -> set[str]:
        """The processes that were to be replaced, and words for new ones."""
        return {row["process"] for event in self.events if event["event"] == "plan" for row in event["rows"]}

    def problem(self, may_fail: bool) -> str:
        """What is wrong with it, in words; empty when nothing is. It may fail with a sentence where faults struck."""
        if self.code is None:
            return f"baton rollout did not end within {LIMIT_S:.0f} s"
        if self.code == 0:
            return (
                ""
                if self.done or not self.planned
                else f"baton rollout ended with 0 and heard of no end: {self.events}"
            )
        sentence = self.errors.splitlines()[-1] if self.errors else ""
        if may_fail and sentence.startswith("error: ") and "Traceback" not in self.errors:
            return ""
        return f"baton rollout ended with {self.code}: {self.errors[-400:]!r}"


async def roll_out(url: str, back: bool, variables: Mapping[str, str]) -> RollOut:
    """`url`: of the service's NATS. `variables`: the keys, and what else its environment has beside ours."""
    what = ["--back"] if back else [part for setting in SETTINGS for part in ("--set", setting)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton", "rollout", "--json", "--nats-url", url, *what),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "proto"), *sys.path)), **variables},
    )
    try:
        said, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
    except TimeoutError:
        return RollOut(None, [], "")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return RollOut(process.returncode, [json.loads(line) for line in said.splitlines()], errors.decode().strip())
