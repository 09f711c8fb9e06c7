"""`baton demo`: a whole service for one question, so that a newcomer sees prefill and decode hand over."""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from baton.cli.terminal.exit_codes import ExitCode, errors_reported
from baton.cli.terminal.output import console, counted, human_bytes
from baton.service.supervisor import Supervisor
from baton.shadowing import refuse_shadowed
from baton_proto.generated import inference_pb2 as pb
from runtime.calls.answer import Answer
from runtime.calls.router import Client
from runtime.checkpoint.served_model import served_model
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig
from runtime.processes.process import Ready
from runtime.telemetry.logging import configure_logging

QUESTION = "What is the capital of France?"
ANSWER_TIMEOUT_S = 60.0
MAX_TOKENS = 100
OVERRIDES = {
    "workers": {"prefill": 1, "decode": 1},
    "router": {"http_port": 0, "grpc_port": 0, "placement": {"local_prefill_tokens": 0}},  # ship even a short prompt
    "engine": {"device": "cpu"},  # also where there is a GPU: the demo shows the hand-over, not speed
    "logging": {"level": "warning"},
}


def demo(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask.")] = QUESTION,
    model: Annotated[str, typer.Option(metavar="NAME_OR_PATH", help="As in `baton up`.")] = "smollm2",
) -> None:
    """Start a small service, ask it one question through gRPC, show who did what, end it."""
    refuse_shadowed()
    with errors_reported():
        config = with_overrides(ServingConfig(), OVERRIDES | {"model": model})
        configure_logging(config.logging, "baton")
        served_model(config, progress=True)
        answer = asyncio.run(_serve_and_ask(config, question))
        if not answer.token_ids or not any(served.kv_blocks for served in answer.served_by):
            typer.echo("error: the prompt's KV blocks were not shipped from a prefill to a decode worker", err=True)
            raise typer.Exit(ExitCode.FAILED)


async def _serve_and_ask(config: ServingConfig, question: str) -> Answer:
    start_s = time.monotonic()

    def process_ready(ready: Ready) -> None:
        typer.echo(f"{ready.id:<12} ready after {time.monotonic() - start_s:4.1f} s  pid {ready.pid}")

    with tempfile.TemporaryDirectory(prefix="baton-demo-") as log_dir:
        async with Supervisor(config, Path(log_dir), process_ready) as supervisor:
            answer = await _ask(supervisor.client(), question)
            _show(answer)
    typer.echo("all processes have ended")
    return answer


async def _ask(client: Client, question: str) -> Answer:
    request = pb.GenerateRequest(
        chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=question)]),
        sampling=pb.SamplingOptions(temperature=0.0, max_tokens=MAX_TOKENS),
    )
    typer.echo(f"\n> {question}")
    async with client:
        answer = await client.generate(request, ANSWER_TIMEOUT_S, lambda piece: typer.echo(piece.text, nl=False))
    typer.echo("\n")
    return answer


def _show(answer: Answer) -> None:
    table = Table(show_header=False)
    for served in answer.served_by:
        table.add_row("prompt ran on", served.prefill_worker or f"{served.decode_worker} itself")
        table.add_row("answer ran on", served.decode_worker)
        table.add_row("KV shipped", f"{counted(served.kv_blocks, 'block')}, {human_bytes(served.kv_bytes)}")
        table.add_row("transport", served.transport or "none")
    table.add_row("prompt", counted(answer.usage.prompt_tokens, "token"))
    table.add_row("answer", counted(answer.usage.completion_tokens, "token"))
    table.add_row("time to first token", f"{answer.ttft_s * 1000:.0f} ms")
    table.add_row("tokens/s after it", f"{answer.decode_tokens_per_s:.1f}")
    console().print(table)
