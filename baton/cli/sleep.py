"""`baton sleep` and `baton wake`: a worker gives its memory back, and takes it again."""

import asyncio
import json
from collections.abc import Coroutine
from contextlib import suppress
from typing import Annotated

import typer

from baton.cli.events.session import nats_session
from baton.cli.terminal.access import Access
from baton.cli.terminal.answering import message_fields
from baton.cli.terminal.asking import asked
from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.options import DEFAULT_ADDRESS, AddressOption, CaFileOption, JsonOption, OperatorKeyFileOption
from baton.cli.terminal.output import console
from baton.runs.run_file import run_at
from baton_proto.generated import inference_pb2 as pb
from baton_proto.planner import PREFILL
from runtime.calls.planner import ask_plan
from runtime.errors import BatonError

PLANNER_TIMEOUT_S = 2.0

WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", help="Its id, as `baton status` shows it.")]


def sleep(
    worker: WorkerArgument,
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1 keeps the weights in host memory, 2 drops them and reads them again.")
    ] = 1,
    drain_timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="For requests in flight, and again for peers.")
    ] = 30.0,
    address: AddressOption = DEFAULT_ADDRESS,
    operator_key_file: OperatorKeyFileOption = None,
    ca_file: CaFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Drain a worker and give its memory back: weights and KV."""
    access = Access(address, None, ca_file, operator_key_file)

    async def work() -> pb.SleepResponse:
        wish = await _planners_wish(access.place, worker)
        response = await asked(access, lambda client: client.sleep(worker, level, drain_timeout))
        if wish:
            typer.echo(f"warning: {wish}", err=True)
        return response

    _report(work(), as_json)


def wake(
    worker: WorkerArgument,
    tags: Annotated[str, typer.Option(metavar="TAG,TAG", help="weights, kv_cache. [default: both]")] = "",
    address: AddressOption = DEFAULT_ADDRESS,
    operator_key_file: OperatorKeyFileOption = None,
    ca_file: CaFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a sleeping worker's memory again; it serves when all of it is there."""
    access = Access(address, None, ca_file, operator_key_file)
    _report(asked(access, lambda client: client.wake(worker, [tag for tag in tags.split(",") if tag])), as_json)


async def _planners_wish(address: str, worker_id: str) -> str:
    """What a planner on this machine has against it that the worker sleeps: a sentence, or nothing."""
    run = await asyncio.to_thread(run_at, address)
    with suppress(BatonError, StopIteration):  # no planner runs, or it has not seen the worker yet
        if run is not None and run.file.nats:
            async with nats_session(run.file.nats, run.file.namespace, PLANNER_TIMEOUT_S) as nats:
                plan = await ask_plan(nats, PLANNER_TIMEOUT_S)
            seen = [] if plan.observation is None else plan.observation.workers
            role = next(worker.role for worker in seen if worker.worker_id == worker_id)
            others = [one for one in seen if one.role == role and one.state == "ready" and one.worker_id != worker_id]
            wanted = 0 if plan.target is None else plan.target.prefill if role == PREFILL else plan.target.decode
            if len(others) < wanted:
                hint = f"; `baton scale {role}={len(others)}` before lets it sleep" if others else ""
                return f"the planner wants {wanted} {role} workers and wakes {worker_id} again{hint}"
    return ""


def _report(asking: Coroutine[None, None, pb.SleepResponse], as_json: bool) -> None:
    with errors_reported():
        response = asyncio.run(asking)
    if as_json:
        typer.echo(json.dumps(message_fields(response)))
        return
    freed = f", {response.freed_bytes / 2**20:,.0f} MiB free" if response.freed_bytes else ""
    asleep = f" ({', '.join(response.asleep)} asleep)" if response.asleep else ""
    console().print(f"{response.worker_id} is {response.state}{asleep}{freed}, after {response.seconds:.2f} s")
