"""A connection to NATS around the work of a command, and its end at Ctrl-C."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from baton.cli.events.options import NamespaceOption, NatsUrlOption
from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.options import OfModelOption
from baton.runs.places import NATS_FLAG, nats_place, reach
from baton.runs.run_file import find_keys
from runtime.config.surroundings import LoggingConfig
from runtime.end_task import end_tasks
from runtime.errors import UnavailableError
from runtime.nats.client import NATS_ERRORS, NatsClient, connect
from runtime.processes.serving import stop_signal
from runtime.security.keys import Keys
from runtime.security.nats_login import each_url, split_url
from runtime.telemetry.logging import configure_logging

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class AtNats:
    """Where a command finds NATS, and whose messages it wants there."""

    nats_url: NatsUrlOption = ""  # see runs/places.py
    namespace: NamespaceOption = "default"
    model: OfModelOption = ""
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Give up when nothing answers for so long.")
    ] = 5.0

    def session(self) -> AbstractAsyncContextManager[NatsClient]:
        return nats_session(self.nats_url, self.namespace, self.timeout_s, self.model)

    def keys(self) -> Keys:
        """Raises ConfigError, UnavailableError."""
        return find_keys(*nats_place(self.nats_url, self.namespace, self.model))

    def run(self, work: Callable[[NatsClient], Awaitable[None]]) -> None:
        """The whole of a command: `work` with a connection. Ends the command with an exit code when it fails."""

        async def run() -> None:
            async with self.session() as nats:
                await work(nats)

        with errors_reported():
            asyncio.run(run())


@asynccontextmanager
async def nats_session(
    url: str, namespace: str, timeout_s: float, model: str | None = None
) -> AsyncIterator[NatsClient]:
    """`url`, `namespace`, `model`: as nats_place takes them. Warnings go to stderr. Raises UnavailableError
    when NATS cannot be reached or stops answering, UnauthorizedError when it does not let us in."""
    configure_logging(LoggingConfig(level="warning"), "baton")
    url, namespace = nats_place(url, namespace, model)
    shown = split_url(url)[0]
    await _reach_one(shown, timeout_s)
    nats = await connect(url, "baton-events", namespace, timeout_s, find_keys(url, namespace).nats)
    try:
        yield nats
    except BrokenPipeError:
        raise  # of our stdout: whoever read it has seen enough
    except NATS_ERRORS as error:
        why = str(error) or type(error).__name__
        raise UnavailableError(f"NATS at {shown} does not answer: {why}") from error
    finally:
        await nats.close()


async def _reach_one(shown: str, timeout_s: float) -> None:
    """Raises UnavailableError when none of the servers listens."""
    problem: UnavailableError | None = None
    for url in each_url(shown):
        place = url.rstrip("/").rpartition("/")[2]
        place = place if ":" in place else f"{place}:4222"
        try:
            await reach(place, timeout_s, f"NATS at {shown} does not answer", NATS_FLAG)
        except UnavailableError as error:
            problem = error
        else:
            return
    if problem is not None:
        raise problem


async def until_stopped(work: Coroutine[Any, Any, None], for_s: float | None = None, said: str | None = None) -> bool:
    """Runs the work until it is done, a signal comes or `for_s` is over. The work has ended when this returns; False:
    it was cut short. `said` goes to stderr as soon as signals are heeded. Raises what the work raises."""
    task = asyncio.ensure_future(work)
    stop = stop_signal(*STOP_SIGNALS)
    if said is not None:
        typer.echo(said, err=True)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, timeout=for_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        await end_tasks(task, stopping)
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
