"""Questions and orders to a running planner, over NATS."""

from typing import Final

from baton_proto.planner_control import (
    MAJOR,
    Done,
    Order,
    Plan,
    Question,
    Release,
    Scale,
    ShowPlan,
    decode_answer,
    encode,
)
from runtime.calls.over_nats import Desk
from runtime.nats.client import NatsClient
from runtime.nats.subjects import planner_subject
from runtime.security.secret import Secret

PLANNER: Final = Desk(
    "planner",
    planner_subject,
    "no planner runs in namespace {}; `baton up --planner` starts one",
    lambda body, proof: encode(Question(MAJOR, body, proof)),
    decode_answer,
)


async def ask_plan(nats: NatsClient, timeout_s: float) -> Plan:
    """The planner's last decision and the effects in flight. Raises as `tell_planner` does."""
    return await PLANNER.ask(nats, ShowPlan(), Plan, timeout_s)


async def tell_planner(
    nats: NatsClient, order: Scale | Release | Order, timeout_s: float, operator_key: Secret | None = None
) -> str:
    """The planner's answer to an order, a sentence. Raises UnavailableError when no planner runs, DeadlineError when it
    does not answer, InvalidRequestError when it refuses, ProtocolError when its answer is malformed, and
    NATS_ERRORS."""
    challenge = (await ask_plan(nats, timeout_s)).challenge
    return (await PLANNER.order(nats, order, Done, timeout_s, challenge, operator_key)).sentence
