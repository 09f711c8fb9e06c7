"""A router whose model thinks and calls tools, for the tests of each protocol over HTTP."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from router.api.http.server import HttpServer
from tests.router.api.conversations import THOUGHT, openai_client, serving, talking_frontend, write_talking_model
from tests.router.scripted_generator import ScriptedGenerator, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talking_model(tmp_path_factory.mktemp("talking"))


@pytest.fixture
def generator(folder: Path) -> ScriptedGenerator:
    return ScriptedGenerator(tiny_tokenizer(folder), [THOUGHT])


@pytest.fixture
async def server(generator: ScriptedGenerator, folder: Path) -> AsyncIterator[HttpServer]:
    async with serving(talking_frontend(generator, folder)) as server:
        yield server


@pytest.fixture
async def http(server: HttpServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
        yield client


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(server) as client:
        yield client
