"""Questions to a running planner and its answers: request and reply on `baton.<namespace>.planner`, core NATS.

An order is answered when it has begun, not when it has ended: `baton plan` shows what has become of it.
"""

from typing import Literal

import msgspec
from msgspec import Struct

from baton_proto.planner import Count, Holds, Observation, Role, Target, Verb
from baton_proto.version import check_major

MAJOR = 1


class ShowPlan(Struct, frozen=True, tag="show"):
    pass


class Scale(Struct, frozen=True, tag="scale"):
    """Counts that shall be, whatever the planner thinks; None: as it was."""

    prefill: Count | None = None
    decode: Count | None = None


class Release(Struct, frozen=True, tag="release"):
    """The planner decides alone again."""


class Order(Struct, frozen=True, tag="order"):
    """One effect, now."""

    verb: Literal["drain", "flip"]
    worker_id: str


class Question(Struct, frozen=True):
    version: int
    body: ShowPlan | Scale | Release | Order


class InFlight(Struct, frozen=True):
    """An effect that has begun and not ended."""

    verb: Verb
    worker_id: str
    role: Role
    running_s: float


class Plan(Struct, frozen=True, tag="plan"):
    """The last decision and what has become of it so far."""

    age_s: float | None  # of the decision; None: there was none yet
    observation: Observation | None  # without its timed steps
    target: Target | None
    effects: list[InFlight]
    holds: Holds
    problem: str = ""  # why nothing could be observed lately; empty: all is well
    metrics_address: str = ""  # HOST:PORT of the Prometheus endpoint


class Done(Struct, frozen=True, tag="done"):
    sentence: str


class Refusal(Struct, frozen=True, tag="refused"):
    field: str
    problem: str


class Answer(Struct, frozen=True):
    version: int
    body: Plan | Done | Refusal


_encoder = msgspec.json.Encoder()
_question = msgspec.json.Decoder(Question)
_answer = msgspec.json.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    return _encoder.encode(message)


def decode_question(data: bytes) -> Question:
    """Raises msgspec.DecodeError or ProtocolError."""
    question = _question.decode(data)
    check_major("question to the planner", question.version, MAJOR)
    return question


def decode_answer(data: bytes) -> Answer:
    """Raises msgspec.DecodeError or ProtocolError."""
    answer = _answer.decode(data)
    check_major("answer of the planner", answer.version, MAJOR)
    return answer
