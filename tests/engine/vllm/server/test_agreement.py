"""What a server must have in common with the service, where a real one is not needed to tell."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from engine.vllm.server.agreement import agreed
from engine.vllm.server.server import VllmServer
from runtime.checkpoint.model_files import resolve_model
from runtime.config.external import ExternalWorkerConfig
from runtime.config.serving import parse_config
from runtime.errors import ConfigError, UnavailableError
from tests.engine.vllm.server.imitation import Imitation


async def nothing(_: web.StreamResponse) -> None:
    """Nobody asks for an answer here."""


async def agree(imitation: Imitation, folder: Path, **changes: Any) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(imitation.serving())
        external = msgspec.convert(msgspec.to_builtins(imitation.worker) | changes, ExternalWorkerConfig)
        server = await stack.enter_async_context(VllmServer(external))
        await agreed(parse_config({"engine": {"block_size": 32}}), external, resolve_model(str(folder)), server)


async def test_a_key_is_shown_and_a_missing_one_is_named(tiny_model: Path, tmp_path: Path) -> None:
    imitation = Imitation(nothing)
    imitation.api_key = "secret"
    with pytest.raises(
        ConfigError, match=r"gpu-7.address: .*Unauthorized \(name the file with its key in api_key_file\)"
    ):
        await agree(imitation, tiny_model, model="m")
    (tmp_path / "key").write_text("secret\n")
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(ConfigError, match="its tokenizer is another one"):  # the next thing that differs
        await agree(imitation, tiny_model, model="m", api_key_file=str(tmp_path / "key"))


async def test_a_server_of_another_kind_is_told_from_vllm(tiny_model: Path) -> None:
    imitation = Imitation(nothing)
    async with imitation.serving(), VllmServer(imitation.worker) as server:
        server.address += "/elsewhere"
        with pytest.raises(ConfigError, match=r"gpu-7.address: .*Not Found"):
            await agreed(parse_config({}), imitation.worker, resolve_model(str(tiny_model)), server)


async def test_a_server_that_does_not_tell_its_blocks_is_refused_with_the_flag(tiny_model: Path) -> None:
    imitation = Imitation(nothing)
    imitation.metrics = ""
    with pytest.raises(ConfigError, match="start it without --disable-log-stats"):
        await agree(imitation, tiny_model, model="m")


async def test_a_server_of_several_engines_is_refused_with_the_way_out(tiny_model: Path) -> None:
    imitation = Imitation(nothing)
    imitation.metrics += 'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75\n'
    with pytest.raises(
        ConfigError, match=r"it has 2 engines, .*: start a server for each, with --data-parallel-size 1"
    ):
        await agree(imitation, tiny_model, model="m")


async def test_a_server_that_starts_is_waited_for(tiny_model: Path) -> None:
    worker = ExternalWorkerConfig("gpu-7", "http://127.0.0.1:9", "tcp://127.0.0.1:9", "tcp://127.0.0.1:9")
    async with VllmServer(worker) as server:
        with pytest.raises(UnavailableError, match=r"no vLLM at http://127\.0\.0\.1:9"):
            await agreed(parse_config({}), worker, resolve_model(str(tiny_model)), server)
