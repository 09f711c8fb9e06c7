"""One batch, from its file to its end, with a service that answers as it is told."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from router.batches import batch_run, folder as folders, lines as batch_lines
from router.batches.batch_run import Asking, BatchRun, Reply
from router.batches.folder import BatchFolder, TenantFolder
from router.batches.lines import OutputFiles, ReadLine
from router.batches.records import Batch, OutputLine, Response, StoredBatch, new_id
from router.batches.room import Room
from runtime.errors import ConfigError, InvalidRequestError
from runtime.security.callers import ANYONE, Caller

PATH = "/v1/completions"
DONE = Reply(200, 0.0, b'{"ok":true}')


class Router:
    """Answers each line with what `say` tells of its id and how often it was asked for before."""

    def __init__(self, root: Path, say: Callable[[str, int], Reply] = lambda name, tries: DONE) -> None:
        self.folder = BatchFolder(root / "folder")
        self.tenant: TenantFolder = self.folder.of("acme")
        self.asked: Counter[str] = Counter()
        self.callers: dict[str, Caller] = {"": ANYONE}
        self.ready = True
        self.leaving = asyncio.Event()
        self._say = say

    async def _ask(self, caller: Caller, stored: StoredBatch, line: ReadLine, request_id: str) -> Reply:
        name = line.line.custom_id
        await asyncio.sleep(0)
        reply = self._say(name, self.asked[name])
        self.asked[name] += 1
        return reply

    def batch(self, names: Iterable[str]) -> StoredBatch:
        upload = self.folder.uploads / "lines"
        asked = [{"custom_id": name, "method": "POST", "url": PATH, "body": {"prompt": name}} for name in names]
        upload.write_text("".join(json.dumps(line) + "\n" for line in asked))
        file = self.tenant.take_in(upload, "lines", "batch")
        now = int(time.time())
        batch = Batch(
            id=new_id("batch_"),
            endpoint=PATH,
            input_file_id=file.id,
            completion_window="1h",
            created_at=now,
            expires_at=now + 60,
        )
        stored = StoredBatch(batch=batch, tenant="acme", key="", output=new_id("file-"), errors=new_id("file-"))
        self.folder.begin(stored)
        return stored

    async def run(self, stored: StoredBatch) -> Batch:
        asking = Asking(self._ask, lambda: self.ready, self.callers.get, Room(lambda lines: 0.0), 1 << 20)
        current = self.tenant.stored_batch(stored.batch.id)
        assert current is not None
        await BatchRun(self.tenant, current, asking).run(self.leaving)
        ended = self.tenant.batch(stored.batch.id)
        assert ended is not None
        return ended

    def output(self, batch: Batch) -> list[str]:
        return [] if batch.output_file_id is None else self.lines(batch.output_file_id)

    def errors(self, batch: Batch) -> list[str]:
        return [] if batch.error_file_id is None else self.lines(batch.error_file_id)

    def lines(self, file_id: str) -> list[str]:
        return [json.loads(line)["custom_id"] for line in self.tenant.data(file_id).read_text().splitlines()]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "LOOK_S", 0.01)


def named(count: int) -> list[str]:
    return [f"line-{number}" for number in range(count)]


async def test_a_line_that_a_router_wrote_before_it_died_is_not_asked_for_again(tmp_path: Path) -> None:
    router = Router(tmp_path)
    stored = router.batch(named(200))
    written = OutputFiles(router.tenant.data(stored.output), router.tenant.data(stored.errors), 200)
    written.append([OutputLine(new_id("batch_req_"), name, Response(200, "r", b"{}")) for name in named(90)])
    written.close()
    with router.tenant.data(stored.output).open("ab") as file:
        file.write(b'{"id":"batch_req_1","custom_id":"line-150","resp')  # the last write of a killed router
    ended = await router.run(stored)
    assert (ended.status, ended.request_counts.completed) == ("completed", 200)
    assert sorted(router.output(ended)) == sorted(named(200))
    assert router.asked == Counter(named(200)[90:])


async def test_a_router_that_leaves_gives_the_batch_to_the_next_one_as_far_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = OutputFiles.append

    def slowly(files: OutputFiles, lines: list[OutputLine]) -> None:  # a disk whose last write ends after all else
        time.sleep(0.05)
        append(files, lines)

    def until_half(name: str, tries: int) -> Reply:
        if len(router.asked) == 100:
            router.leaving.set()
        return DONE

    monkeypatch.setattr(OutputFiles, "append", slowly)
    router = Router(tmp_path, until_half)
    stored = router.batch(named(1000))
    left = await router.run(stored)
    assert left.status == "in_progress"
    assert 0 < left.request_counts.completed == len(router.lines(stored.output)) < 1000
    router.leaving.clear()
    ended = await router.run(stored)
    assert sorted(router.output(ended)) == sorted(named(1000))
    assert ended.request_counts.completed == 1000


async def test_lines_that_the_service_has_no_room_for_come_again(tmp_path: Path) -> None:
    router = Router(tmp_path, lambda name, tries: Reply(429, 0.01, b"{}") if tries < 4 else DONE)
    ended = await router.run(router.batch(named(20)))
    assert sorted(router.output(ended)) == sorted(named(20))
    assert set(router.asked.values()) == {5}


async def test_a_line_that_may_kill_workers_is_given_up_and_not_for_a_service_without_workers(tmp_path: Path) -> None:
    def deadly(name: str, tries: int) -> Reply:
        return Reply(503, 0.0, b'{"error":"died with this request"}') if name == "line-3" else DONE

    router = Router(tmp_path, deadly)
    ended = await router.run(router.batch(named(5)))
    assert (router.errors(ended), router.asked["line-3"]) == (["line-3"], batch_run.MAX_TRIES)
    assert ended.request_counts.failed == 1

    def away(name: str, tries: int) -> Reply:
        router.ready = tries == 9
        asyncio.get_running_loop().call_later(0.02, setattr, router, "ready", True)
        return DONE if tries == 9 else Reply(503, 0.0, b"{}")

    router = Router(tmp_path / "away", away)
    ended = await router.run(router.batch(["line-0"]))
    assert (router.output(ended), router.asked["line-0"]) == (["line-0"], 10)


async def test_without_its_callers_key_a_batch_goes_no_further(tmp_path: Path) -> None:
    def revoked(name: str, tries: int) -> Reply:
        router.callers.clear()
        return DONE

    router = Router(tmp_path, revoked)
    ended = await router.run(router.batch(named(500)))
    assert ended.status == "failed"
    assert ended.errors is not None
    assert [fault.code for fault in ended.errors.data] == ["invalid_api_key"]
    assert len(router.output(ended)) == ended.request_counts.completed < 500


async def test_what_is_not_answered_in_time_is_told_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(name: str, tries: int) -> Reply:
        if name in named(30):
            return DONE
        if len(router.asked) == 50:
            late = SimpleNamespace(time=lambda: time.time() + 3600.0, monotonic=time.monotonic)
            monkeypatch.setattr(batch_run, "time", late)
        return Reply(429, 0.01, b"{}")

    router = Router(tmp_path, full)
    ended = await router.run(router.batch(named(50)))
    assert ended.status == "expired"
    assert (sorted(router.output(ended)), router.errors(ended)) == (sorted(named(30)), named(50)[30:])
    assert (ended.request_counts.completed, ended.request_counts.failed) == (30, 20)


async def test_a_file_that_is_deleted_meanwhile_fails_the_batch(tmp_path: Path) -> None:
    router = Router(tmp_path)
    stored = router.batch(named(3))
    router.tenant.delete_file(stored.batch.input_file_id)
    ended = await router.run(stored)
    assert ended.errors is not None
    assert (ended.status, [fault.code for fault in ended.errors.data]) == ("failed", ["missing_file"])


async def test_a_disk_that_refuses_a_line_ends_the_run_and_the_next_one_completes_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router(tmp_path)
    stored = router.batch(named(100))

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(OutputFiles, "append", refuse)
        with pytest.raises(OSError, match="No space"):
            await router.run(stored)
    ended = await router.run(stored)
    assert sorted(router.output(ended)) == sorted(named(100))


async def test_one_line_more_than_a_batch_may_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "MAX_LINES", 100)
    router = Router(tmp_path)
    assert (await router.run(router.batch(named(100)))).status == "completed"
    ended = await router.run(router.batch(named(101)))
    assert ended.errors is not None
    assert [(fault.code, fault.line) for fault in ended.errors.data] == [("too_many_lines", 101)]


def test_a_batch_has_one_router_until_that_ends_and_none_once_it_is_over(tmp_path: Path) -> None:
    router = Router(tmp_path)
    stored = router.batch(named(1))
    others = BatchFolder(tmp_path / "folder")
    lease = router.folder.lease(stored.batch.id)
    assert lease is not None
    assert others.lease(stored.batch.id) is None
    lease.end(is_over=False)
    again = others.lease(stored.batch.id)
    assert again is not None
    again.end(is_over=True)
    assert router.folder.lease(stored.batch.id) is None
    assert router.folder.open_batches() == []


def test_files_and_open_batches_of_a_tenant_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MAX_FILES", 3)
    monkeypatch.setattr(folders, "MAX_OPEN", 2)
    router = Router(tmp_path)
    for _ in range(2):
        router.batch(named(1))
    with pytest.raises(InvalidRequestError, match="2 batches wait or run already"):
        router.batch(named(1))
    with pytest.raises(InvalidRequestError, match="3 are kept"):
        router.batch(named(1))


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"router\.batch_folder.*lets others read it"):
        BatchFolder(tmp_path / "open")
