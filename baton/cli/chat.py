"""`baton chat`: one question to the model, as a chat, or a conversation."""

from typing import Annotated

import typer

from baton.cli.conversation import converse
from baton.cli.terminal import options
from baton.cli.terminal.answering import Sampling, UsersRouter, answer
from baton.cli.terminal.stdin import text_or_stdin
from baton.client.chat import Message


def chat(
    question: Annotated[
        str | None,
        typer.Argument(metavar="QUESTION", help="What to ask; - reads it from stdin. Left out: a conversation."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="How the model should behave.")] = None,
    *,
    sampling: Sampling,
    timeout_s: options.TimeoutOption = None,
    router: UsersRouter,
    as_json: options.JsonOption = False,
) -> None:
    """Ask the model a question and see the answer as it is written.

    Without QUESTION each line of stdin is one, and the model knows what was said before. Ctrl-C cancels an answer;
    /quit or Ctrl-D ends the conversation.
    """
    begin: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    if question is None:
        raise typer.Exit(converse(begin, sampling.options(), router.access, timeout_s, as_json))
    content = text_or_stdin(question, "QUESTION").strip()
    if not content:
        raise typer.BadParameter("is empty: ask something", param_hint="QUESTION")
    answer([*begin, {"role": "user", "content": content}], sampling.options(), router.access, timeout_s, as_json)
