"""`baton bench`: throughput and latencies of a model in this process, or of whatever speaks OpenAI's API."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton.bench.measured import Point, Spread
from baton.bench.workload import NANO_VLLM_BENCH, Amount
from baton.cli.terminal import options
from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.length_range import length_range
from baton.cli.terminal.output import console, print_table
from baton.runs.access import Access
from runtime.config.overrides import with_overrides
from runtime.config.serving import load_config
from runtime.config.yaml_file import read_yaml
from runtime.telemetry.logging import configure_logging

if TYPE_CHECKING:
    from baton.bench.open_ai import Endpoint

OTHER = "With --address"

Begin = Callable[[str, int], Callable[[], None]]
N = TypeVar("N", int, float)


AddressOption = Annotated[
    str | None, typer.Option(metavar="URL", help="What speaks OpenAI's API. [default: an engine in this process]")
]
NamedOption = Annotated[
    str | None,
    typer.Option(metavar="NAME_OR_PATH", help="As in `baton up`; with --address its name there, if several are."),
]
ConfigOption = Annotated[Path | None, typer.Option(metavar="FILE", help="serving.yaml of the engine in process.")]
RequestsOption = Annotated[
    int | None,
    typer.Option("--requests", "-n", min=1, metavar="N", help="Of each load.", show_default="256; a trace: all"),
]
TokensOption = Annotated[str, typer.Option(metavar="N or N-M", help="Uniform between.")]
SeedOption = Annotated[int, typer.Option(min=0, help="The same seed asks the same.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", "-t", min=0.0, metavar="T", help="0 is greedy.")]
ConcurrencyOption = Annotated[
    str, typer.Option(metavar="N,N,...", help="Requests at a time, one load each.", rich_help_panel=OTHER)
]
RateOption = Annotated[
    str,
    typer.Option(
        metavar="N,N,...",
        help="Requests per second, one load each; with --trace in its order, at its times scaled.",
        rich_help_panel=OTHER,
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="JSON lines: timestamp, input_length, output_length, hash_ids.", rich_help_panel=OTHER
    ),
]
SpeedOption = Annotated[
    float | None,
    typer.Option(
        min=0.001, metavar="N", help="So many times as fast as the trace.", show_default="1", rich_help_panel=OTHER
    ),
]
ChatOption = Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions.", rich_help_panel=OTHER)]
EosOption = Annotated[
    bool, typer.Option(help="Answers of the full length, where the server knows it.", rich_help_panel=OTHER)
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Of a request.", rich_help_panel=OTHER)
]
PlotOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Latencies over throughput, as a picture.")]


def bench(
    address: AddressOption = None,
    model: NamedOption = None,
    config: ConfigOption = None,
    requests: RequestsOption = None,
    prompt_tokens: TokensOption = "100-1024",
    output_tokens: TokensOption = "100-1024",
    seed: SeedOption = 0,
    temperature: TemperatureOption = 0.6,
    concurrency: ConcurrencyOption = "",
    rate: RateOption = "",
    trace: TraceOption = None,
    speed: SpeedOption = None,
    chat: ChatOption = False,
    ignore_eos: EosOption = True,
    timeout_s: TimeoutOption = 600.0,
    api_key_file: options.ApiKeyFileOption = None,
    ca_file: options.CaFileOption = None,
    plot: PlotOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Measure throughput, time to first token (TTFT) and inter-token latency (ITL).

    In process: the requests of nano-vllm's benchmark, all at once, on an engine as Python's LLM has it. With --address:
    English prompts, one load for each number of --concurrency or --rate; `events/token` below 1 says that tokens came
    together.
    """
    if concurrency and (rate or trace):
        raise typer.BadParameter(
            "give it, or --rate and --trace: they have arrivals of their own", param_hint="--concurrency"
        )
    if speed is not None and rate:
        raise typer.BadParameter("give --speed or --rate: both say how fast the trace comes", param_hint="--speed")
    if address is None and (concurrency or rate or trace):
        raise typer.BadParameter("--concurrency, --rate and --trace want an address", param_hint="--address")
    lengths = length_range(prompt_tokens, "--prompt-tokens"), length_range(output_tokens, "--output-tokens")
    amount = Amount(requests or NANO_VLLM_BENCH.requests, lengths[0], lengths[1], seed)
    users, rates = _numbers(concurrency, "--concurrency", int), _numbers(rate, "--rate", float)
    with errors_reported(), _progress() as begin:
        if address is None:
            name, points = _in_process(model, config, amount, temperature, begin)
        else:
            from baton.bench.open_ai import Wishes
            from baton.bench.sweep import Sweep

            wishes = Wishes(model or "", chat, temperature, ignore_eos, timeout_s)
            sweep = Sweep(amount, users, rates, trace, requests, speed or 1.0)
            endpoint = _endpoint(address, Access("", api_key_file, ca_file))
            name, points = asyncio.run(sweep.run(endpoint, wishes, begin))
    if as_json:
        typer.echo(json.dumps({"model": name, "address": address, "points": msgspec.to_builtins(points)}))
    else:
        _show(name, points)
    if plot is not None:  # last: what was measured is shown whether or not it can be drawn
        from baton.bench.plot import draw

        with errors_reported():
            draw(points, name, plot)


def _endpoint(address: str, access: Access) -> "Endpoint":
    from baton.bench.open_ai import Endpoint

    key = access.users_key()
    return Endpoint(address, None if key is None else key.reveal(), access.trust())


def _in_process(
    model: str | None, config: Path | None, amount: Amount, temperature: float, begin: Begin
) -> tuple[str, list[Point]]:
    """The model's name, and the one load."""
    from baton.bench.in_process import bench_model
    from baton.service.launcher import uses_gpus
    from baton.service.local.local_launcher import this_machine
    from baton.service.wanted.machine_defaults import ALONE, suited
    from runtime.checkpoint.served_model import served_model

    flags = ALONE | ({"model": model} if model else {})
    serving = with_overrides(load_config(config), flags, "flags")
    configure_logging(serving.logging, "bench")
    given, gpu = {} if config is None else read_yaml(config), uses_gpus(serving, this_machine())
    serving = suited(serving, given, served_model(serving, progress=True), gpu=gpu)
    return serving.model, [bench_model(serving, amount, temperature, begin("at once", amount.requests))]


@contextmanager
def _progress() -> Iterator[Begin]:
    """Yields a function: from a load's name and number of requests it makes one to call as each request ends."""
    terminal = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    quiet, calm = not terminal.is_terminal, 2  # drawing takes time from the engine's steps
    with Progress(*columns, console=terminal, transient=True, disable=quiet, refresh_per_second=calm) as progress:

        def begin(name: str, num_requests: int) -> Callable[[], None]:
            task = progress.add_task(name, total=num_requests)
            return lambda: progress.advance(task)

        yield begin


def _show(name: str, points: Sequence[Point]) -> None:
    table = Table("load", title=name)
    for header in ("requests/s", "output tok/s", "all tok/s", "TTFT ms P50", "P90", "P99", "ITL ms P50", "P90", "P99"):
        table.add_column(header, justify="right")
    table.add_column("events/token", justify="right")
    for point in points:
        speeds = (point.requests_per_s, point.output_tokens_per_s, point.total_tokens_per_s)
        latencies = (*_shares(point.ttft_ms), *_shares(point.itl_ms))
        shown = [f"{value:,.1f}" for value in (*speeds, *latencies)]
        table.add_row(point.load, *shown, f"{point.events_per_token:.2f}")
    print_table(console(), table)
    for point in points:
        if point.failed:
            total = point.failed + point.requests
            typer.echo(f"warning: {point.load}: {point.failed} of {total} requests failed: {point.problem}", err=True)


def _shares(spread: Spread) -> tuple[float, float, float]:
    return spread.p50, spread.p90, spread.p99


def _numbers(text: str, flag: str, kind: type[N]) -> list[N]:
    """'1,8' -> [1, 8]. Raises typer.BadParameter."""
    try:
        numbers = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [kind(0)]
    if not all(0 < number < float("inf") for number in numbers):
        raise typer.BadParameter(f"{text!r} is no list of positive numbers such as 1,8,64", param_hint=flag)
    return numbers
