"""Questions and orders to a running planner, over NATS."""

import msgspec

from baton_proto.planner_control import (
    MAJOR,
    Done,
    Order,
    Plan,
    Question,
    Refusal,
    Release,
    Scale,
    ShowPlan,
    decode_answer,
    encode,
)
from baton_proto.proof import prove
from runtime.errors import DeadlineError, InvalidRequestError, ProtocolError, UnavailableError
from runtime.nats.client import NatsClient
from runtime.nats.library import nats_errors
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
    try:
        data = await nats.request(planner_subject(nats.namespace), question, timeout_s)
    except nats_errors.NoRespondersError as error:
        where = f"in namespace {nats.namespace!r}"
        raise UnavailableError(f"no planner runs {where}; `baton up --planner` starts one") from error
    except (nats_errors.TimeoutError, TimeoutError) as error:
        raise DeadlineError("the planner's answer", timeout_s) from error
    try:
        answer = decode_answer(data).body
    except msgspec.DecodeError as error:
        raise ProtocolError("planner", f"its answer cannot be read: {error}") from error
    if isinstance(answer, Refusal):
        raise InvalidRequestError(answer.field, answer.problem)
    return answer
