"""`baton up`: a service in the foreground, until a signal drains it."""

import asyncio
import enum
import json
import signal
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from baton.child_process import ChildExit, Ready
from baton.cli.exit_codes import ExitCode, errors_reported
from baton.config import ServingConfig, load_config
from baton.config_overrides import with_overrides
from baton.logging import configure_logging
from baton.supervisor import ROUTER_ID, Supervisor
from engine.served_model import served_model

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Transport(enum.StrEnum):
    AUTO = "auto"
    SHM = "shm"
    TCP = "tcp"


PortOption = Annotated[int | None, typer.Option(min=0, max=65535, metavar="PORT", help="0 picks a free one.")]
CountOption = Annotated[int | None, typer.Option(min=0, metavar="N", help="How many workers of this role.")]


def up(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Such as serving.yaml; flags go before it.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME_OR_PATH", help="smollm2, a Hugging Face folder, a .gguf file or mock.")
    ] = None,
    prefill: CountOption = None,
    decode: CountOption = None,
    http_port: PortOption = None,
    grpc_port: PortOption = None,
    nats_url: Annotated[str | None, typer.Option(metavar="URL", help="Use this NATS instead of starting one.")] = None,
    planner: Annotated[
        bool | None, typer.Option("--planner/--no-planner", help="Start and end workers as the load asks for it.")
    ] = None,
    transport: Annotated[Transport | None, typer.Option(help="How KV blocks travel.")] = None,
    log_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="One log file per process, instead of all logs on stderr.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what happens as one JSON object per line.")] = False,
) -> None:
    """Start a service on this machine and stay in the foreground.

    Ctrl-C or SIGTERM drains: requests in flight end, new ones are refused. A second one ends everything at once.
    """
    flags = {
        "model": model,
        "workers": {"prefill": prefill, "decode": decode},
        "router": {"http_port": http_port, "grpc_port": grpc_port},
        "nats": {"url": nats_url},
        "planner": {"enabled": planner},
        "transfer": {"transport": transport.value if transport else None},
    }
    with errors_reported():
        serving = with_overrides(load_config(config), _given(flags))
        configure_logging(serving.logging, "baton")
        served_model(serving, progress=True)  # converts it, once, where a person can see it
        code = asyncio.run(Foreground(serving, log_dir, as_json).run())
    raise typer.Exit(code)


class Foreground:
    """One run of `baton up`."""

    def __init__(self, config: ServingConfig, log_dir: Path | None, as_json: bool) -> None:
        self._supervisor = Supervisor(config, log_dir, self._process_ready)
        self._as_json = as_json
        self._start_s = time.monotonic()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> ExitCode:
        """Raises ChildFailedError when the service does not come up, ConfigError or UnavailableError when its planner
        does not."""
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)
        if not await _unless(self._stop, self._start()):
            return ExitCode.OK  # told to stop before it was up; nothing is left of it
        try:
            async with self._planner():
                code = await self._serve()
        finally:
            clean = await self._drain()
        return code if clean else ExitCode.FAILED

    def _planner(self) -> AbstractAsyncContextManager[object]:
        """It is gone before the service drains, and starts nothing any more."""
        if not self._supervisor.config.planner.enabled:
            return nullcontext()
        from planner.local import local_planner  # numpy's linear algebra and more, for those alone who plan

        return local_planner(
            self._supervisor,
            lambda address: self._print(
                f"planner at work, metrics on http://{address}/metrics",
                event="planner",
                metrics=f"http://{address}/metrics",
            ),
        )

    async def _start(self) -> bool:
        await self._supervisor.start()
        grpc, http = self._supervisor.address("grpc"), self._supervisor.address("http")
        url = f"{'https' if self._supervisor.speaks_tls else 'http'}://{http}"
        self._print(
            f"gRPC on {grpc}, OpenAI API on {url}/v1, metrics on {url}/metrics, "
            f"events on {self._supervisor.config.nats.url}",
            event="serving",
            grpc=grpc,
            http=http,
            nats=self._supervisor.config.nats.url,
        )
        return True

    async def _serve(self) -> ExitCode:
        """Until a signal, or until too little is left to serve with."""
        code = ExitCode.OK
        while ended := await _unless(self._stop, self._supervisor.wait()):
            code = ExitCode.FAILED
            able = self._supervisor.config.planner.enabled or bool(self._supervisor.workers("decode"))
            goes_on = able and ended.name not in (ROUTER_ID, "nats")
            self._report_loss(ended, goes_on)
            if not goes_on:
                break
        return code

    async def _drain(self) -> bool:
        self._print("draining; once more to end it now", event="draining")
        stopping = asyncio.create_task(self._supervisor.stop())
        if not await _unless(self._hurry, asyncio.shield(stopping), default=False):
            await self._supervisor.kill()
        clean = await stopping
        self._print("all processes have ended", event="stopped", clean=clean)
        return clean

    def _signalled(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()

    def _process_ready(self, ready: Ready) -> None:
        where = ", ".join(f"{name} {address}" for name, address in ready.addresses.items())
        self._print(
            f"{ready.id:<12} ready after {time.monotonic() - self._start_s:4.1f} s  pid {ready.pid}  {where}",
            event="ready",
            process=ready.process,
            id=ready.id,
            pid=ready.pid,
            addresses=ready.addresses,
        )

    def _report_loss(self, ended: ChildExit, goes_on: bool) -> None:
        what = "the service goes on without it" if goes_on else "the service cannot go on"
        typer.echo(
            f"error: {ended}; {what}" + (f"; its last log lines:\n{ended.log_tail}" if ended.log_tail else ""), err=True
        )
        if self._as_json:
            self._print("", event="lost", id=ended.name, pid=ended.pid, returncode=ended.returncode, goes_on=goes_on)

    def _print(self, line: str, **fields: Any) -> None:
        typer.echo(json.dumps(fields) if self._as_json else line)


async def _unless(event: asyncio.Event, work: Any, default: Any = None) -> Any:
    """The result of `work`, or `default` when the event is set first; `work` is cancelled then, and has ended."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait({task})
    return default


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """Without the flags that were left out."""
    nested = {key: _given(value) if isinstance(value, dict) else value for key, value in flags.items()}
    return {key: value for key, value in nested.items() if value is not None and value != {}}
