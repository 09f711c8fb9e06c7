"""`python -m decode_worker --config FILE --worker-id ID`: one decode worker."""

import uvloop

from decode_worker.decode_worker import DecodeWorker
from runtime.config.serving import load_config
from runtime.errors import BatonError
from runtime.telemetry.logging import configure_logging
from worker.arguments import parse_arguments
from worker.process import run_worker


def main() -> None:
    arguments = parse_arguments("decode_worker")
    try:
        config = load_config(arguments.config)
        configure_logging(config.logging, arguments.worker_id)
        external = config.external_worker(arguments.worker_id)
        if external is None:
            uvloop.run(run_worker(config, arguments.worker_id, DecodeWorker))
        else:
            from worker.lives import run_external  # here: the environment of a worker with vLLM has no aiohttp

            uvloop.run(run_external(config, external, DecodeWorker))
    except BatonError as error:
        raise SystemExit(f"{arguments.worker_id}: {error}") from None


if __name__ == "__main__":
    main()
