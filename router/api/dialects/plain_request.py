"""One HTTP request with a body that does not ask for text, from its body to its answer."""

import time
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from router.api.http.body import received_body
from router.api.http.disconnect import NOBODY, until_disconnect
from router.api.http.errors import ErrorForm, error_response, openai_form
from router.api.http.key_guard import CALLER
from router.api.wishes.validation import make_request_id, tenant_of
from router.requests.frontend import Models
from runtime.security.callers import ANYONE
from runtime.side_lane import TENANT

TENANT_HEADER = "x-baton-tenant"

Reply = Callable[[bytes, str, float], Coroutine[Any, Any, Response]]
"""(body, tenant, deadline by time.monotonic()) -> the answer. Raises BatonError."""


async def answer_plain(models: Models, http: Request, reply: Reply, form: ErrorForm = openai_form) -> Response:
    try:
        admit(models, http)
        tenant = enter_tenant(http)
        with models.bodies.hold(tenant) as held:
            data = await received_body(http, models.config.max_body_bytes, held)
            deadline_s = time.monotonic() + models.config.request_timeout_s
            return await until_disconnect(http.receive, reply(data, tenant, deadline_s))
    except ClientDisconnect:
        return NOBODY
    except Exception as error:
        return error_response(error, make_request_id(None)[0], form)


def admit(models: Models, http: Request) -> None:
    """Raises OverloadedError when the caller's rate limit is reached."""
    models.rate_limits.account(http.scope.get(CALLER, ANYONE)).admit()


def enter_tenant(http: Request) -> str:
    """The tenant of a request, which the current task serves from now on. Raises InvalidRequestError."""
    tenant = tenant_of(http.scope.get(CALLER, ANYONE), TENANT_HEADER, http.headers.get(TENANT_HEADER))
    TENANT.set(tenant)
    return tenant
