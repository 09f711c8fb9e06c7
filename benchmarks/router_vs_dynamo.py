"""Speed and memory of the router's parts, beside NVIDIA Dynamo's on the same inputs in one run.

    python -m benchmarks.router_vs_dynamo [--cases hash,find,stream,decision,memory] [--json FILE]
    python -m benchmarks.router_vs_dynamo --profile find

Dynamo's wheel runs in an environment of its own, which is made on first use. Each side is a process that measures
itself; the two take turns, and their answers must be equal. benchmarks/README.md has the goals; exit code 1 when a goal
is missed.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.routing import cases
from benchmarks.routing.comparison import AnswersDifferError, Comparison, Row
from benchmarks.routing.half import ROOT, Half, HalfFailedError
from benchmarks.routing.inputs import write_tokens
from benchmarks.routing.peer_environment import PeerMissingError, dynamo_python
from benchmarks.routing.profile import profile
from benchmarks.routing.report import BUSY_LOAD, machine, print_table, write_json
from benchmarks.routing.stream_writer import write_stream, write_trace_ids

CASES = ("hash", "find", "stream", "decision", "memory")
TRACE = "mooncake_conversation.jsonl.gz"
TRACE_FOLDERS = (ROOT / "tests" / "data", ROOT.parent / "shared" / "data")


def main() -> None:
    options = _parse()
    console = Console() if sys.stdout.isatty() else Console(width=150)
    with tempfile.TemporaryDirectory(prefix="router-vs-dynamo-") as name:
        folder = Path(name)
        _write_inputs(folder, options)
        if options.profile:
            profile(options.profile, folder, options.stream_workers[0], options.requests)
            return
        began = machine()
        if began["load_1min"] > BUSY_LOAD:
            console.print(f"[yellow]The machine is busy (load {began['load_1min']}): trust ratios more than times.[/]")
        rows: list[Row] = []
        failure = ""
        try:
            python = dynamo_python(console)
            with _ours() as ours, Half(python, "benchmarks.routing.dynamo_half") as theirs:
                versions = {"baton": ours.call("versions"), "dynamo": theirs.call("versions")}
                # One case at a time, so that the cases before a failure count.
                rows.extend(_measure(Comparison(ours, theirs, folder, options.budget_s), options, python))
        except (PeerMissingError, HalfFailedError, AnswersDifferError) as error:
            failure = str(error)
    if rows:
        print_table(console, f"Router parts on {began['cpu']}, {began['cores']} cores", rows)
    if options.json and not failure:
        write_json(options.json, rows, versions, began)
    missed = [row for row in rows if row.met is False]
    console.print(f"{len(rows)} rows, {sum(row.met is True for row in rows)} goals met, {len(missed)} missed.")
    sys.exit(failure or (1 if missed else 0))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=_names, default=CASES, help=f"some of {','.join(CASES)}; default all")
    parser.add_argument("--trace", type=Path, default=_default_trace(), help=f"path of {TRACE}")
    parser.add_argument("--requests", type=int, default=2000, help="of the trace, for the stream")
    parser.add_argument("--stream-workers", type=_numbers, default=[8], help="fleets for the stream, e.g. 8,64,256")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="distinct blocks, for the memory")
    parser.add_argument("--budget-s", type=float, default=0.5, help="of each half for each line that times a call")
    parser.add_argument("--json", type=Path, help="also write the rows there, with the machine, versions and command")
    parser.add_argument("--profile", choices=CASES, help="profile our half of one case instead")
    options = parser.parse_args()
    if options.trace is None or not options.trace.exists():
        parser.error(f"the trace {options.trace or TRACE} is not there; name it with --trace")
    return options


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(CASES)}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _default_trace() -> Path | None:
    return next((folder / TRACE for folder in TRACE_FOLDERS if (folder / TRACE).exists()), None)


def _write_inputs(folder: Path, options: argparse.Namespace) -> None:
    wanted = {options.profile} if options.profile else set(options.cases)
    write_tokens(folder)
    if "stream" in wanted:
        for workers in options.stream_workers:
            write_stream(folder, options.trace, options.requests, workers)
    if "memory" in wanted:
        write_trace_ids(folder, options.trace, options.blocks)


def _ours() -> Half:
    return Half(Path(sys.executable), "benchmarks.routing.baton_half")


def _measure(comparison: Comparison, options: argparse.Namespace, python: Path) -> Iterator[Row]:
    def peer() -> Half:
        return Half(python, "benchmarks.routing.dynamo_half")

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for case in CASES:
            if case not in options.cases:
                continue
            task = progress.add_task(case)
            match case:
                case "hash":
                    yield from cases.hashing(comparison)
                case "find":
                    yield from cases.find(comparison)
                case "stream":
                    for workers in options.stream_workers:
                        yield from cases.stream(comparison, workers, options.requests)
                case "decision":
                    yield from cases.decision(comparison, peer)
                case "memory":
                    yield from cases.memory(comparison.folder, options.blocks, (_ours, peer))
            progress.remove_task(task)


if __name__ == "__main__":
    main()
