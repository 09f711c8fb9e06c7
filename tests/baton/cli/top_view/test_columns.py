"""Cells of the table of workers."""

import pytest

from baton.cli.top_view.columns import COLUMNS, kv_bar, percent
from baton.cli.top_view.rates import WorkerRates
from baton_proto.generated import inference_pb2 as pb


@pytest.mark.parametrize(
    ("used", "cached", "total", "bar"),
    [
        (0, 0, 0, "░░░░░░░░   0%"),
        (0, 0, 100, "░░░░░░░░   0%"),
        (50, 25, 100, "████▒▒░░  50%"),
        (100, 0, 100, "████████ 100%"),
        (90, 50, 100, "███████▒  90%"),
    ],
)
def test_a_kv_bar_shows_used_cached_and_free(used: int, cached: int, total: int, bar: str) -> None:
    assert kv_bar(used, cached, total, cells=8).plain == bar


def test_every_column_shows_an_idle_worker_and_can_be_sorted_by() -> None:
    idle = pb.WorkerStatus(worker_id="d")
    busy = pb.WorkerStatus(worker_id="e", running=3, prompt_tokens=10, cached_tokens=5, blocks_used=1, blocks_total=2)
    for column in COLUMNS:
        column.cell(idle, WorkerRates())
        assert len(sorted([busy, idle], key=lambda worker, column=column: column.order(worker, WorkerRates()))) == 2


def test_lower_tiers_show_how_full_they_are() -> None:
    (column,) = (column for column in COLUMNS if column.name == "host+disk")
    host = pb.WorkerStatus(host_blocks_used=1200, host_blocks_total=5000)
    both = pb.WorkerStatus(host_blocks_total=10, disk_blocks_used=7, disk_blocks_total=9)
    cells = [column.cell(worker, WorkerRates()).plain for worker in (pb.WorkerStatus(), host, both)]
    assert cells == ["-", "24%", "0%+78%"]
    assert column.order(host, WorkerRates()) > column.order(both, WorkerRates())


def test_a_share_that_does_not_exist_is_a_dash() -> None:
    assert (percent(None), percent(0.256)) == ("-", "26%")
