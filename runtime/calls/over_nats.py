"""A question to one process of a service, and its answer: request and reply over NATS."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from runtime.errors import DeadlineError, ProtocolError, UnavailableError
from runtime.nats.client import NatsClient
from runtime.nats.library import nats_errors

A = TypeVar("A")


async def answer_of(
    who: str,
    nats: NatsClient,
    subject: str,
    question: bytes,
    decode: Callable[[bytes], A],
    timeout_s: float,
    absent: str,
) -> A:
    """The answer of `who`. Raises UnavailableError with the words `absent` when nobody listens on the subject,
    DeadlineError when no answer comes in time, ProtocolError when it cannot be decoded, and NATS_ERRORS."""
    try:
        data = await nats.request(subject, question, timeout_s)
    except nats_errors.NoRespondersError as error:
        raise UnavailableError(absent) from error
    except (nats_errors.TimeoutError, TimeoutError) as error:
        raise DeadlineError(f"the {who}'s answer", timeout_s) from error
    try:
        return decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(who, f"its answer cannot be read: {error}") from error
