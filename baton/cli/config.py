"""`baton config`: every setting with its default and its meaning."""

import typer

from runtime.config.commented import commented


def config() -> None:
    """Print serving.yaml: every setting with its default and its meaning."""
    typer.echo(commented(), nl=False)
