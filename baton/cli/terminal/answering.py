"""One request for text: its answer goes to stdout as it comes, or as JSON at the end."""

import asyncio
import json
from typing import Any

import grpc
import typer
from google.protobuf.json_format import MessageToDict

from baton.cli.terminal.access import Access
from baton.cli.terminal.exit_codes import ExitCode, errors_reported, fail
from baton_proto.generated import inference_pb2 as pb
from runtime.calls.router import Answer


def answer(
    request: pb.GenerateRequest,
    access: Access,
    timeout_s: float | None,
    as_json: bool,
    said: list[str] | None = None,
) -> None:
    """Prints the answer; `said` gets its pieces as they come. Ends the command with an exit code when there is none."""
    pieces = [] if said is None else said

    def show(piece: pb.Piece) -> None:
        pieces.append(piece.text)
        if not as_json:
            typer.echo(piece.text, nl=False)

    async def ask() -> Answer:
        async with access.client() as client:
            return await client.generate(request, timeout_s, show)

    with errors_reported():
        try:
            result = asyncio.run(ask())
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or timeout_s is None:
                raise
            fail(ExitCode.DEADLINE, f"the answer was not complete within the {timeout_s:g} s of --timeout")
        typer.echo(json.dumps(answer_fields(result), ensure_ascii=False) if as_json else "")


def answer_fields(answer: Answer) -> dict[str, Any]:
    """The answer as `--json` prints it."""
    choice = answer.choices[0]
    fields = {
        "request_id": answer.request_id,
        "model": answer.model,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "usage": message_fields(answer.usage),
        "served_by": [message_fields(served) for served in answer.served_by],
        "ttft_s": round(answer.ttft_s, 4),
        "duration_s": round(answer.duration_s, 4),
        "tokens_per_s": round(answer.decode_tokens_per_s, 2),
    }
    if choice.logprobs:
        fields["logprobs"] = [message_fields(token) for token in choice.logprobs]
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
