"""`baton chat` and `baton generate` with stdin: `-`, and a conversation in a pipe and in a terminal."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.terminal.exit_codes import ExitCode
from tests.baton.cli.terminal_run import TerminalRun
from tests.service import Service, running_service

BATON = [sys.executable, "-m", "baton"]
NOBODY = "127.0.0.1:1"
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(tiny_model: Path) -> AsyncIterator[Service]:
    async with running_service(tiny_model) as service:
        yield service


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def talker() -> AsyncIterator[Service]:
    """A service whose answers take minutes."""
    async with running_service("mock", mock={"answer_tokens": 4000}, step_times={"decode_floor_ms": 100.0}) as service:
        yield service


async def piped(service: Service, text: str | bytes, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
    return await asyncio.to_thread(
        subprocess.run,
        [*BATON, *arguments, "--address", service.grpc_address],
        input=text.encode() if isinstance(text, str) else text,
        capture_output=True,
        timeout=60,
        check=False,
    )


def answers(result: "subprocess.CompletedProcess[bytes]") -> list[Any]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


async def test_a_dash_reads_a_question_a_text_or_token_ids_from_stdin(service: Service) -> None:
    greedy = ("--max-tokens", "4", "-t", "0", "--json")
    for stdin, command, flag in (
        ("What is the capital of France?", "chat", None),
        ("Once upon a time", "generate", None),
        ("Once upon a time", "generate", "--prompt"),
        ("5,6,7\n", "generate", "--tokens"),
    ):
        flags = [flag] if flag else []
        (read,) = answers(await piped(service, stdin, command, *flags, "-", *greedy))
        (given,) = answers(await piped(service, "", command, *flags, stdin.strip(), *greedy))
        assert read["token_ids"] == given["token_ids"]
        assert read["usage"]["prompt_tokens"] == given["usage"]["prompt_tokens"]


@pytest.mark.parametrize("question", ["-", " "])
async def test_an_empty_question_is_refused_before_it_is_asked(question: str) -> None:
    result = CliRunner().invoke(app, ["chat", question, "--address", NOBODY], input="\n")
    assert result.exit_code == ExitCode.USAGE
    assert "QUESTION: is empty" in result.output


@pytest.mark.parametrize(
    "arguments",
    [["chat", "-"], ["generate", "-"], ["generate", "-p", "-"], ["generate", "--tokens", "-"], ["chat", "\udcff"]],
)
async def test_stdin_that_is_no_text_is_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [*arguments, "--address", NOBODY], input=b"\xff\xfe")
    assert result.exit_code == ExitCode.USAGE
    assert "no UTF-8 text" in " ".join(result.output.split())


async def test_a_line_that_is_no_text_is_asked_with_its_bad_bytes_replaced(service: Service) -> None:
    arguments = ("chat", "--max-tokens", "4", "-t", "0", "--json")
    (bad, good) = answers(await piped(service, b"a\xffb\nWhy?\n", *arguments))
    assert bad["text"]
    assert good["text"]


async def test_a_conversation_knows_what_was_said_before(service: Service) -> None:
    arguments = ("chat", "--max-tokens", "4", "-t", "0", "--json", "--system", "Be short.")
    first, second = answers(await piped(service, "Who?\n\nWhy?\n/quit\nnever asked\n", *arguments))
    (alone,) = answers(await piped(service, "Why?\n", *arguments))
    assert second["usage"]["prompt_tokens"] > alone["usage"]["prompt_tokens"] + len(first["token_ids"])
    assert (await piped(service, "", *arguments)).stdout == b""


async def test_a_question_that_is_refused_leaves_the_conversation_as_it_was(service: Service) -> None:
    result = await piped(service, "x" * 100_000 + "\nWhy?\n", "chat", "--max-tokens", "4", "-t", "0", "--json")
    (after,) = answers(result)
    (alone,) = answers(await piped(service, "Why?\n", "chat", "--max-tokens", "4", "-t", "0", "--json"))
    assert after["usage"] == alone["usage"]
    assert result.stderr.startswith(b"error: ")
    assert (await piped(service, "x" * 100_000, "chat")).returncode == ExitCode.USAGE  # how the last one ended


async def test_ctrl_c_cancels_an_answer_and_not_the_conversation(talker: Service) -> None:
    def talk() -> None:
        with TerminalRun("chat", "--address", talker.grpc_address) as terminal:
            shown = terminal.until("> ")
            for _ in range(2):
                terminal.type("Who is there?\r")
                shown = terminal.until("Who is there?\n", shown)
                terminal.until_more(shown)  # the answer comes
                terminal.type("\x03")
                shown = terminal.until("(cancelled)\n> ", shown)
            terminal.press_until("\x03", "/quit or Ctrl-D ends the conversation\n> ", shown)
            terminal.type("\x04")
            assert terminal.end() == 0
            assert "Traceback" not in terminal.seen

    await asyncio.to_thread(talk)
    while (await talker.client.status()).queue.running:  # what was cancelled here ends there
        await asyncio.sleep(0.05)


async def test_quit_ends_a_conversation() -> None:
    def talk() -> None:
        with TerminalRun("chat", "--address", NOBODY) as terminal:
            shown = terminal.until("> ")
            terminal.type("Who is there?\r")
            shown = terminal.until("error: ", shown)
            terminal.until("> ", shown)
            terminal.type("/quit\r")
            assert terminal.end() == ExitCode.UNAVAILABLE

    await asyncio.to_thread(talk)


async def test_a_deadline_is_told_as_it_was_given(talker: Service) -> None:
    result = await piped(talker, "", "generate", "-p", "a", "--timeout", "0.05", "--ignore-eos")
    assert result.returncode == ExitCode.DEADLINE
    assert result.stderr.decode().splitlines()[-1].endswith("within the 0.05 s of --timeout")


@pytest.mark.parametrize("command", ["chat", "generate"])
async def test_an_error_stands_below_the_part_of_the_answer_that_came(talker: Service, command: str) -> None:
    def ask() -> str:
        with TerminalRun(command, "Who?", "--timeout", "1", "--address", talker.grpc_address) as terminal:
            assert terminal.end() == ExitCode.DEADLINE
            return terminal.seen

    *answer, error = (await asyncio.to_thread(ask)).rstrip().splitlines()
    assert any(answer)
    assert error == "error: the answer was not complete within the 1 s of --timeout"
