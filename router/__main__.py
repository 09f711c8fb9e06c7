"""`python -m router --config FILE --router-id ID`: one router."""

import argparse
import os
from pathlib import Path

import uvloop

from router.process import run_router
from runtime.config.serving import load_config
from runtime.errors import BatonError
from runtime.telemetry.logging import configure_logging


def main() -> None:
    arguments = parse_arguments()
    # Prompts come one by one; handing one to the tokenizer's thread pool takes a third longer than encoding it here.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        config = load_config(arguments.config)
        configure_logging(config.logging, arguments.router_id)
        uvloop.run(run_router(config, arguments.router_id, beside=arguments.beside))
    except (BatonError, OSError) as error:
        raise SystemExit(f"{arguments.router_id}: {error}") from None


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Ends the process with a usage message when they are wrong, as argparse does."""
    parser = argparse.ArgumentParser(prog="python -m router", allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, help="serving.yaml with the NATS URL filled in")
    parser.add_argument("--router-id", required=True, help="name in status, logs and on the workers' streams")
    parser.add_argument("--beside", action="store_true", help="other routers of this user have its ports, too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
