"""Two models with room for one: who is asked for is awake, and each answer is its own model's."""

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from baton.service.sleeping.sleepers import Sleepers
from runtime.calls.answer import Answer
from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import greedy, random_prompt
from tests.spine.worker_view import inspect_all, until_gone
from tests.tiny_model import write_tiny_model

NAMES = ("one", "two")
FIRST_SEED = 3  # two models whose likeliest tokens are far apart
TOKENS = 8
BURST = 4  # requests at once, while others swap


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_tiny_model(folder / name, seed=seed) for seed, name in enumerate(NAMES, FIRST_SEED)}


@pytest.fixture(scope="module")
def oracles(folders: dict[str, Path]) -> dict[str, Oracle]:
    return {name: Oracle(path) for name, path in folders.items()}


class Told(list[tuple[str, str]]):
    """(event, model)"""

    def __call__(self, line: str, *, event: str, **fields: Any) -> None:
        self.append((event, fields["model"]))

    async def until(self, *told: tuple[str, str]) -> None:
        async with asyncio.timeout(60):
            while not {*told} <= {*self}:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def sleeping_models(
    folders: dict[str, Path],
    journal: Path | None = None,
    first: dict[str, Any] | None = None,
    gpu_budget: int = 1,
    **entry: Any,
) -> AsyncIterator[tuple[Service, Told]]:
    """They start asleep. `first`: what is another one in the entry of the first."""
    models = [{"name": name, "model": str(path), "asleep": "until_asked"} | entry for name, path in folders.items()]
    models[0] |= first or {}
    limits = {"min_prefill": 0, "gpu_budget": gpu_budget}
    planner = {"limits": limits} | ({} if journal is None else {"journal": str(journal)})
    async with running_service("smollm2", 0, 1, {"models": models, "planner": planner}) as service:
        told = Told()
        async with Sleepers(service.supervisor, told):
            yield service, told


async def ask(service: Service, model: str, prompt: list[int], max_tokens: int = TOKENS, **options: Any) -> Answer:
    request = greedy(prompt, max_tokens, **options)
    request.model = model
    return await service.client.generate(request, 120)


async def states(service: Service) -> dict[str, str]:
    return {worker.worker_id: worker.state for worker in (await service.client.status(60)).workers}


async def test_models_start_asleep_wake_for_a_request_and_sleep_when_they_are_idle(
    folders: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    async with (
        sleeping_models(folders, idle_s=1.0) as (service, told),
        httpx.AsyncClient(base_url=service.http_url, timeout=60) as http,
    ):

        async def shown() -> dict[str, str]:
            return {model["id"]: model["state"] for model in (await http.get("/v1/models")).json()["data"]}

        assert await states(service) == {"decode-one-1": "sleeping", "decode-two-1": "sleeping"}
        assert await shown() == {"one": "asleep", "two": "asleep"}
        assert (await http.get("/ready")).status_code == 200, "a request would be served"
        prompt = random_prompt(50, seed=1)
        for _ in range(2):
            assert (await ask(service, "two", prompt)).token_ids == oracles["two"].greedy(prompt, TOKENS)
            assert await shown() == {"one": "asleep", "two": "ready"}
            told.clear()
            await told.until(("asleep", "two"))
        long = asyncio.create_task(ask(service, "one", prompt, 1500, ignore_eos=True))
        await told.until(("awake", "one"))
        told.clear()
        assert len((await long).token_ids) == 1500
        assert not told, "it has a request, however long that takes"
        await told.until(("asleep", "one"))


async def test_a_wake_beyond_the_budget_puts_the_idle_one_to_sleep_and_the_journal_says_why(
    folders: dict[str, Path], oracles: dict[str, Oracle], tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    async with sleeping_models(folders, journal) as (service, _):
        prompt = random_prompt(50, seed=2)
        for name in (*NAMES, *NAMES):
            assert (await ask(service, name, prompt)).token_ids == oracles[name].greedy(prompt, TOKENS)
            awake = [worker for worker, state in (await states(service)).items() if state == "ready"]
            assert awake == [f"decode-{name}-1"]
        long = asyncio.create_task(ask(service, "two", prompt, 1200, ignore_eos=True))
        answer = await ask(service, "one", prompt)
        assert long.done(), "an answer in flight is not cut"
        assert len(long.result().token_ids) == 1200
        assert answer.token_ids == oracles["one"].greedy(prompt, TOKENS)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [(line["model"], line["asleep"]) for line in lines[:3]] == [("one", []), ("two", ["one"]), ("one", ["two"])]
    assert lines[1]["reason"].startswith("one was ")
    assert not any(line["error"] for line in lines)


async def test_a_model_for_which_there_is_no_room_is_a_503_that_says_who_has_it(folders: dict[str, Path]) -> None:
    async with (
        sleeping_models(folders, first={"asleep": "never"}, wake_timeout_s=3.0) as (service, _),
        httpx.AsyncClient(base_url=service.http_url, timeout=60) as http,
    ):
        body = {"prompt": random_prompt(50, seed=3), "max_tokens": 4}
        refused = await http.post("/v1/completions", json=body | {"model": "two"})
        reason = "the model sleeps, and did not wake within 3 s (its GPUs are held by one)"
        assert (refused.status_code, reason in refused.text) == (503, True), refused.text
        assert int(refused.headers["retry-after"]) >= 1
        assert (await http.post("/v1/completions", json=body | {"model": "one"})).status_code == 200


async def test_a_worker_that_dies_asleep_awake_or_waking_is_started_again_for_who_asks(
    folders: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    prompt, worker = random_prompt(50, seed=5), "decode-one-1"
    right = {name: oracles[name].greedy(prompt, TOKENS) for name in NAMES}

    async with (
        sleeping_models(folders, wake_timeout_s=60.0) as (service, told),
        httpx.AsyncClient(base_url=service.http_url, timeout=60) as http,
    ):

        async def killed() -> None:
            service.kill(worker)
            await service.supervisor.children[worker].wait()

        async def answered(name: str) -> None:
            assert (await ask(service, name, prompt)).token_ids == right[name]
            service.note_pids()

        await killed()
        await answered("one")
        await killed()
        await answered("one")
        await killed()
        await until_gone(service, worker)
        assert (await http.get("/ready")).status_code == 200, "a request would be served"
        for name in ("two", "one", "two"):
            await answered(name)
        service.kill(worker, signal.SIGSTOP)
        told.clear()
        asked = asyncio.create_task(answered("one"))
        await told.until(("asleep", "two"))
        await killed()
        await asked
        assert (await states(service))["decode-two-1"] == "sleeping", "there is room for one"


async def test_models_asked_for_at_once_wake_one_after_the_other_and_answer_before_they_make_room(
    folders: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    """Each needs the room of the others."""
    prompt, rounds = random_prompt(50, seed=4), 5
    async with sleeping_models(folders, wake_timeout_s=60.0) as (service, told):
        for _ in range(rounds):
            answers = await asyncio.gather(*(ask(service, name, prompt) for name in (*NAMES, *reversed(NAMES))))
            right = [oracles[name].greedy(prompt, TOKENS) for name in NAMES]
            assert [answer.token_ids for answer in answers] == [*right, *reversed(right)]
        awake = 0
        for event, _ in told:
            awake += 1 if event == "awake" else -1
            assert 0 <= awake <= 1, told
        assert told.count(("awake", "one")) + told.count(("awake", "two")) <= 2 * rounds, "one woke in vain"


async def test_a_model_wakes_while_the_worker_of_another_one_is_started_again(
    folders: dict[str, Path], oracles: dict[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, worker = random_prompt(50, seed=6), "decode-one-1"
    right = {name: oracles[name].greedy(prompt, TOKENS) for name in NAMES}
    begun, go_on = asyncio.Event(), asyncio.Event()
    async with sleeping_models(folders, gpu_budget=2, wake_timeout_s=60.0) as (service, told):
        start_again = service.supervisor.start_again

        async def slowly(worker_id: str) -> None:
            begun.set()
            await go_on.wait()
            await start_again(worker_id)

        monkeypatch.setattr(service.supervisor, "start_again", slowly)
        service.kill(worker)
        await service.supervisor.children[worker].wait()
        slow = asyncio.create_task(ask(service, "one", prompt))
        await begun.wait()
        assert (await ask(service, "two", prompt)).token_ids == right["two"]
        assert told == [("awake", "two")]
        go_on.set()
        assert (await slow).token_ids == right["one"]
        service.note_pids()


@pytest.mark.slow
async def test_a_hundred_swaps_leave_nothing_behind_and_no_answer_is_wrong(
    folders: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    rng = random.Random(7)
    prompts = [random_prompt(rng.randrange(20, 120), seed=seed) for seed in range(5)]
    right = {name: [oracles[name].greedy(prompt, TOKENS) for prompt in prompts] for name in NAMES}
    async with sleeping_models(folders) as (service, told):

        async def burst(name: str) -> None:
            chosen = [rng.randrange(len(prompts)) for _ in range(BURST)]
            answers = await asyncio.gather(*(ask(service, name, prompts[i]) for i in chosen))
            assert [answer.token_ids for answer in answers] == [right[name][i] for i in chosen]

        async def swapped(times: int) -> Sequence[int]:
            """Memory and open files of all workers."""
            for _ in range(times):
                for name in NAMES:
                    await burst(name)
            workers = [psutil.Process(service.pid(name)) for name in service.workers("decode")]
            return [sum(worker.memory_info().rss for worker in workers), sum(worker.num_fds() for worker in workers)]

        begun = await swapped(10)
        await asyncio.gather(*(burst(name) for name in NAMES for _ in range(5)))  # both at once
        ended = await swapped(45)
        swaps = told.count(("asleep", "one")) + told.count(("asleep", "two"))
        print(f"{swaps} swaps, memory {begun[0] >> 20} -> {ended[0] >> 20} MiB, files {begun[1]} -> {ended[1]}")
        assert swaps >= 100
        assert ended[0] < begun[0] + (32 << 20)
        assert ended[1] <= begun[1] + 4
        for report in await inspect_all(service):
            assert report.problems == []
            assert (report.load.running, report.load.leases) == (0, 0)
