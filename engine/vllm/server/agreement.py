"""What a vLLM server must have in common with the service that uses it, asked of the server before it gets requests."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from baton_proto.pooling import EMBED, GENERATE
from engine.vllm.events.stream import VllmStream
from engine.vllm.server.adapters import Model, models_of
from engine.vllm.server.completion import PATH
from engine.vllm.server.gauges import PATH as METRICS, Gauges, of_any
from engine.vllm.server.pooled import dimension_of, tasks_of
from engine.vllm.server.ranks import Rank, ranks_of
from engine.vllm.server.server import RefusedError, VllmServer
from engine.vllm.versions import check_version
from router.text.tokenizer import Tokenizer
from runtime.checkpoint.model_files import ModelFiles
from runtime.config.external import ExternalWorkerConfig
from runtime.config.serving import ServingConfig
from runtime.config.types import BlockSize
from runtime.errors import BatonError, ConfigError, UnavailableError

SAMPLE = "Hello world 1234, äöü 你好\n  def f(x): return x\t# 🙂"  # words, digits, bytes, white space
CHAT = [{"role": "user", "content": "Hello"}]
GREEDY_TOKENS = 8  # of the answer to SAMPLE, which servers with the same weights give alike
EVENTS_TIMEOUT_S = 10.0
FLAG = (
    '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5558"}\''
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server that agrees with us has told."""

    model: str  # its name for it
    max_model_len: int
    ranks: Sequence[Rank]
    note: str = ""  # what `status` says of it, though it may serve
    root: str = ""  # where its weights come from, as it says
    greedy: str = ""  # the ids of the GREEDY_TOKENS behind SAMPLE; empty: it has not answered
    tasks: tuple[str, ...] = (GENERATE,)
    dimension: int = 0  # of its embeddings


class _Version(Struct):
    version: str


class _Tokens(Struct):
    tokens: list[int]


class _Choice(Struct):
    token_ids: list[int]


class _Answer(Struct):
    choices: list[_Choice]


async def agreed(config: ServingConfig, external: ExternalWorkerConfig, files: ModelFiles, server: VllmServer) -> Facts:
    """Raises ConfigError, which names what differs, and UnavailableError."""
    try:
        version = msgspec.json.decode(await server.ask("/version"), type=_Version).version
        check_version(version, external.where)
        models = await models_of(server)
        gauges = Gauges.read(await server.ask(METRICS))
        model = _model(models, external, config.served_model_name or files.name)
        if not (tasks := await tasks_of(server)):
            raise ConfigError(f"{external.where}.address", "its model neither generates nor embeds nor scores")
        if (follows := GENERATE in tasks or bool(external.events)) or not gauges:
            _check_blocks(of_any(gauges), config, external)
        question = {"model": model.id, "prompt": SAMPLE, "add_special_tokens": False}
        theirs = msgspec.json.decode(await server.ask("/tokenize", question), type=_Tokens).tokens
        dimension = await dimension_of(server, model.id, theirs[:1]) if EMBED in tasks else 0
    except RefusedError as error:
        if error.status >= 500:
            raise UnavailableError(f"{server.address}: {error}") from error
        remedy = " (name the file with its key in api_key_file)" if error.status == 401 else ""
        raise ConfigError(f"{external.where}.address", f"{server.address}: {error}{remedy}") from error
    except (msgspec.DecodeError, ValueError) as error:
        problem = f"{server.address} does not answer as `vllm serve` does: {error}"
        raise ConfigError(f"{external.where}.address", problem) from error
    tokenizer = Tokenizer(files.folder, files.config.vocab_size)
    if theirs != list(tokenizer.encode(SAMPLE, add_special_tokens=False)):
        problem = f"its tokenizer is another one than that of {files.name}: start it with the same model"
        raise ConfigError(f"{external.where}.model", f"{model.id}: {problem}")
    one, ranks = of_any(gauges), list(ranks_of(gauges, external))
    for rank in ranks if follows else ():
        await _check_events(rank, external)
    lengths = {known.id: known.max_model_len for known in models}
    most = one.num_blocks * one.block_size
    caching = "" if one.caches else "its prefix caching is off: start it without --no-enable-prefix-caching"
    length = model.max_model_len or lengths.get(model.parent or "") or most
    if GENERATE not in tasks:
        return Facts(model.id, length, ranks, root=str(model.root or model.id), tasks=tasks, dimension=dimension)
    notes = [caching, await _other_template(server, model.id, tokenizer)]
    note, root = "; ".join(filter(None, notes)), str(model.root or model.id)
    return Facts(model.id, length, ranks, note, root, await _greedy(server, model.id, theirs))


async def _other_template(server: VllmServer, model: str, tokenizer: Tokenizer) -> str:
    """What to say of a server whose chat template is another one than ours; empty when it is the same, or where one of
    the two renders no chat."""
    with suppress(BatonError, RefusedError, msgspec.DecodeError):
        theirs = msgspec.json.decode(await server.ask("/tokenize", {"model": model, "messages": CHAT}), type=_Tokens)
        if theirs.tokens != list(tokenizer.chat(CHAT)):
            return "its chat template is another one and is not used: chats are rendered by that of `model`"
    return ""


async def _greedy(server: VllmServer, model: str, prompt: list[int]) -> str:
    """Says nothing of a server that is too busy to answer."""
    question = {"model": model, "prompt": prompt, "max_tokens": GREEDY_TOKENS, "temperature": 0}
    question |= {"ignore_eos": True, "return_token_ids": True}
    with suppress(BatonError, RefusedError, msgspec.DecodeError, IndexError):
        answer = msgspec.json.decode(await server.ask(PATH, question), type=_Answer)
        return " ".join(map(str, answer.choices[0].token_ids[:GREEDY_TOKENS]))
    return ""


def block_size_of_any(config: ServingConfig) -> int | None:
    """Of the first server that tells one which we can have."""
    return asyncio.run(_first_block_size(config.external_workers))


async def _first_block_size(workers: Sequence[ExternalWorkerConfig]) -> int | None:
    for external in workers:
        with suppress(BatonError, RefusedError, ValueError, msgspec.ValidationError):  # agreed() says what is wrong
            async with VllmServer(external) as server:
                ranks = Gauges.read(await server.ask(METRICS))
                size: int = msgspec.convert(of_any(ranks).block_size, BlockSize)
                return size
    return None


def _model(models: list[Model], external: ExternalWorkerConfig, ours: str) -> Model:
    wanted = external.model or ours
    for model in models:
        if model.id == wanted:
            return model
    known = ", ".join(model.id for model in models)
    raise ConfigError(f"{external.where}.model", f"the server has no model {wanted!r}: name one of its own: {known}")


def _check_blocks(gauges: Gauges, config: ServingConfig, external: ExternalWorkerConfig) -> None:
    size = config.engine.block_size
    if not gauges.num_blocks:
        problem = "its /metrics do not tell how many KV blocks it has: start it without --disable-log-stats"
        raise ConfigError(f"{external.where}.address", problem)
    if gauges.block_size != size:
        problem = (
            f"its KV blocks hold {gauges.block_size} tokens, ours {size}: start it with --block-size {size}, or set"
        )
        raise ConfigError(f"{external.where}.address", f"{problem} engine.block_size: {gauges.block_size}")


async def _check_events(rank: Rank, external: ExternalWorkerConfig) -> None:
    """Raises ConfigError when there are no KV events."""
    stream = VllmStream(rank.events, rank.replay, EVENTS_TIMEOUT_S)
    try:
        await stream.open()
        await stream.check_replay()
    except (UnavailableError, ConfigError) as error:
        problem = f"{error}; start vLLM with {FLAG} and name its ports in `events` and `replay`"
        raise ConfigError(external.where, problem) from error
    finally:
        await stream.close()
