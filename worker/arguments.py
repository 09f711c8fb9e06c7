"""Command line of the worker processes: `python -m prefill_worker|decode_worker --config FILE --worker-id ID`."""

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WorkerArguments:
    config: Path
    worker_id: str


def parse_arguments(program: str, argv: list[str] | None = None) -> WorkerArguments:
    """Ends the process with a usage message when the arguments are wrong, as argparse does."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, help="serving.yaml with the NATS URL filled in")
    parser.add_argument("--worker-id", required=True, help="name in discovery; [A-Za-z0-9_-]+", type=worker_id)
    arguments = parser.parse_args(argv)
    return WorkerArguments(config=arguments.config, worker_id=arguments.worker_id)


def worker_id(text: str) -> str:
    """A worker id, which is a token of NATS subjects: no dots, spaces or wildcards."""
    if not text or not all(character.isascii() and (character.isalnum() or character in "_-") for character in text):
        raise argparse.ArgumentTypeError(f"{text!r} may hold letters, digits, '-' and '_' only")
    return text
