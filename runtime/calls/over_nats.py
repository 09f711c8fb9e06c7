"""A question to one process of a service, and its answer: request and reply over NATS."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from baton_proto.orders import Refusal
from runtime.errors import DeadlineError, InvalidRequestError, ProtocolError, UnavailableError
from runtime.nats.client import NatsClient
from runtime.nats.library import nats_errors

A = TypeVar("A", covariant=True)


class Answer(Protocol[A]):
    @property
    def body(self) -> A | Refusal: ...


async def answer_of(
    who: str,
    nats: NatsClient,
    subject: str,
    question: bytes,
    decode: Callable[[bytes], Answer[A]],
    timeout_s: float,
    absent: str,
) -> A:
    """The body of the answer of `who`. Raises InvalidRequestError when it is a refusal, UnavailableError with the words
    `absent` when nobody listens on the subject, DeadlineError when no answer comes in time, ProtocolError when it
    cannot be decoded, and NATS_ERRORS."""
    try:
        data = await nats.request(subject, question, timeout_s)
    except nats_errors.NoRespondersError as error:
        raise UnavailableError(absent) from error
    except (nats_errors.TimeoutError, TimeoutError) as error:
        raise DeadlineError(f"the {who}'s answer", timeout_s) from error
    try:
        answer = decode(data).body
    except msgspec.DecodeError as error:
        raise ProtocolError(who, f"its answer cannot be read: {error}") from error
    if isinstance(answer, Refusal):
        raise InvalidRequestError(answer.field, answer.problem)
    return answer
