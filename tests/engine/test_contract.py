"""Every engine keeps the contract of engine/interface.py: ours on torch, with layers in one group and in two, the mock,
and a server elsewhere. vLLM itself does in tests/vllm/test_contract.py."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from router.text.tokenizer import Tokenizer
from runtime.checkpoint.model_files import resolve_model
from runtime.config.serving import parse_config
from tests.engine.contract import CONTRACT, Subject
from tests.engine.vllm.events.vllm_engine import Engine
from tests.engine.vllm.server.imitation import METRICS, Imitation
from tests.tiny_families import write_family
from worker.engines.base import EngineAssembly
from worker.engines.table import build_worker_engine, engine_elsewhere

IDLE = METRICS.replace("} 3.0", "} 0.0").replace("} 1.0", "} 0.0").replace("} 0.25", "} 0.0")
BLOCK = 16


@asynccontextmanager
async def own(model: Path) -> AsyncIterator[EngineAssembly]:
    engine = {"device": "cpu", "kv_memory": "4MiB", "threads": 1, "block_size": BLOCK}
    yield build_worker_engine(parse_config({"model": str(model), "engine": engine}))


@asynccontextmanager
async def sliding(model: Path) -> AsyncIterator[EngineAssembly]:
    """Ours on a model some of whose layers have a window and give back what lies outside."""
    folder = model.parent / "sliding"
    if not folder.exists():
        write_family(folder, "gemma3")
    engine = {"device": "cpu", "kv_memory": "4MiB", "threads": 1, "block_size": BLOCK}
    assembly = build_worker_engine(parse_config({"model": str(folder), "engine": engine}))
    assert assembly.layout.window_layers
    yield assembly


@asynccontextmanager
async def mock(_: Path) -> AsyncIterator[EngineAssembly]:
    yield build_worker_engine(parse_config({"model": "mock"}))


@asynccontextmanager
async def external(model: Path) -> AsyncIterator[EngineAssembly]:
    """A server that counts on from the prompt's last token, as fast as it can."""
    files = resolve_model(str(model))
    tokenizer = Tokenizer(files.folder, files.config.vocab_size)

    async def say(answer: web.StreamResponse) -> None:
        asked = dict(http.question)
        for token in range(asked["prompt"][-1] + 1, asked["prompt"][-1] + 1 + asked["max_tokens"]):
            is_last = token == asked["prompt"][-1] + asked["max_tokens"]
            finish = '"stop"' if token in asked["stop_token_ids"] else '"length"' if is_last else "null"
            choice = f'{{"text":"","token_ids":[{token}],"finish_reason":{finish}}}'
            await answer.write(f'data: {{"choices":[{choice}]}}\n\n'.encode())
            if finish == '"stop"':
                break
            await asyncio.sleep(0)
        await answer.write(b"data: [DONE]\n\n")

    http = Imitation(say, lambda text: [int(one) for one in tokenizer.encode(text, add_special_tokens=False)])
    http.metrics = IDLE.replace('block_size="32"', f'block_size="{BLOCK}"')
    events = Engine()
    await events.start()
    async with http.serving():
        told = {"name": "gpu-1", "address": f"http://127.0.0.1:{http.port}", "model": "m"}
        told |= {"events": events.endpoint, "replay": events.replay_endpoint}
        engine = {"block_size": BLOCK}
        config = parse_config({"model": str(model), "external_workers": [told], "engine": engine})
        elsewhere = engine_elsewhere(config, config.external_workers[0])
        async with elsewhere, elsewhere.life() as (assembly,):
            yield assembly
    await events.close()


@pytest.fixture(params=[own, sliding, mock, external], ids=lambda made: made.__name__)
async def subject(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[Subject]:
    async with request.param(tiny_model) as assembly:
        subject = Subject(assembly)
        yield subject
        await subject.close()


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
async def test_an_engine_keeps_the_contract(subject: Subject, clause: Callable[[Subject], Awaitable[None]]) -> None:
    await clause(subject)
