"""What a server gives of prompts besides text: embeddings of token ids, and scores of two texts."""

import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from baton_proto.pooling import EMBED, GENERATE, SCORE, Pooling
from engine.vllm.server.server import RefusedError, VllmServer
from runtime.errors import ProtocolError

PATHS: Final = {GENERATE: "/v1/completions", EMBED: "/v1/embeddings", SCORE: "/score"}
NOT_THERE: Final = 404


class _One(Struct):
    embedding: bytes = b""  # msgspec reads Base64
    score: float = 0.0


class _Answer(Struct):
    data: list[_One]


def question(pooling: Pooling, prompt: Sequence[int], more: dict[str, Any]) -> bytes:
    """`more`: fields of every request. Those that the caller gave do not go before ours."""
    body = msgspec.json.decode(pooling.fields) | more
    if pooling.task == EMBED:
        body |= {"input": [prompt], "encoding_format": "base64"}
    else:
        body |= dict(zip(("text_1", "text_2"), pooling.texts, strict=True))
    encoded: bytes = msgspec.json.encode(body)
    return encoded


def pooled(task: str, data: bytes) -> bytes:
    """f32 LE. Raises ProtocolError."""
    try:
        (one,) = msgspec.json.decode(data, type=_Answer).data
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError("vLLM", f"the answer to {PATHS[task]} cannot be read: {error}") from error
    if task == SCORE:
        return struct.pack("<f", one.score)
    if not one.embedding or len(one.embedding) % 4:
        raise ProtocolError("vLLM", f"an embedding of {len(one.embedding)} bytes")
    return one.embedding


async def tasks_of(server: VllmServer) -> tuple[str, ...]:
    """What the server's model does: vLLM has the path of each such task alone, which it says without computing
    anything. Raises UnavailableError."""
    found = []
    for task, path in PATHS.items():
        try:
            await server.ask(path)
        except RefusedError as error:
            if error.status == NOT_THERE:
                continue
        found.append(task)
    return tuple(found)


async def dimension_of(server: VllmServer, model: str, prompt: list[int]) -> int:
    """Of the server's embeddings. Raises UnavailableError, RefusedError, ProtocolError."""
    body = question(Pooling(EMBED), prompt, {"model": model})
    return len(pooled(EMBED, await server.ask(PATHS[EMBED], body))) // 4
