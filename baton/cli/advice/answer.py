"""The answer of `baton advise`: a table, sentences, or JSON."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from baton.cli.terminal.output import counted, rounded
from simulator.advice.comparison import RESOLUTION, Comparison, Standing
from simulator.advice.layouts import name
from simulator.advice.verdict import Point, Range, best_of_each, difference, plus_minus, ranges

SHOWN = 12  # layouts in the table
STATISTICS = {"ttft_ms": ("mean", "p50", "p90", "p99"), "itl_ms": ("mean", "p50", "p99"), "answer_s": ("mean",)}
HEADERS = ("goodput/GPU", "in time", "TTFT ms P50", "P99", "ITL ms P50", "P99", "carries/GPU", "+-")


def table(comparison: Comparison, standings: Sequence[Standing], rate: float) -> Table:
    targets = comparison.targets
    title = f"{counted(comparison.gpus, 'GPU')}, {rounded(rate)} requests/s, "
    title += f"TTFT {rounded(targets.ttft_ms)} ms, ITL {rounded(targets.itl_ms)} ms"
    shown = Table("layout", title=title)
    for header in HEADERS:
        shown.add_column(header, justify="right")
    for one in standings[:SHOWN]:
        latencies = [f"{one.mean(field):,.0f}" for field in ("ttft_p50_ms", "ttft_p99_ms")]
        latencies += [f"{one.mean(field):,.1f}" for field in ("itl_p50_ms", "itl_p99_ms")]
        carries, spread = _carries(one, comparison.gpus)
        goodput, in_time = rounded(one.mean("goodput") / comparison.gpus), f"{one.mean('in_time'):.1%}"
        shown.add_row(name(one.layout), goodput, in_time, *latencies, rounded(carries), rounded(spread))
    return shown


def sentences(
    comparison: Comparison,
    standings: Sequence[Standing],
    equal: Sequence[Standing],
    points: Sequence[Point],
    rate: float,
) -> list[str]:
    """`equal`: what `recommended` says."""
    best, share = equal[0], comparison.targets.attainment
    carries, spread = (value * comparison.gpus for value in _carries(best, comparison.gpus))
    carried = f"{rounded(carries)} +- {rounded(spread)} requests/s with {share:.4g} in time"
    said = [f"Recommended: {name(best.layout)}, {carried}."]
    if not carries:
        said = [f"Recommended: {name(best.layout)}, {best.mean('in_time'):.1%} in time at {rounded(rate)} requests/s."]
        said.append(f"At no rate has any layout {share:.4g} in time: raise --ttft or --itl, or lower --attainment.")
    elif carries < rate:
        wanted = f"{rounded(rate)} requests/s"
        said.append(f"No layout carries {wanted} within the targets: take more GPUs, or wider targets.")
    step_ms = comparison.targets.of_steps(apart=best.layout.prefill > 0).itl_ms
    said.append(
        f"Its steps beside answers last up to {rounded(step_ms)} ms (by planner.targets.itl_ms), longer beside few "
        "readers, or where prompts are late for planner.targets.ttft_ms."
    )
    said += [f"Expected at {rounded(rate)} requests/s: {'; '.join(_expected(best))}."]
    if len(equal) > 1:
        said.append(f"Within noise of it: {'; '.join(name(one.layout) for one in equal[1:4])}.")
    sides = best_of_each(standings)
    if len(sides) == 2:
        mixed, split = sides
        gain, base = difference(split.carried, mixed.carried, RESOLUTION), float(np.mean(mixed.carried))
        if base and not gain.is_noise:
            told = f"carries {gain.mean / base:+.1%} +- {gain.plus_minus / base:.1%}, beside"
        else:
            told = "carries the same, within noise, as"
        said.append(f"Splitting: the best split, {name(split.layout)}, {told} the best mixed, {name(mixed.layout)}.")
    return said + [_sentence(one) for one in ranges(points)]


def document(
    comparison: Comparison,
    standings: Sequence[Standing],
    equal: Sequence[Standing],
    points: Sequence[Point],
    rate: float,
) -> dict[str, Any]:
    rows = [
        {
            "layout": name(one.layout),
            "prefill": one.layout.prefill,
            "decode": one.layout.decode,
            "gpus_per_prefill_worker": one.layout.prefill_kind.gpus,
            "gpus_per_decode_worker": one.layout.decode_kind.gpus,
            "goodput_per_gpu": one.mean("goodput") / comparison.gpus,
            "in_time": one.mean("in_time"),
            **_figures(one, lambda values: float(np.mean(values))),
            "plus_minus": _figures(one, plus_minus),
            "carries_per_gpu": _carries(one, comparison.gpus)[0],
            "carries_per_gpu_plus_minus": _carries(one, comparison.gpus)[1],
        }
        for one in standings
    ]
    best = equal[0]
    return {
        "gpus": comparison.gpus,
        "rate": rate,
        "targets": comparison.targets,
        "seeds": len(comparison.seeds),
        "recommended": name(best.layout),
        "split_pays": all(one.layout.prefill for one in equal),
        "within_noise": [name(one.layout) for one in equal[1:]],
        "layouts": rows,
        "curve": points,
        "ranges": ranges(points),
    }


def _carries(one: Standing, gpus: int) -> tuple[float, float]:
    """Mean and half of the 95 % interval, in requests/s per GPU."""
    return float(np.mean(one.carried)) / gpus, plus_minus(one.carried) / gpus


def _figures(one: Standing, of_seeds: Callable[[list[float]], float]) -> dict[str, dict[str, float]]:
    return {
        name: {of: of_seeds(one.each(f"{what}_{of}_{unit}")) for of in statistics}
        for name, statistics in STATISTICS.items()
        for what, unit in [name.split("_")]
    }


def _expected(one: Standing) -> list[str]:
    def shown(field: str, digits: int) -> str:
        return f"{one.mean(field):,.{digits}f} +- {plus_minus(one.each(field)):,.{digits}f}"

    ttft = ", ".join(f"{of} {shown(f'ttft_{of}_ms', 0)}" for of in STATISTICS["ttft_ms"])
    itl = ", ".join(f"{of} {shown(f'itl_{of}_ms', 1)}" for of in STATISTICS["itl_ms"])
    return [f"TTFT {ttft} ms", f"ITL {itl} ms", f"whole answers {shown('answer_mean_s', 2)} s"]


def _sentence(found: Range) -> str:
    rates = f"At {rounded(found.from_rate)} to {rounded(found.to_rate)} requests/s"
    if found.ahead == "neither":
        return f"{rates} the best mixed and the best split layout give the same, within noise."
    better, worse = ("split", "mixed") if found.ahead == "split" else ("mixed", "split")
    return f"{rates} the best {better} layout gives up to {found.by:.1%} more goodput than the best {worse} one."
