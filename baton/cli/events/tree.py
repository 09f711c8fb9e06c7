"""`baton events tree`: shows the router's radix tree, the most used prefixes first."""

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from baton.cli.terminal import options
from baton.cli.terminal.asking import OperatorsRouter
from baton.cli.terminal.output import console, counted, print_table
from baton_proto.generated import inference_pb2 as pb
from runtime.calls.answer import message_fields
from runtime.calls.router import Client

OWNERS_SHOWN = 4


def tree(
    depth: Annotated[
        int, typer.Option("--depth", min=0, max=options.UINT32_MAX, metavar="N", help="Levels of runs; 0 shows all.")
    ] = 3,
    children: Annotated[
        int,
        typer.Option(
            "--children",
            min=0,
            max=options.UINT32_MAX,
            metavar="N",
            help="Runs behind each run, the most used; 0 shows all.",
        ),
    ] = 8,
    max_runs: Annotated[
        int, typer.Option("--max-runs", min=0, max=options.UINT32_MAX, metavar="N", help="In all; 0 shows all.")
    ] = 1000,
    hottest: Annotated[
        int, typer.Option("--hottest", min=0, max=options.UINT32_MAX, metavar="N", help="Prefixes reused most.")
    ] = 5,
    *,
    model: options.OfModelOption = "",
    timeout_s: options.WaitOption = options.STATUS_TIMEOUT_S,
    router: OperatorsRouter,
    as_json: options.JsonOption = False,
) -> None:
    """Show which prefixes the router knows to be cached, where, and how much they are used."""
    wanted = pb.TreeRequest(max_depth=depth, max_children=children, max_runs=max_runs, max_hottest=hottest, model=model)

    async def question(client: Client) -> tuple[pb.TreeSummary, list[pb.TreeRun], pb.StatusResponse]:
        return (*await client.tree(wanted, timeout_s), await client.status(timeout_s))

    summary, runs, status = router.ask(timeout_s, question)
    if as_json:
        typer.echo(json.dumps({"summary": _summary_fields(summary), "runs": [_run_fields(run) for run in runs]}))
    else:
        _name_flipped(summary, runs, status.workers)
        out = console()
        out.print(_tree(summary, runs))
        if summary.hottest:
            print_table(out, _hottest(summary))


def _name_flipped(summary: pb.TreeSummary, runs: Iterable[pb.TreeRun], workers: Iterable[pb.WorkerStatus]) -> None:
    """`decode-2 (prefill)`, for a worker whose role its id does not tell."""
    names = {w.worker_id: f"{w.worker_id} ({w.role})" for w in workers if w.role not in w.worker_id}
    for owners in (summary.workers, *(prefix.owners for prefix in summary.hottest), *(run.owners for run in runs)):
        for owner in owners:
            owner.worker_id = names.get(owner.worker_id, owner.worker_id)


def _tree(summary: pb.TreeSummary, runs: Sequence[pb.TreeRun]) -> Tree:
    root = Tree(_heading(summary))
    branches = {0: root}
    hidden = {0: summary.first_runs}
    for run in runs:
        branches[run.number] = branches[run.parent].add(_label(run, summary.block_size))
        hidden[run.number] = run.children
        hidden[run.parent] -= 1
    for number, count in hidden.items():
        if count > 0:
            branches[number].add(Text(f"{count} more", style="dim"))
    return root


def _heading(summary: pb.TreeSummary) -> str:
    tokens = summary.blocks * summary.block_size
    workers = ", ".join(f"{owner.worker_id} {owner.blocks}{_in_brackets(_lower(owner))}" for owner in summary.workers)
    return (
        f"{summary.router_id}: {counted(summary.blocks, 'distinct block')} ({tokens} tokens) "
        f"in {counted(summary.runs, 'run')}; "
        f"held by {workers or 'nobody'}"
    )


def _label(run: pb.TreeRun, block_size: int) -> Text:
    label = Text(counted(run.blocks, "block"), style="bold")
    label.append(f"  tokens {run.first_block * block_size} to {(run.first_block + run.blocks) * block_size}", "")
    label.append(f"  {_owners(run.owners, run.blocks)}", "cyan")
    if run.hits:
        label.append(f"  {counted(run.hits, 'hit')}", "green")
    label.append(f"  {run.first_hash:016x}", "dim")
    return label


def _owners(owners: Sequence[pb.TreeOwner], blocks: int) -> str:
    """Worker ids, with the number of blocks where a worker does not hold all of `blocks`, and those in lower homes."""
    names = [
        owner.worker_id + _in_brackets([*([] if owner.blocks == blocks else [str(owner.blocks)]), *_lower(owner)])
        for owner in owners[:OWNERS_SHOWN]
    ]
    more = len(owners) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _lower(owner: pb.TreeOwner) -> list[str]:
    """Returns a note on the blocks that lie in lower homes."""
    homes = (("in host memory", owner.host_blocks), ("on disk", owner.disk_blocks))
    return [f"{blocks} {where}" for where, blocks in homes if blocks]


def _in_brackets(facts: Sequence[str]) -> str:
    return f" ({', '.join(facts)})" if facts else ""


def _hottest(summary: pb.TreeSummary) -> Table:
    table = Table(title="reused most, lately")
    for header in ("hits", "blocks", "tokens"):
        table.add_column(header, justify="right")
    table.add_column("held by")
    table.add_column("last block")
    for prefix in summary.hottest:
        tokens = prefix.blocks * summary.block_size
        holders = [owner.worker_id for owner in prefix.owners[:OWNERS_SHOWN]]
        if len(prefix.owners) > OWNERS_SHOWN:
            holders.append(f"{len(prefix.owners) - OWNERS_SHOWN} more")
        numbers = map(str, (prefix.hits, prefix.blocks, tokens))
        table.add_row(*numbers, ", ".join(holders), f"{prefix.last_hash:016x}")
    return table


def _summary_fields(summary: pb.TreeSummary) -> dict[str, Any]:
    return message_fields(summary) | {
        "workers": _owner_fields(summary.workers),
        "hottest": [
            message_fields(prefix) | {"last_hash": f"{prefix.last_hash:016x}", "owners": _owner_fields(prefix.owners)}
            for prefix in summary.hottest
        ],
    }


def _run_fields(run: pb.TreeRun) -> dict[str, Any]:
    return message_fields(run) | {"first_hash": f"{run.first_hash:016x}", "owners": _owner_fields(run.owners)}


def _owner_fields(owners: Iterable[pb.TreeOwner]) -> list[dict[str, Any]]:
    return [message_fields(owner) for owner in owners]
