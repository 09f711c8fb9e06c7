"""`baton advise`: does disaggregation pay for this traffic on these GPUs?"""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import track

from baton.cli.advice.answer import SHOWN, document, sentences, table
from baton.cli.advice.inputs import Workers, traffic
from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.options import JsonOption
from baton.cli.terminal.output import console, counted, print_table
from router.placement.weights import Weights
from simulator.advice.comparison import Comparison, Standing
from simulator.advice.verdict import LEAST_SEEDS, MOST_SEEDS, curve, recommended
from simulator.stepwise.fleet import Layout

PER_GPU, LEAST_REQUESTS = 400, 4000  # of a simulation


GpusOption = Annotated[int, typer.Option(min=1, max=1024, metavar="N", help="How many there are.")]
ProfileOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="What `baton profile --out` wrote, or a serving.yaml; one for each engine.tensor_parallel to compare.",
    ),
]
GpuOption = Annotated[
    str | None, typer.Option("--gpu", metavar="h100 | h200", help="With --model 8b: steps that were measured on it.")
]
NamedOption = Annotated[
    str | None,
    typer.Option(metavar="NAME_OR_PATH", help="Measure its steps here first, as `baton profile`; `mock`: made up."),
]
TraceOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="JSON lines: timestamp (ms), input_length, output_length.")
]
RateOption = Annotated[
    float | None,
    typer.Option(min=1e-3, max=1e6, metavar="N", help="Requests per second.", show_default="the trace's own"),
]
SpeedOption = Annotated[
    float | None,
    typer.Option(min=1e-3, max=1e6, metavar="N", help="So many times as fast as the trace.", show_default="1"),
]
InputOption = Annotated[str | None, typer.Option("--input", metavar="N or N-M", help="Of prompts, uniform between.")]
OutputOption = Annotated[str | None, typer.Option("--output", metavar="N or N-M", help="Of answers, uniform between.")]
TtftOption = Annotated[
    float | None, typer.Option(min=0.1, max=1e9, metavar="MS", show_default="planner.targets", help="Target.")
]
ItlOption = Annotated[
    float | None,
    typer.Option(min=0.1, max=1e9, metavar="MS", show_default="planner.targets", help="Of a request's mean."),
]
AttainmentOption = Annotated[
    float | None,
    typer.Option(min=0.5, max=0.9999, metavar="SHARE", show_default="planner.targets", help="That is in time."),
]
CachedOption = Annotated[
    float | None,
    typer.Option(
        min=0, max=0.99, metavar="SHARE", show_default="0; by a trace's hash_ids", help="Of prompts, in prefix caches."
    ),
]
KvTokensOption = Annotated[
    int | None,
    typer.Option(min=1, max=10**9, metavar="N", show_default="524288; of --gpu", help="KV memory of one GPU."),
]
RequestsOption = Annotated[
    int | None,
    typer.Option(
        min=100, max=5_000_000, metavar="N", show_default="4000, 400 per GPU; a trace: all", help="Per simulation."
    ),
]
SeedsOption = Annotated[int, typer.Option(min=LEAST_SEEDS, max=MOST_SEEDS, metavar="N", help="Of requests.")]
PlotOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Goodput over the rate, as a picture.")]


def advise(
    gpus: GpusOption,
    profile: ProfileOption = None,
    gpu: GpuOption = None,
    model: NamedOption = None,
    trace: TraceOption = None,
    rate: RateOption = None,
    speed: SpeedOption = None,
    input_tokens: InputOption = None,
    output_tokens: OutputOption = None,
    ttft: TtftOption = None,
    itl: ItlOption = None,
    attainment: AttainmentOption = None,
    cached: CachedOption = None,
    kv_tokens: KvTokensOption = None,
    requests: RequestsOption = None,
    seeds: SeedsOption = 5,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Does disaggregation pay here? Simulate mixed workers, and prefill beside decode workers in all splits.

    Steps last as long as the targets allow, as the engine's do. Goodput: requests per second whose TTFT and mean ITL
    meet the targets, at --rate. A layout carries the highest rate at which the share --attainment is in time. `+-` is
    half of the 95 % interval over --seeds.
    """
    with errors_reported():
        workers = Workers(profile or [], model, kv_tokens, gpu)
        given = {"ttft_ms": ttft, "itl_ms": itl, "attainment": attainment}
        targets = msgspec.structs.replace(
            workers.config.planner.targets, **{key: value for key, value in given.items() if value is not None}
        )
        count = requests or (None if trace else max(LEAST_REQUESTS, PER_GPU * gpus))
        coming, per_s, longest = traffic(trace, rate, speed, input_tokens, output_tokens, count, cached)
        workers.check_room(*longest)
        mixed, splits = workers.layouts(gpus)
        comparison = Comparison(coming, targets, Weights.of(workers.config.router.placement), gpus, seeds)
        standings = _standings(comparison, mixed + splits, per_s)
        points = curve(comparison, standings)
        equal = recommended(standings)
        standings.sort(key=lambda one: (one is not equal[0], -sum(one.carried), -one.mean("goodput")))
    if as_json:
        typer.echo(msgspec.json.encode(document(comparison, standings, equal, points, per_s)).decode())
    else:
        out = console()
        print_table(out, table(comparison, standings, per_s))
        if len(standings) > SHOWN:
            out.print(f"and {counted(len(standings) - SHOWN, 'layout')} more; --json shows all")
        for line in sentences(comparison, standings, equal, points, per_s):
            out.print(line)
    if plot is not None:
        from simulator.advice.plot import draw

        with errors_reported():
            draw(points, standings, gpus, per_s, plot)


def _standings(comparison: Comparison, layouts: list[Layout], rate: float) -> list[Standing]:
    """The first run on a machine compiles the simulation."""
    terminal = Console(stderr=True)
    shown = track(layouts, "simulating", console=terminal, transient=True, disable=not terminal.is_terminal)
    return [comparison.standing(layout, rate) for layout in shown]
