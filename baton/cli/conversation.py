"""`baton chat` without a question: questions from stdin, one per line, each with what was said before."""

import contextlib
import io
import sys

import typer

from baton.cli.terminal.answering import answer
from baton.cli.terminal.exit_codes import ExitCode
from baton.client.chat import Message
from baton.client.request import Options
from baton.runs.access import Access

QUIT = "/quit"


def converse(
    begin: list[Message], options: Options, access: Access, timeout_s: float | None, as_json: bool
) -> ExitCode:
    """Returns how the last question ended. Ctrl-C cancels an answer: what came of it stays in the conversation. A
    question without any answer is forgotten."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    messages, code = [*begin], ExitCode.OK
    while (question := _next_question(as_json)) is not None:
        said: list[str] = []
        asked = {"role": "user", "content": question}
        code = ExitCode.OK
        try:
            answer([*messages, asked], options, access, timeout_s, as_json, said)
        except typer.Exit as error:
            if error.exit_code == ExitCode.INTERRUPTED:
                typer.echo(" (cancelled)", err=True)
            else:
                code = ExitCode(error.exit_code)
        if said:
            messages += [asked, {"role": "assistant", "content": "".join(said)}]
    return code


def _next_question(as_json: bool) -> str | None:
    """Returns None when there are no more."""
    by_hand = sys.stdin.isatty() and not as_json
    if by_hand:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines with it)
    while True:
        try:
            question = input("> " if by_hand else "").strip()
        except EOFError:
            if by_hand:
                typer.echo()
            return None
        except KeyboardInterrupt:
            typer.echo(f"\n{QUIT} or Ctrl-D ends the conversation", err=True)
            continue
        if question == QUIT:
            return None
        if question:
            return question
