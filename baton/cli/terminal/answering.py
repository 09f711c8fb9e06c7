"""One request for text: its answer goes to stdout as it comes, or as JSON at the end."""

import asyncio
import json
from dataclasses import asdict
from typing import Any

import typer
from google.protobuf.json_format import MessageToDict

from baton.cli.terminal.exit_codes import ExitCode, errors_reported, fail
from baton.client.async_client import AsyncClient
from baton.client.request import Options, Prompt
from baton.runs.access import Access
from runtime.calls.answer import Answer
from runtime.errors import BatonError, DeadlineError


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


def message_fields(message: Any) -> dict[str, Any]:
    """Every field of a protobuf message by name, default values included; 64-bit numbers stay numbers."""
    fields: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    wide = [
        field.name
        for field in message.DESCRIPTOR.fields
        if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64)
    ]
    return fields | {name: getattr(message, name) for name in wide}
