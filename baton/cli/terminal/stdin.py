"""Texts that a command takes as an argument or, for `-`, from stdin."""

import sys

import typer


def text_or_stdin(text: str, flag: str) -> str:
    """Raises typer.BadParameter."""
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"what stdin holds is no UTF-8 text: {error.reason}", param_hint=flag) from None
