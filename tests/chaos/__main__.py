"""`python -m tests.chaos --seed 1 --minutes 5`: plays rounds, prints a table, exits with 1 when anything was wrong."""

import argparse
import asyncio
import contextlib
import json
import math
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.faults import BY_NAME
from tests.chaos.jobs import GRACE_MINUTES, limit_minutes_of, play_jobs
from tests.chaos.judging.tally import Tally, table
from tests.chaos.rounds import Game
from tests.chaos.service import scenarios
from tests.chaos.service.scenarios import SCENARIOS, Device, why_not

AGAIN_S = 15.0


def main() -> None:
    arguments = parse_arguments()
    names, left_out = chosen(arguments.scenario, arguments.engine, arguments.device)
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="baton-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    what = f"seeds {arguments.seed} to {arguments.seed + arguments.jobs - 1}" if arguments.jobs > 1 else arguments.seed
    print(f"seed {what}, scenarios {', '.join(names)}; logs in {folder}", flush=True)
    if arguments.jobs > 1:
        results = play_jobs(arguments, names, folder)
    else:
        results = asyncio.run(play(arguments, names, left_out, folder))
    if arguments.json:
        from benchmarks.machine import describe, write_result  # torch, which a round does not need

        settings = settings_of(arguments, names)
        write_result(arguments.json, {"benchmark": "chaos", **describe(), "settings": settings, "results": results})
    show(results)
    sys.exit(1 if results["failures"] else 0)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="no round begins later; 1 without --rounds")
    parser.add_argument(
        "--limit-minutes", type=float, help=f"the end, whatever runs; --minutes and {GRACE_MINUTES:g} more by default"
    )
    parser.add_argument("--rounds", type=int, help="so many rounds, and none after --minutes where that is given too")
    parser.add_argument(
        "--round", type=int, help="the first round, such as one that has failed; it alone without --rounds"
    )
    parser.add_argument("--jobs", type=int, default=1, help="games at the same time, with this seed and those after it")
    parser.add_argument("--scenario", action="append", choices=[one.name for one in SCENARIOS], help="may be repeated")
    parser.add_argument(
        "--without", action="append", default=[], choices=list(BY_NAME), help="a fault; may be repeated"
    )
    parser.add_argument(
        "--fault", action="append", default=[], choices=list(BY_NAME), help="only these; may be repeated"
    )
    parser.add_argument("--engine", choices=["tiny", "mock", "vllm"], help="scenarios of this engine alone")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of all workers that compute")
    parser.add_argument("--folder", help="for configuration and logs; a new one in /tmp by default")
    parser.add_argument("--json", type=Path, help="where to write the record of the run")
    arguments = parser.parse_args(argv)
    if arguments.minutes is None and arguments.rounds is None and arguments.round is None:
        arguments.minutes = 1.0
    if arguments.fault:
        arguments.without += [name for name in BY_NAME if name not in arguments.fault]
    return arguments


def chosen(names: list[str] | None, engine: str | None, device: Device) -> tuple[tuple[str, ...], dict[str, str]]:
    """Scenarios that can run here, in the order in which they were named, and why each other one cannot. Exits when
    none can."""
    asked = [scenarios.BY_NAME[name] for name in names] if names else list(SCENARIOS)
    if engine or not names:  # those with vLLM take minutes to start, so they are played where they are asked for
        asked = [one for one in asked if one.engine == engine or (not engine and one.engine != "vllm")]
    why = {f"scenario {one.name}": why_not(one, device) for one in asked}
    able = tuple(one.name for one in asked if not why[f"scenario {one.name}"])
    left_out = {name: said for name, said in why.items() if said}
    return able or sys.exit(f"no scenario is left: {left_out}"), left_out


async def play(
    arguments: argparse.Namespace, names: tuple[str, ...], left_out: dict[str, str], folder: Path
) -> dict[str, Any]:
    """One game, in this process. It ends at the limit, and at SIGTERM, with what it has found until then."""
    first = arguments.round or 0
    count = arguments.rounds or (None if arguments.round is None else 1)
    end_s = time.monotonic() + (math.inf if arguments.minutes is None else arguments.minutes * 60)

    def go_on(number: int) -> bool:
        return time.monotonic() < end_s and (count is None or number < first + count)

    def note(tally: Tally) -> None:
        if arguments.json:
            record = {"settings": settings_of(arguments, names), "results": tally.results()}
            arguments.json.write_text(json.dumps(record))

    def tell(line: str) -> None:
        print(line, flush=True)

    without = tuple(arguments.without)
    game = Game(arguments.seed, names, folder, go_on, tell, first, without, note, arguments.device)
    game.tally.skipped |= left_out
    playing = asyncio.ensure_future(game.play())
    loop = asyncio.get_running_loop()

    def end() -> None:
        """Again after a while, because asyncio.wait_for of Python 3.11 may swallow it, and an end may hang."""
        playing.cancel()
        loop.call_later(AGAIN_S, end)

    loop.add_signal_handler(signal.SIGTERM, end)
    if math.isfinite(limit_minutes := limit_minutes_of(arguments)):
        loop.call_later(limit_minutes * 60, end)
    with contextlib.suppress(asyncio.CancelledError):
        await playing
    note(game.tally)
    return game.tally.results()


def show(results: dict[str, Any]) -> None:
    shown = Table("what", "how many", title="chaos")
    for row in table(results):
        shown.add_row(*row)
    Console().print(shown)
    for failure in results["failures"]:
        print(f"FAILED  {failure}")


def settings_of(arguments: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {
        "seed": arguments.seed,
        "jobs": arguments.jobs,
        "scenarios": names,
        "first_round": arguments.round or 0,
        "without": arguments.without,
        "device": arguments.device,
    }


if __name__ == "__main__":
    main()
