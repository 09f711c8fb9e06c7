"""One request for text: how a command says it, and its answer, which goes to stdout as it comes, or as JSON."""

import asyncio
import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast

import typer

from baton.cli.terminal.exit_codes import ExitCode, errors_reported, fail
from baton.cli.terminal.options import UINT32_MAX, UINT64_MAX, AddressOption, ApiKeyFileOption, CaFileOption
from baton.client.async_client import AsyncClient
from baton.client.request import Options, Prompt
from baton.runs.access import Access
from runtime.calls.answer import Answer
from runtime.errors import BatonError, DeadlineError


@dataclass(frozen=True)
class Sampling:
    """How an answer's tokens are chosen."""

    temperature: Annotated[
        float | None, typer.Option("--temperature", "-t", metavar="T", help="0 is greedy. [default: 1.0]")
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, max=UINT32_MAX, metavar="N", help="Longest answer.")
    ] = None
    top_p: Annotated[
        float | None, typer.Option("--top-p", metavar="P", help="Sample from the most likely tokens of this mass.")
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", min=0, max=UINT32_MAX, metavar="K", help="Sample from the K most likely; 0 is all."),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, max=UINT64_MAX, metavar="N", help="The same seed gives the same text."),
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; may be repeated.")
    ] = None
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", show_default=False, help="Of the model. [default: the one served]")
    ] = ""

    def options(self) -> Options:
        return cast("Options", vars(self))


@dataclass(frozen=True)
class UsersRouter:
    """How a command that asks for text reaches the service."""

    address: AddressOption = ""  # see runs/places.py
    api_key_file: ApiKeyFileOption = None
    ca_file: CaFileOption = None

    @property
    def access(self) -> Access:
        return Access(self.address, self.api_key_file, self.ca_file)


def answer(
    prompt: Prompt,
    options: Options,
    access: Access,
    timeout_s: float | None,
    as_json: bool,
    said: list[str] | None = None,
) -> None:
    """Prints the answer; `said` gets its pieces as they come. Ends the command with an exit code when there is none."""
    pieces = [] if said is None else said

    async def ask() -> Answer:
        async with AsyncClient.through(access) as client, client.stream(prompt, options, timeout_s=timeout_s) as stream:
            async for piece in stream:
                pieces.append(piece.text)
                if not as_json:
                    typer.echo(piece.text, nl=False)
        return stream.answer

    with errors_reported():
        try:
            result = asyncio.run(ask())
        except BatonError as error:
            if any(pieces) and not as_json:
                typer.echo()  # the error has a line of its own
            if timeout_s is None or not isinstance(error, DeadlineError):
                raise
            fail(ExitCode.DEADLINE, f"the answer was not complete within the {timeout_s:g} s of --timeout")
        typer.echo(json.dumps(answer_fields(result), ensure_ascii=False) if as_json else "")


def answer_fields(answer: Answer) -> dict[str, Any]:
    """The answer as `--json` prints it."""
    fields = {
        "request_id": answer.request_id,
        "model": answer.model,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "usage": asdict(answer.usage),
        "served_by": [asdict(served) for served in answer.served_by],
        "ttft_s": round(answer.ttft_s, 4),
        "duration_s": round(answer.duration_s, 4),
        "tokens_per_s": round(answer.decode_tokens_per_s, 2),
    }
    if answer.logprobs:
        fields["logprobs"] = [asdict(token) for token in answer.logprobs]
    return fields
