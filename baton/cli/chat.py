"""`baton chat`: one question to the model, as a chat, or a conversation."""

from typing import Annotated

import typer

from baton.cli.conversation import converse
from baton.cli.terminal import options
from baton.cli.terminal.answering import answer
from baton.cli.terminal.stdin import text_or_stdin
from baton.client.chat import Message
from baton.client.request import Options
from baton.runs.access import Access


def chat(
    question: Annotated[
        str | None,
        typer.Argument(metavar="QUESTION", help="What to ask; - reads it from stdin. Left out: a conversation."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="How the model should behave.")] = None,
    temperature: options.TemperatureOption = None,
    max_tokens: options.MaxTokensOption = None,
    top_p: options.TopPOption = None,
    top_k: options.TopKOption = None,
    seed: options.SeedOption = None,
    stop: options.StopOption = None,
    model: options.ModelOption = "",
    timeout_s: options.TimeoutOption = None,
    address: options.AddressOption = options.DEFAULT_ADDRESS,
    api_key_file: options.ApiKeyFileOption = None,
    ca_file: options.CaFileOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Ask the model a question and see the answer as it is written.

    Without QUESTION each line of stdin is one, and the model knows what was said before. Ctrl-C cancels an answer;
    /quit or Ctrl-D ends the conversation.
    """
    begin: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    options = Options(
        model=model, temperature=temperature, max_tokens=max_tokens, top_p=top_p, top_k=top_k, seed=seed, stop=stop
    )
    access = Access(address, api_key_file, ca_file)
    if question is None:
        raise typer.Exit(converse(begin, options, access, timeout_s, as_json))
    content = text_or_stdin(question, "QUESTION").strip()
    if not content:
        raise typer.BadParameter("is empty: ask something", param_hint="QUESTION")
    answer([*begin, {"role": "user", "content": content}], options, access, timeout_s, as_json)
