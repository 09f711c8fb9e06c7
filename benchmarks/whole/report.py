"""The tables of a comparison of whole systems, and the goals that it misses."""

from collections.abc import Iterator, Mapping, Sequence
from math import isnan

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from benchmarks.whole.figures import FIGURES, ITL_MS, TARGET, TTFT_MS, Cell, Estimate, Run, carried, estimate, ratio

PEER, MIXED, SPLIT = "vllm", "mixed", "split"
# Most of Baton's figure over vLLM's where the issue of the comparison names one; elsewhere 1.
GOALS: dict[Cell, dict[str, float]] = {
    ("conversations", 4.0): {"TTFT mean": 0.9, "TTFT p99": 1.1, "ITL p99": 0.35, "answer s": 0.9},
    ("agents", 6.0): {"TTFT mean": 0.65, "TTFT p99": 0.8, "ITL p99": 0.45, "answer s": 0.8},
}
SPLIT_GOAL = 1.05  # of the mixed workers' figures
CARRIED_GOAL = 1.4  # of vLLM's rate, at TARGET
ADVICE_GOAL = 0.15
_AT = (TTFT_MS.index(TARGET[0]), ITL_MS.index(TARGET[1]))


class Expectation(Struct, frozen=True):
    """The advisor's figures for a run."""

    system: str
    trace: str
    rate: float
    seed: int
    figures: dict[str, float]


class Comparison:
    def __init__(self, runs: Sequence[Run], expectations: Sequence[Expectation]) -> None:
        self.runs, self.expectations = runs, expectations
        self.cells = sorted({run.cell for run in runs})
        self.systems = list(dict.fromkeys(run.system for run in runs))

    def values(self, system: str, cell: Cell, figure: str) -> dict[int, float]:
        """By seed."""
        found = (run for run in self.runs if (run.system, run.cell) == (system, cell))
        return {run.seed: run.figures[figure] for run in found}

    def ratios(self, system: str, base: str, cell: Cell) -> dict[str, Estimate]:
        """By figure; empty where one of the two was not measured with a seed of the other."""
        pairs = {figure: (self.values(system, cell, figure), self.values(base, cell, figure)) for figure in FIGURES}
        return {figure: ratio(*pair) for figure, pair in pairs.items() if pair[0].keys() & pair[1].keys()}

    def bases(self, system: str) -> list[str]:
        """Systems that this one is compared with."""
        bases = [] if system.startswith(PEER) else [PEER]
        bases += [MIXED] if "P+" in system or system == SPLIT else []
        return [base for base in bases if base in self.systems]

    def carried(self, system: str, trace: str, ttft: int, itl: int) -> tuple[str, float] | None:
        """The rate that a system carries at targets TTFT_MS[ttft] and ITL_MS[itl], see `figures.carried`."""
        shares: dict[float, list[float]] = {}
        for run in self.runs:
            if (run.system, run.trace) == (system, trace):
                shares.setdefault(run.rate, []).append(run.in_time[ttft][itl])
        return carried({rate: sum(found) / len(found) for rate, found in shares.items()}) if shares else None

    def lead(self, trace: str, ttft: int, itl: int) -> tuple[str, float] | None:
        """The highest rate that a system of ours carries over the highest of vLLM's, with the sign of ours. None where
        a side carries none, or vLLM carries all that was measured."""
        rates = {system: self.carried(system, trace, ttft, itl) for system in self.systems}
        sides: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
        for system, rate in rates.items():
            if rate is not None and rate[0] != "<":
                sides[system.startswith(PEER)].append((rate[1], rate[0]))
        if not sides[True] or not sides[False] or max(sides[True])[1]:
            return None
        best, sign = max(sides[False])
        return sign, best / max(sides[True])[0]

    def advice(self) -> Iterator[tuple[str, Cell, str, Estimate, float]]:
        """(system, cell, figure, expected over measured, mean measured)"""
        for system in self.systems:
            for cell in self.cells:
                expected = {
                    one.seed: one.figures
                    for one in self.expectations
                    if (one.system, (one.trace, one.rate)) == (system, cell)
                }
                for figure in next(iter(expected.values()), {}):
                    measured = self.values(system, cell, figure)
                    told = {seed: figures[figure] for seed, figures in expected.items()}
                    yield system, cell, figure, ratio(told, measured), estimate(list(measured.values())).mean

    def missed(self) -> list[str]:
        """A sentence for each goal that is missed."""
        said = [f"{run.system}, {_cell(run.cell)}, seed {run.seed}: {run.wrong} of {run.requests} answers are wrong: "
                f"{run.problem}" for run in self.runs if run.wrong]  # fmt: skip
        for system in self.systems:
            for base in self.bases(system):
                for cell in self.cells:
                    found = self.ratios(system, base, cell)
                    goals = _goals(base, cell)
                    said += [
                        f"{system}, {_cell(cell)}: {figure} {found[figure].mean:.2f} of {base}'s, not {goal:g}"
                        for figure, goal in goals.items()
                        if found and found[figure].mean > goal
                    ]
        for trace in dict.fromkeys(trace for trace, _ in self.cells):
            lead = self.lead(trace, *_AT)
            if lead is not None and not lead[0] and lead[1] < CARRIED_GOAL:
                said.append(f"{trace}: {lead[1]:.2f} of the rate that vLLM carries, not {CARRIED_GOAL}")
        return said + [
            f"{system}, {_cell(cell)}: advised {figure} {told.mean:.2f} of the measured"
            for system, cell, figure, told, _ in self.advice()
            if abs(told.mean - 1) > ADVICE_GOAL
        ]


def _goals(base: str, cell: Cell) -> Mapping[str, float]:
    if base == MIXED:
        return dict.fromkeys(FIGURES, SPLIT_GOAL) | {"ITL p99": 1.0}
    return GOALS.get(cell) or dict.fromkeys(FIGURES, 1.0)


def show(comparison: Comparison, console: Console) -> None:
    for cell in comparison.cells:
        console.print(_latencies(comparison, cell))
    for trace in dict.fromkeys(trace for trace, _ in comparison.cells):
        console.print(_pareto(comparison, trace))
    if comparison.expectations:
        console.print(_advice(comparison))
    for sentence in comparison.missed():
        console.print(f"goal missed: {sentence}", highlight=False)


def _latencies(comparison: Comparison, cell: Cell) -> Table:
    table = Table("system", title=f"{_cell(cell)}; +- is half of the 95 % interval over seeds")
    for header in (*FIGURES, "tokens/s", "in time", "tokens in + out", "events/token", "wrong"):
        table.add_column(header, justify="right")
    for system in comparison.systems:
        runs = [run for run in comparison.runs if (run.system, run.cell) == (system, cell)]
        if not runs:
            continue
        shown = [_estimate(estimate([run.figures[figure] for run in runs])) for figure in FIGURES]
        requests = sum(run.requests for run in runs)
        shown.append(_estimate(estimate([run.tokens_per_s for run in runs])))
        shown.append(_estimate(estimate([100 * run.in_time[_AT[0]][_AT[1]] for run in runs])) + " %")
        prompt, output = sum(run.prompt_tokens for run in runs), sum(run.output_tokens for run in runs)
        shown.append(f"{prompt / requests:,.0f} + {output / requests:,.0f}")
        shown.append(f"{sum(run.events_per_token for run in runs) / len(runs):.2f}")
        table.add_row(system, *shown, f"{sum(run.wrong for run in runs)}/{requests}")
        for base in comparison.bases(system):
            ratios = comparison.ratios(system, base, cell)
            table.add_row(f"  / {base}", *(_estimate(ratios[figure], 2) for figure in ratios), style="bold")
    return table


def _pareto(comparison: Comparison, trace: str) -> Table:
    """Rates by targets; the last column compares the best system of each side."""
    title = f"{trace}: requests/s with 90 % of them within TTFT and mean ITL"
    table = Table("TTFT ms", "ITL ms", title=title)
    has_peer = any(system.startswith(PEER) for system in comparison.systems)
    for header in comparison.systems + ["best / best vLLM"] * has_peer:
        table.add_column(header, justify="right")
    for row, ttft in enumerate(TTFT_MS):
        for column, itl in enumerate(ITL_MS):
            rates = {system: comparison.carried(system, trace, row, column) for system in comparison.systems}
            shown = ["" if rate is None else f"{rate[0]}{rate[1]:.2f}" for rate in rates.values()]
            if has_peer:
                lead = comparison.lead(trace, row, column)
                shown.append(f"{lead[0]}{lead[1]:.2f}" if lead else "")
            table.add_row(f"{ttft:g}", f"{itl:g}", *shown, style="bold" if (ttft, itl) == TARGET else None)
    return table


def _advice(comparison: Comparison) -> Table:
    table = Table("system", "load", "figure", title="what baton advise expects, over what was measured")
    for header in ("measured ms", "expected / measured"):
        table.add_column(header, justify="right")
    for system, cell, figure, told, measured in comparison.advice():
        table.add_row(system, _cell(cell), figure, f"{measured:,.1f}", _estimate(told, 2))
    return table


def _cell(cell: Cell) -> str:
    return f"{cell[0]} at {cell[1]:g}/s"


def _estimate(value: Estimate, digits: int = -1) -> str:
    """`digits` -1: as many as its size asks for."""
    places = digits if digits >= 0 else 0 if abs(value.mean) >= 100 else 1 if abs(value.mean) >= 10 else 2
    spread = "" if isnan(value.plus_minus) else f" +-{value.plus_minus:,.{places}f}"
    return f"{value.mean:,.{places}f}{spread}"
