"""Works on one batch, from wherever the last router has left it to its end.

A line is written before it counts as answered, and this router alone writes while it has the lease: a line that was
written is never asked for again, and one that was not, is. Invariant: no thread writes when run() has returned.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, closing
from functools import partial
from typing import Final, NamedTuple

from msgspec import Raw
from msgspec.structs import replace

from router.batches.folder import TenantFolder
from router.batches.lines import Checked, FileFaultError, InputFile, OutputFiles, ReadLine
from router.batches.records import Ending, Fault, Faults, LineError, OutputLine, Response, StoredBatch, new_id
from router.batches.room import Room
from runtime.end_task import end_tasks
from runtime.security.callers import Caller

LOOK_S: Final = 1.0  # between two looks at what callers want of the batch, and between two words of its progress
AGAIN: Final = (429, 503, 504)  # statuses that say nothing of the line
UNAVAILABLE: Final = 503
MAX_TRIES: Final = 3  # at a line that is answered with 503 while there are workers: perhaps they die of it
MAX_PAUSE_S: Final = 30.0
EXPIRED: Final = LineError("batch_expired", "This request could not be executed before the completion window expired.")
NO_KEY: Final = Fault("invalid_api_key", "The key that asked for the batch is none of this service's any more.")
NO_FILE: Final = Fault("missing_file", "The input file was deleted before the batch had ended.")


class Reply(NamedTuple):
    status: int
    pause_s: float  # before the next request, where the status says so
    body: bytes


class Asking(NamedTuple):
    """What a run has of its router."""

    ask: Callable[[Caller, StoredBatch, ReadLine, str], Awaitable[Reply]]  # the last is the request's id
    is_ready: Callable[[], bool]  # there is a worker
    caller: Callable[[str], Caller | None]  # by the name of its key; None: there is no such key any more
    room: Room
    max_body_bytes: int


class BatchRun:
    def __init__(self, folder: TenantFolder, stored: StoredBatch, asking: Asking) -> None:
        self._folder = folder
        self._stored = stored
        self._router = asking
        self._again: deque[ReadLine] = deque()  # answered with AGAIN; while there are any, no other line begins
        self._tries: Counter[int] = Counter()  # by number of a line
        self._in_flight = 0
        self._news = asyncio.Event()  # a line has ended, or is to be written
        self._go_on_s = 0.0  # time.monotonic()
        self._unwritten: list[tuple[OutputLine, asyncio.Future[None]]] = []
        self._fault: Fault | None = None  # why the batch cannot go on

    async def run(self, leaving: asyncio.Event) -> bool:
        """Returns whether the batch has ended; `leaving` ends the work on it early. Raises OSError, where the disk does
        not do its part: the batch may be tried again."""
        if self._stored.batch.status == "validating":
            await self._check()
        return not self._stored.batch.is_open or await self._work(leaving)

    async def _check(self) -> None:
        checked = Checked(self._stored.batch.endpoint)
        try:
            with closing(await asyncio.to_thread(self._input)) as lines:
                while chunk := await asyncio.to_thread(lines.take):
                    await asyncio.to_thread(checked.add, chunk)
            checked.end()
        except FileFaultError as fault:
            checked.faults.append(fault.fault)
        except FileNotFoundError:
            checked.faults.append(NO_FILE)
        if checked.faults:
            failed = {"status": "failed", "failed_at": int(time.time()), "errors": Faults(checked.faults)}
            self._stored = replace(self._stored, batch=replace(self._stored.batch, **failed))
            await asyncio.to_thread(self._folder.end_batch, self._stored)
            return
        counts = replace(self._stored.batch.request_counts, total=checked.num_lines)
        await self._save(status="in_progress", in_progress_at=int(time.time()), request_counts=counts)

    async def _work(self, leaving: asyncio.Event) -> bool:
        paths = self._folder.data(self._stored.output), self._folder.data(self._stored.errors)
        files = await asyncio.to_thread(OutputFiles, *paths, self._stored.batch.request_counts.total)
        with closing(files):
            try:
                lines = await asyncio.to_thread(self._input)
            except FileNotFoundError:
                self._fault = NO_FILE
                await self._end("failed", files)
                return True
            with closing(lines):
                how = await self._ended_early() or await self._until_end(lines, files, leaving)
                if how == "expired":
                    await self._write_expired(lines, files)
                if how is not None:
                    await self._end(how, files)
        return how is not None

    async def _until_end(self, lines: InputFile, files: OutputFiles, leaving: asyncio.Event) -> Ending | None:
        working, stopping = asyncio.create_task(self._ask_all(lines, files)), asyncio.create_task(leaving.wait())
        writing = asyncio.create_task(self._write_all(files, working))
        how: Ending | None = None
        try:
            while how is None and not leaving.is_set():
                await asyncio.wait({working, writing, stopping}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in (working, writing):
                    if task.done():
                        task.result()
                how = "completed" if working.done() else await self._ended_early()
                await self._save(request_counts=files.counts())
        finally:
            await end_tasks(working, stopping)
            self._news.set()
            await asyncio.wait({writing})
        if how is None:  # whoever goes on shows what was written last, too
            await self._save(request_counts=files.counts())
        return how

    async def _ended_early(self) -> Ending | None:
        batch = self._stored.batch
        if self._router.caller(self._stored.key) is None:
            self._fault = NO_KEY
            return "failed"
        if await asyncio.to_thread(self._folder.is_cancelled, batch.id):
            return "cancelled"
        return "expired" if time.time() >= batch.expires_at else None

    # --- the lines ----------------------------------------------------------------------------------------------------

    async def _ask_all(self, lines: InputFile, files: OutputFiles) -> None:
        async with asyncio.TaskGroup() as group, aclosing(self._to_ask(lines, files)) as to_ask:
            async for line in to_ask:
                await self._router.room.enter(line.num_bytes)
                self._in_flight += 1
                group.create_task(self._ask(line)).add_done_callback(partial(self._left, line))

    async def _to_ask(self, lines: InputFile, files: OutputFiles) -> AsyncGenerator[ReadLine, None]:
        """All lines that are not answered, until the last one is."""
        while chunk := await asyncio.to_thread(lines.read):
            for line in chunk:
                while self._again:
                    yield await self._next_try()
                if line.line.custom_id not in files.done:
                    yield line
        while self._in_flight or self._again:
            if self._again:
                yield await self._next_try()
            else:
                self._news.clear()
                await self._news.wait()

    async def _next_try(self) -> ReadLine:
        line = self._again.popleft()
        while (wait_s := self._go_on_s - time.monotonic()) > 0 or not self._router.is_ready():
            await asyncio.sleep(max(wait_s, LOOK_S))
        return line

    async def _ask(self, line: ReadLine) -> None:
        caller = self._router.caller(self._stored.key)
        if caller is None:
            self._again.append(line)  # the next look ends the batch
            self._pause(MAX_PAUSE_S)
            return
        request_id = new_id("batch_req_")
        reply = await self._router.ask(caller, self._stored, line, request_id)
        self._tries[line.number] += reply.status == UNAVAILABLE and self._router.is_ready()
        if reply.status in AGAIN and self._tries[line.number] < MAX_TRIES:
            self._again.append(line)
            self._pause(min(reply.pause_s, MAX_PAUSE_S))
            return
        response = Response(reply.status, request_id, Raw(reply.body))
        written = asyncio.get_running_loop().create_future()
        self._unwritten.append((OutputLine(request_id, line.line.custom_id, response), written))
        self._news.set()
        await written

    def _pause(self, seconds: float) -> None:
        self._go_on_s = max(self._go_on_s, time.monotonic() + seconds)

    def _left(self, line: ReadLine, _: object) -> None:
        self._in_flight -= 1
        self._router.room.leave(line.num_bytes)
        self._news.set()

    async def _write_all(self, files: OutputFiles, working: "asyncio.Task[None]") -> None:
        """Writes what was answered, all that waits at once, until `working` has ended. Nobody cancels it."""
        while self._unwritten or not working.done():
            if not self._unwritten:
                await self._news.wait()
                self._news.clear()
                continue
            lines, self._unwritten = self._unwritten, []
            await asyncio.to_thread(files.append, [line for line, _ in lines])
            for _, written in lines:
                if not written.done():
                    written.set_result(None)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _end(self, how: Ending, files: OutputFiles) -> None:
        faults = self._stored.batch.errors if self._fault is None else Faults([self._fault])
        shown = await asyncio.to_thread(self._show, files)
        self._stored = replace(
            self._stored, batch=replace(self._stored.batch.ended(how, files.counts(), *shown), errors=faults)
        )
        await asyncio.to_thread(self._folder.end_batch, self._stored)

    async def _write_expired(self, lines: InputFile, files: OutputFiles) -> None:
        lines.rewind()
        while chunk := await asyncio.to_thread(lines.read):
            ids = [line.line.custom_id for line in chunk if line.line.custom_id not in files.done]
            expired = [OutputLine(new_id("batch_req_"), custom_id, error=EXPIRED) for custom_id in ids]
            await asyncio.to_thread(files.append, expired)

    def _show(self, files: OutputFiles) -> list[str | None]:
        """Ids of the output and of the error file, None for one without a line."""
        shown: list[str | None] = []
        for kind, (name, file_id) in enumerate((("output", self._stored.output), ("error", self._stored.errors))):
            if files.has(kind):
                self._folder.show(file_id, f"{self._stored.batch.id}_{name}.jsonl", "batch_output")
            else:
                self._folder.data(file_id).unlink(missing_ok=True)
            shown.append(file_id if files.has(kind) else None)
        return shown

    def _input(self) -> InputFile:
        return InputFile(self._folder.data(self._stored.batch.input_file_id), self._router.max_body_bytes)

    async def _save(self, **changes: object) -> None:
        batch = replace(self._stored.batch, **changes)
        if batch != self._stored.batch:
            self._stored = replace(self._stored, batch=batch)
            await asyncio.to_thread(self._folder.save_batch, self._stored)
