"""New weights of one running worker: it checks a checkpoint, drains, reads the values in place, and serves again.

Invariant: no KV of former weights is used with the new ones. Nothing is in flight and no peer is connected while they
change; cached prefixes are forgotten on device, host and disk; and peers, routers and the disk tier know the worker by
its new `model_hash` before it serves again.
"""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from baton_proto.worker import UpdateReport, UpdateRequest
from engine.interface import Engine
from runtime.checkpoint.served_model import served_model
from runtime.config.serving import ServingConfig
from runtime.errors import ModelError, UnavailableError
from worker.changes.sleep import Sleeper
from worker.runtime import WorkerRuntime

if TYPE_CHECKING:  # the mock engine needs no torch
    from engine.model.checkpoint import Checkpoint

STEPS = ("check", "hold", "load", "release")
HELD = "its weights are being updated"
HOLD_GRACE_S = 60.0  # beyond the time that other workers may take to drain

log = structlog.get_logger()


class WeightsUpdater:
    def __init__(self, runtime: WorkerRuntime, sleeper: Sleeper) -> None:
        self._runtime = runtime
        self._sleeper = sleeper
        self._checkpoint: Checkpoint | None = None  # while the worker is held
        self._release: asyncio.Task[None] | None = None

    async def update(self, request: UpdateRequest) -> UpdateReport:
        """Every step but "load" leaves the weights as they are. When "load" fails, the worker is not ready until an
        update succeeds or it restarts; the report says why."""
        began_s = time.monotonic()
        problem = ""
        async with self._sleeper.turn:
            try:
                await self._step(request)
            except (UnavailableError, ModelError, RuntimeError, OSError) as error:
                problem = f"{'is not ready' if self._runtime.assembly.memory.problem else 'keeps its weights'}: {error}"
                log.warning("weights not updated", step=request.step, reason=problem)
        runtime = self._runtime
        return UpdateReport(runtime.state, runtime.assembly.model_hash, time.monotonic() - began_s, problem)

    async def _step(self, request: UpdateRequest) -> None:
        folder = Path(request.folder)
        match request.step:
            case "check":
                await self._opened(folder)
            case "hold":
                await self._hold(await self._opened(folder), request.timeout_s)
            case "load":
                if self._checkpoint is None or self._checkpoint.folder != folder:
                    raise UnavailableError("it was not held for these weights, or for too long")
                await self._load(self._checkpoint)
            case "release":
                if self._checkpoint is not None:
                    await self._serve_on()
            case other:
                raise UnavailableError(f"step: {other!r} is none of {', '.join(STEPS)}")

    async def _opened(self, folder: Path) -> "Checkpoint":
        """Raises ModelError."""
        if not await asyncio.to_thread(_may_come_from, folder, self._runtime.config):
            raise ModelError(str(folder), "lies in none of workers.weights_folders, which new weights may come from")
        if not folder.is_absolute() or not await asyncio.to_thread(folder.is_dir):
            raise ModelError(str(folder), "is no absolute path of a folder on this worker's machine")
        return await asyncio.to_thread(self._runtime.assembly.memory.opened, folder)

    async def _hold(self, checkpoint: "Checkpoint", timeout_s: float) -> None:
        runtime = self._runtime
        if self._checkpoint is not None:
            raise UnavailableError("another update is under way")
        if runtime.draining and not runtime.asleep and not runtime.assembly.memory.problem:
            raise UnavailableError("it drains, to leave")
        if not runtime.asleep:
            try:
                await self._sleeper.let_go(timeout_s)
            except UnavailableError:
                await self._sleeper.rise()
                raise
        self._checkpoint, self._sleeper.held = checkpoint, HELD
        self._release = asyncio.create_task(self._release_after(4 * timeout_s + HOLD_GRACE_S))

    async def _load(self, checkpoint: "Checkpoint") -> None:
        runtime, assembly = self._runtime, self._runtime.assembly

        def read(_: Engine) -> None:
            assembly.memory.read(checkpoint)
            assembly.weights_changed()

        try:
            await self._sleeper.forget(keep=False)
            await runtime.bridge.call(read)
            await asyncio.to_thread(runtime.role.peers.weights_changed)
        finally:
            await self._serve_on()
        log.info("weights updated", folder=str(checkpoint.folder), model_hash=assembly.model_hash)

    async def _serve_on(self) -> None:
        """Ends the hold."""
        if self._release is not None and self._release is not asyncio.current_task():
            self._release.cancel()
        self._checkpoint = self._release = None
        self._sleeper.held = ""
        await self._sleeper.rise()

    async def _release_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        async with self._sleeper.turn:
            log.warning("weights not updated: nobody said load")
            await self._serve_on()


def _may_come_from(folder: Path, config: ServingConfig) -> bool:
    """Whether the folder, wherever its links lead, lies in one that the configuration names, or else in that of the
    served model."""
    named = [Path(each).expanduser() for each in config.workers.weights_folders]
    if not named:
        model = Path(config.model).expanduser()
        named = [served_model(config).folder.parent, *([model.parent] if model.exists() else [])]
    return not folder.is_absolute() or any(folder.resolve().is_relative_to(each.resolve()) for each in named)
