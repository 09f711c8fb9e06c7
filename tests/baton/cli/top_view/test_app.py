"""The live view, driven with keys: against a real service, and without one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from textual.pilot import Pilot
from textual.widgets import DataTable, Sparkline, Static
from typer.testing import CliRunner

from baton.cli.app import app as cli
from baton.cli.terminal.exit_codes import ExitCode
from baton.cli.top_view.app import AskStatus, TopApp
from baton.cli.top_view.columns import COLUMNS
from baton_proto.generated import inference_pb2 as pb
from runtime.calls.router import Client
from runtime.processes.ports import free_port
from runtime.security.secret import Secret
from tests.service import Service, running_service
from tests.spine.prompts import ask, random_prompt

pytestmark = pytest.mark.slow

SIZE = (180, 30)
NAMES = [column.name for column in COLUMNS]


def text(app: TopApp, name: str) -> str:
    return str(app.query_one(f"#{name}", Static).render())


def table(app: TopApp) -> list[dict[str, str]]:
    """Rows from top to bottom, by the names of the columns."""
    shown: DataTable[object] = app.query_one(DataTable)
    return [dict(zip(NAMES, map(str, shown.get_row_at(row)), strict=True)) for row in range(shown.row_count)]


def order(app: TopApp) -> list[str]:
    return [row["worker"] for row in table(app)]


async def until(pilot: Pilot[None], condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await pilot.pause(0.02)


def watching(ask_status: AskStatus) -> TopApp:
    return TopApp(ask_status, "there:1", interval_s=0.05)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(tiny_model: Path) -> AsyncIterator[Service]:
    async with running_service(tiny_model, 1, 2, router={"placement": {"local_prefill_tokens": 0}}) as service:
        yield service


@pytest.mark.asyncio(loop_scope="module")
async def test_a_running_service_is_watched(service: Service) -> None:
    app = watching(lambda: service.client.status(2))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: order(app) == ["decode-1", "decode-2", "prefill-1"])
        assert text(app, "service").startswith("router-1 at there:1: 3 workers")
        assert {row["state"] for row in table(app)} == {"ready"}
        prompt = random_prompt(100, seed=1)
        answer = asyncio.create_task(ask(service.client, prompt, 1000, ignore_eos=True))
        await until(pilot, lambda: any(row["running"] == "1" for row in table(app)))
        assert "queue: 1 running, 0 waiting; room for 1024" in text(app, "queue")
        await until(pilot, lambda: any(row["tok/s"] != "0" for row in table(app)))
        assert max(app.query_one(Sparkline).data or [0]) > 0
        decode = (await answer).served_by[0].decode_worker
        await ask(service.client, prompt + random_prompt(40, seed=2), 1)
        await until(pilot, lambda: table(app)[2]["hit rate"] not in ("-", "0%"))
        await until(pilot, lambda: any(row["worker"] == decode and row["events/s"] != "0" for row in table(app)))
        assert "0 gaps" in text(app, "events")
        await pilot.press("q")
    assert app.return_code == 0


class Router:
    """Says what it is told to."""

    def __init__(self) -> None:
        self.answers = False
        self.asked = 0
        self._turns: asyncio.Semaphore | None = None
        self.status = pb.StatusResponse(
            router_id="r",
            workers=[
                pb.WorkerStatus(worker_id="a", role="decode", running=1, blocks_used=5, blocks_total=10),
                pb.WorkerStatus(worker_id="b", role="prefill", running=7, note="no events"),
                pb.WorkerStatus(worker_id="c", role="decode", running=3, blocks_used=9, blocks_total=10),
            ],
            queue=pb.QueueStatus(waiting=2, capacity=8, oldest_age_s=1.5),
            totals=pb.Totals(clock_s=1.0, events_refused=4),
        )

    def take_turns(self) -> None:
        """From now on it answers once for each call of answer(). A view that is drawn all the time is never idle, and
        each key of a pilot waits for that."""
        self._turns = asyncio.Semaphore(0)

    async def answer(self, pilot: Pilot[None]) -> None:
        """Returns when the view shows one more answer."""
        assert self._turns is not None
        asked = self.asked
        self._turns.release()
        await until(pilot, lambda: self.asked > asked)

    async def ask(self) -> pb.StatusResponse:
        self.asked += 1
        if self._turns is not None:
            await self._turns.acquire()
        if not self.answers:
            metadata = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "Connection refused")
        return self.status


async def test_without_a_router_it_says_so_and_asks_on() -> None:
    router = Router()
    app = watching(router.ask)
    async with app.run_test(size=SIZE) as pilot:
        problem = app.query_one("#problem")
        await until(pilot, lambda: problem.has_class("shown"))
        assert "no router answers at there:1" in text(app, "problem")
        assert "Connection refused" in text(app, "problem")
        router.answers = True
        await until(pilot, lambda: not problem.has_class("shown"))
        assert order(app) == ["a", "b", "c"]
        router.answers = False
        await until(pilot, lambda: problem.has_class("shown"))
        assert "what follows is old" in text(app, "problem")
        assert order(app) == ["a", "b", "c"]
        await pilot.press("q")


async def test_a_router_that_appears_at_the_address_is_found(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a real connection that was refused first."""
    operator_key = Secret("k" * 32)
    port = free_port("127.0.0.1")
    monkeypatch.setenv("BATON_OPERATOR_KEY", operator_key.reveal())
    async with Client(f"127.0.0.1:{port}", operator_key=operator_key) as client:
        app = watching(lambda: client.status(1))
        async with app.run_test(size=SIZE) as pilot:
            problem = app.query_one("#problem")
            await until(pilot, lambda: problem.has_class("shown"))
            async with running_service(tiny_model, 0, 1, router={"grpc_port": port}):
                await until(pilot, lambda: order(app) == ["decode-1"])
                assert not problem.has_class("shown")


async def test_keys_and_headers_sort() -> None:
    router = Router()
    router.answers = True
    router.take_turns()
    app = watching(router.ask)
    async with app.run_test(size=SIZE) as pilot:
        await router.answer(pilot)
        assert order(app) == ["a", "b", "c"]
        await pilot.press("r")
        assert order(app) == ["c", "b", "a"]
        await pilot.press(*["s"] * NAMES.index("running"))
        assert order(app) == ["b", "c", "a"], "the busiest first"
        await pilot.press("r")
        assert order(app) == ["a", "c", "b"]
        await pilot.press("S")
        assert order(app) == ["c", "a", "b"], "the fullest first"
        router.status.workers[0].blocks_used = 10
        await router.answer(pilot)
        assert order(app) == ["a", "c", "b"]
        await pilot.click(DataTable, offset=(2, 0))
        assert order(app) == ["a", "b", "c"]


async def test_workers_come_and_go_and_trouble_is_shown() -> None:
    router = Router()
    router.answers = True
    app = watching(router.ask)
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: order(app) == ["a", "b", "c"])
        assert "b: no events" in text(app, "events")
        assert "2 waiting, the oldest for 1.5 s" in text(app, "queue")
        assert "4 refused" in text(app, "events")
        del router.status.workers[1]
        router.status.workers.add(worker_id="aa")
        await until(pilot, lambda: order(app) == ["a", "aa", "c"])


def test_without_a_terminal_it_refuses_and_names_what_to_use() -> None:
    result = CliRunner().invoke(cli, ["top"])
    assert result.exit_code == ExitCode.USAGE
    assert "baton status --json" in result.stderr


@pytest.mark.parametrize("size", [(150, 24), (149, 24), (80, 24), (79, 24), (60, 40), (52, 40), (30, 60)])
async def test_at_any_width_every_column_is_seen_and_no_id_is_cut(size: tuple[int, int]) -> None:
    router = Router()
    router.answers = True
    router.status.workers[1].worker_id = "decode-2"  # a decode worker that was flipped
    router.status.workers[0].queued_prefill_tokens = 16384
    router.status.workers[0].blocks_total = 0
    router.take_turns()
    app = watching(router.ask)
    async with app.run_test(size=size) as pilot:
        await router.answer(pilot)
        await router.answer(pilot)  # columns are as wide as their names from the second one on

        def screen() -> list[str]:
            return ["".join(part.text for part in strip) for strip in app.screen._compositor.render_strips()]

        await until(pilot, lambda: all(any(name in line for line in screen()) for name in NAMES))
        assert any(line.split()[:1] == ["decode-2"] for line in screen())
        for _ in NAMES:  # sorted by any column
            await pilot.press("s")
            await router.answer(pilot)
            await pilot.pause()
            assert not app.query_one(DataTable).show_horizontal_scrollbar
        await pilot.resize_terminal(*SIZE)
        await until(pilot, lambda: order(app) == ["a", "c", "decode-2"])
        assert table(app)[2]["role"] == "prefill"
