"""What a server must have in common with the service, where a real one is not needed to tell."""

import ssl
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import trustme
from aiohttp import web

from baton_proto.pooling import EMBED
from engine.vllm.server.agreement import Facts, agreed
from engine.vllm.server.pooled import PATHS
from engine.vllm.server.server import VllmServer
from router.text.tokenizer import Tokenizer
from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.config.external import ExternalWorkerConfig
from runtime.config.serving import parse_config
from runtime.errors import ConfigError, UnavailableError
from tests.engine.vllm.events.vllm_engine import Engine
from tests.engine.vllm.server.imitation import METRICS, MODELS, Imitation


async def nothing(_: web.StreamResponse) -> None:
    """Nobody asks for an answer here."""


def tokenizer_of(files: ModelFiles) -> Callable[[str], list[int]]:
    tokenizer = Tokenizer(files.folder, files.config.vocab_size)
    return lambda text: [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


@asynccontextmanager
async def events_of_an_engine() -> AsyncIterator[dict[str, str]]:
    engine = Engine()
    await engine.start()
    try:
        yield {"events": engine.endpoint, "replay": engine.replay_endpoint}
    finally:
        await engine.close()


async def agree(imitation: Imitation, folder: Path, **changes: Any) -> Facts:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(imitation.serving())
        external = msgspec.convert(msgspec.to_builtins(imitation.worker) | changes, ExternalWorkerConfig)
        server = await stack.enter_async_context(VllmServer(external))
        return await agreed(parse_config({"engine": {"block_size": 32}}), external, resolve_model(str(folder)), server)


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


async def test_a_server_whose_certificate_this_machine_does_not_trust_needs_its_ca(
    tiny_model: Path, tmp_path: Path
) -> None:
    authority = trustme.CA()
    imitation = Imitation(nothing)
    imitation.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(imitation.tls)
    with pytest.raises(UnavailableError, match="certificate verify failed"):
        await agree(imitation, tiny_model, model="m")
    authority.cert_pem.write_to_path(tmp_path / "ca")
    with pytest.raises(ConfigError, match="its tokenizer is another one"):  # the next thing that differs
        await agree(imitation, tiny_model, model="m", ca_file=str(tmp_path / "ca"))
    with pytest.raises(ConfigError, match=r"gpu-7\.ca_file: .*/none: No such file"):
        await agree(imitation, tiny_model, model="m", ca_file=str(tmp_path / "none"))


async def test_a_server_of_another_kind_is_told_from_vllm(tiny_model: Path) -> None:
    imitation = Imitation(nothing)
    async with imitation.serving(), VllmServer(imitation.worker) as server:
        server.address += "/elsewhere"
        with pytest.raises(ConfigError, match=r"gpu-7.address: .*Not Found"):
            await agreed(parse_config({}), imitation.worker, resolve_model(str(tiny_model)), server)


@pytest.mark.parametrize(("asked", "length"), [("m", 512), ("sql", 512), ("base", 728 * 32)])
async def test_a_server_with_adapters_serves_them_and_its_base_model(tiny_model: Path, asked: str, length: int) -> None:
    """What else it says of them is not read."""
    adapter = {"id": "sql", "max_model_len": None, "parent": "m", "root": 5, "permission": "?"}
    imitation = Imitation(nothing, tokenizer_of(resolve_model(str(tiny_model))))
    imitation.models = {"data": [adapter, *MODELS["data"], {"id": "base", "parent": None}, {"object": "model"}]}
    async with events_of_an_engine() as endpoints:
        facts = await agree(imitation, tiny_model, model=asked, **endpoints)
    assert (facts.model, facts.max_model_len, facts.ranks[0].num_blocks, facts.note) == (asked, length, 728, "")


async def test_a_server_that_keeps_no_prefixes_serves_and_is_noted(tiny_model: Path) -> None:
    imitation = Imitation(nothing, tokenizer_of(resolve_model(str(tiny_model))))
    imitation.metrics = METRICS.replace("engine=", 'enable_prefix_caching="False",engine=')
    async with events_of_an_engine() as endpoints:
        facts = await agree(imitation, tiny_model, model="m", **endpoints)
    assert facts.note == "its prefix caching is off: start it without --no-enable-prefix-caching"


async def test_what_a_server_makes_of_chats_and_of_a_fixed_prompt_is_told(tiny_model: Path) -> None:
    (tiny_model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    answer = {"choices": [{"token_ids": [5, 6]}]}

    async def say(response: web.StreamResponse) -> None:
        await response.write(msgspec.json.encode(answer))

    imitation = Imitation(say, tokenizer_of(resolve_model(str(tiny_model))))
    imitation.models = {"data": [MODELS["data"][0] | {"root": "/models/m"}]}
    imitation.chat = [1]
    async with events_of_an_engine() as endpoints:
        facts = await agree(imitation, tiny_model, model="m", **endpoints)
        assert facts.note == "its chat template is another one and is not used: chats are rendered by that of `model`"
        assert (facts.root, facts.greedy) == ("/models/m", "5 6")
        assert (imitation.question["max_tokens"], imitation.question["temperature"]) == (8, 0)
        answer.clear()
        assert (await agree(imitation, tiny_model, model="m", **endpoints)).greedy == "", "it says something else"


async def test_a_server_that_only_embeds_needs_no_events_and_no_blocks_of_our_size(tiny_model: Path) -> None:
    embedding = b64encode(np.ones(16, "<f4").tobytes()).decode()

    async def say(response: web.StreamResponse) -> None:
        await response.write(msgspec.json.encode({"data": [{"embedding": embedding}]}))

    imitation = Imitation(say, tokenizer_of(resolve_model(str(tiny_model))))
    imitation.metrics = METRICS.replace('block_size="32"', 'block_size="128"')
    imitation.paths = (PATHS[EMBED],)
    facts = await agree(imitation, tiny_model, model="m", events=None, replay=None)
    assert (facts.tasks, facts.dimension, facts.greedy, facts.note) == ((EMBED,), 16, "", "")
    imitation.paths = ("/elsewhere",)
    with pytest.raises(ConfigError, match="its model neither generates nor embeds nor scores"):
        await agree(imitation, tiny_model, model="m", events=None, replay=None)


async def test_a_server_that_does_not_tell_its_blocks_is_refused_with_the_flag(tiny_model: Path) -> None:
    imitation = Imitation(nothing)
    imitation.metrics = ""
    with pytest.raises(ConfigError, match="start it without --disable-log-stats"):
        await agree(imitation, tiny_model, model="m")


async def test_a_server_that_starts_is_waited_for(tiny_model: Path) -> None:
    worker = ExternalWorkerConfig("gpu-7", "http://127.0.0.1:9", "tcp://127.0.0.1:9", "tcp://127.0.0.1:9")
    async with VllmServer(worker) as server:
        with pytest.raises(UnavailableError, match=r"no vLLM at http://127\.0\.0\.1:9"):
            await agreed(parse_config({}), worker, resolve_model(str(tiny_model)), server)
