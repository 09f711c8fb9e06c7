"""`baton events bridge`: passes the KV events of a vLLM engine on to Baton's routers."""

import re
from contextlib import AsyncExitStack
from typing import Annotated

import typer

from baton.cli.events import options
from baton.cli.events.session import run_with_nats, until_stopped
from baton.events.event_source import EventSource, discovery_ttl_s
from baton.events.vllm_bridge import Bridge
from engine.vllm.events.stream import VllmStream
from runtime.config.serving import EngineConfig
from runtime.nats.client import NatsClient


def bridge(
    vllm: Annotated[str, typer.Option("--vllm", metavar="tcp://HOST:PORT", help="vLLM's --kv-events-config endpoint.")],
    vllm_replay: Annotated[
        str | None,
        typer.Option(
            "--vllm-replay", metavar="tcp://HOST:PORT", help="Its replay_endpoint, to ask for what was missed."
        ),
    ] = None,
    topic: Annotated[str, typer.Option("--topic", metavar="TEXT", help="As in vLLM's configuration.")] = "",
    worker_id: Annotated[
        str | None,
        typer.Option(
            "--worker-id", metavar="ID", callback=options.check_name, help="To appear as. [default: from the endpoint]"
        ),
    ] = None,
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="That the engine serves.")] = "",
    block_size: Annotated[
        int, typer.Option("--block-size", min=1, metavar="TOKENS", help="Of the cluster, and of the engine.")
    ] = EngineConfig().block_size,
    nats_url: options.NatsUrlOption = options.DEFAULT_NATS_URL,
    namespace: options.NamespaceOption = "default",
    timeout_s: options.EventsTimeoutOption = options.DEFAULT_TIMEOUT_S,
) -> None:
    """Let routers know what a vLLM engine has cached, until Ctrl-C. They send no requests to it."""
    name = worker_id or "vllm-" + re.sub(r"[^A-Za-z0-9_-]+", "-", vllm.partition("://")[2]).strip("-")

    async def work(nats: NatsClient) -> None:
        async with AsyncExitStack() as closing:
            stream = VllmStream(vllm, vllm_replay, topic, timeout_s)
            closing.push_async_callback(stream.close)
            await stream.open()
            source = EventSource(nats, name, model, block_size, await discovery_ttl_s(nats))
            closing.push_async_callback(source.close)
            await source.start(timeout_s)
            await until_stopped(Bridge(nats, stream, source, block_size).run(), said=f"{vllm} appears as worker {name}")

    run_with_nats(nats_url, namespace, timeout_s, work)
