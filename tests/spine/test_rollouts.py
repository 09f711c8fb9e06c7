"""A service becomes another one under load: no request fails, each answer is whole, and what fails changes nothing."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from baton.service.launcher import Launch
from baton.service.local.local_launcher import LocalLauncher
from baton.service.rolling.rollouts import Rollouts
from runtime.calls.router import Client
from runtime.config.overrides import merged
from runtime.security.keys import OPERATOR_KEY_VARIABLE
from runtime.security.secret import Secret
from tests.baton.service.test_service_run import KEY, Told, running
from tests.service import TEST_DEFAULTS
from tests.spine.oracle import Oracle
from tests.spine.prompts import greedy, random_prompt
from tests.spine.steady_load import Load, steady_load
from tests.tiny_model import write_tiny_model

LIMIT_S = 300.0
PAUSE_S = 10.0  # half of drain_timeout_s: nobody waits for a drain; a replay takes up to 5 s on a busy machine
MAX_TOKENS = 100
PROMPTS = [[token % 250 + 3 for token in random_prompt(40 + 13 * i, seed=i)] for i in range(24)]
PAIR = {"workers": {"prefill": 1, "decode": 1, "per_process": 1, "ready_timeout_s": 60.0, "drain_timeout_s": 20.0}}
ROOT = Path(__file__).parents[2]
MODELS = ("one", "two", "three")


async def rollout(told: Told, *arguments: str, code: Path = ROOT) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, events and stderr of the command."""
    command = [sys.executable, "-m", "baton", "rollout", "--json", "--nats-url", told.addresses["nats"]["nats"]]
    environ = os.environ | {OPERATOR_KEY_VARIABLE: KEY, "PYTHONPATH": f"{code}:{code / 'proto'}"}
    done = await asyncio.to_thread(
        subprocess.run,
        [*command, *arguments],
        capture_output=True, text=True, timeout=LIMIT_S, env=environ, cwd=code,
    )  # fmt: skip
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


async def rolled_out(told: Told, *arguments: str, code: Path = ROOT) -> list[dict[str, str]]:
    """The rows of the plan that was carried out."""
    began_s = time.monotonic()
    returncode, events, errors = await rollout(told, *arguments, code=code)
    assert returncode == 0, errors
    print(f"{' '.join(arguments) or 'code'}: {time.monotonic() - began_s:.1f} s")
    rows: list[dict[str, str]] = events[0]["rows"]
    return rows


@asynccontextmanager
async def loaded(told: Told, model: str = "") -> AsyncIterator[Load]:
    addresses = told.addresses["router-1"]
    prompts = lambda number: PROMPTS[number % len(PROMPTS)]  # noqa: E731
    async with steady_load(addresses["grpc"], addresses["http"], prompts, MAX_TOKENS, KEY, model) as load:
        yield load
    print(load.figures)
    assert len(load.answers) >= len(PROMPTS)
    assert load.longest_pause_s < PAUSE_S


async def processes(told: Told) -> dict[str, str]:
    """The workers that the router knows, with their states; and the routers."""
    async with Client(told.addresses["router-1"]["grpc"], operator_key=Secret(KEY)) as client:
        status = await client.status(LIMIT_S)
    return {worker.worker_id: worker.state for worker in status.workers} | dict.fromkeys(status.routers, "router")


async def test_configuration_changes_back_and_forth_under_load() -> None:
    router, workers = "router.queue_limit=1000", "engine.max_running=32"
    async with running(**PAIR) as (told, task):
        async with loaded(told) as load:
            rows = await rolled_out(told, "--set", router, "--set", workers)
            assert {row["process"] for row in rows} >= {"router-1", "prefill-1", "decode-1"}
            assert await processes(told) == {"prefill-2": "ready", "decode-2": "ready", "router-2": "router"}
            assert await rolled_out(told, "--set", router, "--set", workers) == []
            rows = await rolled_out(told, "--set", "router.queue_limit=1024")
            assert [row["process"] for row in rows] == ["router-2", "1 router"]
            await rolled_out(told, "--back")
            rows = await rolled_out(told, "--set", "workers.decode=2", "--set", "logging.level=warning")
            assert [row["process"] for row in rows] == ["supervisor", "supervisor", "1 decode"]
        assert len({tokens for prompt, tokens in load.answers if prompt == tuple(PROMPTS[0])}) == 1
        assert not task.done()


async def test_a_service_that_has_just_come_up_takes_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens a moment after it has said that it serves."""
    entered = Rollouts.__aenter__

    async def late(rollouts: Rollouts) -> Rollouts:
        await asyncio.sleep(2.0)  # a command starts faster
        return await entered(rollouts)

    monkeypatch.setattr(Rollouts, "__aenter__", late)
    async with running(workers={"prefill": 0, "decode": 1}) as (told, _):
        assert await rolled_out(told, "--dry-run") == []


class NoRoom(LocalLauncher):
    async def has_room(self, launch: Launch) -> bool:
        return False


async def test_without_room_for_one_more_an_old_worker_ends_first() -> None:
    async with running(NoRoom, **PAIR | {"workers": PAIR["workers"] | {"decode": 2}}) as (told, _):
        async with loaded(told):
            await rolled_out(told, "--set", "engine.max_running=32")
        assert [*await processes(told)] == ["decode-3", "decode-4", "prefill-2", "router-1"]


async def test_weights_change_and_each_answer_is_wholly_of_one_model(tmp_path: Path) -> None:
    old, new = write_tiny_model(tmp_path / "old"), write_tiny_model(tmp_path / "new", seed=1)
    async with running(model=str(old), **PAIR) as (told, _):
        async with loaded(told) as load:
            returncode, _, errors = await rollout(told, "--model", str(new))
            assert (returncode, "served_model_name=old" in errors) == (2, True)
            await rolled_out(told, "--model", str(new), "--set", "served_model_name=old")
            changed = len(load.answers)
            await asyncio.sleep(1)
        models = [Oracle(old), Oracle(new)]
        of = [
            [list(tokens) == model.greedy(list(prompt), MAX_TOKENS, True, tokens) for model in models]
            for prompt, tokens in load.answers
        ]
        assert all(map(any, of)), "an answer is of neither model"
        assert of[0] == [True, False]
        assert all(one == [False, True] for one in of[changed + 8 :]), "an old model answers after the roll-out"


async def test_models_change_come_and_go_while_another_one_answers(tmp_path: Path) -> None:
    """The one that answers keeps its worker. The prompts are the same for all."""
    written = {name: write_tiny_model(tmp_path / name, seed=seed) for seed, name in enumerate(MODELS, 3)}
    one, two, three = ({"name": name, "model": str(path)} for name, path in written.items())
    sections = PAIR | {"model": "smollm2", "workers": PAIR["workers"] | {"prefill": 0}}
    file = tmp_path / "serving.yaml"
    file.write_text(yaml.safe_dump(merged(TEST_DEFAULTS, sections) | {"models": [one, three]}))

    async def answers(told: Told) -> dict[str, list[int]]:
        """Of the models that there are."""
        found = {}
        async with Client(told.addresses["router-1"]["grpc"]) as client:
            for name in MODELS:
                request = greedy(PROMPTS[0], MAX_TOKENS, ignore_eos=True)
                request.model = name
                with contextlib.suppress(grpc.aio.AioRpcError):
                    found[name] = (await client.generate(request, LIMIT_S)).token_ids
        return found

    async with running(**sections, models=[one, two]) as (told, task):
        async with loaded(told, "one") as load:
            rows = await rolled_out(told, "--model", "two", "--set", "engine.max_running=32")
            assert [row["process"] for row in rows] == ["decode-two-1", "1 decode of two"]
            assert await processes(told) == {"decode-one-1": "ready", "decode-two-2": "ready", "router-1": "router"}
            rows = await rolled_out(told, "--config", str(file))
            assert {row["process"] for row in rows} >= {"decode-two-2", "1 decode of three", "router-1"}
            assert await processes(told) == {"decode-one-1": "ready", "decode-three-1": "ready", "router-2": "router"}
            later = await answers(told)
            await rolled_out(told, "--back")
            back = await answers(told)
            returncode, _, errors = await rollout(told, "--model", "four", "--set", "engine.max_running=16")
            assert (returncode, "'four', which is not served: one, two" in errors) == (2, True), errors
        assert (later.keys(), back.keys()) == ({"one", "three"}, {"one", "two"})
        oracles = {name: Oracle(path) for name, path in written.items()}
        for name, tokens in (*later.items(), *back.items()):
            assert tokens == oracles[name].greedy(PROMPTS[0], MAX_TOKENS, True, tokens), name
        for prompt, tokens in load.answers:
            assert [*tokens] == oracles["one"].greedy([*prompt], MAX_TOKENS, True, tokens)
        assert not task.done()


async def test_a_worker_that_does_not_become_ready_changes_nothing(tmp_path: Path) -> None:
    async with running(**PAIR) as (told, _):
        before = await processes(told)
        broken = tmp_path / "code"
        for package in ("baton", "decode_worker", "engine", "kvtransfer", "planner", "prefill_worker", "proto"):
            shutil.copytree(ROOT / package, broken / package, ignore=shutil.ignore_patterns("__pycache__"))
        for package in ("router", "runtime", "worker"):
            shutil.copytree(ROOT / package, broken / package, ignore=shutil.ignore_patterns("__pycache__"))
        main = broken / "decode_worker" / "__main__.py"
        main.write_text("raise SystemExit('this version is broken')\n")
        async with loaded(told):
            returncode, _, errors = await rollout(told, code=broken)
            assert returncode == 1
            assert "this version is broken" in errors
            assert await processes(told) == before
            main.write_text((ROOT / "decode_worker" / "__main__.py").read_text() + "\n# another version\n")
            rows = await rolled_out(told, code=broken)
            assert {row["process"] for row in rows} >= {"router-1", "prefill-1", "decode-1"}
        worker = Path("/proc", str(told.pids[next(one for one in await processes(told) if "decode" in one)]), "environ")
        assert str(broken) in worker.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "namespace=other"], "namespace: (namespace default -> other) cannot change while the service runs"),
        (["--set", "engine.block_size=32"], "engine.block_size: (engine.block_size 16 -> 32) cannot change"),
        (["--back"], "nothing to go back to"),
    ],
)
async def test_what_cannot_change_is_refused_with_the_way_out(arguments: list[str], words: str) -> None:
    async with running(**PAIR) as (told, _):
        returncode, _, errors = await rollout(told, *arguments)
    assert (returncode, words in errors) == (2, True), errors
