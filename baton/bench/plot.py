"""A picture of a sweep: latencies over throughput."""

from collections.abc import Sequence
from pathlib import Path

from baton.bench.measured import Point
from runtime.pictures import new_figure, save_figure


def draw(points: Sequence[Point], title: str, file: Path) -> None:
    """Raises ConfigError when there is no matplotlib, or `file` cannot be written."""
    figure = new_figure(8, 6)
    figure.suptitle(title)
    axes = figure.subplots(2, 1, sharex=True)
    speeds = [point.output_tokens_per_s for point in points]
    for axis, name, spreads in (
        (axes[0], "TTFT", [point.ttft_ms for point in points]),
        (axes[1], "ITL", [point.itl_ms for point in points]),
    ):
        for share in ("p50", "p90", "p99"):
            axis.plot(speeds, [getattr(spread, share) for spread in spreads], "o-", label=share.upper())
        axis.set_ylabel(f"{name}, ms")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    for point, speed in zip(points, speeds, strict=True):
        axes[0].annotate(point.load, (speed, point.ttft_ms.p50), fontsize="small")
    axes[0].legend()
    axes[1].set_xlabel("output tokens per second")
    save_figure(figure, file)
