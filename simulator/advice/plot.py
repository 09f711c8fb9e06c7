"""A picture of a comparison: goodput per GPU over the rate, mixed beside split, and what each layout carries."""

from collections.abc import Sequence
from pathlib import Path

from runtime.pictures import new_figure, save_figure
from simulator.advice.comparison import Standing
from simulator.advice.layouts import name
from simulator.advice.verdict import Point

SHOWN = 20  # layouts


def draw(points: Sequence[Point], standings: Sequence[Standing], gpus: int, rate: float, file: Path) -> None:
    """`standings`: the best first. Raises ConfigError when there is no matplotlib, or `file` cannot be written."""
    figure = new_figure(9, 9)
    over_rate, bars = figure.subplots(2, 1)
    rates = [point.rate for point in points]
    over_rate.plot(rates, [point.mixed / gpus for point in points], "o-", label="best mixed layout")
    gains = [point.gain.plus_minus / gpus for point in points]
    split = [point.split / gpus for point in points]
    over_rate.errorbar(rates, split, yerr=gains, fmt="s-", capsize=3, label="best split, 95 % of its difference")
    over_rate.axvline(rate, color="gray", linestyle=":", label="rate asked for")
    over_rate.set(xlabel="requests per second", ylabel="goodput per GPU, requests/s")
    over_rate.legend()
    over_rate.grid(alpha=0.3)
    shown = list(standings[:SHOWN])[::-1]
    means = [sum(one.carried) / len(one.carried) / gpus for one in shown]
    spans = [
        [mean - min(one.carried) / gpus for mean, one in zip(means, shown, strict=True)],
        [max(one.carried) / gpus - mean for mean, one in zip(means, shown, strict=True)],
    ]
    colours = ["tab:orange" if one.layout.prefill else "tab:blue" for one in shown]
    bars.barh([name(one.layout) for one in shown], means, xerr=spans, color=colours)
    bars.set_xlabel("requests/s per GPU carried within the targets, with the least and the most of the seeds")
    save_figure(figure, file)
