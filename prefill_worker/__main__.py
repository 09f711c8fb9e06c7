"""`python -m prefill_worker --config FILE --worker-id ID`: one prefill worker."""

import uvloop

from prefill_worker.prefill_worker import PrefillWorker
from runtime.config.serving import for_prefill_worker, load_config
from runtime.errors import BatonError
from runtime.telemetry.logging import configure_logging
from worker.arguments import parse_arguments
from worker.process import run_worker


def main() -> None:
    arguments = parse_arguments("prefill_worker")
    try:
        config = for_prefill_worker(load_config(arguments.config))
        configure_logging(config.logging, arguments.worker_id)
        uvloop.run(run_worker(config, arguments.worker_id, PrefillWorker))
    except BatonError as error:
        raise SystemExit(f"{arguments.worker_id}: {error}") from None


if __name__ == "__main__":
    main()
