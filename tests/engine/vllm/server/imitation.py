"""A server for faults that a real vLLM cannot be made to show: it says what the test wants."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from engine.vllm.server import image_prompt
from engine.vllm.server.completion import PATH
from engine.vllm.server.ranks import HEADER
from runtime.config.external import ExternalWorkerConfig

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="m"} 5.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 10.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 0.2
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="728"} 1.0
"""
MODELS = {"data": [{"id": "m", "max_model_len": 512}]}
Say = Callable[[web.StreamResponse], Awaitable[None]]


class Imitation:
    """`say`: writes the answer to a completion. `tokenize`: a text's tokens. `is_healthy`, `hangs`: what it does when
    asked for its health."""

    def __init__(self, say: Say, tokenize: Callable[[str], list[int]] = lambda _: []) -> None:
        self.say = say
        self.tokenize = tokenize
        self.metrics = METRICS
        self.models: Any = MODELS
        self.chat: list[int] | None = None  # the tokens of any chat; None: it has no template
        self.question: dict[str, Any] = {}  # the last one
        self.rank = ""  # that it was for
        self.clients: list[Any] = []  # addresses from which completions came
        self.paths: Sequence[str] = (PATH, image_prompt.PATH)  # that have what its model does
        self.api_key = ""  # that it asks for
        self.is_healthy = True
        self.hangs = False
        self.refuses: tuple[int, str] | None = None  # status and reason with which it refuses completions
        self.gone = asyncio.Event()  # a client has left
        self.port = 0
        self.tls: ssl.SSLContext | None = None

    @property
    def worker(self) -> ExternalWorkerConfig:
        address = f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"
        return ExternalWorkerConfig("gpu-7", address, "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Imitation"]:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics/", self._metrics)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/{verb}_lora_adapter", self._adapt)
        app.router.add_post("/tokenize", self._tokenize)
        for path in self.paths:
            app.router.add_post(path, self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True, ssl_context=self.tls)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.Event().wait()
        return web.Response(status=200 if self.is_healthy else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _version(self, request: web.Request) -> web.Response:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "Unauthorized"}}, status=401)
        return web.json_response({"version": "0.32.0"})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(self.models)

    async def _adapt(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        others = [model for model in self.models["data"] if model["id"] != name]
        if request.match_info["verb"] == "load":
            others.append({"id": name, "parent": "m", "root": (await request.json())["lora_path"]})
        elif len(others) == len(self.models["data"]):
            return web.json_response({"error": {"message": "cannot be found"}}, status=404)
        self.models = {"data": others}
        return web.Response(text="Success")

    async def _tokenize(self, request: web.Request) -> web.Response:
        question = await request.json()
        if "messages" in question:
            return web.json_response({"tokens": self.chat}, status=400 if self.chat is None else 200)
        return web.json_response({"tokens": self.tokenize(question["prompt"])})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.question, self.rank = await request.json(), request.headers.get(HEADER, "")
        assert request.transport is not None
        self.clients.append(request.transport.get_extra_info("peername"))
        if self.refuses is not None:
            status, reason = self.refuses
            return web.json_response({"error": {"message": reason}}, status=status)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await answer.prepare(request)
            await self.say(answer)
        except (asyncio.CancelledError, ConnectionError):
            self.gone.set()
            raise
        return answer
