"""`baton sleep` and `baton wake`: a worker gives its memory back, and takes it again."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Annotated

import typer

from baton.cli.terminal.access import Access
from baton.cli.terminal.answering import message_fields
from baton.cli.terminal.asking import asked
from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.options import DEFAULT_ADDRESS, AddressOption, CaFileOption, JsonOption, OperatorKeyFileOption
from baton.cli.terminal.output import console
from baton_proto.generated import inference_pb2 as pb

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
    _report(asked(access, lambda client: client.sleep(worker, level, drain_timeout)), as_json)


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


def _report(asking: Coroutine[None, None, pb.SleepResponse], as_json: bool) -> None:
    with errors_reported():
        response = asyncio.run(asking)
    if as_json:
        typer.echo(json.dumps(message_fields(response)))
        return
    freed = f", {response.freed_bytes / 2**20:,.0f} MiB free" if response.freed_bytes else ""
    asleep = f" ({', '.join(response.asleep)} asleep)" if response.asleep else ""
    console().print(f"{response.worker_id} is {response.state}{asleep}{freed}, after {response.seconds:.2f} s")
