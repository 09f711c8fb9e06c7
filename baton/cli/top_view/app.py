"""The full-screen live view of a service: workers, queue, rates.

It asks the router's Status again and again. While the router does not answer, the view says so above the last answer.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Final

import grpc
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.widgets import DataTable, Footer, Sparkline, Static

from baton.cli.terminal.output import counted
from baton.cli.top_view.columns import COLUMNS, percent, places_in, stacked
from baton.cli.top_view.rates import Rates, RateWindow
from baton_proto.generated import inference_pb2 as pb
from baton_proto.token_counts import counts_of

SPARK_POINTS: Final = 120  # answers whose tokens/s are drawn

AskStatus = Callable[[], Awaitable[pb.StatusResponse]]
"""Raises grpc.aio.AioRpcError."""


class TopApp(App[None]):
    TITLE = "baton top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Static, Sparkline { height: auto; padding: 0 1; }
    Sparkline { height: 2; margin: 0 0 1 0; }
    #events { max-height: 30%; }
    #problem { background: $error; color: $text; display: none; }
    #problem.shown { display: block; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "quit", key_display="q"),
        Binding("s,right", "sort_next(1)", "sort by the next column", key_display="s"),
        Binding("S,left", "sort_next(-1)", "by the one before", key_display="S"),
        Binding("r", "reverse", "reverse"),
    ]

    def __init__(self, ask: AskStatus, address: str, interval_s: float) -> None:
        super().__init__()
        self._ask = ask
        self._address = address
        self._interval_s = interval_s
        self._window = RateWindow()
        self._tokens_per_s: list[float] = []
        self._status: pb.StatusResponse | None = None
        self._rates: Rates | None = None
        self._lost_since_s: float | None = None  # monotonic
        self._sorted_by = 0
        self._reversed = False
        self._places: Sequence[Sequence[int]] = ()

    def compose(self) -> ComposeResult:
        yield Static(id="problem")
        yield Static(f"asking the router at {self._address} ...", id="service")
        yield Static(id="queue")
        yield Static(id="events")
        yield Sparkline(id="tokens")
        yield DataTable(id="workers", cursor_type="none", zebra_stripes=True, fixed_columns=1)
        yield Footer()

    def on_resize(self, event: Resize) -> None:
        places = places_in(event.size.width)
        if places is self._places:
            return
        self._places, table = places, self._table
        table.clear(columns=True)
        table.header_height = max(map(len, places))
        for place in range(len(places)):
            table.add_column("", key=str(place))
        self._label_columns()
        if self._status is not None and self._rates is not None:
            self._show(self._status, self._rates)

    def on_ready(self) -> None:
        self.run_worker(self._follow(), name="status")

    # --- asking -------------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Asks until the view closes. An answer that comes later finds no widgets and is dropped."""
        while self.is_running:
            answer: pb.StatusResponse | grpc.aio.AioRpcError
            try:
                answer = await self._ask()
            except grpc.aio.AioRpcError as error:
                answer = error
            if not self.is_running:
                return
            if isinstance(answer, pb.StatusResponse):
                self._answered(answer)
            else:
                self._not_answered(answer)
            await asyncio.sleep(self._interval_s)

    def _answered(self, status: pb.StatusResponse) -> None:
        self._lost_since_s = None
        self._status, self._rates = status, self._window.add(status)
        self._tokens_per_s = [*self._tokens_per_s, self._rates.output_tokens_per_s][-SPARK_POINTS:]
        self.query_one("#problem", Static).remove_class("shown")
        self._show(status, self._rates)

    def _not_answered(self, error: grpc.aio.AioRpcError) -> None:
        now = time.monotonic()
        self._lost_since_s = self._lost_since_s or now
        problem = self.query_one("#problem", Static)
        known = ", what follows is old" if self._status is not None else ""
        reason = error.details() or error.code().name
        problem.update(
            Text(
                f"no router answers at {self._address} for {now - self._lost_since_s:.0f} s{known}; "
                f"asking again every {self._interval_s:g} s ({reason})"
            )
        )
        problem.add_class("shown")

    # --- showing ------------------------------------------------------------------------------------------------------

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one("#workers", DataTable)

    def _show(self, status: pb.StatusResponse, rates: Rates) -> None:
        self.query_one("#service", Static).update(_service_line(status, rates, self._address))
        self.query_one("#queue", Static).update(_queue_line(status.queue))
        self.query_one("#events", Static).update(_events_line(status, rates))
        self.query_one("#tokens", Sparkline).data = self._tokens_per_s
        table = self._table
        shown = {str(key.value) for key in table.rows}
        for gone in shown - {worker.worker_id for worker in status.workers}:
            table.remove_row(gone)
        for worker in status.workers:
            each = [column.cell(worker, rates.workers[worker.worker_id]) for column in COLUMNS]
            cells = stacked(each, self._places)
            if worker.worker_id not in shown:
                table.add_row(*cells, key=worker.worker_id, height=max(map(len, self._places)))
                continue
            for i, cell in enumerate(cells):
                table.update_cell(worker.worker_id, str(i), cell, update_width=True)
        self._sort(status, rates)

    def _sort(self, status: pb.StatusResponse, rates: Rates) -> None:
        column = COLUMNS[self._sorted_by]
        workers = sorted(status.workers, key=lambda worker: worker.worker_id)
        workers.sort(
            key=lambda worker: column.order(worker, rates.workers[worker.worker_id]),
            reverse=column.largest_first != self._reversed,
        )
        places = {worker.worker_id: place for place, worker in enumerate(workers)}
        self._table.sort("0", key=lambda first: places[first.plain.partition("\n")[0]])

    def _label_columns(self) -> None:
        names = [Text(column.name) for column in COLUMNS]
        names[self._sorted_by].append(" ▼" if COLUMNS[self._sorted_by].largest_first != self._reversed else " ▲")
        for column, label in zip(self._table.columns.values(), stacked(names, self._places), strict=True):
            column.label = label
        self._table.refresh()

    # --- keys ---------------------------------------------------------------------------------------------------------

    def action_sort_next(self, step: int) -> None:
        self._sort_by((self._sorted_by + step) % len(COLUMNS))

    def action_reverse(self) -> None:
        self._reversed = not self._reversed
        self._resort()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        self._sort_by(self._places[event.column_index][0])

    def _sort_by(self, index: int) -> None:
        self._sorted_by, self._reversed = index, False
        self._resort()

    def _resort(self) -> None:
        self._label_columns()
        if self._status is not None and self._rates is not None:
            self._sort(self._status, self._rates)


def _service_line(status: pb.StatusResponse, rates: Rates, address: str) -> Text:
    ever = percent(counts_of(status.totals).hit_rate)
    return Text.assemble(
        (", ".join(status.routers), "bold"),
        f" at {address}: {counted(len(status.workers), 'worker')}   ",
        (f"{rates.output_tokens_per_s:,.0f} tokens/s", "bold green"),
        f"   prompts {rates.prompt_tokens_per_s:,.0f} tokens/s   {rates.requests_per_s:,.1f} requests/s"
        f"   hit rate {percent(rates.hit_rate)} (since the start {ever})",
    )


def _queue_line(queue: pb.QueueStatus) -> Text:
    line = Text(f"queue: {queue.running} running, ")
    line.append(f"{queue.waiting} waiting", "bold yellow" if queue.waiting else "")
    if queue.waiting:
        line.append(f", the oldest for {queue.oldest_age_s:.1f} s")
    return line.append(f"; room for {queue.capacity}")


def _events_line(status: pb.StatusResponse, rates: Rates) -> Text:
    """Adds a line for each worker about which there is something to note."""
    totals = status.totals
    line = Text(f"events: {rates.event_batches_per_s:,.0f}/s; the tree has {totals.tree_blocks:,} blocks")
    line.append(f" in {totals.tree_runs:,} runs; {totals.event_gaps} gaps, {totals.snapshots} snapshots")
    trouble = totals.events_refused + totals.events_malformed
    if trouble:
        line.append(f", {totals.events_refused} refused, {totals.events_malformed} malformed", "bold red")
    for worker in status.workers:
        line.append(f"\n{worker.worker_id}: {worker.note}" if worker.note else "", "red")
    return line
