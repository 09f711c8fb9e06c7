"""A plot of a journal: load, workers with their targets, and latencies over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baton_proto.planner import ROLES, Observation, Target
from planner.policy.observation import counts
from runtime.pictures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 12.0, 9.0  # inches
COLOURS = {"prefill": "tab:blue", "decode": "tab:orange"}


def plot_decisions(
    path: Path, observations: Sequence[Observation], sides: Sequence[Sequence[Target]], targets_ms: tuple[float, float]
) -> None:
    """Writes an image with a panel for load, one for the workers of each side, and one for TTFT and ITL with
    `targets_ms`. Raises ConfigError when matplotlib is missing or the file cannot be written."""
    figure = new_figure(WIDTH, HEIGHT)
    axes = figure.subplots(2 + len(sides), 1, sharex=True)
    first_s = observations[0].time_s
    unit, unit_s = _unit(observations[-1].time_s - first_s)
    times = [(observation.time_s - first_s) / unit_s for observation in observations]
    _load(axes[0], times, observations)
    for panel, targets in zip(axes[1:-1], sides, strict=True):
        _workers(panel, times, observations, targets)
    _latencies(axes[-1], times, observations, targets_ms)
    axes[-1].set_xlabel(unit)
    for panel in axes:
        panel.legend(loc="upper right", fontsize="small")
        panel.grid(alpha=0.3)
    save_figure(figure, path)


def _unit(length_s: float) -> tuple[str, float]:
    """Name and seconds of the time unit for an axis of this length."""
    for unit, unit_s in (("hours", 3600.0), ("minutes", 60.0)):
        if length_s >= 2 * unit_s:
            return unit, unit_s
    return "seconds", 1.0


def _load(panel: "Axes", times: list[float], observations: Sequence[Observation]) -> None:
    rates = [observation.interval.arrivals / observation.interval.duration_s for observation in observations]
    panel.plot(times, rates, color="tab:gray", linewidth=0.6, label="requests/s")
    waiting = panel.twinx()
    waiting.plot(times, [o.queue.waiting for o in observations], color="tab:red", linewidth=0.8)
    waiting.set_ylabel("waiting", color="tab:red")
    panel.set_ylabel("load")


def _workers(panel: "Axes", times: list[float], observations: Sequence[Observation], targets: Sequence[Target]) -> None:
    for role in ROLES:
        serving = [counts(observation, role).serving for observation in observations]
        panel.step(times, serving, where="post", color=COLOURS[role], label=f"{role} serving")
        wanted = [getattr(target, role) for target in targets]
        panel.step(times, wanted, where="post", color=COLOURS[role], linestyle=":", label=f"{role} wanted")
    panel.locator_params(axis="y", integer=True)
    panel.set_ylabel(f"workers\n{targets[0].policy}")


def _latencies(
    panel: "Axes", times: list[float], observations: Sequence[Observation], targets_ms: tuple[float, float]
) -> None:
    for name, colour, target_ms in (("ttft", "tab:purple", targets_ms[0]), ("itl", "tab:green", targets_ms[1])):
        p90 = [getattr(observation.interval, f"{name}_p90_ms") for observation in observations]
        points = [(time, ms) for time, ms in zip(times, p90, strict=True) if ms is not None]
        panel.plot([x for x, _ in points], [y for _, y in points], color=colour, linewidth=0.6, label=f"{name} P90")
        panel.axhline(target_ms, color=colour, linestyle="--", linewidth=0.8)
    panel.set_yscale("log")
    panel.set_ylabel("ms")
