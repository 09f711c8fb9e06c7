"""Questions and orders to the supervisor of a running service, over NATS."""

import msgspec

from baton_proto.proof import prove
from baton_proto.rollout import (
    MAJOR,
    Back,
    Planned,
    Question,
    Refusal,
    Rollout,
    ServiceView,
    ShowService,
    decode_answer,
    encode,
)
from runtime.errors import DeadlineError, InvalidRequestError, ProtocolError, UnavailableError
from runtime.nats.client import NatsClient
from runtime.nats.library import nats_errors
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
    try:
        data = await nats.request(supervisor_subject(nats.namespace), encode(Question(MAJOR, body, proof)), timeout_s)
    except nats_errors.NoRespondersError as error:
        where = f"in namespace {nats.namespace!r}"
        raise UnavailableError(f"no service that `baton up` has started runs {where}, or it is not up yet") from error
    except (nats_errors.TimeoutError, TimeoutError) as error:
        raise DeadlineError("the supervisor's answer", timeout_s) from error
    try:
        answer = decode_answer(data).body
    except msgspec.DecodeError as error:
        raise ProtocolError("supervisor", f"its answer cannot be read: {error}") from error
    if isinstance(answer, Refusal):
        raise InvalidRequestError(answer.field, answer.problem)
    return answer
