"""Texts that a command takes as an argument or, for `-`, from stdin."""

import sys

import typer


def text_or_stdin(text: str, flag: str) -> str:
    """Raises typer.BadParameter."""
    try:
        return sys.stdin.buffer.read().decode() if text == "-" else text.encode().decode()
    except UnicodeError as error:
        raise typer.BadParameter(f"is no UTF-8 text: {error}", param_hint=flag) from None
