"""`python -m baton.service.many_workers --config FILE [--name NAME] WORKER_ID...`: many workers in one process.

It is meant for the mock engine, which waits instead of computing: hundreds of workers share one thread, one NATS
connection and one metrics endpoint. To the rest of the service they look like workers with processes of their own. The
role of `prefill-3` is prefill.
"""

import argparse
import threading
from collections.abc import Sequence
from pathlib import Path

import structlog
import uvloop

from baton_proto.discovery import WorkerRecord
from decode_worker.decode_worker import DecodeWorker
from prefill_worker.prefill_worker import PrefillWorker
from runtime.config.serving import ServingConfig, for_prefill_worker, load_config
from runtime.end_task import run_all
from runtime.errors import BatonError
from runtime.processes.collector import calm_collector
from runtime.processes.die_with_parent import die_with_parent
from runtime.processes.serving import print_ready, stop_signal
from runtime.telemetry.logging import configure_logging
from worker.arguments import worker_id
from worker.engines.own import build_engine
from worker.process import serve_worker, shared_parts
from worker.worker import Worker

THREAD_STACK_BYTES = 256 * 1024  # small: a decode worker has threads for its KV receiver and for each connection
ROLES: dict[str, type[Worker]] = {"prefill": PrefillWorker, "decode": DecodeWorker}

log = structlog.get_logger()


def main() -> None:
    die_with_parent()
    arguments = parse_arguments()
    try:
        config = load_config(arguments.config)
        configure_logging(config.logging, arguments.name)
        threading.stack_size(THREAD_STACK_BYTES)
        uvloop.run(run_workers(config, arguments.name, arguments.worker_ids))
    except BatonError as error:
        raise SystemExit(f"{arguments.name}: {error}") from None


async def run_workers(config: ServingConfig, name: str, worker_ids: Sequence[str]) -> None:
    """Serves until SIGTERM or SIGINT, then drains all workers. When one worker's engine fails, all workers end."""
    stop = stop_signal()
    ready: list[WorkerRecord] = []

    def on_ready(record: WorkerRecord) -> None:
        ready.append(record)
        if len(ready) == len(worker_ids):
            calm_collector()
            print_ready("workers", name, {"metrics": record.metrics_address})
            log.info("ready", workers=len(ready), metrics=record.metrics_address)

    async with shared_parts(config, name) as shared:
        of_role = {"prefill": for_prefill_worker(config), "decode": config}
        await run_all(
            serve_worker(shared, one, ROLES[role_of(one)], build_engine(of_role[role_of(one)]), stop, on_ready)
            for one in worker_ids
        )


def role_of(one: str) -> str:
    return one.partition("-")[0]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Ends the process with a usage message when they are wrong, as argparse does."""
    parser = argparse.ArgumentParser(prog="python -m baton.service.many_workers", allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, help="serving.yaml with the NATS URL filled in")
    parser.add_argument("--name", default="workers", help="of the process, in logs")
    parser.add_argument("worker_ids", nargs="+", type=worker_id, metavar="WORKER_ID", help="ROLE-NAME")
    arguments = parser.parse_args(argv)
    if strange := [one for one in arguments.worker_ids if role_of(one) not in ROLES]:
        parser.error(f"{strange[0]!r} does not begin with {' or '.join(ROLES)}")
    if len(set(arguments.worker_ids)) < len(arguments.worker_ids):
        parser.error("a worker id is given twice")
    return arguments


if __name__ == "__main__":
    main()
