"""`python -m tests.chaos --seed 1 --minutes 5`: plays rounds, prints a table, exits with 1 when anything was wrong."""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.chaos.faults import BY_NAME
from tests.chaos.judging.tally import Tally
from tests.chaos.rounds import Game
from tests.chaos.service.scenarios import SCENARIOS, why_not


def main() -> None:
    arguments = parse_arguments()
    names = chosen(arguments.scenario, arguments.engine)
    end_s = time.monotonic() + arguments.minutes * 60
    first = arguments.round or 0
    count = arguments.rounds or (None if arguments.round is None else 1)

    def go_on(number: int) -> bool:
        return number < first + count if count else time.monotonic() < end_s

    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="baton-chaos-"))
    print(f"seed {arguments.seed}, scenarios {', '.join(names)}; logs in {folder}", flush=True)
    without = tuple(arguments.without)
    settings = {"seed": arguments.seed, "scenarios": list(names), "first_round": first, "without": list(without)}

    def keep(tally: Tally) -> None:
        if arguments.json:
            write(arguments.json, tally, settings)

    game = Game(arguments.seed, names, folder, go_on, lambda line: print(line, flush=True), first, without, keep)
    tally = asyncio.run(game.play())
    show(tally)
    keep(tally)
    sys.exit(1 if tally.failures else 0)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1.0, help="no round begins later")
    parser.add_argument("--rounds", type=int, help="so many rounds, whatever time they take")
    parser.add_argument(
        "--round", type=int, help="the first round, such as one that has failed; it alone without --rounds"
    )
    parser.add_argument("--scenario", action="append", choices=[one.name for one in SCENARIOS], help="may be repeated")
    parser.add_argument(
        "--without", action="append", default=[], choices=list(BY_NAME), help="a fault; may be repeated"
    )
    parser.add_argument("--engine", choices=["tiny", "mock"], help="scenarios of this engine alone")
    parser.add_argument("--folder", help="for configuration and logs; a new one in /tmp by default")
    parser.add_argument("--json", type=Path, help="where to write the record of the run")
    return parser.parse_args(argv)


def chosen(names: list[str] | None, engine: str | None) -> tuple[str, ...]:
    """Scenarios that can run here; says of each other one why it cannot. Exits when none can."""
    asked = [one for one in SCENARIOS if (not names or one.name in names) and (not engine or one.engine == engine)]
    for one in asked:
        if why := why_not(one):
            print(f"left out: {one.name}: {why}")
    able = tuple(one.name for one in asked if not why_not(one))
    return able or sys.exit("no scenario is left")


def show(tally: Tally) -> None:
    table = Table("what", "how many", title="chaos")
    for row in tally.table():
        table.add_row(*row)
    Console().print(table)
    for failure in tally.failures:
        print(f"FAILED  {failure}")


def write(path: Path, tally: Tally, settings: dict[str, object]) -> None:
    from benchmarks.machine import describe, write_result  # torch, which a round does not need

    write_result(path, {"benchmark": "chaos", **describe(), "settings": settings, "results": tally.results()})


if __name__ == "__main__":
    main()
