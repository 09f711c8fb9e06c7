"""`baton plan replay`: runs another policy over the observations of a planner's journal."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.options import JsonOption
from baton.cli.terminal.output import console, counted, print_table
from planner.journal import read_journal
from planner.plot import plot_decisions
from planner.replay import Replay, Summary, replay as replay_journal, summary
from runtime.config.overrides import with_overrides
from runtime.config.planner import POLICIES
from runtime.config.serving import load_config
from runtime.errors import ConfigError

SHOWN = 20  # differing decisions in the table


def replay(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="File that a planner wrote.")],
    policy: Annotated[
        str | None,
        typer.Option(
            metavar=f"<{'|'.join(POLICIES)}>",
            help="To run over it.",
            show_default="that of the configuration",
        ),
    ] = None,
    config_path: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="serving.yaml with the settings to try.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="OUT.png", help="Draw load, targets, workers and latencies.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run another policy over recorded observations and show where it differs.

    What was observed stays as it was: the cluster does not answer to what the other policy wants.
    """
    with errors_reported():
        flags = {"planner": {"policy": policy}} if policy else {}
        config = with_overrides(load_config(config_path), flags, "flags")
        replayed = replay_journal(read_journal(journal), config.planner, config.step_times)
        if not replayed.decisions:
            raise ConfigError(str(journal), "holds no decision")
        recorded = [decision.recorded for decision in replayed.decisions]
        other = [decision.other for decision in replayed.decisions]
    sides = [summary(recorded), summary(other)]
    if as_json:
        typer.echo(msgspec.json.encode(_document(replayed, sides)).decode())
    else:
        _show(replayed, sides)
    if plot is not None:
        targets = config.planner.targets
        observations = [decision.observation for decision in replayed.decisions]
        with errors_reported():
            plot_decisions(plot, observations, [recorded, other], (targets.ttft_ms, targets.itl_ms))


def _document(replayed: Replay, sides: list[Summary]) -> dict[str, object]:
    differing = [
        {"time_s": decision.other.time_s, "recorded": decision.recorded, "other": decision.other}
        for decision in replayed.decisions
        if decision.differ
    ]
    return {"recorded": sides[0], "other": sides[1], "differing": differing, "effects": len(replayed.effects)}


def _show(replayed: Replay, sides: list[Summary]) -> None:
    out = console()
    table = Table("", "policy", title=counted(len(replayed.decisions), "decision"))
    for header in ("changes", "frozen", "prefill mean", "most", "decode mean", "most"):
        table.add_column(header, justify="right")
    for name, side in zip(("recorded", "replayed"), sides, strict=True):
        means = (f"{side.mean_prefill:.2f}", str(side.most_prefill), f"{side.mean_decode:.2f}", str(side.most_decode))
        table.add_row(name, side.policy, str(side.changes), str(side.frozen), *means)
    print_table(out, table)
    differing = [decision for decision in replayed.decisions if decision.differ]
    if not differing:
        out.print("both want the same all the time")
        return
    first_s = replayed.decisions[0].observation.time_s
    table = Table("after", "recorded P+D", "replayed P+D", "reasons of the replayed one", title="where they differ")
    for decision in differing[:SHOWN]:
        recorded, other = decision.recorded, decision.other
        table.add_row(
            f"{other.time_s - first_s:.0f} s",
            f"{recorded.prefill}+{recorded.decode}",
            f"{other.prefill}+{other.decode}",
            escape("; ".join(other.reasons)),
        )
    print_table(out, table)
    if len(differing) > SHOWN:
        out.print(f"and {len(differing) - SHOWN} more of {len(replayed.decisions)}; --json shows all")
