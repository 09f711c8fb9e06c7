"""Questions and orders to the supervisor of a running service, over NATS."""

from typing import Final

from baton_proto.rollout import MAJOR, Back, Planned, Question, Rollout, ServiceView, ShowService, decode_answer, encode
from runtime.calls.over_nats import Desk
from runtime.nats.client import NatsClient
from runtime.nats.subjects import supervisor_subject
from runtime.security.secret import Secret

SUPERVISOR: Final = Desk(
    "supervisor",
    supervisor_subject,
    "no service that `baton up` has started runs in namespace {}, or it is not up yet",
    lambda body, proof: encode(Question(MAJOR, body, proof)),
    decode_answer,
)


async def ask_service(nats: NatsClient, timeout_s: float, seen: int = 0) -> ServiceView:
    """`seen`: news that the caller has. Raises as `tell_supervisor` does."""
    return await SUPERVISOR.ask(nats, ShowService(seen), ServiceView, timeout_s)


async def tell_supervisor(
    nats: NatsClient, order: Rollout | Back, timeout_s: float, operator_key: Secret | None = None
) -> Planned:
    """What happens. Raises UnavailableError when no supervisor runs, DeadlineError when it does not answer,
    InvalidRequestError when it refuses, ProtocolError when its answer is malformed, and NATS_ERRORS."""
    challenge = (await ask_service(nats, timeout_s)).challenge
    return await SUPERVISOR.order(nats, order, Planned, timeout_s, challenge, operator_key)
