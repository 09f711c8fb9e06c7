"""Questions to a running planner and its answers: request and reply on `baton.<namespace>.planner`, core NATS.

The answer to an order comes when the effect begins, not when it ends: `baton plan` shows effects in flight.
"""

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Struct

from baton_proto.decoding import Count, Name, Rows, Text, versioned
from baton_proto.orders import Challenge, Proof, Refusal
from baton_proto.planner import Holds, Observation, Role, Target, Verb

MAJOR = 1


class ShowPlan(Struct, frozen=True, tag="show"):
    pass


class Scale(Struct, frozen=True, tag="scale"):
    """Sets counts by hand, which override the policy's; None leaves a role as it was."""

    prefill: Count | None = None
    decode: Count | None = None


class Release(Struct, frozen=True, tag="release"):
    """Releases the counts set by hand: the planner decides alone again."""


class Order(Struct, frozen=True, tag="order"):
    """Begins one effect at once."""

    verb: Literal["drain", "flip"]
    worker_id: Name


class Question(Struct, frozen=True):
    """An order carries a proof, over the challenge of the last Plan, that its sender has an operator key."""

    version: Count
    body: ShowPlan | Scale | Release | Order
    proof: Proof = ""


class InFlight(Struct, frozen=True):
    """An effect that has begun and has not ended."""

    verb: Verb
    worker_id: Name
    role: Role
    running_s: float


class Plan(Struct, frozen=True, tag="plan"):
    """The last decision and the effects in flight."""

    age_s: float | None  # of the decision; None: no decision yet
    observation: Observation | None  # without its timed steps
    target: Target | None
    effects: Annotated[list[InFlight], Rows]
    holds: Holds
    problem: Text = ""  # why the last step observed nothing; empty when it did
    metrics_address: Name = ""  # HOST:PORT of the Prometheus endpoint
    challenge: Challenge = ""


class Done(Struct, frozen=True, tag="done"):
    sentence: Text


class Answer(Struct, frozen=True):
    version: Count
    body: Plan | Done | Refusal


encode: Callable[[Question | Answer], bytes] = msgspec.json.Encoder().encode
decode_question = versioned(Question, "question to the planner", MAJOR, json=True)
decode_answer = versioned(Answer, "answer of the planner", MAJOR, json=True)
