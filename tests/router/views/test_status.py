"""Status: every field of a worker and of the queue, and the notes an operator needs."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from baton_proto.discovery import LoadReport, WorkerLoad, WorkerRecord
from baton_proto.token_counts import TokenCounts
from router.counters.metrics import RouterMetrics
from router.counters.tally import Tally
from router.index.radix_tree import RadixTree
from router.requests.admission import AdmissionQueue
from router.views.status import StatusView
from router.workers.account import LoadView
from router.workers.load import LoadLedger
from router.workers.pool import WorkerPool
from runtime.discovery.directory import Change, Foreign
from runtime.discovery.worker_key import WorkerKey
from tests.router.counters.test_tally import assignment
from tests.router.scripted_worker import ScriptedWorker

LOAD = WorkerLoad(
    running=2,
    waiting=1,
    blocks_used=7,
    blocks_cached=9,
    blocks_total=200,
    queued_prefill_tokens=70,
    leases=3,
    last_event_id=5,
    step_ms=1.5,
)


@dataclass
class Events:
    notes: dict[WorkerKey, str] = field(default_factory=dict)
    batches: int = 11
    refused_events: int = 1
    malformed_events: int = 2
    gaps: int = 3
    snapshots: int = 4
    tree: RadixTree = field(default_factory=RadixTree)

    def batches_of(self, worker: WorkerKey) -> int:
        return 6

    def last_event_id(self, worker: WorkerKey) -> int:
        return 4

    def note(self, worker: WorkerKey) -> str:
        return self.notes.get(worker, "")


class View:
    """A pool with the status built on it."""

    def __init__(self) -> None:
        self.ledger = LoadLedger(16, 300.0)
        self.queue = AdmissionQueue(100)
        self.seen: list[tuple[WorkerKey, WorkerLoad]] = []
        self._changed = asyncio.Event()
        self.pool = WorkerPool(
            *("router-0", "tiny", 16, self.ledger),
            changed=self._changed.set,
            load_seen=lambda worker, load: self.seen.append((worker, load)),
        )
        self.events = Events()
        self.metrics = RouterMetrics()
        self.namesakes: dict[str, WorkerRecord] = {}
        self.status = StatusView(
            "router-0", self.pool, self.ledger, self.events, self.queue, self.metrics, self.namesakes.get
        ).status

    async def connected(self, worker_id: str) -> None:
        async with asyncio.timeout(60):
            while not self.pool.workers[worker_id].link.connected:
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
async def view() -> AsyncIterator[View]:
    view = View()
    yield view
    await view.pool.close()


async def test_a_worker_is_shown_with_its_load_and_the_trees_view_of_it(view: View) -> None:
    async with ScriptedWorker("d0", incarnation=3) as decode, ScriptedWorker("a0", "prefill") as prefill:
        view.pool.apply(Change("added", replace(decode.record(), engine="vllm")))
        view.pool.apply(prefill.added("draining"))
        await view.connected("d0")
        await view.connected("a0")
        view.pool.load_report(LoadReport(version=1, worker_id="d0", incarnation=3, load=LOAD))
        first, second = (await view.status()).workers
        assert (first.worker_id, first.role, first.state, first.blocks_total) == ("a0", "prefill", "draining", 256)
        assert (second.worker_id, second.role, second.state, second.incarnation) == ("d0", "decode", "ready", 3)
        assert (second.blocks_used, second.blocks_cached, second.blocks_total) == (7, 9, 200)
        assert (second.running, second.waiting, second.leases, second.last_event_id) == (2, 1, 3, 4)
        assert (second.address, second.note) == (decode.address, "")
        assert (first.engine, second.engine) == ("", "vllm"), "as each has announced it"
        assert view.seen == [(("d0", 3), LOAD)]


async def test_notes_name_what_is_wrong(view: View) -> None:
    async with ScriptedWorker("d0") as decode, AsyncExitStack() as stack:
        misfit = await stack.enter_async_context(ScriptedWorker("d1"))
        view.pool.apply(Change("added", replace(decode.record(), note="its prefixes are not found")))
        view.pool.apply(Change("added", replace(misfit.record(), model="another")))
        await view.connected("d0")
        await view.connected("d1")
        await decode.die()
        async with asyncio.timeout(60):
            while view.pool.workers["d0"].link.connected:
                await asyncio.sleep(0.001)
        view.events.notes["d0", 1] = "no events though 9 blocks are cached"
        first, second = (await view.status()).workers
        assert first.note == (
            "the router has no connection to it; no events though 9 blocks are cached; its prefixes are not found"
        )
        assert "serves model 'another'" in second.note
        assert (first.used, second.used) == (False, False)
        view.namesakes["d1"] = replace(decode.record(), pid=7)
        note = (await view.status()).workers[1].note
        assert f"announced twice: the process 7 at {decode.address} has the same name" in note


async def test_workers_of_other_generations_and_versions_are_told_apart(view: View) -> None:
    async with AsyncExitStack() as stack:
        for name, role, weights in (("d0", "decode", "a"), ("d1", "decode", "b"), ("p0", "prefill", "c")):
            worker = await stack.enter_async_context(ScriptedWorker(name, role))
            worker.model_hash = weights
            view.pool.apply(worker.added())
            await view.connected(name)
        view.pool.foreign = lambda: {"d9": Foreign("decode", "it speaks worker 99", math.inf)}
        rows = {row.worker_id: row for row in (await view.status()).workers}
        assert [name for name, row in rows.items() if row.used] == ["d0", "d1"]
        assert rows["d0"].note == rows["d1"].note == "other decode workers have other weights"
        assert rows["p0"].note == "not used: no decode worker has its weights, form of KV and version of Baton"
        assert (rows["d9"].state, rows["d9"].note) == ("unknown", "not used: it speaks worker 99")
        assert view.pool.absent() == "; not used: d9 (it speaks worker 99)"


async def test_a_worker_that_takes_no_stream_says_why_in_log_status_and_refusals(view: View) -> None:
    async with ScriptedWorker("d0") as decode:
        decode.hello = replace(decode.hello, version=99)
        with capture_logs() as logs:
            view.pool.apply(decode.added())
            async with asyncio.timeout(60):
                while decode.connections < 3:
                    await asyncio.sleep(0.01)
        (worker,) = (await view.status()).workers
        assert worker.note.startswith("the router has no connection to it: d0: steps stream: major version 99")
        assert view.pool.absent().startswith("; not used: d0 (d0: steps stream: major version 99")
        said = [line for line in logs if line["log_level"] == "warning"]
        assert [line["event"] for line in said] == ["worker not used"], "one line until it is connected"


async def test_servers_that_answer_a_fixed_prompt_otherwise_are_named_and_the_majority_is_not(view: View) -> None:
    async with AsyncExitStack() as stack:
        for name, greedy in (("d0", "5 6"), ("d1", "5 7"), ("d2", "")):
            worker = await stack.enter_async_context(ScriptedWorker(name))
            record = replace(worker.record(), greedy=greedy, root=f"/{name}")
            view.pool.apply(Change("added", record))
            await view.connected(name)
        workers = (await view.status()).workers
        first, second, third = [worker.note for worker in workers]
        assert all(worker.used for worker in workers), "it is only said"
        said = "answers a fixed prompt otherwise than d0: other weights, or another dtype (it serves '/d1', d0 '/d0')"
        assert (second, third) == (said, "")
        assert "than d1" in first
        worker = await stack.enter_async_context(ScriptedWorker("d3"))
        view.pool.apply(Change("added", replace(worker.record(), greedy="5 6")))
        await view.connected("d3")
        assert [bool(worker.note) for worker in (await view.status()).workers] == [False, True, False, False]


async def test_the_queue_is_shown(view: View) -> None:
    with view.queue.admit() as ticket, view.queue.turn(ticket, lambda: None) as turn:
        await turn.wait(0.01)
        queue = (await view.status()).queue
        assert (queue.waiting, queue.running, queue.capacity) == (1, 0, 100)
        assert queue.oldest_age_s >= 0.01
    queue = (await view.status()).queue
    assert (queue.waiting, queue.oldest_age_s) == (0, 0.0)


async def test_a_new_incarnation_takes_the_place_of_the_old_one(view: View) -> None:
    async with ScriptedWorker("d0", incarnation=1) as old, ScriptedWorker("d0", incarnation=2) as new:
        view.pool.apply(old.added())
        await view.connected("d0")
        view.pool.load_report(LoadReport(version=1, worker_id="d0", incarnation=1, load=LOAD))
        view.pool.apply(Change("removed", old.record()))
        assert view.pool.no_decode_since_s is not None
        view.pool.apply(new.added())
        view.pool.load_report(LoadReport(version=1, worker_id="d0", incarnation=1, load=LOAD))  # last words
        await view.connected("d0")
        assert [worker.key for worker in view.pool.ready_decode()] == [("d0", 2)]
        assert view.pool.no_decode_since_s is None
        assert view.ledger.view(("d0", 2)) == LoadView(0, 0, 0)
        (shown,) = (await view.status()).workers
        assert (shown.incarnation, shown.running) == (2, 0)


async def test_traffic_and_events_are_counted_per_worker_and_in_all(view: View) -> None:
    async with ScriptedWorker("d0") as decode:
        view.pool.apply(decode.added())
        await view.connected("d0")
        view.pool.load_report(LoadReport(version=1, worker_id="d0", incarnation=1, load=LOAD))
        view.events.tree.apply_stored(("d0", 1), None, bytes(range(1, 17)), bytes(range(1, 17)))
        served = assignment(("d0", 1))
        for assigned, prompt_tokens, cached_tokens in ((served, 100, 32), (assignment(("gone", 1)), 10, 0)):
            tally = Tally(view.metrics, 0, prompt_tokens)
            tally.attempt()
            tally.placed(assigned, 0.1)
            tally.prompt_done(assigned.placement, TokenCounts(cached_tokens=cached_tokens), None)
        tally.output(served, 5)
        view.metrics.forget(("gone", 1))
        status = await view.status()
    (shown,) = status.workers
    assert (shown.prompt_tokens, shown.cached_tokens, shown.output_tokens) == (100, 32, 5)
    assert (shown.event_batches, shown.blocks_in_tree, shown.queued_prefill_tokens, shown.step_ms) == (6, 2, 70, 1.5)
    totals = status.totals
    assert (totals.requests, totals.prompt_tokens, totals.cached_tokens, totals.output_tokens) == (2, 110, 32, 5)
    assert (totals.event_batches, totals.events_refused, totals.events_malformed) == (11, 1, 2)
    assert (totals.event_gaps, totals.snapshots, totals.tree_blocks, totals.tree_runs) == (3, 4, 2, 1)
    assert totals.clock_s > 0


async def test_a_prefill_worker_is_ready_when_it_was_reached(view: View) -> None:
    async with ScriptedWorker("p0", "prefill") as prefill:
        view.pool.apply(prefill.added())
        assert view.pool.prefill_keys() == ()
        async with asyncio.timeout(60):
            while not (keys := view.pool.prefill_keys()):
                view._changed.clear()
                await view._changed.wait()
        assert keys == (("p0", 1),)
        assert view.pool.prefill_keys(16) is keys
        assert view.pool.prefill_keys(10**9) == ()
