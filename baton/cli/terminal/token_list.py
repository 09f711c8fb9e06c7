"""Token ids as `--tokens` takes them."""

import typer

from baton.cli.terminal.options import UINT32_MAX


def token_ids(text: str) -> list[int]:
    """'1,2,3' -> [1, 2, 3]. Raises typer.BadParameter."""
    try:
        ids = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,2,3", param_hint="--tokens") from None
    if not all(0 <= token_id <= UINT32_MAX for token_id in ids):
        raise typer.BadParameter(f"token ids lie between 0 and {UINT32_MAX}", param_hint="--tokens")
    return ids
