"""`baton generate`: continues a text or a list of token ids, without a chat template."""

from typing import Annotated

import typer

from baton.cli.terminal import options
from baton.cli.terminal.answering import Sampling, UsersRouter, answer
from baton.cli.terminal.stdin import text_or_stdin
from baton.cli.terminal.token_list import token_ids
from baton.client.request import Options, Prompt


def generate(
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="Text to continue; - reads stdin.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The same.")] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="1,2,3", help="Token ids to continue; - reads stdin.")
    ] = None,
    *,
    sampling: Sampling,
    min_tokens: Annotated[
        int | None, typer.Option("--min-tokens", min=0, max=options.UINT32_MAX, metavar="N", help="Shortest answer.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's own end.")] = False,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", min=0, max=20, metavar="N", help="Alternatives per token, in --json.")
    ] = None,
    timeout_s: options.TimeoutOption = None,
    router: UsersRouter,
    as_json: options.JsonOption = False,
) -> None:
    """Continue a text or a list of token ids."""
    if [text, prompt, tokens].count(None) != 2:
        raise typer.BadParameter("give one of TEXT, --prompt and --tokens", param_hint="TEXT")
    asked: Prompt
    if tokens is not None:
        asked = token_ids(text_or_stdin(tokens, "--tokens"))
    else:
        asked = text_or_stdin(prompt or "", "--prompt") if text is None else text_or_stdin(text, "TEXT")
    wished: Options = {**sampling.options(), "min_tokens": min_tokens, "ignore_eos": ignore_eos, "logprobs": logprobs}
    answer(asked, wished, router.access, timeout_s, as_json)
