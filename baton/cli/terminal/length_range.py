"""Numbers of tokens as `--prompt-tokens` and the like take them."""

import typer


def length_range(text: str, flag: str) -> tuple[int, int]:
    """'100-1024' -> (100, 1024), '512' -> (512, 512). Raises typer.BadParameter."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and (high or low).isdecimal() and 0 < int(low) <= int(high or low)):
        raise typer.BadParameter(
            f"{text!r} is neither a number of tokens nor a range such as 100-1024", param_hint=flag
        )
    return int(low), int(high or low)
