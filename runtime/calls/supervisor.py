"""Questions and orders to the supervisor of a running service, over NATS."""

from baton_proto.orders import prove
from baton_proto.rollout import (
    MAJOR,
    Back,
    Planned,
    Question,
    Rollout,
    ServiceView,
    ShowService,
    decode_answer,
    encode,
)
from runtime.calls.over_nats import answer_of
from runtime.errors import ProtocolError
from runtime.nats.client import NatsClient
from runtime.nats.subjects import supervisor_subject
from runtime.security.secret import Secret


async def ask_service(nats: NatsClient, timeout_s: float, seen: int = 0) -> ServiceView:
    """`seen`: news that the caller has. Raises as `tell_supervisor` does."""
    answer = await _ask(nats, ShowService(seen), timeout_s)
    if not isinstance(answer, ServiceView):
        raise ProtocolError("supervisor", "answered something else than what runs")
    return answer


async def tell_supervisor(
    nats: NatsClient, order: Rollout | Back, timeout_s: float, operator_key: Secret | None = None
) -> Planned:
    """What happens. Raises UnavailableError when no supervisor runs, DeadlineError when it does not answer,
    InvalidRequestError when it refuses, ProtocolError when its answer is malformed, and NATS_ERRORS."""
    challenge = (await ask_service(nats, timeout_s)).challenge
    proof = "" if operator_key is None else prove(operator_key.reveal(), challenge, order)
    answer = await _ask(nats, order, timeout_s, proof)
    if not isinstance(answer, Planned):
        raise ProtocolError("supervisor", "answered something else than what it does")
    return answer


async def _ask(
    nats: NatsClient, body: ShowService | Rollout | Back, timeout_s: float, proof: str = ""
) -> ServiceView | Planned:
    question = encode(Question(MAJOR, body, proof))
    absent = f"no service that `baton up` has started runs in namespace {nats.namespace!r}, or it is not up yet"
    subject = supervisor_subject(nats.namespace)
    return await answer_of("supervisor", nats, subject, question, decode_answer, timeout_s, absent)
