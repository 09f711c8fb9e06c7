"""Several games at the same time, each a process with a seed, a folder and a first scenario of its own."""

import argparse
import json
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.judging.tally import Tally, summed

MARK = "BATON_CHAOS_RUN"  # a variable of every process of a run
GRACE_MINUTES = 3.0  # from the last round's beginning to a game's own end
ENDING_S = 45.0  # from a game's limit until it is killed


@dataclass(frozen=True, slots=True)
class Job:
    seed: int
    process: "subprocess.Popen[bytes]"
    record: Path
    said: Path

    def results(self) -> dict[str, Any]:
        """What it has found. A game that came to no end has failed, and what it had found until then counts."""
        found = json.loads(self.record.read_text())["results"] if self.record.exists() else Tally().results()
        if self.process.returncode not in (0, 1) or not self.record.exists():
            problem = f"seed {self.seed}: tests/chaos itself ended with {self.process.returncode}; see {self.said}"
            found["failures"].append(problem)
        return found


def play_jobs(arguments: argparse.Namespace, names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Returns when all games and all that they had started have ended."""
    mark = secrets.token_hex(8)
    limit_minutes = limit_minutes_of(arguments)
    end_s = time.monotonic() + limit_minutes * 60 + ENDING_S
    with ExitStack() as open_files:
        jobs = [
            _start(arguments, arguments.seed + number, _rotated(names, number), folder, mark, limit_minutes, open_files)
            for number in range(arguments.jobs)
        ]
    for job in jobs:
        try:
            job.process.wait(None if math.isinf(end_s) else max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()
    results = summed(job.results() for job in jobs)
    for process in _marked(mark):
        results["failures"].append(f"a process is left: {' '.join(process.cmdline())}")
        process.kill()
    return results


def limit_minutes_of(arguments: argparse.Namespace) -> float:
    """How long until a game is ended, whatever runs. Infinite when it was asked for rounds alone."""
    if arguments.limit_minutes is None:
        return math.inf if arguments.minutes is None else float(arguments.minutes + GRACE_MINUTES)
    return float(arguments.limit_minutes)


def _start(
    arguments: argparse.Namespace,
    seed: int,
    names: Sequence[str],
    folder: Path,
    mark: str,
    limit_minutes: float,
    open_files: ExitStack,
) -> Job:
    own = folder / f"seed-{seed}"
    own.mkdir(parents=True, exist_ok=True)
    record, said = own / "record.json", own / "said.txt"
    command = [sys.executable, "-m", "tests.chaos", "--seed", str(seed), "--json", str(record), "--folder", str(own)]
    command += ["--device", arguments.device, "--limit-minutes", str(limit_minutes)]
    for flag in ("minutes", "rounds", "round"):
        command += [] if getattr(arguments, flag) is None else [f"--{flag}", str(getattr(arguments, flag))]
    for flag, values in (("scenario", names), ("without", arguments.without)):
        for value in values:
            command += [f"--{flag}", value]
    output = open_files.enter_context(said.open("wb"))
    environment = {**os.environ, MARK: mark}
    process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    return Job(seed, process, record, said)


def _rotated(names: Sequence[str], by: int) -> list[str]:
    """Games begin with different scenarios, for a short run to play them all."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def _marked(mark: str) -> Iterator[psutil.Process]:
    """The processes of a run that live."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            pass
