"""Pictures that commands draw with `--plot`, by matplotlib, which is an optional dependency."""

from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> "Figure":
    """An empty picture of so many inches. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot", "needs matplotlib: pip install 'baton-serve[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", file: Path) -> None:
    """Raises ConfigError when the file cannot be written, or is of an unknown type."""
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError("--plot", f"{file}: {error}") from error
