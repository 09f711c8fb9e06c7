"""Questions and orders to a running planner, over NATS."""

from baton_proto.orders import prove
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
from runtime.calls.over_nats import answer_of
from runtime.errors import ProtocolError
from runtime.nats.client import NatsClient
from runtime.nats.subjects import planner_subject
from runtime.security.secret import Secret


async def ask_plan(nats: NatsClient, timeout_s: float) -> Plan:
    """The planner's last decision and the effects in flight. Raises as `tell_planner` does."""
    answer = await _ask(nats, ShowPlan(), timeout_s)
    if not isinstance(answer, Plan):
        raise ProtocolError("planner", "answered something else than its plan")
    return answer


async def tell_planner(
    nats: NatsClient, order: Scale | Release | Order, timeout_s: float, operator_key: Secret | None = None
) -> str:
    """The planner's answer to an order, a sentence. Raises UnavailableError when no planner runs, DeadlineError when it
    does not answer, InvalidRequestError when it refuses, ProtocolError when its answer is malformed, and
    NATS_ERRORS."""
    challenge = (await ask_plan(nats, timeout_s)).challenge
    proof = "" if operator_key is None else prove(operator_key.reveal(), challenge, order)
    answer = await _ask(nats, order, timeout_s, proof)
    if not isinstance(answer, Done):
        raise ProtocolError("planner", "answered something else than what it does")
    return answer.sentence


async def _ask(
    nats: NatsClient, body: ShowPlan | Scale | Release | Order, timeout_s: float, proof: str = ""
) -> Plan | Done:
    question = encode(Question(MAJOR, body, proof))
    absent = f"no planner runs in namespace {nats.namespace!r}; `baton up --planner` starts one"
    subject = planner_subject(nats.namespace)
    return await answer_of("planner", nats, subject, question, decode_answer, timeout_s, absent)
