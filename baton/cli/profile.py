"""`baton profile`: measures how long the engine's steps take on this machine, for the planner."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
import yaml
from msgspec import Struct
from rich.console import Console
from rich.progress import track
from rich.table import Table

from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.options import JsonOption
from baton.cli.terminal.output import console, counted, print_table
from baton.service.launcher import uses_gpus
from baton.service.local.local_launcher import this_machine
from baton.service.wanted.machine_defaults import suited
from baton_proto.discovery import TimedStep
from engine.runners.step_profile import StepProfile
from runtime.checkpoint.served_model import served_model
from runtime.config.overrides import with_overrides
from runtime.config.serving import DiskKvConfig, ServingConfig, for_prefill_worker, load_config
from runtime.config.step_fit import ENOUGH, decode_rows, errors, fitted, prefill_rows
from runtime.config.step_times import StepTimes
from runtime.config.yaml_file import read_yaml
from runtime.errors import ConfigError
from runtime.telemetry.logging import configure_logging
from worker.engines.own import build_engine

FITS = 5  # each begins with the result of the last, until the configured profile has no weight
DIGITS = 4
PROFILE_S = 60.0


class Fit(Struct, frozen=True):
    """The fit of one kind of steps. Errors are shares of the measured time."""

    steps: int
    median_error: float
    p90_error: float


class Profile(Struct, frozen=True):
    times: StepTimes
    prefill: Fit
    decode: Fit


def profile(
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="serving.yaml of the service to be.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME_OR_PATH", help="As in `baton up`.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the section of serving.yaml there.")] = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="How long prompts and batches may take, each, about.")
    ] = PROFILE_S,
    as_json: JsonOption = False,
) -> None:
    """Measure how long the engine's steps take on this machine, for the planner.

    Runs prompts of up to 8192 tokens and batches of up to 256 sequences on an engine of its own, as workers with this
    configuration would, and fits the six coefficients of the section step_times. Nothing else should run meanwhile.
    """
    with errors_reported():
        found = measured_profile(suited_config(config, model, "profile"), seconds)
        section = yaml.safe_dump({"step_times": msgspec.to_builtins(found.times)}, sort_keys=False)
        if out is not None:
            try:
                out.write_text(section)
            except OSError as error:
                raise ConfigError(str(out), error.strerror or str(error)) from error
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
        return
    print_table(console(), _table(found))
    if out is None:
        typer.echo(section, nl=False)


def suited_config(config: Path | None, model: str | None, command: str) -> ServingConfig:
    """Returns the configuration with what its workers would take on this machine. Raises ConfigError, ModelError."""
    serving = with_overrides(load_config(config), {"model": model} if model else {}, "flags")
    configure_logging(serving.logging, command)
    given, gpu = {} if config is None else read_yaml(config), uses_gpus(serving, this_machine())
    return suited(serving, given, served_model(serving, progress=True), gpu=gpu)


def measured_profile(config: ServingConfig, seconds: float) -> Profile:
    """Times prompts as a prefill worker runs them, if there are any, and batches as a decode worker does."""
    prompts_on = for_prefill_worker(config) if config.workers.count("prefill") else config
    prefill = prefill_rows(_measured(prompts_on, "prompts", seconds))
    decode = decode_rows(_measured(config, "batches", seconds))
    for kind, rows in (("prompts", prefill), ("batches", decode)):
        if len(rows) < ENOUGH:
            raise ConfigError("--seconds", f"in {seconds:g} s only {counted(len(rows), 'step')} of {kind} came")
    times = config.step_times
    for _ in range(FITS):
        times = fitted(prefill, decode, times)
    times = StepTimes(*(float(f"{value:.{DIGITS}g}") for value in msgspec.structs.astuple(times)))
    of_prompts, of_batches = (
        Fit(len(shares), *(round(float(np.quantile(shares, q)), DIGITS) for q in (0.5, 0.9)))
        for shares in errors(prefill, decode, times)
    )
    return Profile(times, of_prompts, of_batches)


def _measured(config: ServingConfig, kind: str, seconds: float) -> list[TimedStep]:
    """`kind`: "prompts" or "batches"."""
    engine = msgspec.structs.replace(config.engine, disk_kv=DiskKvConfig())  # it is not to be filled with noise
    assembly = build_engine(msgspec.structs.replace(config, engine=engine))
    try:
        vocab_size = served_model(config).config.vocab_size
        run = StepProfile(assembly.engine, vocab_size, assembly.max_model_len, seconds)
        steps: Iterable[TimedStep] = run.prompts() if kind == "prompts" else run.batches()
        terminal = Console(stderr=True)
        return list(track(steps, f"timing {kind}", console=terminal, transient=True, disable=not sys.stderr.isatty()))
    finally:
        assembly.close()


def _table(found: Profile) -> Table:
    table = Table("steps", "floor ms", "per token or sequence, ms", "per pair or token of context, ms", "timed")
    table.add_column("error, median", justify="right")
    table.add_column("P90", justify="right")
    for name, fit, values in (
        ("prefill", found.prefill, found.times.prefill),
        ("decode", found.decode, found.times.decode),
    ):
        shown = [f"{value:g}" for value in values]
        table.add_row(name, *shown, str(fit.steps), f"{fit.median_error:.1%}", f"{fit.p90_error:.1%}")
    return table
