"""What README and docs/vllm.md tell who has vLLM servers: the lines as they stand there work."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.processes.ports import free_port
from tests.test_packaging import ROOT
from tests.vllm.environment import LIMIT_S, PATIENCE_S, START_S, smollm2, variables
from tests.vllm.server import BLOCK

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]

NAME = "Qwen/Qwen3-0.6B"
SERVER = "-m vllm.entrypoints.openai.api_server --model"
QUESTION = "Which of the words in this sentence is the longest one? " * 12


@dataclass
class Followed:
    """A page's servers and service, running. `told`: what `baton up` said when it served."""

    told: dict[str, Any]
    environment: dict[str, str]

    async def baton(self, *arguments: str) -> Any:
        """What a command says as JSON; None when it fails, as `status` does while there is no worker."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "baton", *arguments, "--json"), env=self.environment, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
        return json.loads(said) if process.returncode == 0 else None

    async def ready(self) -> dict[str, Any]:
        """The workers that `baton status` shows as ready, by name."""
        status = await self.baton("status")
        workers = status["workers"] if status else []
        return {worker["worker_id"]: worker for worker in workers if worker["state"] == "ready"}

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Waits for what the ready workers are to be like."""
        async with asyncio.timeout(START_S):
            while not holds(await self.ready()):
                await asyncio.sleep(0.2)


@pytest.mark.parametrize(("page", "servers"), [("README.md", 1), ("docs/vllm.md", 2)])
async def test_a_page_s_lines_put_baton_before_servers_of_vllm(
    page: str, servers: int, vllm_python: Path, tmp_path: Path
) -> None:
    """With another model under the page's name, in Hugging Face's cache, and on free ports."""
    async with following(page, servers, vllm_python, tmp_path) as followed:
        names = [f"gpu-{number}" for number in range(servers)]
        await followed.until(lambda ready: ready.keys() == {*names})
        async with httpx.AsyncClient(base_url=f"http://{followed.told['http']}", timeout=PATIENCE_S) as client:
            body = {"model": NAME, "prompt": QUESTION, "max_tokens": 2, "temperature": 0}
            (await client.post("/v1/completions", json=body)).raise_for_status()
            await followed.until(lambda ready: any(worker["blocks_in_tree"] >= 4 for worker in ready.values()))
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
        assert usage["prompt_tokens"] > 4 * BLOCK
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 4 * BLOCK, "nearly all of the prompt"
        assert {name: worker["note"] for name, worker in (await followed.ready()).items()} == dict.fromkeys(names, "")
        diff = await followed.baton("events", "diff")
        assert {worker["worker_id"]: worker["verdict"] for worker in diff["workers"]} == dict.fromkeys(names, "equal")


@asynccontextmanager
async def following(page: str, servers: int, python: Path, folder: Path) -> AsyncIterator[Followed]:
    """As long as the service runs. It may be there before the servers, which take a minute."""
    http, events, replay = (free_port("0.0.0.0", in_a_row=servers) for _ in range(3))
    text = (ROOT / page).read_text()
    for there, here in {"555": events, "556": replay, "810": http}.items():
        text = text.replace(f"{there}'$n'", f"'$(({here} + n))'").replace(f"{there}$n", f"$(({here} + n))")
        for number in range(servers):
            text = re.sub(rf"\b{there}{number}\b", str(here + number), text)
    text = re.sub(r"\b5557\b", str(events), re.sub(r"\b5558\b", str(replay), text))
    text = text.replace(f"vllm serve {NAME}", f".venv-vllm/bin/python {SERVER} {NAME}")
    text = text.replace(".venv-vllm/bin/python", str(python))
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    shell = next(block for kind, block in blocks if kind == "sh" and SERVER in block)
    lines = [line for line in shell.splitlines() if not line.startswith((".venv/bin/baton", "make "))]
    (folder / "front.yaml").write_text(next((block for kind, block in blocks if kind == "yaml"), ""))
    environment = variables() | {"HF_HOME": str(cache(folder)), "XDG_STATE_HOME": str(folder / "state")}
    script = "\n".join(lines).replace("\n\ncat", " &\n\ncat")
    command = [sys.executable, "-m", "baton", "up", "--json", "--config", "front.yaml", "--set", "router.http_port=0"]
    with (folder / "log").open("wb") as log:
        started = await asyncio.create_subprocess_exec(
            *("bash", "-ec", f"{script}\nexec {' '.join(command)} --set router.grpc_port=0"),
            cwd=folder,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert started.stdout is not None
    said: dict[str, Any] = {}
    try:
        async with asyncio.timeout(START_S):
            while said.get("event") != "serving":
                line = await started.stdout.readline()
                assert line, "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("*log")))
                said = json.loads(line) if line.startswith(b"{") else {}
        yield Followed(said, environment)
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # the servers stay when the service has drained
            with suppress(ProcessLookupError):
                os.killpg(started.pid, number)
            await started.wait()


def cache(folder: Path) -> Path:
    """Hugging Face's cache with smollm2 under the page's name."""
    repository = folder / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    for file in smollm2().iterdir():
        (snapshot / file.name).symlink_to(file)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    return folder
