"""Checks that two services do the same work: for one request, both count equal numbers of prompt and output tokens."""

import asyncio
import urllib.request
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from benchmarks.frontend.cases import Bodies

STREAMING, WHOLE = b'"stream":true', b'"stream":false'


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class Answer(Struct, frozen=True):
    usage: Usage


class AnswersDifferError(Exception):
    def __init__(self, usages: Sequence[Usage]) -> None:
        super().__init__(f"the services do not count the same for the same request: {usages}")


async def check_same_answers(addresses: Sequence[str], bodies: Bodies) -> None:
    """Raises AnswersDifferError."""
    body = next(iter(bodies)).replace(STREAMING, WHOLE)
    usages = [await asyncio.to_thread(_usage, f"http://{address}{bodies.path}", body) for address in addresses]
    if len(set(usages)) > 1:
        raise AnswersDifferError(usages)


def _usage(url: str, body: bytes) -> Usage:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return msgspec.json.decode(answer.read(), type=Answer).usage
