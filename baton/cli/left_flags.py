"""Flags that `baton up` no longer has, because `--set KEY=VALUE` sets every key of serving.yaml."""

from collections.abc import Sequence
from itertools import zip_longest

import typer

KEYS = {
    "--served-model-name": "served_model_name",
    "--generation-config": "router.generation_config",
    "--tool-parser": "router.tool_parser",
    "--reasoning-parser": "router.reasoning_parser",
    "--max-model-len": "engine.max_model_len",
    "--kv-memory": "engine.kv_memory",
    "--block-size": "engine.block_size",
    "--tensor-parallel": "engine.tensor_parallel",
    "--transport": "transfer.transport",
    "--host": "router.host",
    "--grpc-port": "router.grpc_port",
    "--api-key-file": "security.api_key_file",
    "--insecure": "security.insecure",
    "--nats-url": "nats.url",
}


def refuse_left_flags(command: str | None, arguments: Sequence[str]) -> None:
    """Raises typer.BadParameter that says what to write instead."""
    if command != "up":
        return
    for argument, next_one in zip_longest(arguments, arguments[1:], fillvalue="VALUE"):
        flag, equals, value = argument.partition("=")
        if key := KEYS.get(flag):
            value = "true" if flag == "--insecure" else value if equals else next_one
            raise typer.BadParameter(f"is a setting like all others now: --set {key}={value}", param_hint=flag)
