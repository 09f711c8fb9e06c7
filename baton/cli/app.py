"""The commands of `baton`, in the order in which its help shows them."""

import importlib.metadata
from typing import Annotated

import typer

from baton.cli.lazy_group import lazy_group, plain_app

COMMANDS = {
    "up": "baton.cli.up:up",
    "down": "baton.cli.down:down",
    "rollout": "baton.cli.rollout:rollout",
    "chat": "baton.cli.chat:chat",
    "generate": "baton.cli.generate:generate",
    "status": "baton.cli.status:status",
    "models": "baton.cli.models:models",
    "top": "baton.cli.top:top",
    "ui": "baton.cli.ui:ui",
    "logs": "baton.cli.logs:logs",
    "scale": "baton.cli.plan.orders:scale",
    "drain": "baton.cli.plan.orders:drain",
    "flip": "baton.cli.plan.orders:flip",
    "sleep": "baton.cli.workers.sleep:sleep",
    "wake": "baton.cli.workers.sleep:wake",
    "update-weights": "baton.cli.workers.update_weights:update_weights",
    "config": "baton.cli.config:config",
    "profile": "baton.cli.profile:profile",
    "advise": "baton.cli.advice.advise:advise",
    "bench": "baton.cli.bench:bench",
    "demo": "baton.cli.demo:demo",
    "events": "baton.cli.events.app:app",
    "plan": "baton.cli.plan.app:app",
}

app = plain_app(
    name="baton",
    cls=lazy_group(COMMANDS),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("baton-serve"))
        raise typer.Exit


@app.callback()
def baton(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Serve large language models with prefill and decode on different workers."""
