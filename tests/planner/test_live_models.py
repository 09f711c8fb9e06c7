"""Planners of several models with one budget of GPUs: real processes, tiny models, orders from the command line."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from baton_proto.generated import inference_pb2 as pb
from planner.journal import read_journal
from tests.planner.live import Planned, planned_service
from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

NAMES = ("one", "two")
FIRST_SEED = 3  # two models whose likeliest tokens are far apart
BUDGET = 3
PLANNER = {"limits": {"min_prefill": 0, "max_prefill": 0, "gpu_budget": BUDGET}}
PROMPT, TOKENS = list(range(5, 60)), 8


async def scale(service: Service, *words: str) -> str:
    told = ["--nats-url", service.config.nats.url or "", "--timeout", "30"]
    command = [sys.executable, "-m", "baton", "scale", *words, *told]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    return done.stdout or done.stderr


async def test_models_are_scaled_one_by_one_and_never_hold_more_than_the_budget(tmp_path: Path) -> None:
    folders = {name: write_tiny_model(tmp_path / name, seed=seed) for seed, name in enumerate(NAMES, FIRST_SEED)}
    right = {name: Oracle(folder).greedy(PROMPT, TOKENS) for name, folder in folders.items()}
    models = [{"name": name, "model": str(folder)} for name, folder in folders.items()]
    async with planned_service(tmp_path, 0, 1, PLANNER, "smollm2", models=models) as both:
        one, two = (replace(both, journal=tmp_path / f"plan-{name}.jsonl") for name in NAMES)

        async def until(model: Planned, condition: Callable[[], bool]) -> None:
            """Both answer meanwhile, each its own."""
            waiting = asyncio.create_task(model.until(condition))
            while not waiting.done():
                for name in NAMES:
                    request = pb.GenerateRequest(model=name, tokens=pb.TokenIds(ids=PROMPT))
                    request.sampling.max_tokens, request.sampling.temperature = TOKENS, 0.0
                    answer = await both.service.client.generate(request, timeout_s=60)
                    assert list(answer.token_ids) == right[name]
                    assert answer.served_by[0].decode_worker.startswith(f"decode-{name}-")
                await asyncio.wait({waiting}, timeout=0.2)
            await waiting

        await until(one, lambda: one.count() == (0, 1))
        assert "set by hand: decode 2" in await scale(both.service, "decode=2", "--model", "one")
        await until(one, lambda: one.count() == (0, 2))
        assert "set by hand: decode 2" in await scale(both.service, "decode=2", "--model", "two")
        await until(two, lambda: "1 GPUs are what other models leave" in " ".join(two.last().target.reasons))
        assert len(both.service.workers("decode")) == BUDGET
        assert "decides alone" in await scale(both.service, "--release", "--model", "one")
        await until(two, lambda: two.count() == (0, 2))
        assert sorted(both.service.workers("decode"))[-2:] == ["decode-two-1", "decode-two-2"]
        for name in NAMES:
            decided = [line for line in read_journal(tmp_path / f"plan-{name}.jsonl") if hasattr(line, "observation")]
            assert {worker.worker_id.split("-")[1] for line in decided for worker in line.observation.workers} == {name}
        assert most_at_once(one, two) <= BUDGET


def most_at_once(*models: Planned) -> int:
    """Workers of all models together, between any two decisions."""
    held: dict[int, int] = {}
    seen = sorted(
        (
            decision.time_s,
            number,
            len(decision.observation.workers) + sum(a.verb == "add" for a in decision.target.actions),
        )
        for number, model in enumerate(models)
        for decision in model.decisions()
    )
    most = 0
    for _, number, workers in seen:
        held[number] = workers
        most = max(most, sum(held.values()))
    return most


async def test_a_dry_run_says_for_each_model_what_its_planner_would_do_and_how_they_share_the_budget(
    tmp_path: Path,
) -> None:
    """Both want two GPUs of three, of which one is kept for a third model."""
    folders = {name: str(write_tiny_model(tmp_path / name, seed=seed)) for seed, name in enumerate((*NAMES, "rare"))}
    models = [{"name": name, "model": folder} for name, folder in folders.items()]
    models[-1]["asleep"] = "until_asked"
    wanted = {"limits": {"min_prefill": 0, "max_prefill": 0, "min_decode": 2, "gpu_budget": BUDGET}, "interval_s": 1}
    (tmp_path / "try.yaml").write_text(json.dumps({"models": models, "planner": wanted, "workers": {"prefill": 0}}))
    async with running_service("smollm2", 0, 1, {"models": models}) as service:
        told = ["--nats-url", service.config.nats.url or "", "--config", str(tmp_path / "try.yaml"), "--decisions", "2"]
        command = [sys.executable, "-m", "baton", "plan", "--dry-run", *told]
        texts, one = [
            await asyncio.to_thread(subprocess.run, [*command, *more], capture_output=True, text=True, timeout=60)
            for more in (["--json"], ["--model", "one"])
        ]
    assert "1 GPUs are kept for models that sleep" in texts.stderr, texts
    decided = [json.loads(line) for line in texts.stdout.splitlines()]
    assert Counter(one["model"] for one in decided) == dict.fromkeys(NAMES, 2)
    for told_of in decided:
        assert (told_of["observation"]["gpu_share"], told_of["target"]["decode"]) == (1, 1)
        assert "1 GPUs are what other models leave" in " ".join(told_of["target"]["reasons"])
    assert "1 GPUs held; 1 of 3 may be" in one.stdout, one
    assert "two" not in one.stdout
