"""The peer's virtual environments, apart from ours: each is made once, in the user's cache."""

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

DYNAMO_VERSION = "1.6.1"
PEERS = Path.home() / ".cache" / "baton" / "peers"
RUNTIME = f"ai-dynamo-runtime=={DYNAMO_VERSION}"
FRONTEND = f"ai-dynamo=={DYNAMO_VERSION}"
FRONTEND_IMPORTS = ("msgspec", "packaging", "prometheus-client", "pyyaml")


class PeerMissingError(Exception):
    def __init__(self, package: str, folder: Path, reason: str) -> None:
        super().__init__(
            f"cannot install {package} into {folder}: {reason}\n"
            "It needs PyPI (or an index that pip is configured for), Linux with glibc 2.28 or newer."
        )


def dynamo_python(console: Console) -> Path:
    """The interpreter of an environment with Dynamo's binding in it. Raises PeerMissingError."""
    folder = PEERS / f"dynamo-{DYNAMO_VERSION}"
    return _environment(console, folder, RUNTIME, [[RUNTIME, "numpy>=2"]], "dynamo.llm")


def dynamo_frontend_python(console: Console) -> Path:
    """The interpreter of one that also runs `dynamo.frontend` and `dynamo.mocker`. Raises PeerMissingError.

    Only those dependencies of ai-dynamo are installed that these two import. The others are clients of Kubernetes and
    Redis, transformers, and a simulator from a package index of its own.
    """
    folder = PEERS / f"dynamo-frontend-{DYNAMO_VERSION}"
    steps = [[RUNTIME, *FRONTEND_IMPORTS], ["--no-deps", FRONTEND]]
    return _environment(console, folder, FRONTEND, steps, "dynamo.frontend.main, dynamo.mocker.main")


def _environment(console: Console, folder: Path, package: str, steps: Sequence[Sequence[str]], modules: str) -> Path:
    """`steps`: arguments of one `pip install` each; `modules` must then be importable."""
    python = folder / "bin" / "python"
    installed = folder / ".installed"
    if installed.exists():
        return python
    console.print(f"Installing {package} into {folder} (its own environment, 350 MB, once)")
    try:
        venv.create(folder, with_pip=True, clear=True)
        for arguments in steps:
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
            subprocess.run(pip, check=True, stdout=sys.stderr)
        subprocess.run([python, "-E", "-P", "-c", f"import {modules}"], check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerMissingError(package, folder, str(error)) from error
    installed.touch()
    return python
