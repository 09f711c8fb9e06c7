"""The peer's own virtual environment: made once, in the user's cache, never ours."""

import subprocess
import sys
import venv
from pathlib import Path

from rich.console import Console

DYNAMO_VERSION = "1.6.1"
PEERS = Path.home() / ".cache" / "baton" / "peers"


class PeerMissingError(Exception):
    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(
            f"cannot install ai-dynamo-runtime=={DYNAMO_VERSION} into {folder}: {reason}\n"
            "It needs PyPI (or an index that pip is configured for), Linux with glibc 2.28 or newer."
        )


def dynamo_python(console: Console) -> Path:
    """The interpreter of an environment with Dynamo in it. Raises PeerMissingError."""
    folder = PEERS / f"dynamo-{DYNAMO_VERSION}"
    python = folder / "bin" / "python"
    installed = folder / ".installed"
    if installed.exists():
        return python
    console.print(f"Installing ai-dynamo-runtime=={DYNAMO_VERSION} into {folder} (its own environment, 350 MB, once)")
    try:
        venv.create(folder, with_pip=True, clear=True)
        packages = [f"ai-dynamo-runtime=={DYNAMO_VERSION}", "numpy>=2"]
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
            check=True,
            stdout=sys.stderr,
        )
        subprocess.run([python, "-c", "import dynamo.llm"], check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerMissingError(folder, str(error)) from error
    installed.touch()
    return python
