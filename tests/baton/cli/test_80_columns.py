"""In a terminal of 80 columns tables cut nothing: ids stay whole, and a worker that was flipped shows its role."""

import asyncio
import io
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from rich.console import Console
from rich.table import Table

from baton.cli.terminal.output import print_table
from tests.baton.cli.terminal_run import TerminalRun
from tests.service import Service, running_service
from tests.spine.prompts import ask, random_prompt
from tests.spine.worker_view import until_idle, until_tree_is_right

IDS = ("prefill-1", "decode-1", "decode-2")
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(tiny_model: Path) -> AsyncIterator[Service]:
    """Whose worker decode-2 prefills, as after `baton flip`."""
    async with running_service(tiny_model, 1, 1, router={"placement": {"local_prefill_tokens": 0}}) as service:
        await service.supervisor.add_worker("prefill", "decode-2")
        service.note_pids()
        for seed in range(6):
            await ask(service.client, random_prompt(100, seed=seed), 2)
        await until_idle(service)
        await until_tree_is_right(service)
        yield service


async def shown(*arguments: str) -> str:
    def run() -> str:
        with TerminalRun(*arguments) as terminal:
            assert terminal.end() == 0, terminal.seen
            return terminal.seen

    return await asyncio.to_thread(run)


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["events", "explain", "--prompt", "What is the capital of France?"],
        ["events", "tree"],
        ["events", "diff"],
    ],
    ids=" ".join,
)
async def test_no_command_cuts_an_id_at_80_columns(service: Service, arguments: list[str]) -> None:
    text = await shown(*arguments, "--address", service.grpc_address)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for worker_id in IDS:
        assert worker_id in text


@pytest.mark.parametrize(
    "arguments", [["status"], ["events", "explain", "--prompt", "Why?"], ["events", "tree"]], ids=" ".join
)
async def test_a_flipped_worker_is_shown_with_its_role(service: Service, arguments: list[str]) -> None:
    text = await shown(*arguments, "--address", service.grpc_address)
    assert re.search(r"decode-2\s+(\(|role )?prefill", text), text


async def test_a_pipe_is_as_wide_as_its_variable_says(service: Service) -> None:
    nats = str(service.supervisor.config.nats.url)
    for columns in ("80", "40"):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "baton", "events", "lag", "--nats-url", nats),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"COLUMNS": columns},
        )
        text = (await process.communicate())[0].decode()
        assert process.returncode == 0
        assert max(map(len, text.splitlines())) <= int(columns)
        for worker_id in IDS:
            assert worker_id in text


def rendered(table: Table, columns: int) -> str:
    out = io.StringIO()
    print_table(Console(file=out, width=columns), table)
    return out.getvalue()


@pytest.mark.parametrize("columns", [40, 50, 60, 80, 100, 120, 200])
async def test_a_table_keeps_every_word_in_a_terminal_of_any_width(columns: int) -> None:
    table = Table("worker", "role", "a longer heading", "note", title="some workers")
    table.add_row("decode-1000000001", "decode", "31000/32768", "it has [bold]lost[/bold] its connection")
    table.add_row("prefill-1", "prefill", "", "", style="bold")
    text = rendered(table, columns)
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    words = "some decode-1000000001 decode 31000/32768 it has lost its connection prefill-1 longer heading"
    for word in words.split():
        assert word in text
