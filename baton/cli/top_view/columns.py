"""The columns of the live view's table of workers: what a cell shows and by what it is sorted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.text import Text

from baton.cli.top_view.rates import WorkerRates
from baton_proto.generated import inference_pb2 as pb
from baton_proto.token_counts import counts_of

BAR_CELLS: Final = 8
STATE_STYLES: Final = {"ready": "green", "draining": "yellow", "sleeping": "blue"}


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    cell: Callable[[pb.WorkerStatus, WorkerRates], Text]
    order: Callable[[pb.WorkerStatus, WorkerRates], Any]
    largest_first: bool = True


def kv_bar(used: int, cached: int, total: int, cells: int = BAR_CELLS) -> Text:
    """A bar of full cells for referenced blocks, half ones for cached blocks, empty ones for free blocks, and the share
    of referenced blocks."""
    share = used / total if total else 0.0
    full = min(cells, round(share * cells))
    half = min(cells - full, round(cached / total * cells)) if total else 0
    color = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    return Text.assemble(
        ("█" * full, color), ("▒" * half, "cyan"), ("░" * (cells - full - half), "dim"), f" {share:4.0%}"
    )


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _number(value: float) -> Text:
    return Text(f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}", justify="right")


def _numeric(name: str, value: Callable[[pb.WorkerStatus, WorkerRates], float]) -> Column:
    return Column(name, lambda worker, rates: _number(value(worker, rates)), value)


def _state(worker: pb.WorkerStatus, rates: WorkerRates) -> Text:
    return Text(worker.state, STATE_STYLES.get(worker.state, ""))


def _lower(worker: pb.WorkerStatus, rates: WorkerRates) -> Text:
    """The share of the lower tiers that is in use."""
    tiers = (worker.host_blocks_used, worker.host_blocks_total), (worker.disk_blocks_used, worker.disk_blocks_total)
    return Text("+".join(percent(used / total) for used, total in tiers if total) or "-", justify="right")


def _hit_rate(worker: pb.WorkerStatus) -> float | None:
    return counts_of(worker).hit_rate


def _kv_order(worker: pb.WorkerStatus, rates: WorkerRates) -> float:
    return worker.blocks_used / worker.blocks_total if worker.blocks_total else 0.0


COLUMNS: Final = (
    Column("worker", lambda w, r: Text(w.worker_id, "bold"), lambda w, r: w.worker_id, largest_first=False),
    Column("role", lambda w, r: Text(w.role), lambda w, r: w.role, largest_first=False),
    Column("state", _state, lambda w, r: w.state, largest_first=False),
    Column("KV used", lambda w, r: kv_bar(w.blocks_used, w.blocks_cached, w.blocks_total), _kv_order),
    _numeric("running", lambda w, r: w.running),
    _numeric("waiting", lambda w, r: w.waiting),
    _numeric("queued tokens", lambda w, r: w.queued_prefill_tokens),
    Column(
        "hit rate",
        lambda w, r: Text(percent(_hit_rate(w)), justify="right"),
        lambda w, r: -1.0 if _hit_rate(w) is None else _hit_rate(w),
    ),
    _numeric("prompt tok/s", lambda w, r: r.prompt_tokens_per_s),
    _numeric("tok/s", lambda w, r: r.output_tokens_per_s),
    _numeric("events/s", lambda w, r: r.event_batches_per_s),
    _numeric("step ms", lambda w, r: w.step_ms),
    Column("host+disk", _lower, lambda w, r: w.host_blocks_used + w.disk_blocks_used),
)

PLACES: Final = {
    160: tuple((index,) for index in range(len(COLUMNS))),
    80: ((0,), (1, 2), (3, 12), (4, 5), (6, 8), (9, 10), (7, 11)),
    52: ((0, 1, 2), (3, 12, 7), (4, 5, 9), (6, 8, 10, 11)),
    0: ((0, 1, 2, 4, 5, 7, 11), (3, 12, 6, 8, 9, 10)),
}
"""Which of COLUMNS stand above each other in one column of the screen, by its least width in cells."""


def places_in(width: int) -> Sequence[Sequence[int]]:
    return next(places for least, places in PLACES.items() if width >= least)


def stacked(cells: Sequence[Text], places: Sequence[Sequence[int]]) -> list[Text]:
    """`cells`: one for each of COLUMNS. Returns one for each of `places`."""
    return [Text("\n", justify=cells[indices[0]].justify).join(cells[i] for i in indices) for indices in places]
