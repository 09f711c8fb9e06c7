"""A real vLLM keeps the contract of engine/interface.py, alone and with workers that share KV."""

import asyncio
import json
from pathlib import Path

import pytest

from runtime.config.serving import dump_config, parse_config
from tests.engine.contract import CONTRACT
from tests.test_packaging import ROOT
from tests.vllm.environment import LIMIT_S, START_S, smollm2, variables
from tests.vllm.test_workers import sections

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_vllm_keeps_the_contract(vllm_python: Path, tmp_path: Path, num_prefill: int) -> None:
    settings = sections(vllm_python)
    settings["workers"] |= {"prefill": num_prefill, "decode": 1}
    path = tmp_path / "serving.yaml"
    path.write_text(dump_config(parse_config({"model": str(smollm2()), **settings})))
    log = tmp_path / "log"
    with log.open("w") as stderr:
        child = await asyncio.create_subprocess_exec(
            *(str(vllm_python), "-P", "-m", "tests.vllm.contract_run", str(path)),
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=variables(),
            cwd=ROOT,
        )
    try:
        out, _ = await asyncio.wait_for(child.communicate(), START_S)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    told = [json.loads(line) for line in out.decode().splitlines() if line.startswith('{"clause"')]
    assert [one["problem"] for one in told if one["problem"]] == []
    assert [one["clause"] for one in told] == [clause.__name__ for clause in CONTRACT], log.read_text()[-4000:]
