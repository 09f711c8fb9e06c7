"""A model with tools and reasoning that answers what it is told, behind every protocol of HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pydantic
from starlette.types import ASGIApp

from router.api.http.server import HttpServer, serve_http
from router.api.responses.store import ResponseStore
from router.api.serving.app import create_app
from router.api.serving.grpc_api import GrpcApi
from router.parsing.parsing import ModelFamilies
from router.requests.frontend import Frontend
from runtime.grammar.compiler import GrammarCompiler
from runtime.security.bearer_keys import BearerKeys
from tests.router.operator_questions import make_questions
from tests.router.scripted_generator import ScriptedGenerator, make_frontend
from tests.tiny_model import EOS_TOKEN_IDS, VOCAB_SIZE, write_tiny_model

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}:{{ call.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{{ reasoning_effort }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
)
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "caf\u00e9 {"}}\n</tool_call>'
THOUGHT = f"<think>So be it.</think>\n\nLet me see.\n{CALL}"
FIND_SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}


class Rain(pydantic.BaseModel):
    """What is asked for as a class."""

    day: str
    hours: int


def write_talking_model(folder: Path, template: str = TEMPLATE) -> Path:
    write_tiny_model(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def answers(generator: ScriptedGenerator, text: str) -> None:
    generator.answers = [[*map(int, generator.tokenizer.encode(text)), EOS_TOKEN_IDS[0]]]


def prompt_of(generator: ScriptedGenerator) -> str:
    return generator.tokenizer.decode(generator.requests[-1].prompt.tolist(), skip_special_tokens=False)


def talking_frontend(generator: ScriptedGenerator, folder: Path) -> Frontend:
    grammars = GrammarCompiler(folder, VOCAB_SIZE, EOS_TOKEN_IDS)
    return replace(make_frontend(generator, None, grammars), families=ModelFamilies("hermes", "think"))


def app_of(frontend: Frontend, store: ResponseStore | None = None, keys: BearerKeys | None = None) -> ASGIApp:
    """Keeps responses."""
    return create_app(frontend, lambda: b"", keys=keys, store=store or ResponseStore(1 << 20, 60.0))


@asynccontextmanager
async def grpc_serving(frontend: Frontend, **settings: Any) -> AsyncIterator[GrpcApi]:
    """`settings`: of GrpcApi."""
    api = GrpcApi(frontend, make_questions(), **settings)
    await api.start("127.0.0.1", 0)
    try:
        yield api
    finally:
        await api.stop()


def openai_client(server: HttpServer, key: str = "none") -> openai.AsyncOpenAI:
    url = f"http://127.0.0.1:{server.port}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)


@asynccontextmanager
async def serving(
    frontend: Frontend, store: ResponseStore | None = None, keys: BearerKeys | None = None
) -> AsyncIterator[HttpServer]:
    async with await serve_http(app_of(frontend, store, keys), "127.0.0.1", 0) as server:
        yield server
