"""`baton events diff`: compares the router's radix tree with each worker's own block table."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from baton.cli.terminal import options
from baton.cli.terminal.asking import OperatorsRouter
from baton.cli.terminal.exit_codes import ExitCode
from baton.cli.terminal.output import console, print_table
from baton_proto.generated import inference_pb2 as pb
from runtime.calls.answer import message_fields

DIFF_TIMEOUT_S = 30.0

WORDS = {
    pb.DIFF_VERDICT_EQUAL: "equal",
    pb.DIFF_VERDICT_DIFFERENT: "different",
    pb.DIFF_VERDICT_UNREACHABLE: "unreachable",
    pb.DIFF_VERDICT_MOVING: "moving",
}
# What the command ends with; the first verdict that occurs decides.
CODES = {
    pb.DIFF_VERDICT_DIFFERENT: ExitCode.FAILED,
    pb.DIFF_VERDICT_UNREACHABLE: ExitCode.UNAVAILABLE,
    pb.DIFF_VERDICT_MOVING: ExitCode.DEADLINE,
}
KINDS = {
    "missing": "only the worker has",
    "extra": "only the tree has",
    "changed": "have another block hash",
    "moved": "lie in another home",
}


def diff(
    workers: Annotated[
        list[str] | None, typer.Option("--worker", metavar="ID", help="Only this one; may be repeated.")
    ] = None,
    max_blocks: Annotated[
        int, typer.Option("--blocks", min=0, max=options.UINT32_MAX, metavar="N", help="Differing blocks to list.")
    ] = 10,
    *,
    model: options.OfModelOption = "",
    timeout_s: options.WaitOption = DIFF_TIMEOUT_S,
    router: OperatorsRouter,
    as_json: options.JsonOption = False,
) -> None:
    """Compare what the router thinks is cached with what the workers have; both at the same event.

    Ends with 0 when all agree, 1 when a worker differs, else 3 when one could not be asked, else 4 when one's events
    went on too fast to compare.
    """
    wanted = pb.DiffRequest(worker_ids=workers or [], max_blocks=max_blocks, model=model)
    diffs = router.ask(timeout_s, lambda client: client.diff(wanted, timeout_s))
    if as_json:
        typer.echo(json.dumps({"workers": [_fields(diff) for diff in diffs]}))
    else:
        _show(diffs)
    code = next((code for verdict, code in CODES.items() if any(diff.verdict == verdict for diff in diffs)), None)
    if code is not None:
        raise typer.Exit(code)


def _show(diffs: Sequence[pb.WorkerDiff]) -> None:
    out = console()
    if not diffs:
        out.print("no workers")
        return
    table = Table("worker", "verdict")
    for header in ("event", "worker's blocks", "tree's blocks", *KINDS):
        table.add_column(header, justify="right")
    table.add_column("note")
    for diff in diffs:
        counts = (diff.event_id, diff.worker_blocks, diff.tree_blocks, *(getattr(diff, kind) for kind in KINDS))
        compared = diff.verdict in (pb.DIFF_VERDICT_EQUAL, pb.DIFF_VERDICT_DIFFERENT)
        numbers = map(str, counts) if compared else "-" * len(counts)
        table.add_row(diff.worker_id, WORDS[diff.verdict], *numbers, diff.note)
    print_table(out, table)
    for diff in diffs:
        for kind, words in KINDS.items():
            hashes = getattr(diff, f"{kind}_hashes")
            if hashes:
                more = getattr(diff, kind) - len(hashes)
                out.print(f"{diff.worker_id}: {getattr(diff, kind)} blocks {words}, by sequence hash:")
                out.print("  " + " ".join(f"{name:016x}" for name in hashes) + (f" and {more} more" if more else ""))


def _fields(diff: pb.WorkerDiff) -> dict[str, Any]:
    hashes = {f"{kind}_hashes": [f"{name:016x}" for name in getattr(diff, f"{kind}_hashes")] for kind in KINDS}
    return message_fields(diff) | {"verdict": WORDS[diff.verdict]} | hashes
